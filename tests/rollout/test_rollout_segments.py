import threading
import time
import weakref

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.probe import Counting, Mixed, Tasked, Waiting
from envfleet.errors import BadArgument, FaultError
from envfleet.rollout import AgentFailed, Collector, LatencyHistogram, Stats, Verdict
from envfleet.rollout.policy_protocol import Answer
from envfleet.rollout.timing import Clock
from envfleet.util.trees import tree_leaves
from tests.support.rollout_envs import Fragile, Frozen, Walk


def arrays_of(segment):
    names = ("obs", "action", "reward", "terminated", "truncated", "scored", "bootstrap_obs", "episode", "step", "task",
             "policy_version", "end_index", "final_obs", "end_return", "end_length")  # fmt: skip
    return {**{name: getattr(segment, name) for name in names}, **segment.extras}


def following_obs(segment):
    """[T, B, ...] what followed each action: the final observation where an episode ended there."""
    following = np.concatenate([segment.obs[1:], segment.bootstrap_obs[None]])
    following[tuple(segment.end_index.T)] = segment.final_obs
    return following


def segments(backend="serial", num_workers=None, mode="sync", count=3, num_steps=17):
    with ef.make(Walk, num_envs=5, backend=backend, num_workers=num_workers) as fleet:
        collector = Collector(fleet, Frozen(), seed=2, mode=mode)
        return [collector.segment(num_steps) for _ in range(count)], collector


def test_a_segment_is_what_the_environments_did():
    """Every slot is replayed alone, with the actions of the segments, from the seed of each of its episodes."""
    found, collector = segments()
    assert collector.ledger.started == collector.ledger.used + 5 == collector.ledger.used + collector.ledger.in_flight
    obs = np.concatenate([s.obs for s in found])
    following = np.concatenate([following_obs(s) for s in found])
    columns = {name: np.concatenate([getattr(s, name) for s in found]) for name in
               ("action", "reward", "terminated", "truncated", "episode", "step", "scored", "policy_version")}  # fmt: skip
    assert columns["scored"].all() and (columns["policy_version"] == 7).all() and obs.shape == (51, 5, 3)
    for slot in range(5):
        env, episode, ended = Walk(), -1, True
        for t in range(51):
            if ended:
                episode += 1
                now, _ = env.reset(seed=ef.episode_seed(2, "segment", slot, episode))
                step = 0
            assert np.array_equal(obs[t, slot], now)
            assert (columns["episode"][t, slot], columns["step"][t, slot]) == (episode, step)
            now, reward, terminated, truncated, _ = env.step(columns["action"][t, slot])
            assert reward == columns["reward"][t, slot] and terminated == columns["terminated"][t, slot]
            assert truncated == columns["truncated"][t, slot] and np.array_equal(following[t, slot], now)
            ended, step = terminated or truncated, step + 1


def test_ends_are_compact_and_complete():
    (segment, *_), _ = segments()
    assert np.array_equal(segment.end_index, np.argwhere(segment.ended))
    assert len(segment.final_obs) == len(segment.end_index) == len(segment.end_return) == len(segment.end_length)
    assert np.array_equal(segment.end_length, segment.step[tuple(segment.end_index.T)] + 1)
    t, b = segment.end_index[segment.end_index[:, 0] > 8][0]
    first = t - segment.step[t, b]
    position = np.flatnonzero((segment.end_index == (t, b)).all(axis=1))[0]
    assert segment.end_return[position] == segment.reward[first : t + 1, b].sum()
    assert segment.num_scored == 85 and segment.num_steps == 17 and segment.num_slots == 5
    assert segment.extras["logprob"].shape == (17, 5) and (segment.extras["logprob"] != 0).any()


@pytest.mark.parametrize(
    "backend, num_workers, mode",
    [("serial", None, "overlap"), ("thread", 3, "async"), ("shm", 2, "overlap"), ("shm", 2, "async")],
)
def test_segments_are_the_same_on_every_backend_and_mode(backend, num_workers, mode):
    expected, _ = segments()
    got, _ = segments(backend, num_workers, mode)
    for a, b in zip(expected, got):
        there = arrays_of(b)
        for name, values in arrays_of(a).items():
            assert np.array_equal(values, there[name]), name


