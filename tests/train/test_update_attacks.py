"""What an update must not do quietly: learn from nothing, from a wrong observation, or into memory that no network uses."""

import threading

import gymnasium as gym
import numpy as np
import pytest
import torch

import envfleet as ef
from envfleet.errors import BadArgument, TrainingStopped
from envfleet.networks.actor_critic import ActorCritic, NetworkConfig
from envfleet.networks.network_policy import Policy
from envfleet.networks.numpy_layers import NumpyLayers
from envfleet.rollout.collector import Collector
from envfleet.rollout.segments.segment import Segment
from envfleet.train.config import PPOConfig
from envfleet.train.objective import Coefficients
from envfleet.train.trainer import PPOTrainer
from envfleet.train.update import PolicyLearner

NOW = Coefficients(1e-3, 0.2, 0.01)


def settings(**given):
    return PPOConfig(**{"env": "CartPole-v1", "preset": "none", "num_envs": 4, "num_steps": 16, "backend": "serial", **given})


def learner_of(slots=4, **given):
    config = settings(**given)
    torch.manual_seed(0)
    net = ActorCritic(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2), config.network())
    return PolicyLearner(net, config, slots, np.random.default_rng(0))


def segment(seed, steps=16, slots=4):
    rng = np.random.default_rng(seed)
    made = Segment.empty(steps, slots, obs=np.zeros((slots, 3), np.float32), action=np.zeros(slots, np.int64))
    made.obs[:], made.reward[:] = rng.standard_normal(made.obs.shape), rng.standard_normal(made.reward.shape)
    made.action[:], made.scored[:] = rng.integers(0, 2, made.action.shape), True
    made.step[:] = np.arange(steps)[:, None]
    return made


@pytest.mark.parametrize("arch", ["markov", "memory"])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_a_segment_of_which_no_row_is_learned_from_changes_no_weight(arch, activation):
    learner = learner_of(arch=arch, activation=activation, target_kl=0.02)
    learner.learn(segment(1), NOW)
    before, nothing = learner.flat.detach().clone(), segment(2)
    nothing.learned = np.zeros(nothing.scored.shape, bool)
    assert "policy_loss" not in learner.learn(nothing, NOW)
    assert torch.equal(learner.flat, before)


def test_sequences_in_which_no_row_counts_are_in_no_minibatch():
    """A slot that is gone has such sequences for the rest of the run."""
    one = learner_of(arch="memory", num_minibatches=4, num_epochs=1)
    lost = segment(1)
    lost.scored[:, 1:] = False
    losses = one.learn(lost, NOW)
    assert one.optimiser.count == 1
    assert losses["entropy"] == pytest.approx(np.log(2), rel=0.01)  # not a mean with zeros of empty minibatches


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_losses_are_means_over_the_minibatches_that_were_learned_from(activation):
    learner = learner_of(activation=activation, on_nan="skip", num_minibatches=4, num_epochs=1, gae_lambda=0.0)
    data = segment(1)
    data.reward[3, 2] = 1e25  # its error is finite, but not the square of it
    losses = learner.learn(data, NOW)
    assert losses["skipped"] == 1 and losses["value_loss"] < 10
    assert losses["entropy"] == pytest.approx(np.log(2), rel=0.01)


CHANGES = {
    "assigned": lambda net: net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True),
    "cast and back": lambda net: net.double().float(),
    "another dtype": lambda net: net.double(),
    "one replaced": lambda net: setattr(net.actor_head, "weight", torch.nn.Parameter(net.actor_head.weight.detach().clone())),
    "its data replaced": lambda net: setattr(net.critic_head.bias, "data", net.critic_head.bias.data.clone()),
    "one shared": lambda net: setattr(net.actor_layers[0], "weight", net.critic_layers[0].weight),
}


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_network_whose_parameters_have_moved_is_refused_and_not_left_as_it_is(change, activation):
    learner = learner_of(activation=activation)
    CHANGES[change](learner.net)
    with pytest.raises(BadArgument, match="was replaced or moved"):
        learner.learn(segment(1), NOW)


def test_a_parameter_that_is_not_to_be_learned_is_refused():
    learner = learner_of()
    learner.net.actor_head.bias.requires_grad_(False)
    with pytest.raises(BadArgument, match=r"actor_head\.bias has requires_grad=False"):
        learner.learn(segment(1), NOW)


def test_gradients_that_were_set_to_none_are_found_again():
    one, other = learner_of(activation="relu"), learner_of(activation="relu")
    other.net.zero_grad()
    for seed in (1, 2):
        one.learn(segment(seed), NOW)
        other.learn(segment(seed), NOW)
    assert torch.equal(one.flat, other.flat)


