"""Advantage and update: values worked out by hand, gradients against autograd, rows that must not count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from envfleet.networks.actor_critic import ActorCritic, NetworkConfig
from envfleet.networks.network_policy import NotFinite
from envfleet.rollout.segments.segment import Segment
from envfleet.train import PPOConfig
from envfleet.train.advantage import following_values, gae
from envfleet.train.normalise import ObservationNormaliser, RewardNormaliser, RunningMoments
from envfleet.train.objective import Coefficients, FlatAdam, ppo_gradients
from envfleet.train.update import PolicyLearner, _Shuffled

VECTOR = spaces.Box(-1, 1, (3,), np.float32)
NOW = Coefficients(1e-3, 0.2, 0.01)


def column(*values):
    return np.array(values, dtype=float)[:, None]


def flags(*values):
    return np.array(values, dtype=bool)[:, None]


def test_gae_without_ends_is_the_discounted_sum_of_errors():
    values = column(1, 2, 3, 4)
    following = following_values(values, column(0, 0, 0), flags(0, 0, 0), flags(0, 0, 0))
    advantage, target = gae(column(1, 1, 1), values, following, flags(0, 0, 0), flags(1, 1, 1), 0.9, 0.5)
    d2 = 1 + 0.9 * 4 - 3
    d1 = 1 + 0.9 * 3 - 2
    d0 = 1 + 0.9 * 2 - 1
    a1 = d1 + 0.45 * d2
    np.testing.assert_allclose(advantage.ravel(), [d0 + 0.45 * a1, a1, d2])
    np.testing.assert_allclose(target, advantage + values[:-1])


def test_gae_at_a_termination_and_at_a_truncation():
    values = column(1, 2, 3)
    for terminated, truncated, after in ((True, False, 0.0), (False, True, 10.0), (True, True, 0.0)):
        flag_t, flag_c = flags(terminated, 0), flags(truncated, 0)
        following = following_values(values, column(10, 10), flag_t, flag_c)
        advantage, _ = gae(column(1, 1), values, following, flag_t | flag_c, flags(1, 1), 0.5, 0.5)
        # The next episode's step must not leak into this one; the value of where it stopped counts if truncated.
        np.testing.assert_allclose(advantage.ravel(), [1 + 0.5 * after - 1, 1 + 0.5 * 3 - 2])


def test_gae_at_a_fault_row():
    values = column(1, 2, 3)
    following = following_values(values, column(5, 5), flags(0, 0), flags(0, 1))
    advantage, target = gae(column(1, 0), values, following, flags(0, 1), flags(1, 0), 0.5, 0.5)
    assert advantage[1, 0] == 0 and target[1, 0] == 2
    assert advantage[0, 0] == 1 + 0.5 * 2 - 1


def reference_loss(log_prob, value, entropy, batch, advantage, weight, now):
    ratio = (log_prob - batch["log_prob"]).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - now.clip, 1 + now.clip) * advantage)
    error = (value - batch["target"]) ** 2
    if now.value_clip is not None:
        near = batch["value"] + (value - batch["value"]).clamp(-now.value_clip, now.value_clip)
        error = torch.maximum(error, (near - batch["target"]) ** 2)
    each = -gain + 0.5 * now.value * error - now.entropy * entropy
    return each.mean() if weight is None else (each * weight).sum() / weight.sum()


@pytest.mark.parametrize("value_clip", [None, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_and_its_gradient_equal_the_formula(value_clip, weighted):
    torch.manual_seed(0)
    rows = 200
    now = Coefficients(1e-3, 0.2, 0.01, value_clip=value_clip)
    leaves = [torch.randn(rows, requires_grad=True) for _ in range(3)]
    batch = {"log_prob": torch.randn(rows), "target": torch.randn(rows), "value": torch.randn(rows)}
    advantage = torch.randn(rows)
    weight = (torch.rand(rows) < 0.7).float() if weighted else None
    ours, report = ppo_gradients(*leaves, batch, advantage, weight, now)
    theirs = reference_loss(*leaves, batch, advantage, weight, now)
    parts = report()
    whole = parts["policy_loss"] + now.value * parts["value_loss"] - now.entropy * parts["entropy"]
    assert whole == pytest.approx(theirs.item(), rel=1e-5)
    for got, wanted in zip(ours, torch.autograd.grad(theirs, leaves)):
        torch.testing.assert_close(got, wanted)


def test_adam_equals_torch():
    torch.manual_seed(0)
    start = torch.randn(50)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    adam, reference = FlatAdam(ours, eps=1e-5), torch.optim.Adam([theirs], lr=3e-3, eps=1e-5)
    for _ in range(20):
        grad = torch.randn(50)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        adam.step(3e-3)
        reference.step()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


# -- learning from segments ----------------------------------------------------------------------------------------------


def make_segment(steps=8, slots=4, seed=0):
    rng = np.random.default_rng(seed)
    segment = Segment.empty(steps, slots, obs=np.zeros((slots, 3), np.float32), action=np.zeros(slots, np.int64))
    segment.obs[:] = rng.standard_normal(segment.obs.shape)
    segment.bootstrap_obs[:] = rng.standard_normal((slots, 3))
    segment.action[:] = rng.integers(0, 2, segment.action.shape)
    segment.reward[:] = rng.standard_normal(segment.reward.shape)
    segment.scored[:] = True
    segment.step[:] = np.arange(1, steps + 1)[:, None]
    return segment


def end(segment, t, b, *, truncated, final):
    (segment.truncated if truncated else segment.terminated)[t, b] = True
    if t + 1 < segment.num_steps:
        segment.step[t + 1 :, b] = np.arange(segment.num_steps - t - 1)
    segment.end_index = np.concatenate([segment.end_index, [[t, b]]])
    segment.final_obs = np.concatenate([segment.final_obs, np.asarray(final, np.float32)[None]])


def make_learner(arch="markov", slots=4, **settings):
    torch.manual_seed(0)
    net = ActorCritic(VECTOR, spaces.Discrete(2), NetworkConfig(arch=arch, state_size=6, hidden=(8, 8)))
    return PolicyLearner(net, PPOConfig(preset="none", **settings), slots, np.random.default_rng(0))


@pytest.mark.parametrize("arch", ["markov", "memory", "memory_markov"])
def test_truncation_is_bootstrapped_from_its_final_observation(arch):
    segment = make_segment()
    end(segment, 3, 1, truncated=True, final=[9, 9, 9])
    learner = make_learner(arch)
    inputs, bad = learner._inputs(segment)
    data, _ = learner._prepare(segment, inputs, bad)
    # The value of (9, 9, 9) as the critic sees it after the steps of that episode, computed step by step.
    net = make_learner(arch).net
    path = np.concatenate([segment.obs[:4, 1], [[9, 9, 9]]]).astype(np.float32)[:, None]
    with torch.no_grad():
        out = net({"vector": torch.from_numpy(path)}, net.initial_state(1), torch.zeros(5, 1, dtype=torch.bool))
        last = float(out.value[4, 0])
        here = float(out.value[3, 0])
    wanted = segment.reward[3, 1] + 0.99 * last - here
    assert float(data["advantage"][3, 1]) == pytest.approx(wanted, abs=1e-4)


def test_the_critic_starts_afresh_after_an_end():
    segment = make_segment()
    end(segment, 3, 1, truncated=False, final=[0, 0, 0])
    learner = make_learner("memory")
    data, _ = learner._prepare(segment, *learner._inputs(segment))
    net = make_learner("memory").net
    with torch.no_grad():
        alone = net({"vector": torch.from_numpy(segment.obs[4:, 1:2])}, net.initial_state(1), torch.zeros(4, 1, dtype=torch.bool))
    torch.testing.assert_close(data["value"][4:, 1], alone.value[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arch", ["markov", "memory"])
def test_rows_that_are_no_transitions_do_not_count(arch):
    def learned(action, reward):
        segment = make_segment()
        segment.scored[2, 1] = False
        end(segment, 2, 1, truncated=True, final=segment.obs[2, 1])
        segment.action[2, 1], segment.reward[2, 1] = action, reward
        learner = make_learner(arch)
        learner.learn(segment, NOW)
        return learner.flat.detach().clone()

    assert torch.equal(learned(0, 0.0), learned(1, 1e6))


def test_sequences_begin_in_the_state_that_was_there():
    learner = make_learner("memory", sequence_length=2)
    segment = make_segment()
    data, _ = learner._prepare(segment, *learner._inputs(segment))
    shuffled = _Shuffled(data, learner.config, True)
    assert shuffled.flat["vector"].shape == (2, 16, 3)
    with torch.no_grad():
        out = learner.net(shuffled.flat, shuffled.flat["state"], shuffled.flat["fresh"])
        log_prob, _ = learner.net.actions.score(out.actions, None, shuffled.flat["raw"])
    torch.testing.assert_close(log_prob, shuffled.flat["log_prob"], atol=1e-5, rtol=1e-5)


def test_learning_raises_the_probability_of_what_paid():
    learner = make_learner(num_epochs=10)
    segment = make_segment(steps=64)
    segment.reward[:] = segment.action  # action 1 pays
    segment.terminated[:] = True  # every step is an episode: the advantage is the reward
    segment.step[:] = 0
    for _ in range(10):
        losses = learner.learn(segment, Coefficients(1e-2, 0.2, 0.0))
    out = learner.net({"vector": torch.from_numpy(segment.obs[0])}, learner.state, learner.state)
    assert (out.actions.softmax(-1)[:, 1] > 0.9).all()
    assert {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance"} <= set(losses)


def test_target_kl_ends_the_epochs():
    segment = make_segment(steps=64)
    losses = make_learner(num_epochs=50, target_kl=1e-4).learn(segment, Coefficients(1e-1, 0.2, 0.0))
    assert losses["epochs"] < 50


def test_nan_stops_with_an_address_or_is_left_out():
    segment = make_segment()
    segment.obs[5, 2, 0] = np.nan
    segment.episode[5, 2] = 7
    with pytest.raises(NotFinite, match="slot 2, episode 7, step 6"):
        make_learner().learn(segment, NOW)
    learner = make_learner(on_nan="skip")
    learner.learn(segment, NOW)
    assert torch.isfinite(learner.flat).all()
    segment = make_segment()
    segment.reward[1, 3] = np.inf
    with pytest.raises(NotFinite, match="reward is not finite at slot 3"):
        make_learner().learn(segment, NOW)


def test_masks_reach_the_update():
    segment = make_segment()
    segment.action[:] = 0
    segment.columns["action_mask"] = np.tile(np.array([1, 0], np.int8), (8, 4, 1))
    losses = make_learner().learn(segment, NOW)
    assert losses["entropy"] == pytest.approx(0.0, abs=1e-6)


# -- normalisers ---------------------------------------------------------------------------------------------------------


def test_moments_merge_exactly():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((100, 3)) * 5 + 2
    moments = RunningMoments(3)
    for part in np.split(rows, [10, 11, 60]):
        moments.update(part)
    np.testing.assert_allclose(moments.mean, rows.mean(0))
    np.testing.assert_allclose(moments.var, rows.var(0))


def test_normalisers_come_back_from_their_state():
    first, second = ObservationNormaliser(2), ObservationNormaliser(2)
    first.take({"vector": np.random.default_rng(0).standard_normal((50, 2))})
    second.load(first.state())
    rows = {"vector": np.ones((3, 2), np.float32)}
    assert (first(rows)["vector"] == second(rows)["vector"]).all()
    one, two = RewardNormaliser(2, 0.9), RewardNormaliser(2, 0.9)
    one(np.ones((5, 2)), np.zeros((5, 2), bool))
    two.load(one.state())
    assert (one(np.ones((5, 2)), np.zeros((5, 2), bool)) == two(np.ones((5, 2)), np.zeros((5, 2), bool))).all()


@pytest.mark.parametrize("arch", ["markov", "memory"])
def test_an_update_in_which_no_row_counts_changes_nothing(arch):
    net = ActorCritic(VECTOR, spaces.Discrete(2), NetworkConfig(arch=arch, state_size=8))
    config = PPOConfig(preset="none", num_envs=4, num_steps=8, num_minibatches=2, on_nan="skip", arch=arch)
    learner = PolicyLearner(net, config, 4, np.random.default_rng(0))
    before = learner.flat.detach().clone()
    segment = make_segment()
    segment.obs[:] = np.nan
    losses = learner.learn(segment, NOW)
    assert losses["explained_variance"] == 0.0
    if arch == "markov":
        assert torch.equal(before, learner.flat)