def test_trees_tasks_and_cuts():
    with ef.make(Mixed, num_envs=3, backend="serial") as fleet:
        segment = Collector(fleet, random_actions=True, max_steps=4).segment(10)
    assert segment.obs["image"].shape == (10, 3, 4, 4) and segment.action["force"].shape == (10, 3, 2)
    assert segment.end_length.tolist() == [4] * 6 and segment.truncated[3].all() and segment.truncated[7].all()
    assert segment.final_obs["pair"][0].shape == (6,) and segment.bootstrap_obs["position"].shape == (3, 3)
    assert (segment.episode[:, 0] == [0] * 4 + [1] * 4 + [2] * 2).all()
    with ef.make(Tasked, num_envs=2, backend="serial") as fleet:
        collector = Collector(fleet, random_actions=True, tasks=lambda number: 100 + number)
        segment = collector.segment(20)
        values = np.array([[fleet.task_value(task) for task in row] for row in segment.task])
    assert np.array_equal(segment.obs[:, :, 0], values)  # the task of a row is the one its environment ran
    assert np.array_equal(values, 100 + segment.episode * 2 + np.arange(2))


class Talk(gym.Env):
    """Observations without a fixed shape."""

    observation_space = gym.spaces.Dict(text=gym.spaces.Text(20), number=gym.spaces.Box(0, 9, (2,)))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.see(), {}

    def see(self):
        word = f"{self.time} {self.np_random.integers(100)}"
        return {"text": word, "number": np.full(2, self.time, np.float32)}

    def step(self, action):
        self.time += 1
        return self.see(), float(action), self.time == 5, False, {}


@pytest.mark.parametrize("max_steps", [None, 3])
def test_text_observations_are_the_same_in_every_mode(max_steps):
    found = {}
    for mode in ("sync", "overlap", "async"):
        with ef.make(Talk, num_envs=3, backend="serial") as fleet:
            found[mode] = Collector(fleet, random_actions=True, mode=mode, max_steps=max_steps).segment(12)
    length = max_steps or 5
    for segment in found.values():
        for name in ("obs", "final_obs", "bootstrap_obs"):
            wanted = dict(tree_leaves(getattr(found["sync"], name)))
            for path, leaf in tree_leaves(getattr(segment, name)):
                assert leaf.tolist() == wanted[path].tolist(), (name, path)
        assert [text[0] for text in segment.obs["text"][:, 1]] == [str(t % length) for t in range(12)]
        assert {text[0] for text in segment.final_obs["text"]} == {str(length)} and segment.final_obs["text"].dtype == object


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_collector_goes_on_where_another_one_stopped(mode):
    def collector(fleet):
        return Collector(fleet, Frozen(), seed=2, mode=mode, resumable=True)

    with ef.make(Walk, num_envs=4, backend="serial") as fleet:
        ours = collector(fleet)
        assert ours.segment_state() is None
        for _ in range(3):
            ours.segment(7)
        state, wanted = ours.segment_state(), ours.segment(9)
        ledger = str(ours.ledger)
    assert set(ours.segment_state(running=False)) == {"episode", "ledger"}
    with ef.make(Walk, num_envs=4, backend="serial") as fleet:
        theirs = collector(fleet)
        assert theirs.restore_segments(state).tolist() == []
        got = theirs.segment(9)
        assert str(theirs.ledger) == ledger
        for name, values in arrays_of(wanted).items():
            assert np.array_equal(values, arrays_of(got)[name]), name
    with ef.make(Walk, num_envs=4, backend="serial") as fleet:
        ended = collector(fleet)
        assert ended.restore_segments(state, "end").tolist() == [0, 1, 2, 3]
        assert (ended.segment(1).episode[0] == state["episode"] + 1).all()
        assert ended.ledger.dropped == {"ended when the run was resumed": 4}
    with ef.make(Walk, num_envs=4, backend="serial") as fleet:
        without = Collector(fleet, Frozen())
        without.segment(2)
        with pytest.raises(BadArgument, match="resumable=True"):
            without.segment_state()