def test_a_weight_of_another_shape_is_an_error_and_not_a_read_beyond_it():
    net = torch.nn.Linear(4, 3)
    layers = NumpyLayers([net])
    layers(np.zeros((2, 4), np.float32))
    net.weight = torch.nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ValueError):
        layers(np.zeros((2, 4), np.float32))
    net.weight, net.bias = torch.nn.Parameter(torch.zeros(3, 4)), torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError):
        layers(np.zeros((2, 4), np.float32))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint16])
def test_a_policy_gives_discrete_actions_in_the_dtype_of_their_space(dtype):
    space = gym.spaces.Discrete(3, dtype=dtype)
    policy = Policy(ActorCritic(gym.spaces.Box(-1, 1, (4,)), space, NetworkConfig()), 5, np.random.default_rng(0))
    chosen, raw = policy.choose(np.zeros((5, 4), np.float32))
    assert all(space.contains(action) for action in chosen) and raw.dtype == np.int64


class EndsBadly(gym.Env):
    """Only the last observation of an episode is not finite."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)
    last, terminates, time = np.nan, False, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.time += 1
        over = self.time == 5
        return np.full(3, self.last if over else 0.5, np.float32), 1.0, over and self.terminates, over, {}


class EndsInfinite(EndsBadly):
    last = np.inf


class Terminates(EndsBadly):
    terminates = True


@pytest.mark.parametrize("arch", ["markov", "memory"])
@pytest.mark.parametrize("env", [EndsBadly, EndsInfinite])
def test_a_last_observation_that_is_not_finite_is_not_bootstrapped_from(env, arch):
    with PPOTrainer(settings(env=env, arch=arch)) as trainer, pytest.raises(TrainingStopped, match="episode 0, step 4"):
        trainer.train_episode_vectorized()
    with PPOTrainer(settings(env=env, arch=arch, on_nan="skip")) as trainer:
        trainer.train_episode_vectorized()
        advantage = trainer.learner.advantage
    assert not advantage[4].any() and advantage[3].all()  # the row is left out


def test_the_last_observation_of_a_terminated_episode_does_not_matter():
    with PPOTrainer(settings(env=Terminates)) as trainer:
        assert trainer.train_episode_vectorized().num_steps == 64


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_rewards_whose_sum_is_infinite_stop_the_run_as_others_do():
    learner, data = learner_of(), segment(1)
    data.reward[:] = 1.7e308
    with pytest.raises(Exception, match="loss is not finite"):
        learner.learn(data, NOW)


def test_networks_that_are_built_at_once_in_two_threads_have_the_weights_of_their_seed():
    def build(_=None):
        with PPOTrainer(settings(hidden=(256, 256))) as trainer:
            built.append(trainer.learner.flat.clone())

    built = []
    build()
    for _ in range(3):
        together = [threading.Thread(target=build) for _ in range(2)]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join()
    assert len(built) == 7 and all(torch.equal(one, built[0]) for one in built)


class StopsAt:
    """Random steps until a step at which Ctrl-C is pressed."""

    def __init__(self, number):
        self.number = number

    def __call__(self, obs):
        self.number -= 1
        if not self.number:
            raise KeyboardInterrupt
        return np.zeros(len(obs), np.int64)


def test_segments_after_an_interrupt_begin_new_episodes_and_play_none_twice():
    with ef.make("CartPole-v1", 2, backend="serial") as fleet:
        collector = Collector(fleet, StopsAt(30), seed=0, resumable=True)
        first = collector.segment(20)
        with pytest.raises(KeyboardInterrupt):
            collector.segment(20)
        left = collector.segment_state()
        later = collector.segment(5)
        assert (later.episode[0] > first.episode[-1]).all()
        other = Collector(fleet, StopsAt(-1), seed=0, resumable=True)
        other.restore_segments(left)
        again = other.segment(5)
        assert np.array_equal(again.episode, later.episode) and np.array_equal(again.obs, later.obs)


@pytest.mark.parametrize("where", ["collecting", "learning"])
def test_open_transitions_of_agents_are_not_closed_by_an_episode_after_an_interrupt(where, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with PPOTrainer(settings(env="gridworld-aec", total_steps=1000)) as trainer:
        trainer.train_episode_vectorized()
        assert trainer.learner.transitions.num_held
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            if where == "collecting":
                patched.setattr(trainer.collector.engine, "step", interrupt)
            else:
                patched.setattr(next(iter(trainer.learner.trained.values())).learner, "_inputs", interrupt)
            trainer.train_episode_vectorized()
        assert not trainer.learner.transitions.num_held
        assert trainer.train_episode_vectorized().num_steps == 128
