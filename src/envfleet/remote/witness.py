"""How a duplicated or late answer is found out where answers carry no number: with every server that is not ours.

OpenEnv matches answers to requests by their order alone. One answer too many shifts every later one, and each still
looks like an answer. Two things give it away. A duplicate is the same bytes as an earlier answer; and a `state` request
is answered by a `state` frame, so that an `observation` that comes first is one too many. So `state` is asked when an
answer repeats an earlier one, and at every episode's end, before the row that ends it is given out. Its `step_count`
must then be the number of steps taken: a step that ran twice, or not at all, shows there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

WINDOW = 4096  # answers of a session that are remembered; an older one is found at the episode's end


class Witness:
    """What is remembered of the sessions with one server.

    Example:
        >>> witness = Witness()
        >>> [witness.repeats(mark) for mark in (7, 8, 7)]
        [False, False, True]
        >>> witness.stepped()
        >>> witness.disagrees({"step_count": 2}), witness.disagrees({"step_count": 1})
        ('step_count is 2 after 1 steps', None)
    """

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._marks: set[int] = set()
        self._steps = self._failed = 0
        self._counts = False  # the server was seen to count
        self.has_state = False  # it was seen to answer `state`

    def connected(self) -> None:
        """A new session: what the last one said has nothing to do with it."""
        self._order.clear()
        self._marks.clear()
        self.began()

    def repeats(self, mark: int) -> bool:
        """Whether an answer with these bytes came before."""
        if mark in self._marks:
            return True
        self._marks.add(mark)
        self._order.append(mark)
        if len(self._order) > WINDOW:
            self._marks.discard(self._order.popleft())
        return False

    def began(self) -> None:
        """An episode was reset."""
        self._steps = self._failed = 0

    def stepped(self) -> None:
        """A step was answered."""
        self._steps += 1

    def failed(self) -> None:
        """A step was answered with an error: the server may have counted it or not."""
        self._failed += 1

    def disagrees(self, state: Mapping[str, Any]) -> str | None:
        """What is wrong with the server's state, or None.

        A server that never counted (no `step_count`, or always the 0 it begins with) cannot be asked.
        """
        count = state.get("step_count")
        if type(count) is not int or (count == 0 and not self._counts):
            return "its state has no step_count any more" if self._counts else None
        if self._steps <= count <= self._steps + self._failed:
            self._counts = self._counts or count > 0
            return None
        return f"step_count is {count} after {self._steps} steps"
