"""What every backend must do, as functions: each takes a `Start` and raises AssertionError if the backend does not.

`serial` is the reference: it is the shortest, and its own rows are checked against `gymnasium.vector.SyncVectorEnv`.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from envfleet.backends.base import Backend
from envfleet.core.construct import make
from envfleet.core.fleet import Fleet
from envfleet.core.fleet_options import BackendName
from envfleet.core.slot_table import KEEP
from envfleet.envs.probe import Counting, Faulty, Mixed, Tasked
from envfleet.errors import EnvFailed, FleetClosed, ResetNeeded, SlotBusy
from envfleet.slots.layout import FAULT, QUARANTINED, READY
from envfleet.testing import Actions, Held, leaks_since, record


class Start:
    """Starts fleets on the backend under test: a name, or a class (or callable) that gives a new `Backend`.

    Example:
        >>> from envfleet.backends.serial import SerialBackend
        >>> with Start(SerialBackend)("CartPole-v1", 2) as fleet:
        ...     fleet.plan.backend
        'serial'
    """

    def __init__(self, backend: BackendName | Callable[..., Backend], **options: Any) -> None:
        self.backend = backend
        self.options = options

    def __call__(self, env: Any, num_envs: int | None = None, num_workers: int | None = None, **options: Any) -> Fleet:
        """A fleet; `num_workers` is left out where the backend does not take it."""
        options = {**self.options, **options}
        if isinstance(self.backend, str):
            if self.backend != "serial":
                options["num_workers"] = num_workers
            return make(env, num_envs, backend=self.backend, **options)
        takes = "num_workers" in inspect.signature(self.backend).parameters
        return make(env, num_envs, backend=self.backend(num_workers) if takes else self.backend(), **options)


class Repeating(gym.Env[Any, Any]):
    """An env of the kind that is picky: it observes what `step` was given, and its reset has no defaults."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self.action_space, self.observation_space = space, spaces.Text(400)

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        self.left = 3
        return f"{seed} {options}", {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        leaves = list(action.values()) if isinstance(action, dict) else [action]
        text = "; ".join(f"{type(leaf).__name__} {leaf.dtype} {leaf.tolist()}" for leaf in leaves)
        return text, 0.0, self.left == 0, False, {}


class Informed(Counting):
    """Counting with an info of every kind, or none: nothing but the infos may differ between the two."""

    def __init__(self, talk: bool) -> None:
        super().__init__(limit=4)
        self.talk = talk

    def step(self, action: Any) -> Any:
        """One step, with a large info that contains keys of other libraries."""
        result = super().step(action)
        info = {"final_obs": 1, "final_info": {}, "episode": {"r": 9.0}, "TimeLimit.truncated": True, "task": 3}
        return (*result[:4], info if self.talk else {})


class Spoken(gym.Env[Any, Any]):
    """Text and sequence observations: leaves that travel beside the rows."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            text=spaces.Text(20), count=spaces.Discrete(100), many=spaces.Sequence(spaces.Discrete(9))
        )
        self.action_space = spaces.Dict(say=spaces.Text(20), push=spaces.Discrete(3))
        self.said: list[str] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Forget."""
        super().reset(seed=seed)
        self.said = []
        return {"text": "", "count": 0, "many": ()}, {}

    def step(self, action: Any) -> Any:
        """Return the argument."""
        self.said.append(action["say"])
        obs = {"text": action["say"], "count": len(self.said), "many": tuple(range(len(self.said)))}
        return obs, float(action["push"]), len(self.said) == 3, False, {}


def same_bytes_as_serial(start: Start) -> None:
    """Invariant 5: same seed and same actions give the same bytes, for every worker count, in step and out of step."""
    for env in ("CartPole-v1", Mixed, Tasked):
        for on_end in ("reset", "wait"):
            with make(env, 5, backend="serial", on_end=on_end) as fleet:
                wanted = record(fleet, 60, seed=7).digest()
            for workers, at_least in ((1, None), (2, 2), (3, 1)):
                with start(env, 5, workers, on_end=on_end) as fleet:
                    got = record(fleet, 60, seed=7, at_least=at_least).digest()
                    assert got == wanted, f"{env} on_end={on_end} workers={workers} at_least={at_least}"


def many_agents_are_as_in_serial(start: Start) -> None:
    """Invariant 5 for many agents, born and dying, at once and in turns. Nothing to check where PettingZoo is not installed."""
    if importlib.util.find_spec("pettingzoo") is None:
        return
    from envfleet.envs.crowd import Crowd, crowd_aec

    for env in (Crowd, functools.partial(Crowd, mixed=True), crowd_aec):
        for on_end in ("reset", "wait"):
            with make(env, 5, backend="serial", on_end=on_end, with_state=True) as fleet:
                wanted = record(fleet, 30, seed=7).digest()
            for workers, at_least in ((2, None), (3, 1))[on_end == "wait" :]:
                with start(env, 5, workers, on_end=on_end, with_state=True) as fleet:
                    got = record(fleet, 30, seed=7, at_least=at_least).digest()
                    assert got == wanted, f"{env} on_end={on_end} workers={workers} at_least={at_least}"


def every_slot_sent_comes_back(start: Start) -> None:
    """Invariant 4: whatever is sent, in whatever portions, is received exactly once."""
    rng = np.random.default_rng(0)
    with start(lambda: Counting(limit=3), 7, 3) as fleet:
        fleet.reset(seed=0)
        sent, received, out = np.zeros(7, int), np.zeros(7, int), np.zeros(7, bool)
        for _ in range(120):
            choice = np.flatnonzero(~out & (rng.random(7) < 0.5))
            if len(choice):
                fleet.send(np.zeros(len(choice), int), choice)
                sent[choice] += 1
                out[choice] = True
            if out.any():
                batch = fleet.recv(at_least=int(rng.integers(1, out.sum() + 1)))
                assert (np.diff(batch.slots) > 0).all() and out[batch.slots].all()
                received[batch.slots] += 1
                out[batch.slots] = False
        if out.any():
            received[fleet.recv().slots] += 1
        assert sent.tolist() == received.tolist()


def rows_carry_their_identity(start: Start) -> None:
    """Invariant 6: episodes and steps count on without a gap, lengths and returns are those of the episode."""
    with start(Tasked, 4, 2) as fleet:
        first = fleet.reset(seed=3)
        assert first.episode.tolist() == [0] * 4 and first.step.tolist() == [-1] * 4
        assert not first.scored.any() and first.seed.tolist() == [3, 4, 5, 6] and first.task.tolist() == [-1] * 4
        episode, step, total = np.zeros(4, int), np.full(4, -1), np.zeros(4)
        for _ in range(60):
            batch = fleet.step(np.zeros(4, int))
            step += 1
            total += batch.reward
            assert batch.scored.all() and (batch.status == READY).all() and batch.slots.tolist() == [0, 1, 2, 3]
            assert batch.episode.tolist() == episode.tolist() and batch.step.tolist() == step.tolist()
            assert batch.length.tolist() == (step + 1).tolist() and batch.ep_return.tolist() == total.tolist()
            assert batch.seed.tolist() == [3 + i if episode[i] == 0 else -1 for i in range(4)]
            ended = batch.ended
            episode[ended], step[ended], total[ended] = episode[ended] + 1, -1, 0.0


def tasks_and_seeds_go_ahead(start: Start) -> None:
    """`assign` takes effect at the next reset, automatic or not; a task stays, a seed is used once."""
    with start(Tasked, 2, 2) as fleet:
        fleet.reset(seed=1, tasks=["10", 20])
        fleet.assign([1], tasks=[30], seeds=[99])
        seen: dict[int, list[Any]] = {0: ["10"], 1: [20]}
        seeds: list[int] = []
        for _ in range(30):
            batch = fleet.step([0, 0])
            for i in np.flatnonzero(batch.ended).tolist():
                assert batch.final_info[i]["task"] == fleet.task_value(batch.task[i]) == seen[i][-1]
                seen[i].append(batch.info[i]["task"])
                if i == 1:
                    seeds.append(int(batch.seed[i]))
        assert set(seen[0]) == {"10"} and seen[1][:2] == [20, 30] and set(seen[1][1:]) == {30}
        assert seeds[1] == 99 and set(seeds[2:]) == {-1}
        fleet.assign([0, 1], tasks=[None, KEEP])
        assert [info["task"] for info in fleet.reset().info] == [-1, 30]


def ends_keep_the_last_observation(start: Start) -> None:
    """`final_obs` is the ended episode's last; `obs` the next one's first, or with "wait" still the last."""
    for reuse in (False, True):
        with start(lambda reuse=reuse: Counting(limit=2, reuse=reuse), 3, 2) as fleet:
            fleet.reset(seed=0)
            steps = [fleet.step([0] * 3) for _ in range(4)]
            assert [batch.obs[:, 0].tolist() for batch in steps] == [[1.0] * 3, [0.0] * 3, [1.0] * 3, [0.0] * 3]
            assert [batch.final_obs[:, 0].tolist() for batch in steps] == [[0.0] * 3, [2.0] * 3] * 2
        with start(lambda reuse=reuse: Counting(limit=2, reuse=reuse), 3, 2, on_end="wait") as fleet:
            fleet.reset(seed=0)
            steps = [fleet.step([0] * 3) for _ in range(3)]
            assert [batch.obs[0, 0] for batch in steps] == [1.0, 2.0, 0.0]
            assert steps[1].final_obs[0, 0] == 2.0 and not steps[1].active.any()
            assert steps[2].step.tolist() == [-1] * 3 and not steps[2].scored.any()
            assert steps[2].reward.tolist() == [0.0] * 3


def nothing_depends_on_info(start: Start) -> None:
    """Invariant 3: an env that fills `info` with everything gives the same rows as one with an empty info."""
    digests = set()
    for talk in (False, True):
        with start(lambda talk=talk: Informed(talk), 3, 2) as fleet:
            digests.add(record(fleet, 20, seed=0, with_info=False).digest())
            assert any(fleet.step([0] * 3).info) == talk
    assert len(digests) == 1


def a_held_row_is_its_holders(start: Start) -> None:
    """Invariant 1: a busy slot refuses the caller; what was received stays as it was received."""
    with start(lambda: Counting(limit=100), 3, 3) as fleet:
        _raises(ResetNeeded, lambda: fleet.send([0, 0, 0]))
        kept = [fleet.reset(seed=0)]
        fleet.send([0], [1])
        busy = _raises(SlotBusy, lambda: fleet.send([0, 0], [0, 1]))
        assert busy.slots == [1]
        assert _raises(SlotBusy, lambda: fleet.reset(slots=[1])).slots == [1] or fleet.plan.backend == "serial"
        kept.append(fleet.recv())
        before = [pickle.dumps(batch.obs) for batch in kept]
        for _ in range(5):
            fleet.step([1, 1, 1])
        assert [pickle.dumps(batch.obs) for batch in kept] == before


def objects_travel_beside_rows(start: Start) -> None:
    """Text and sequences come through, both ways, with the columns of the same space."""
    with start(Spoken, 3, 2) as fleet:
        fleet.reset(seed=0)
        for step in range(1, 7):
            words = tuple(f"{slot} {step}" for slot in range(3))
            batch = fleet.step({"say": words, "push": [0, 1, 2]})
            assert batch.reward.tolist() == [0.0, 1.0, 2.0]
            seen = batch.final_obs if step % 3 == 0 else batch.obs
            count = (step - 1) % 3 + 1
            assert seen["text"] == words and seen["count"].tolist() == [count] * 3
            assert seen["many"] == (tuple(range(count)),) * 3
            assert batch.ended.all() == (step % 3 == 0)


def the_envs_can_be_called(start: Start) -> None:
    """call, get_attr, set_attr and render reach each env; an error there names slot and phase."""
    with start(lambda: Counting(limit=100, render_mode="rgb_array"), 3, 2) as fleet:
        fleet.reset(seed=0)
        fleet.set_attr("limit", [5, 6, 7])
        assert fleet.get_attr("limit") == (5, 6, 7)
        assert fleet.call("limit", slots=[2, 0]) == (7, 5)
        fleet.step([0, 0, 0])
        assert int(fleet.render(1).mean()) == 1
        error = _raises(EnvFailed, lambda: fleet.call("no_such_thing", slots=[1]))
        assert error.slot == 1 and error.phase == "call" and "no_such_thing" in str(error)
        assert fleet.step([0, 0, 0]).scored.all()


def a_failing_env_is_a_fault(start: Start) -> None:
    """Invariant 4: an exception is an EnvFailed with address and cause, or with "restart" a fault row; others go on."""
    envs = [lambda: Counting(limit=10), lambda: Faulty("step", "raise", at=3)]
    with start(envs, num_workers=2) as fleet:
        fleet.reset(seed=5, tasks="easy")
        for _ in range(2):
            fleet.step([0, 0])
        error = _raises(EnvFailed, lambda: fleet.step([0, 1]))
        fault = error.fault
        assert (fault.slot, fault.phase, fault.episode, fault.step, fault.seed, fault.task) == (1, "step", 0, 2, 6, "easy")
        assert "RuntimeError: planted fault in step" in str(error) and int(fault.last_actions[-1]) == 1
        assert isinstance(error.__cause__, RuntimeError)
        assert fleet.reset(seed=1).status.tolist() == [READY, READY]
    with start(envs, num_workers=2, on_fault="restart", max_restarts=1) as fleet:
        fleet.reset(seed=5)
        rows = [fleet.step([0, 0]) for _ in range(7)]
        status = [batch.status[1] for batch in rows]
        assert status == [READY, READY, FAULT, READY, READY, QUARANTINED, QUARANTINED]
        assert rows[2].truncated[1] and not rows[2].scored[1] and rows[2].reward[1] == 0.0
        assert rows[2].final_obs[1, 0] == 2.0 and rows[2].obs[1, 0] == 0.0 and rows[2].length[1] == 2
        assert [batch.obs[0, 0] for batch in rows] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        assert [fault.slot for fault in fleet.faults] == [1, 1] and fleet.quarantined.tolist() == [1]


def actions_arrive_as_they_were_given(start: Start) -> None:
    """Each env gets its item of the caller's array, in the caller's dtype; a reset without defaults gets its arguments."""
    box, wide = spaces.Box(-1, 1, (2,), np.float32), spaces.Box(0, 9, (2, 0), np.uint8)
    for space in (spaces.Discrete(3), box, wide, spaces.Dict(a=spaces.Discrete(3), b=box)):
        with start(functools.partial(Repeating, space), 3, 2) as fleet:
            first = fleet.reset(seed=5)
            assert [str(text) for text in first.obs] == ["5 None", "6 None", "7 None"], first.obs
            for dtype in ("i8", "f4", "i4", "u1", "f8", "?", "f2", "i8"):
                rows = (np.arange(6).reshape(3, 2) / 8).astype(dtype)
                given: Any = {"a": rows[:, 0], "b": rows} if isinstance(space, spaces.Dict) else rows
                given = (
                    rows[:, 0] if isinstance(space, spaces.Discrete) else np.zeros((3, 2, 0), dtype) if space is wide else given
                )
                batch = fleet.step(given)
                for slot in range(3):
                    part = [value[slot] for value in given.values()] if isinstance(given, dict) else [given[slot]]
                    wanted = "; ".join(f"{type(leaf).__name__} {leaf.dtype} {leaf.tolist()}" for leaf in part)
                    got = batch.final_obs[slot] if batch.ended[slot] else batch.obs[slot]
                    assert got == wanted, (got, wanted)


def closing_is_complete(start: Start) -> None:
    """Invariant 7: close is idempotent, leaves nothing, and what comes after it is FleetClosed; so is dropping it."""
    start("CartPole-v1", 2, 2).close()  # whatever is set up once per process is set up now
    before = Held.now()
    fleet = start("CartPole-v1", 4, 2)
    fleet.reset(seed=0)
    fleet.send([0] * 4)
    fleet.close()
    fleet.close()
    for use, args in ((fleet.recv, ()), (fleet.reset, ()), (fleet.send, ([0] * 4,))):
        _raises(FleetClosed, functools.partial(use, *args))
    del use
    del fleet
    assert leaks_since(before) == {}
    dropped = start("CartPole-v1", 2, 2)
    dropped.reset(seed=0)
    del dropped
    assert leaks_since(before) == {}


CHECKS: tuple[Callable[[Start], None], ...] = (
    same_bytes_as_serial,
    many_agents_are_as_in_serial,
    every_slot_sent_comes_back,
    rows_carry_their_identity,
    tasks_and_seeds_go_ahead,
    ends_keep_the_last_observation,
    nothing_depends_on_info,
    a_held_row_is_its_holders,
    objects_travel_beside_rows,
    the_envs_can_be_called,
    a_failing_env_is_a_fault,
    actions_arrive_as_they_were_given,
    closing_is_complete,
)


def check_backend(backend: BackendName | Callable[..., Backend], **options: Any) -> list[str]:
    """Run every check on a backend; returns the names of those it passed, raises at the first it does not.

    Example:
        >>> from envfleet.backends.serial import SerialBackend
        >>> len(check_backend(SerialBackend)) == len(CHECKS)
        True
    """
    start = Start(backend, **options)
    for check in CHECKS:
        check(start)
    return [check.__name__ for check in CHECKS]


def _raises(kind: type[BaseException], function: Callable[[], Any]) -> Any:
    try:
        function()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


__all__ = ["CHECKS", "Actions", "Start", "check_backend", *(check.__name__ for check in CHECKS)]
