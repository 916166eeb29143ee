"""on_fault="restart": the failing slots come back as fault rows, the healthy ones do not notice."""

from __future__ import annotations

from typing import Any

import pytest

import envfleet as ef
from envfleet.envs.probe import Faulty, Tasked
from envfleet.testing import Actions, Stream

FAILING = {2: "raise", 7: "exit", 11: "kill"}


class Sick(Tasked):
    """Tasked, but fails in its own way at the 3rd step of an episode that lasts so long, in the share `rate` of them."""

    def __init__(self, how: str, rate: float = 1.0) -> None:
        super().__init__()
        self.how, self.rate = how, rate

    def step(self, action: Any) -> Any:
        from envfleet.envs.probe import fail_now

        result = super().step(action)
        if self.count == 3 and (self.rate == 1.0 or self.np_random.random() < self.rate):
            fail_now(self.how, "step")
        return result


def run(backend: str, workers: int, steps: int, failing: dict[int, str], **options: Any) -> tuple[Stream, list[Any]]:
    rate = 1.0 if steps < 1000 else 0.01  # every fault waits for its backoff: thousands of them would take an hour
    envs = [(lambda how=failing[i]: Sick(how, rate)) if i in failing else Tasked for i in range(16)]
    with ef.make(envs, backend=backend, num_workers=workers, start_method="fork", **options) as fleet:
        stream = Stream()
        actions = Actions(fleet.single_action_space, 16, 1)
        stream.add(fleet.reset(seed=1))
        for _ in range(steps):
            stream.add(fleet.step(actions.of(range(16))))
        return stream, list(fleet.faults)


def check(backend: str, steps: int) -> None:
    """Invariant 4 and 5: the 13 healthy trajectories hash equal to a run without faults."""
    healthy, none = run(backend, 16, steps, {})
    stream, faults = run(backend, 16, steps, FAILING, on_fault="restart", max_restarts=10**6)
    assert not none and {fault.slot for fault in faults} == set(FAILING)
    for slot in range(16):
        assert stream.rows[slot] == steps + 1
        assert (stream.slot_digest(slot) == healthy.slot_digest(slot)) == (slot not in FAILING)


@pytest.mark.parametrize("backend", ["pipe", "shm"])
def test_healthy_slots_do_not_notice(backend: str) -> None:
    check(backend, 12)


def test_the_keeper_works_where_there_is_no_waitid(monkeypatch: pytest.MonkeyPatch, no_leaks: Any) -> None:
    """macOS has it since Python 3.13; the forked keeper has this process's `os`."""
    monkeypatch.delattr("os.waitid")
    check("pipe", 12)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["pipe", "shm"])
def test_full_healthy_slots_do_not_notice(backend: str) -> None:
    check(backend, 10_000)


@pytest.mark.parametrize("backend", ["pipe", "shm"])
def test_sharers_say_whom_they_shared_with(backend: str) -> None:
    stream, faults = run(backend, 4, 20, {7: "exit"}, on_fault="restart", max_restarts=10**6)
    first = next(fault for fault in faults if fault.slot == 7)
    shared = {fault.slot: fault for fault in faults if fault.shared_with == 7}
    assert first.exit_code == 7 and set(shared) == {4, 5, 6}
    assert all("it shared worker 1 with slot 7" in str(fault) for fault in shared.values())
    assert {fault.slot for fault in faults} == {4, 5, 6, 7} and set(stream.rows.values()) == {21}


def test_a_rebuilt_env_is_healthy_again(tmp_path: Any) -> None:
    once = str(tmp_path / "once")
    with ef.make(
        lambda: Faulty("step", "kill", once_file=once), 1, backend="shm", start_method="fork", on_fault="restart"
    ) as fleet:
        fleet.reset(seed=0)
        status = [int(fleet.step([0]).status[0]) for _ in range(30)]
    assert status.count(2) == 1


class FailsEveryOther(Tasked):
    """Every second episode fails in its first step; the others complete."""

    def reset(self, **kwargs: Any) -> Any:
        self.resets = getattr(self, "resets", 0) + 1
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        if self.resets % 2 == 0:
            raise RuntimeError("every other episode")
        return super().step(action)


@pytest.mark.parametrize("by_step", [True, False], ids=["step", "send and recv"])
def test_a_completed_episode_clears_the_account(by_step: bool) -> None:
    with ef.make(FailsEveryOther, 2, backend="serial", on_fault="restart", max_restarts=1) as fleet:
        fleet.reset(seed=0)
        for _ in range(60):
            if by_step:
                fleet.step([0, 0])
            else:
                fleet.send([0, 0])
                fleet.recv()
        assert len(fleet.faults) > 6 and not len(fleet.quarantined)
