"""Training with many agents: transitions, advantages, policies, memory, self-play, checkpoints, refusals."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")

import torch

import envfleet as ef
from envfleet.cli.main import main
from envfleet.errors import BadArgument
from envfleet.multiagent.policy_map import assign_policies, read_policies
from envfleet.rollout.collector import Collector
from envfleet.rollout.segments.agent_segment import AgentSegment
from envfleet.train import PPOConfig, PPOTrainer, load_agent, trainer
from envfleet.train.advantage import following_values, gae
from envfleet.train.selfplay import rate
from envfleet.train.transitions import Transitions
from tests.support.agent_envs import Breaks, Clock, Crowd, Odd, OddBox, One, Turns


def config(**changes):
    base = {
        "env": Clock, "num_envs": 3, "num_steps": 12, "total_steps": 3 * 12 * 4, "seed": 5, "preset": "none",
        "backend": "serial", "tensorboard": False, "report": False, "hidden": (16, 16), "state_size": 8,
    }  # fmt: skip
    return PPOConfig(**{**base, **changes})


def weights(trainer):
    return trainer.learner.flat


def trained(settings):
    with PPOTrainer(settings) as trainer:
        trainer.train()
        return weights(trainer)


# -- who plays whom ----------------------------------------------------------------------------------------------------


def test_policies_are_shared_independent_or_named():
    with ef.make(Clock, 1, backend="serial") as fleet:
        agents, groups = fleet.agents, fleet.groups
    assert [s.agents for s in assign_policies("shared", agents, groups)] == [("clock_0", "clock_1")]
    assert [s.name for s in assign_policies("independent", agents, groups)] == ["clock_0", "clock_1"]
    named = assign_policies(read_policies("b=clock_1,a=clock_0"), agents, groups)
    assert [(s.name, s.indices.tolist()) for s in named] == [("b", [1]), ("a", [0])]


@pytest.mark.parametrize(
    ("policies", "told"),
    [
        ({"a": ["clock_0"]}, "no policy plays clock_1"),
        ({"a": ["clock_0", "clock_7"]}, "no agent 'clock_7'"),
        ({"a": ["clock_0", "clock_1"], "b": ["clock_1"]}, "clock_1 appear more than once"),
        ("everyone", "shared"),
        ({}, "at least one"),
    ],
)
def test_policies_that_do_not_fit_are_named(policies, told):
    with pytest.raises(BadArgument, match=told):
        PPOTrainer(config(policies=policies))


def test_shared_policies_of_agents_with_different_spaces_are_refused_before_any_process_starts(monkeypatch):
    monkeypatch.setattr(trainer, "make", lambda *args, **kwargs: pytest.fail("a fleet was made"))
    with pytest.raises(BadArgument, match=r"clock_0 observes Box.*\(2,\).*clock_1 observes Box.*\(3,\)"):
        PPOTrainer(config(env=Odd, backend="shm"))


def test_settings_for_many_agents_are_refused_where_there_is_one():
    with pytest.raises(BadArgument, match="has one agent"):
        PPOTrainer(config(env=One, self_play=True))
    with pytest.raises(BadArgument, match="has one agent"):
        PPOTrainer(config(env="CartPole-v1", policies="independent"))


# -- transitions and advantages ----------------------------------------------------------------------------------------


def collected(env, policies="shared", steps=(12,), num_envs=2):
    """Segments of random play, cut into transitions."""
    with ef.make(env, num_envs, backend="serial") as fleet:
        transitions = Transitions(assign_policies(policies, fleet.agents, fleet.groups), num_envs)
        rng = np.random.default_rng(0)

        class Player:
            answers_fit = True

            def act(self, ask):
                from envfleet.rollout.policy_protocol import Answer

                return Answer(rng.integers(2, size=(len(ask), len(fleet.agents))))

        collector = Collector(fleet, Player(), seed=3, timing=False)
        segments = [collector.segment(count) for count in steps]
    return segments, [transitions.cut(segment) for segment in segments], transitions


def test_gae_equals_hand_computed_values_per_agent_where_episodes_are_truncated():
    gamma, lam = 0.9, 0.8
    (segment,), (parts,), _ = collected(Clock, steps=(7,))
    part = parts["shared"]
    assert part.num_steps == 7 and part.lengths.tolist() == [7] * 4 and part.scored.all()
    # A value that is known: the sum of what is seen. Time is 0..4, then 0, 1 of the next episode.
    values = np.concatenate([part.obs.sum(-1), part.bootstrap_obs.sum(-1)[None]]).astype(np.float64)
    final = np.zeros(part.reward.shape)
    final[part.end_index[:, 0], part.end_index[:, 1]] = part.final_obs.sum(-1)
    assert len(part.end_index) == 4, "every end has a final observation"
    following = following_values(values, final, part.terminated, part.truncated)
    advantage, _ = gae(part.reward, values, following, part.ended, part.scored, gamma, lam)
    for column in range(4):
        agent = column % 2
        value = lambda time, agent=agent: time / 4 + agent
        reward = [time + 10.0 * agent for time in (1, 2, 3, 4, 5, 1, 2)]
        after = [value(1), value(2), value(3), value(4), value(5), value(1), value(2)]  # the fifth is of final_obs
        now = [value(0), value(1), value(2), value(3), value(4), value(0), value(1)]
        delta = [r + gamma * v - w for r, v, w in zip(reward, after, now)]
        wanted, running = [], 0.0
        for t in reversed(range(7)):
            running = delta[t] + (0.0 if t == 4 else gamma * lam * running)
            wanted.insert(0, running)
        np.testing.assert_allclose(advantage[:, column], wanted, rtol=1e-6)


def test_players_that_take_turns_have_their_own_sequences_and_rewards_of_others_turns():
    # Nine moves an episode: 1+t for one's own move, 0.5 for each move of the other until one's next turn.
    (segment,), (parts,), transitions = collected(Turns, steps=(9,), num_envs=1)
    part = parts["shared"]
    assert part.lengths.tolist() == [5, 4] and transitions.num_held == 0
    assert part.reward[:5, 0].tolist() == [1.5, 3.5, 5.5, 7.5, 9.0]
    assert part.reward[:4, 1].tolist() == [2.5, 4.5, 6.5, 8.5]
    assert part.terminated[4, 0] and part.terminated[3, 1] and part.terminated.sum() == 2
    assert part.obs[:5, 0, 0].tolist() == pytest.approx([0, 0.4, 0.8, 1.2, 1.6])
    assert part.step[:4, 1].tolist() == [0, 1, 2, 3]


def test_what_is_open_at_the_end_of_a_segment_is_the_first_of_the_next():
    whole, (all_at_once,), _ = collected(Turns, steps=(28,))
    pieces, cut, transitions = collected(Turns, steps=(4, 1, 1, 10, 12))
    for name in ("reward", "terminated", "step", "action"):
        wanted = all_at_once["shared"]
        for column in range(4):
            joined = [getattr(p["shared"], name)[: p["shared"].lengths[column], column] for p in cut]
            np.testing.assert_array_equal(
                np.concatenate(joined), getattr(wanted, name)[: wanted.lengths[column], column], err_msg=name
            )
    first = cut[0]["shared"]  # four moves: player 0 waits for its second outcome, which needs the fifth
    assert first.lengths.tolist() == [1, 1, 1, 1] or first.lengths.tolist() == [2, 1, 2, 1]
    # Below the last transition stands what the agent saw next: the value there is the bootstrap.
    rows = np.concatenate([first.obs, first.bootstrap_obs[None]])
    assert rows[first.lengths[0], 0, 0] == pytest.approx(0.4 * first.lengths[0])


def test_births_and_deaths_leave_every_transition_with_what_followed_it():
    (segment,), (parts,), transitions = collected(Crowd, steps=(60,), num_envs=4)
    part = parts["shared"]
    assert isinstance(segment, AgentSegment)
    acted = int(segment.acted.sum())
    assert acted == part.lengths.sum() + transitions.num_held and transitions.num_dropped == 0
    assert part.num_scored == part.lengths.sum()
    assert part.reward.sum() == segment.agent_reward.sum()
    ended = part.ended
    assert 0 < ended.sum() == len(part.end_index)
    # A life begins after every end, and nowhere else.
    for column in range(part.num_slots):
        length = part.lengths[column]
        begins = part.step[:length, column] == 0
        assert begins[0] and (begins[1:] == ended[: length - 1, column]).all()


def test_transitions_that_a_fault_cut_off_are_not_learned_from(monkeypatch):
    monkeypatch.setattr(Breaks, "left", 2)
    with PPOTrainer(config(env=Breaks, on_fault="restart", num_envs=2)) as trainer:
        segment = trainer.collector.segment(5)
        part = trainer.learner.transitions.cut(segment)["shared"]
        broken = np.argwhere(~segment.scored).tolist()
        assert broken == [[2, 0], [2, 1]] and part.num_scored == 16
        for t, b in broken:
            for column in (2 * b, 2 * b + 1):
                assert not part.scored[t, column] and part.truncated[t, column]
                assert part.step[t + 1, column] == 0, "the next life begins"
        trainer.train_episode_vectorized()
        assert torch.isfinite(weights(trainer)).all()


def test_an_agent_that_vanishes_unscored_is_dropped_and_counted():
    transitions = Transitions(assign_policies("shared", ("a", "b"), [_group("x", ("a", "b"))]), 1)
    segment = AgentSegment.of(2, obs=np.zeros((1, 2, 1)), action=np.zeros((1, 2), np.int64), active=np.zeros((1, 2), bool))
    segment.acted[0, 0, 0] = segment.agent_scored[0, 0, 0] = True  # scored, goes on, but is not there any more
    part = transitions.cut(segment)["shared"]
    assert part.lengths.tolist() == [1, 0] and part.num_scored == 0 and transitions.num_dropped == 1


def _group(name, agents):
    from types import SimpleNamespace

    import gymnasium as gym

    return SimpleNamespace(
        name=name, agents=agents, observation_space=gym.spaces.Box(-1, 1, (1,)), action_space=gym.spaces.Discrete(2)
    )


# -- training ----------------------------------------------------------------------------------------------------------

CASES = {
    "shared": {},
    "independent": {"env": Odd, "policies": "independent"},
    "box": {"env": OddBox, "policies": "independent", "normalize_obs": True, "normalize_reward": True},
    "crowd": {"env": Crowd, "arch": "memory", "normalize_obs": True, "normalize_reward": True},
    "turns": {"env": Turns, "arch": "memory_markov", "policies": {"a": ["turn_0"], "b": ["turn_1"]}},
    "central": {"centralised_critic": True},
    "central memory": {"centralised_critic": True, "arch": "memory", "rnn": "lstm"},
    "self-play": {"env": Turns, "self_play": True, "self_play_every": 1, "self_play_pool": 2, "arch": "memory"},
}


@pytest.mark.parametrize("case", CASES)
def test_training_moves_the_weights_and_logs_every_agent(case, tmp_path):
    settings = config(**CASES[case], out=str(tmp_path))
    with PPOTrainer(settings) as trainer:
        before = weights(trainer)
        result = trainer.train()
        assert result.num_steps == settings.total_steps
        after = weights(trainer)
        agents = trainer.learner.agents
        evaluation = trainer.evaluate(2)
    assert torch.isfinite(after).all() and (before != after).any()
    assert set(evaluation.agent_returns) == set(agents)
    from envfleet.train.loggers import read_rows

    logged = set().union(*read_rows(tmp_path))
    assert {f"return/{agent}" for agent in agents} <= logged
    assert ("elo" in logged) == (case == "self-play")


def test_one_forward_per_policy_and_batch(monkeypatch):
    from envfleet.networks.network_policy import Policy

    rows = []
    choose = Policy.choose
    monkeypatch.setattr(Policy, "choose", lambda self, obs, *args: rows.append(len(args[0])) or choose(self, obs, *args))
    with PPOTrainer(config(env=Turns, num_envs=4)) as trainer:
        trainer.collector.segment(8)
    assert rows == [4] * 8, "whoever's turn it is, one call has every environment's row"
    rows.clear()
    with PPOTrainer(config(policies="independent", num_envs=4)) as trainer:
        trainer.collector.segment(8)
    assert rows == [4] * 16


def test_only_those_who_act_advance_their_memory():
    with PPOTrainer(config(env=Turns, arch="memory", num_envs=2)) as trainer:
        policy = trainer.learner.trained["shared"].policy
        trainer.collector.segment(2)  # each had its turn
        before = policy.state.reshape(2, 2, -1).copy()
        trainer.collector.segment(1)  # the first again
        changed = (policy.state.reshape(2, 2, -1) != before).any(axis=2)
        assert before[:, 1].any() and changed.tolist() == [[True, False]] * 2


def test_learned_state_follows_each_agents_own_rows():
    """The learner's memory after ragged columns equals the actor's, which advanced step by step."""
    with PPOTrainer(config(env=Crowd, arch="memory", num_envs=4, learning_rate=0.0)) as trainer:
        for _ in range(3):
            trainer.train_episode_vectorized()
            side, held = trainer.learner.trained["shared"], trainer.learner.transitions.held_mask
            run = trainer.collector._segments
            going = (run.agent_step > 0).reshape(-1) & ~held.reshape(-1)
            assert going.any()
            ours, theirs = side.learner.state[0].numpy(), side.policy.state
            np.testing.assert_allclose(ours[going], theirs[going], atol=1e-5)


@pytest.mark.parametrize("case", ["self-play", "crowd"])
def test_a_resumed_run_ends_with_the_same_weights(case, tmp_path):
    changes = CASES[case]
    whole = trained(config(**changes, out=str(tmp_path / "whole")))
    first = config(**changes, out=str(tmp_path / "parts"), checkpoint_every=1)
    with PPOTrainer(first) as trainer:
        trainer.train_episode_vectorized()
        trainer.train_episode_vectorized()
        trainer.save()
    again = config(**changes, out=str(tmp_path / "parts"), resume=True)
    assert torch.equal(trained(again), whole)


def test_weights_do_not_depend_on_the_backend():
    changes = {"env": Crowd, "total_steps": 3 * 12 * 2, "num_envs": 3}
    assert torch.equal(trained(config(**changes)), trained(config(**changes, backend="shm", num_workers=2)))


# -- self-play ---------------------------------------------------------------------------------------------------------


def test_ratings_move_by_what_was_unexpected():
    assert rate(1000.0, 1000.0, 0.5) == (1000.0, 1000.0)
    ours, theirs = rate(1400.0, 1000.0, 1.0)
    assert ours - 1400.0 < 2.0 and ours + theirs == pytest.approx(2400.0)


def test_past_policies_play_one_side_and_are_not_learned_from():
    settings = config(env=Turns, self_play=True, self_play_every=1, self_play_past=1.0, num_envs=4, self_play_pool=2)
    with PPOTrainer(settings) as trainer:
        segment = trainer.collector.segment(20)
        past = segment.extras["past_policy"]
        assert ((past >= 0).sum(axis=2) == 1).all(), "one side is past, one is ours"
        part = trainer.learner.transitions.cut(segment)["shared"]
        ours = (segment.acted & (past < 0)).sum()
        assert part.lengths.sum() + trainer.learner.transitions.num_held == ours < segment.acted.sum()
        for _ in range(6):
            trainer.train_episode_vectorized()
        pool = trainer.learner.pool
        assert len(pool.entries) <= 2 + len(np.unique(pool.playing)) and pool.games > 0
        assert sum(entry.games for entry in pool.entries) <= pool.games
        assert pool.rating != 1000.0 or pool.games == 0


# -- commands ----------------------------------------------------------------------------------------------------------


def test_train_and_eval_from_the_command_line(tmp_path, capsys):
    out = str(tmp_path / "run")
    flags = ["--n-envs", "2", "--num-steps", "32", "--total-steps", "192", "--backend", "serial", "--quiet"]
    flags += ["--env-kwargs", "max_cycles=6"]  # episodes end in every update
    assert main(["train", "gridworld-aec", "--policies", "shared", "--out", out, *flags, "--no-tensorboard"]) == 0
    assert main(["eval", out, "--episodes", "2", "--json"]) == 0
    import json

    told = json.loads(capsys.readouterr().out)
    assert set(told["agent_returns"]) == {"agent_0", "agent_1"} and len(told["returns"]) == 2
    report = (tmp_path / "run" / "report.html").read_text()
    assert "Return of agent_0" in report
    assert load_agent(out).agents == ("agent_0", "agent_1")
    with pytest.raises(BadArgument, match="agents agent_0, agent_1: evaluate"):
        load_agent(out).policy()


def test_eval_against_opponents_counts_games(tmp_path, capsys):
    pytest.importorskip("pettingzoo.classic")
    out = str(tmp_path / "run")
    flags = [
        "--n-envs",
        "4",
        "--num-steps",
        "16",
        "--total-steps",
        "64",
        "--self-play",
        "--out",
        out,
        "--quiet",
        "--backend",
        "serial",
    ]
    assert main(["train", "pettingzoo:classic/tictactoe_v3", *flags, "--no-tensorboard"]) == 0
    assert main(["eval", out, "--episodes", "6", "--opponent", "envfleet.envs.tictactoe:minimax2"]) == 0
    told = capsys.readouterr().out
    won, drawn, lost = (int(part.split()[0]) for part in told.strip().splitlines()[-1].split(": ")[1].split(", "))
    assert won + drawn + lost == 6
    agent = load_agent(out)
    assert agent.elo is not None
    with pytest.raises(BadArgument, match="no agent 'player_9'"):
        agent.evaluate(1, opponents={"player_9": "random"})
    assert main(["eval", out, "--opponent", "nowhere:nobody"]) == 2