class OneEpisode(Walk):
    """Ends no episode; `breaks`: fails in every step instead."""

    def __init__(self, breaks=False):
        super().__init__()
        self.breaks = breaks

    def step(self, action):
        if self.breaks:
            raise RuntimeError("broken")
        self.limit = self.t + 10
        return super().step(action)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_slot_that_ends_no_episode_does_not_hold_the_actions_of_all_others(breaks):
    """Also one in quarantine. And what is kept of the episode is all of its actions."""
    envs = [Walk, lambda: OneEpisode(breaks), Walk]
    with ef.make(envs, backend="serial", on_fault="restart", max_restarts=1) as fleet:
        collector = Collector(fleet, random_actions=True, resumable=True)
        alive, actions = [], []
        for _ in range(60):
            segment = collector.segment(5)
            alive.append(weakref.ref(segment.action))
            actions.append(segment.action[:, 1].copy())
        del segment
        assert sum(ref() is not None for ref in alive) < 20
        stored = collector.segment_state()
    if breaks:
        assert stored["lost"].tolist() == [1] and not len(stored["actions"][1])
    else:
        assert np.array_equal(stored["actions"][1], np.concatenate(actions))
    with ef.make([Walk, OneEpisode, Walk], backend="serial") as fleet:
        assert Collector(fleet, random_actions=True, resumable=True).restore_segments(stored).tolist() == [1] * breaks


class Still:
    """Every agent does nothing."""

    version, answers_fit = 0, True

    def act(self, ask):
        return Answer(np.zeros(ask.columns["active"].shape, np.int64))


@pytest.mark.parametrize("agents", [False, True])
def test_a_slot_that_comes_back_begins_an_episode_that_can_be_played_again(agents):
    """A worker has no place for a while, as one on Ray: the episodes of its slots have no end."""
    if agents:
        pytest.importorskip("pettingzoo")
    env, kwargs = ("envfleet.envs.crowd:Crowd", {"max_cycles": 1000, "death": 0.0}) if agents else (OneEpisode, {})

    def collector(fleet):
        return Collector(fleet, Still() if agents else None, random_actions=not agents, resumable=True)

    with ef.make(env, 4, backend="pipe", num_workers=2, on_fault="restart", env_kwargs=kwargs) as fleet:
        ours = collector(fleet)
        ours.segment(5)
        fleet._backend.placings.append((1, "has no place"))
        ours.segment(6)
        assert fleet.quarantined.tolist() == [2, 3]
        fleet._backend.placings.append((1, ""))
        segment = ours.segment(6)
        back = segment.scored[:, 2].argmax()
        assert not len(fleet.quarantined) and not segment.scored[:back, 2:].any()
        assert (segment.step[back:, 2:] == np.arange(6 - back)[:, None]).all() and (segment.episode[back:, 2:] == 1).all()
        state, wanted = ours.segment_state(), ours.segment(5)
    with ef.make(env, 4, backend="serial", env_kwargs=kwargs) as fleet:
        theirs = collector(fleet)
        assert not len(theirs.restore_segments(state))
        assert np.array_equal(theirs.segment(5).obs, wanted.obs)


def test_fault_rows_are_marked_and_the_ledger_balances():
    with ef.make(Fragile, num_envs=4, backend="serial", on_fault="restart", max_restarts=1000) as fleet:
        collector = Collector(fleet, Frozen(), seed=2)
        found = [collector.segment(20) for _ in range(2)]
        ledger = collector.ledger
        lost = sum(int((~s.scored).sum()) for s in found)
        assert lost == len(fleet.faults) == ledger.failed.total() > 0
        assert all((s.truncated[~s.scored]).all() and (s.reward[~s.scored] == 0).all() for s in found)
        assert ledger.in_flight == 4 and ledger.started == ledger.used + ledger.failed.total() + 4
        collector.collect(3)  # leaves the segments
        assert ledger.in_flight == 0 and ledger.dropped["running when segments were left"] == 4


