"""Segments as results of tickets: what a curriculum is told of the episodes that ended in them, and which rows are learned from."""

from __future__ import annotations

from typing import Any

import numpy as np

from envfleet.rollout.segments.segment import Bools, Floats, Ints, Segment
from envfleet.tasks.curriculum import TaskResult
from envfleet.tasks.task_source import TaskSource


class SegmentResults:
    """Gives a task source the results of segments, in the order of tickets. Episode e of slot b is ticket e * B + b.

    Example:
        >>> source = TaskSource(["left", "right"], seed=0)
        >>> segment = Segment.empty(2, 1, obs=np.zeros((1, 4)), action=np.zeros(1))
        >>> segment.scored[:], segment.task[:], segment.end_index = True, 0, np.array([[1, 0]])
        >>> segment.end_return, segment.end_length = np.array([3.0]), np.array([2])
        >>> [result.episode_return for result in SegmentResults(source, num_slots=1).give(segment)]
        [3.0]
    """

    def __init__(self, source: TaskSource, num_slots: int) -> None:
        self.source = source
        self._error = np.zeros((2, num_slots))  # [sum and count, slot] of |advantage| in the running episode

    def learned(self, segment: Segment) -> Bools | None:
        """[T, B] rows that are learned from; None: all. Robust PLR only looks at levels that it has not seen. Ask before `give`."""
        tickets = tickets_of(segment)
        trains = {ticket: self.source.trains_on(ticket) for ticket in np.unique(tickets).tolist()}
        return None if all(trains.values()) else np.vectorize(trains.__getitem__, otypes=[bool])(tickets)

    def give(self, segment: Segment, advantage: Floats | None = None) -> list[TaskResult]:
        """Give the results of a segment to the curriculum, with how wrong the values were where the advantages [T, B] are known."""
        results = []
        tickets = tickets_of(segment)
        begin = np.zeros(segment.num_slots, np.int64)
        for (t, b), total, length in zip(segment.end_index.tolist(), segment.end_return.tolist(), segment.end_length.tolist()):
            ticket = int(tickets[t, b])
            error = self._value_error(advantage, begin[b], t + 1, b, ends=True)
            begin[b] = t + 1
            # A fault cut it short, so that its return means nothing; or the environment failed with the task and ran another.
            if not segment.scored[t, b] or segment.task[t, b] < 0:
                self.source.drop([ticket])
                continue
            results.append(self.source.add(TaskResult(ticket, self.source.task(ticket), total, length, value_error=error)))
        for b in range(segment.num_slots):
            self._value_error(advantage, begin[b], segment.num_steps, b, ends=False)
        self.source.advance()
        return results

    def _value_error(self, advantage: Floats | None, first: int, last: int, slot: int, ends: bool) -> float | None:
        """Mean |advantage| of the running episode, with what earlier segments had of it; cleared where it ends."""
        if advantage is None:
            return None
        self._error[:, slot] += np.abs(advantage[first:last, slot]).sum(), last - first
        total, count = self._error[:, slot]
        if ends:
            self._error[:, slot] = 0.0
        return float(total / max(count, 1))

    def forget(self, slots: Ints) -> None:
        """The running episodes of these slots are not continued."""
        self._error[:, slots] = 0.0

    def drop_before(self, episode: Ints) -> None:
        """Slot b runs episode[b] now: tickets of earlier ones that are still out, because they were ended without a result, are dropped."""
        count = len(episode)
        self.source.drop([ticket for ticket in self.source.out() if ticket // count < episode[ticket % count]])

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores."""
        return {"source": self.source.state_dict(), "error": self._error.copy()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint stored."""
        self.source.load_state_dict(state["source"])
        self._error = np.array(state["error"])


def tickets_of(segment: Segment) -> Ints:
    """[T, B] the ticket of every row."""
    tickets: Ints = segment.episode * segment.num_slots + segment.slots
    return tickets
