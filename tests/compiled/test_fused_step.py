"""The compiled minibatch of PPO: the gradients of autograd, and the same bits on any number of threads."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch

from envfleet.networks.actor_critic import ActorCritic, NetworkConfig, flatten_parameters
from envfleet.networks.numpy_layers import NumpyLayers
from envfleet.rollout.segments.segment import Segment
from envfleet.train import fused_step
from envfleet.train.config import PPOConfig
from envfleet.train.fused_step import FusedStep
from envfleet.train.objective import Coefficients
from envfleet.train.update import PolicyLearner

pytestmark = pytest.mark.skipif(fused_step.COMPILED is None, reason="envfleet._dense is not built")

SPACES = {
    "discrete": gym.spaces.Discrete(2),
    "wide": gym.spaces.Discrete(37),
    "multi": gym.spaces.MultiDiscrete([3, 2, 5]),
    "box": gym.spaces.Box(-1, 1, (3,)),
}


def network(kind, inputs=4, hidden=(64, 64), **settings):
    torch.manual_seed(3)
    net = ActorCritic(gym.spaces.Box(-1, 1, (inputs,)), SPACES[kind], NetworkConfig(hidden=hidden, **settings))
    for parameter in net.parameters():  # away from the start, where the outputs are close to 0
        parameter.data += 0.1 * torch.randn_like(parameter)
    return net


def segment_data(net, rows, masked=False, seed=0):
    """Rows of a segment as a learner prepares them, with ratios and values on both sides of the clip ranges."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    actions = net.actions
    data = {"vector": torch.randn(rows, net.features.vector_size)}
    mask = None
    if masked:
        mask = torch.from_numpy(rng.random((rows, actions.num_outputs)) < 0.6)
        mask[:, actions.offsets[:-1]] = True  # the first choice of every part is allowed
        mask[0] = False  # a row where nothing is allowed
        data["mask"] = mask
    with torch.no_grad():
        outputs = net._actor_end(net.actor_encoder(data)).numpy()
        log_std = net.log_std.numpy() if net.log_std is not None else None
        data["raw"] = torch.from_numpy(actions.draw(outputs, log_std, rng, mask.numpy() if masked else None))
        log_prob, _ = actions.score(torch.from_numpy(outputs), net.log_std, data["raw"], mask)
    data["log_prob"] = log_prob + 0.3 * torch.randn(rows)
    data |= {name: torch.randn(rows) for name in ("value", "advantage", "target")}
    return data


def autograd(net, data, index, now, normalise):
    """The gradients and the parts of the objective, left to PyTorch: its layers, its minimum, its backward pass."""
    batch = {name: value[torch.from_numpy(index)] for name, value in data.items()}
    x = batch["vector"]
    hidden = [part.layers(x) if len(part.layers) else x for part in (net.actor_encoder, net.critic_encoder)]
    outputs = net.actor_head(net.actor_layers(hidden[0]))
    value = net.critic_head(net.critic_layers(hidden[1])).squeeze(-1)
    log_prob, entropy = net.actions.score(outputs, net.log_std, batch["raw"], batch.get("mask"))
    advantage = batch["advantage"]
    if normalise and len(index) > 1:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (log_prob - batch["log_prob"]).exp()
    policy_loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - now.clip, 1 + now.clip) * advantage).mean()
    error = (value - batch["target"]).square()
    if now.value_clip is not None:
        near = batch["value"] + (value - batch["value"]).clamp(-now.value_clip, now.value_clip)
        error = torch.maximum(error, (near - batch["target"]).square())
    value_loss = 0.5 * error.mean()
    loss = policy_loss + now.value * value_loss - now.entropy * entropy.mean()
    grads = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    flat = torch.cat([torch.zeros(p.numel()) if g is None else g.reshape(-1) for g, p in zip(grads, net.parameters())])
    kl = (ratio - 1 - ratio.log()).mean()
    clipped = ((ratio - 1).abs() > now.clip).float().mean()
    parts = (policy_loss, value_loss, entropy.mean(), kl, clipped)
    return flat, dict(zip(fused_step.REPORTED, (float(part.detach()) for part in parts)))