def test_errors_of_segments():
    with ef.make(Counting, num_envs=2, backend="serial", on_end="wait") as fleet, pytest.raises(BadArgument, match="on_end"):
        Collector(fleet, random_actions=True).segment(4)
    with ef.make(Counting, num_envs=2, backend="serial") as fleet:
        collector = Collector(fleet, lambda obs: np.full(len(obs), 5))
        with pytest.raises(AgentFailed, match="slot 0"):
            collector.segment(4)
        assert collector.ledger.in_flight == 0
    with ef.make([Counting, lambda: Fragile2()], backend="serial") as fleet:
        collector = Collector(fleet, random_actions=True)
        with pytest.raises(FaultError, match="snap"):
            collector.segment(10)
        assert collector.ledger.failed.total() == 1 and collector.ledger.in_flight == 0


class Fragile2(Counting):
    def step(self, action):
        if self.count == 2:
            raise RuntimeError("snap")
        return super().step(action)


@pytest.mark.parametrize("backend, num_workers", [("serial", None), ("thread", 4), ("shm", 4)])
def test_the_verdict_names_the_slow_slot(backend, num_workers):
    envs = [lambda: Waiting(step_s=0.001, limit=20) for _ in range(4)]
    envs[2] = lambda: Waiting(step_s=0.05, limit=20)
    with ef.make(envs, backend=backend, num_workers=num_workers) as fleet:
        collector = Collector(fleet, random_actions=True)
        collector.segment(40)
        verdict = collector.verdict()
    assert verdict.straggler is not None and verdict.straggler.slot == 2, str(verdict)
    assert verdict.sentence.startswith("one straggler: slot 2 p99") and verdict.straggler.p99_s > 0.03
    assert "slot" in str(verdict) and verdict.slots[2].steps == verdict.slots[0].steps


def test_the_verdict_names_the_policy():
    def slow(obs):
        time.sleep(0.01)
        return np.zeros(len(obs), np.int64)

    with ef.make(Counting, num_envs=3, backend="serial") as fleet:
        collector = Collector(fleet, slow)
        assert collector.verdict().sentence == "nothing was collected yet"
        collector.collect(6)
        assert collector.verdict().sentence.startswith("policy-bound") and "batch it" in collector.verdict().sentence
    parts = {"policy": 0.1, "env": 0.2, "slowest": 0.6, "transfer": 0.1}
    assert 'use mode="async"' in Verdict(parts, []).sentence
    assert "at_least" in Verdict(parts, [], mode="async").sentence
    assert Verdict({**parts, "env": 2.0}, []).sentence.startswith("env-bound")
    assert Verdict({**parts, "slowest": 0.0, "transfer": 2.0}, []).sentence.startswith("overhead-bound")


def test_the_verdict_of_a_fleet_with_agents():
    pytest.importorskip("pettingzoo")
    from envfleet.envs.crowd import Crowd

    class Slow:
        version, answers_fit = 0, True

        def act(self, ask):
            time.sleep(0.002)
            return Answer(np.zeros(ask.columns["active"].shape, np.int64))

    with ef.make(Crowd, num_envs=2, backend="serial") as fleet:
        collector = Collector(fleet, Slow())
        collector.segment(20)
        verdict = collector.verdict()
    assert verdict.sentence.startswith("policy-bound"), str(verdict)
    assert verdict.seconds["env"] > 0 and [slot.steps for slot in verdict.slots] == [20, 20]


def test_the_callers_time_is_not_the_collectors():
    with ef.make(Counting, num_envs=2, backend="serial") as fleet:
        collector = Collector(fleet, random_actions=True)
        stream = collector.episodes(8)
        for _ in range(4):
            next(stream)
            time.sleep(0.1)
        stream.close()
        assert 0 < collector.verdict().total_s < 0.4


def test_timing_starts_no_thread():
    with ef.make(Counting, num_envs=2, backend="thread") as fleet:
        collector = Collector(fleet, random_actions=True)
        before = threading.enumerate()
        stream = collector.episodes(100)
        next(stream)
        assert threading.enumerate() == before
        stream.close()


