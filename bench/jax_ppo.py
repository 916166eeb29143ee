"""PPO on CartPole as one jitted function of JAX: environments, network, advantages and updates. A yardstick, not a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

EPOCHS, MINIBATCHES = 4, 4
GAMMA, LAMBDA, CLIP, ENTROPY, RATE, MAX_NORM = 0.99, 0.95, 0.2, 0.01, 1e-3, 0.5
SIZES = (4, 64, 64)


def network(key: Any, outputs: int, gain: float) -> list[Any]:
    layers = []
    for fan_in, fan_out, scale in ((*SIZES[:2], 2**0.5), (*SIZES[1:], 2**0.5), (SIZES[-1], outputs, gain)):
        key, own = jax.random.split(key)
        layers.append((jax.nn.initializers.orthogonal(scale)(own, (fan_in, fan_out)), jnp.zeros(fan_out)))
    return layers


def run(layers: list[Any], x: Any) -> Any:
    for weight, bias in layers[:-1]:
        x = jnp.tanh(x @ weight + bias)
    return x @ layers[-1][0] + layers[-1][1]


def env_step(state: Any, age: Any, action: Any, fresh: Any) -> tuple[Any, ...]:
    """CartPole-v1 with its limit of 500 steps: next state and age, the state before a reset, terminated, truncated."""
    x, x_dot, theta, theta_dot = state.T
    force = jnp.where(action == 1, 10.0, -10.0)
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    temp = (force + 0.05 * theta_dot**2 * sin) / 1.1
    theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    x_acc = temp - 0.05 * theta_acc * cos / 1.1
    last = jnp.stack([x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc], 1)
    terminated = (jnp.abs(last[:, 0]) > 2.4) | (jnp.abs(last[:, 2]) > 12 * 2 * jnp.pi / 360)
    truncated = ~terminated & (age + 1 >= 500)
    ended = terminated | truncated
    return jnp.where(ended[:, None], fresh, last), jnp.where(ended, 0, age + 1), last, terminated, truncated


def loss(net: Any, batch: dict[str, Any]) -> Any:
    log_p = jax.nn.log_softmax(run(net["actor"], batch["obs"]))
    log_prob = jnp.take_along_axis(log_p, batch["action"][:, None], 1)[:, 0]
    ratio = jnp.exp(log_prob - batch["log_prob"])
    advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
    policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
    value = 0.5 * ((run(net["critic"], batch["obs"])[:, 0] - batch["target"]) ** 2).mean()
    return policy + 0.5 * value + ENTROPY * (jnp.exp(log_p) * log_p).sum(1).mean()


def adam(net: Any, mean: Any, square: Any, grad: Any, count: Any) -> tuple[Any, Any, Any]:
    norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grad)))
    grad = jax.tree.map(lambda g: g * jnp.minimum(1.0, MAX_NORM / (norm + 1e-6)), grad)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grad)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, grad)
    rate = RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    return jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), net, mean, square), mean, square


def collect(carry: Any, _: Any) -> tuple[Any, Any]:
    net, key, state, age = carry
    key, for_action, for_reset = jax.random.split(key, 3)
    log_p = jax.nn.log_softmax(run(net["actor"], state))
    action = jax.random.categorical(for_action, log_p)
    fresh = jax.random.uniform(for_reset, state.shape, minval=-0.05, maxval=0.05)
    after, age, last, terminated, truncated = env_step(state, age, action, fresh)
    log_prob = jnp.take_along_axis(log_p, action[:, None], 1)[:, 0]
    row = {
        "obs": state,
        "action": action,
        "log_prob": log_prob,
        "last": last,
        "terminated": terminated,
        "ended": terminated | truncated,
    }
    return (net, key, after, age), row


def advantages(net: Any, rows: dict[str, Any]) -> tuple[Any, Any]:
    value = run(net["critic"], rows["obs"])[..., 0]
    # The state before a reset is the next one where nothing ended: one pass gives what follows, at truncations too.
    following = run(net["critic"], rows["last"])[..., 0] * ~rows["terminated"]
    delta = 1.0 + GAMMA * following - value
    decay = GAMMA * LAMBDA * ~rows["ended"]

    def back(last: Any, row: Any) -> tuple[Any, Any]:
        now = row[0] + row[1] * last
        return now, now

    advantage = jax.lax.scan(back, jnp.zeros(value.shape[1]), (delta, decay), reverse=True)[1]
    return advantage, advantage + value


def make_update(num_envs: int, num_steps: int) -> tuple[Callable[[Any], Any], Any]:
    """(the jitted function from what a run carries to the next, what it begins with)."""
    size = num_envs * num_steps

    def minibatch(carry: Any, batch: Any) -> tuple[Any, None]:
        net, mean, square, count = carry
        count = count + 1
        return (*adam(net, mean, square, jax.grad(loss)(net, batch), count), count), None

    def epoch(carry: Any, _: Any) -> tuple[Any, None]:
        learning, key, data = carry
        key, own = jax.random.split(key)
        order = jax.random.permutation(own, size).reshape(MINIBATCHES, -1)
        learning, _ = jax.lax.scan(minibatch, learning, {name: values[order] for name, values in data.items()})
        return (learning, key, data), None

    @jax.jit
    def update(run_state: Any) -> Any:
        learning, key, state, age = run_state
        (_, key, state, age), rows = jax.lax.scan(collect, (learning[0], key, state, age), None, num_steps)
        advantage, target = advantages(learning[0], rows)
        data = {name: rows[name].reshape(size, *rows[name].shape[2:]) for name in ("obs", "action", "log_prob")}
        data |= {"advantage": advantage.reshape(-1), "target": target.reshape(-1)}
        (learning, key, _), _ = jax.lax.scan(epoch, (learning, key, data), None, EPOCHS)
        return (learning, key, state, age), rows["ended"].sum()

    key, for_actor, for_critic, for_envs = jax.random.split(jax.random.key(0), 4)
    net = {"actor": network(for_actor, 2, 0.01), "critic": network(for_critic, 1, 1.0)}
    zeros = jax.tree.map(jnp.zeros_like, net)
    state = jax.random.uniform(for_envs, (num_envs, 4), minval=-0.05, maxval=0.05)
    return update, ((net, zeros, zeros, jnp.zeros((), jnp.int32)), key, state, jnp.zeros(num_envs, jnp.int32))
