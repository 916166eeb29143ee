"""The parent's handle of one worker process: its socket, and the pulses that show what it is doing."""

from __future__ import annotations

from typing import Any

from envfleet.workers.channel import ParentChannel
from envfleet.workers.launcher import Keeper
from envfleet.workers.shared_memory import Pulse, anonymous_file, owned


class WorkerHandle:
    """One worker process. It has one pulse, or one for every slot when its slots have threads of their own."""

    def __init__(self, index: int, slots: list[int], pulses: list[Pulse], keeper: Keeper) -> None:
        self.index = index
        self.slots = slots
        self.pulses = pulses
        self.channel: ParentChannel | None = None
        self.start_number = 0  # of its start, with the keeper
        self._keeper = keeper
        self.attached = False  # it knows its rows
        self.loss_told = True  # its process is there, or its end is among the backend's losses
        self.num_tasks = 0  # how many tasks it knows
        self.rung = 0  # the first message it has not been rung for, where it does not wait at its socket
        self.handing: tuple[Any, Any, ParentChannel, int] | None = None  # slots, turns … of a frame being posted
        self.told = (-1, 0, 0)  # the last pulse it sent, where pulses come by messages
        self.stack = ""  # the Python stack it sent with one
        self.attempts = 0  # at reading the frame that is next
        self.stack_file = owned(anonymous_file("envfleet-stack"))  # its Python stacks are written here

    @property
    def pid(self) -> int:
        """Its process id, which the keeper reports shortly after the start."""
        pid = self._keeper.pid_of(self.start_number, 2.0)
        if pid is None:
            raise ProcessLookupError(f"worker {self.index} has no process")
        return pid

    def close(self) -> None:
        """Give the descriptor back."""
        self.stack_file.close()

    @property
    def alive(self) -> bool:
        """Whether its process is there, as far as its socket shows."""
        return self.channel is not None

    def doing(self) -> tuple[int, str, float]:
        """The call it has been in for longest: (slot or -1, phase, since when)."""
        return min((pulse.read() for pulse in self.pulses), key=lambda seen: (seen[0] < 0, seen[2]))

    def last_seen(self) -> tuple[int, str]:
        """(slot, phase) it was in when it ended; slot -1 when it was in none, or in several and any may be to blame."""
        busy = [seen for seen in (pulse.read() for pulse in self.pulses) if seen[0] >= 0]
        if len(busy) == 1:
            return busy[0][0], busy[0][1]
        return -1, busy[0][1] if busy else "idle"

    def rest(self) -> None:
        """Its process is gone: clear its pulses."""
        for pulse in self.pulses:
            pulse.enter(-1, "idle")