def fused(net, data, index, now, normalise, threads=1):
    flat = flatten_parameters(net)
    flat.grad.fill_(7.0)  # what was there before does not count
    step = FusedStep.of(net, flat, threads)
    step.take({name: value.unsqueeze(0) for name, value in data.items()})
    norm, parts = step(index, now, normalise)
    return flat.grad, norm, parts


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("value_clip", [None, 0.4])
@pytest.mark.parametrize("entropy", [0.0, 0.03])
@pytest.mark.parametrize(
    ("kind", "masked"),
    [("discrete", False), ("discrete", True), ("wide", True), ("multi", False), ("multi", True), ("box", False)],
)
def test_the_compiled_gradients_are_those_of_autograd(kind, masked, entropy, value_clip, normalise):
    net = network(kind)
    data = segment_data(net, 700, masked)
    index = np.random.default_rng(1).permutation(700)[:301]
    now = Coefficients(1e-3, 0.2, entropy, 0.5, value_clip)
    wanted, wanted_parts = autograd(net, data, index, now, normalise)
    grad, norm, parts = fused(net, data, index, now, normalise)
    torch.testing.assert_close(grad, wanted, rtol=2e-4, atol=2e-6 * float(wanted.abs().max()) + 1e-7)
    assert norm == pytest.approx(float(wanted.norm()), rel=1e-5)
    assert parts == pytest.approx(wanted_parts, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("hidden", [(1,), (5,), (16, 48), (7, 33, 20), (130, 64)])
@pytest.mark.parametrize("inputs", [1, 16, 77])
@pytest.mark.parametrize("rows", [1, 129, 1100])
def test_any_widths_and_numbers_of_rows_give_the_gradients_of_autograd(hidden, inputs, rows):
    net = network("discrete", inputs, hidden)
    data, now = segment_data(net, rows), Coefficients(1e-3, 0.2, 0.01)
    index = np.arange(rows)
    wanted, _ = autograd(net, data, index, now, True)
    grad, _, _ = fused(net, data, index, now, True)
    torch.testing.assert_close(grad, wanted, rtol=5e-4, atol=5e-6 * float(wanted.abs().max()) + 1e-6)


def segment(rng, steps=40, slots=32):
    made = Segment.empty(steps, slots, obs=np.zeros((slots, 4), np.float32), action=np.zeros(slots, np.int64))
    made.obs[:] = rng.standard_normal(made.obs.shape)
    made.action[:] = rng.integers(0, 2, made.action.shape)
    made.reward[:] = rng.standard_normal(made.reward.shape)
    made.scored[:] = rng.random(made.scored.shape) < 0.9
    made.truncated[:] = False
    made.terminated[:] = rng.random(made.scored.shape) < 0.05
    return made


def learned(threads=1, slots=32, **settings):
    config = PPOConfig(preset="none", num_threads=threads, num_minibatches=2, entropy=0.01, **settings)
    learner = PolicyLearner(network("discrete"), config, slots, np.random.default_rng(0))
    rng = np.random.default_rng(5)
    for _ in range(2):
        losses = learner.learn(segment(rng, slots=slots), Coefficients(1e-3, 0.2, 0.01))
    return learner, losses


def test_every_number_of_threads_learns_the_same_bits():
    one, losses = learned()
    assert one.fused is not None
    for threads in (2, 3, 8):
        other, other_losses = learned(threads)
        assert torch.equal(one.flat, other.flat)
        assert losses == other_losses


def test_a_learner_without_the_compiled_step_learns_the_same_up_to_rounding(monkeypatch):
    with_it, losses = learned()
    monkeypatch.setattr(fused_step, "COMPILED", None)
    without, other_losses = learned()
    assert with_it.fused is not None and without.fused is None
    torch.testing.assert_close(with_it.flat, without.flat, rtol=1e-3, atol=1e-4)
    assert losses == pytest.approx(other_losses, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("sizes", [(1, 1), (4, 64, 64, 2), (77, 5, 130, 33), (16, 16)])
def test_the_compiled_forward_pass_is_that_of_pytorch_and_a_row_has_the_same_bits_in_any_company(sizes):
    torch.manual_seed(1)
    modules = []
    for size, out in itertools.pairwise(sizes):
        modules += [torch.nn.Linear(size, out), torch.nn.Tanh()]
    x = torch.randn(3000, sizes[0])
    for parts in (modules, modules[:-1]):
        layers = NumpyLayers(parts)
        assert layers._in_one_call
        whole = layers(x.numpy())
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(whole), torch.nn.Sequential(*parts)(x), rtol=1e-5, atol=1e-5)
        for threads in (2, 3):
            assert np.array_equal(layers(x.numpy(), threads), whole)
        for rows in (0, 1, 7, 64, 65):
            assert np.array_equal(layers(x[:rows].numpy()), whole[:rows])


def test_a_forward_pass_of_arrays_or_layers_that_do_not_fit_is_refused():
    x, y = np.zeros((3, 4), np.float32), np.zeros((3, 2), np.float32)
    weight, bias = np.zeros((2, 4), np.float32), np.zeros(2, np.float32)
    layer = (4, 2, weight.ctypes.data, bias.ctypes.data, False)
    with pytest.raises(ValueError, match="x has"):
        fused_step.COMPILED.forward((layer,), 4, 1, x=x, y=y)
    with pytest.raises(ValueError, match="as wide as"):
        fused_step.COMPILED.forward((layer, layer), 3, 1, x=x, y=y)
    with pytest.raises(ValueError, match="1 to 16 layers"):
        fused_step.COMPILED.forward((), 3, 1, x=x, y=y)


def test_what_is_not_the_plain_case_is_learned_layer_by_layer():
    def of(kind, **settings):
        net = network(kind, **settings)
        return FusedStep.of(net, flatten_parameters(net), 1)

    assert of("discrete") is not None and of("box") is not None
    for settings in ({"activation": "relu"}, {"arch": "memory"}, {"arch": "memory_markov"}, {"share_encoder": True}):
        assert of("discrete", **settings) is None
    for settings in ({"std": "state"}, {"squash": True}):
        assert of("box", **settings) is None


@pytest.mark.parametrize("wrong", ["vector", "advantage", "target", "log_prob"])
def test_nan_in_any_input_of_a_minibatch_reaches_its_gradient(wrong):
    net = network("discrete")
    data = segment_data(net, 300)
    data[wrong][17] = float("nan")
    _, norm, _ = fused(net, data, np.arange(300), Coefficients(1e-3, 0.2, 0.0), False)
    assert not np.isfinite(norm)


def test_rows_actions_and_arrays_that_do_not_fit_are_refused():
    net = network("discrete")
    data, now = segment_data(net, 10), Coefficients(1e-3, 0.2, 0.0)
    with pytest.raises(IndexError, match="out of range"):
        fused(net, data, np.array([3, 10]), now, False)
    with pytest.raises(IndexError, match="out of range"):
        fused(net, data | {"raw": torch.full((10,), 2)}, np.arange(10), now, False)
    with pytest.raises(ValueError, match="x has"):
        fused(net, data | {"vector": torch.zeros(9, 4)}, np.arange(10), now, False)
    with pytest.raises(ValueError, match="no row"):
        fused(net, data, np.arange(0), now, False)


@pytest.mark.parametrize("rows", [1, 7, 13, 301])
@pytest.mark.parametrize("kind", ["discrete", "wide", "box"])
def test_longer_vectors_change_no_bit(kind, rows):
    if not fused_step.COMPILED.use_wide(True):
        pytest.skip("this processor has no AVX-512")
    net = network(kind, inputs=5, hidden=(64, 33))
    data = segment_data(net, 320)
    index = np.random.default_rng(1).permutation(320)[:rows]
    found = []
    for wide in (True, False):
        assert fused_step.COMPILED.use_wide(wide) is wide
        grad, norm, parts = fused(net, data, index, Coefficients(1e-3, 0.2, 0.01, 0.5, None), normalise=True)
        found.append((grad.numpy().tobytes(), norm, parts))
    fused_step.COMPILED.use_wide(True)
    assert found[0] == found[1]