def looked(mode: str, step_ms: list[float], waited_ms: float, workers: int = 2, backend: str = "thread") -> Verdict:
    """The verdict of a clock that saw one batch: how long each slot worked, how long the collector waited."""
    with ef.make(Counting, num_envs=len(step_ms), backend=backend, num_workers=workers) as fleet:
        batch = fleet.reset(seed=0)
        clock = Clock(fleet, mode=mode)
        clock.start()
        clock.steps += 1
        clock.wait_s = waited_ms / 1e3
        batch._field("step_ns")[:] = 1e6 * np.array(step_ms)
        fleet.slab.busy_ns[:] += (1e6 * np.array(step_ms)).astype(np.int64)
        clock.received(batch, clock.wait_s)
        clock.pause()
        fleet.slab.busy_ns[:] += 10**9  # somebody else's
        return clock.verdict()


@pytest.mark.parametrize(
    "mode, step_ms, waited_ms, wanted",
    [
        ("sync", [1, 1, 2, 2], 5, {"env": 3, "slowest": 1, "transfer": 1}),  # workers: 2 and 4 ms
        ("sync", [1, 1, 2, 2], 2, {"env": 1.5, "slowest": 0.5, "transfer": 0}),  # half of it before the wait
        ("sync", [2, 2, 2, 2], 4, {"env": 4, "slowest": 0, "transfer": 0}),
        ("async", [1, 1, 2, 2], 5, {"env": 3, "slowest": 1, "transfer": 1}),
        ("async", [6, 6, 6, 6], 4, {"env": 4, "slowest": 0, "transfer": 0}),  # work went on while nobody waited
    ],
)
def test_what_the_waiting_was_for(mode, step_ms, waited_ms, wanted):
    verdict = looked(mode, step_ms, waited_ms)
    assert {name: 1e3 * verdict.seconds[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)
    assert [1e3 * slot.busy_s for slot in verdict.slots] == pytest.approx(step_ms, abs=1e-6)
    assert [1e3 * slot.p99_s for slot in verdict.slots] == pytest.approx(step_ms, rel=0.03)


def test_slots_of_one_pool_share_its_threads():
    assert looked("sync", [2] * 8, 10, backend="aio").seconds == pytest.approx(
        {"policy": 0, "env": 0.008, "slowest": 0, "transfer": 0.002}
    )


def test_without_timing_the_verdict_has_no_slots():
    with ef.make(Counting, num_envs=2, backend="serial") as fleet:
        collector = Collector(fleet, random_actions=True, timing=False)
        collector.segment(8)
        verdict = collector.verdict()
    assert verdict.slots == [] and verdict.seconds["env"] > 0


def test_looks_are_rationed():
    with ef.make(Counting, num_envs=4, backend="serial") as fleet:
        collector = Collector(fleet, random_actions=True)
        collector.segment(2000)
        clock = collector._clock
        counted = clock._calls.count()
    assert clock._looks >= 8 and counted == 4 * clock._looks and clock._looks < 500


def test_latency_percentiles_are_right_to_a_bin():
    rng = np.random.default_rng(0)
    values = rng.lognormal(-6, 1, 10_000)
    histogram = LatencyHistogram(3)
    histogram.add(values, 1)
    for percent in (50, 90, 99):
        assert histogram.percentile(percent, 1) == pytest.approx(np.percentile(values, percent), rel=0.03)
    assert np.isnan(histogram.percentile(50, 0)) and histogram.count(1) == histogram.count() == 10_000


def test_statistics_without_episodes_and_as_a_table():
    empty = Stats.of([])
    assert empty.num_episodes == 0 and np.isnan(empty.mean_return) and "episodes" in str(empty)
    rich = pytest.importorskip("rich.console")
    with ef.make(Walk, num_envs=2, backend="serial") as fleet:
        collector = Collector(fleet, Frozen())
        collector.collect(4)
        console = rich.Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(collector.stats())
    assert "throughput" in console.export_text()
