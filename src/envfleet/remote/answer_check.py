"""How a duplicated or late answer is detected if answers carry no number: with every server that is not ours.

OpenEnv matches answers to requests by their order only. One extra answer shifts every later one, and each still looks
like an answer. Two things show it: a duplicate has the same bytes as an earlier answer; and a `state` request is
answered by a `state` frame, so an `observation` that comes first is extra. So the client asks for `state` when an answer
repeats an earlier one, and at the end of every episode, before it returns the last row. Its `step_count` must then be
the number of steps taken: a step that ran twice, or not at all, shows there.

One case is left: an answer repeated in place of one that was lost, which shifts nothing. If the observation has a field
that counts steps (it was equal to their number often enough), the repetition is found there, unless both answer a
reset; with such a field the client asks for `state` as soon as the count is wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

from envfleet.remote.exact_protocol import Message

WINDOW = 4096  # answers that are remembered; an older one is found at the episode's end
ENOUGH = 16  # answers in which a field equalled the number of steps, before it is taken for a counter


class AnswerChecker:
    """What is remembered of the sessions with one server; `learnt` is what its clients share."""

    def __init__(self, learnt: dict[str, Any] | None = None) -> None:
        self._order: deque[int] = deque()
        self._marks: set[int] = set()
        self._steps = self._failed = 0
        # Known of the server, not of the session, and shared: "counts", whether it was seen to count; "counters", the
        # fields that equalled the number of steps in every answer so far; "agreed", in how many.
        self._learnt = learnt if learnt is not None else {}
        self.has_state = False  # it was seen to answer `state`
        self.stateless: Message | None = None  # its answer to `state` if that is neither a state nor an error

    def connected(self, first: Message) -> None:
        """A new session, with its answer to a first `state`."""
        self.has_state |= first.kind == "state"
        self.stateless = first if first.kind not in ("state", "error") else None
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

    def watch(self, observation: Mapping[str, Any], repeated: bool) -> Literal["fine", "check", "duplicate"]:
        """Whether an answer's own step counter shows a duplicate, or that the server must be asked."""
        learnt = self._learnt
        counters, agreed = learnt.get("counters"), learnt.get("agreed", 0)
        names = observation if counters is None else counters
        equal = {name for name in names if type(observation.get(name)) is int and observation[name] == self._steps}
        contradicts = agreed >= ENOUGH and bool(counters) and not equal
        if repeated:  # it may be a duplicate: nothing is learnt from it
            return "duplicate" if contradicts else "check"
        if contradicts:
            return "check"
        learnt["counters"], learnt["agreed"] = equal, agreed + 1
        return "fine"

    def unlearn(self) -> None:
        """The field contradicted the steps, and the server's state did not: the field is no counter."""
        self._learnt["counters"] = set()

    def began(self) -> None:
        """An episode is being reset."""
        self._steps = self._failed = 0
        if not self._learnt.get("counters"):
            self._learnt["counters"], self._learnt["agreed"] = None, 0  # another field may be one

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
        count, counts = state.get("step_count"), self._learnt.get("counts", False)
        if type(count) is not int or (count == 0 and not counts):
            return "its state has no step_count any more" if counts else None
        if self._steps <= count <= self._steps + self._failed:
            self._learnt["counts"] = counts or count > 0
            return None
        return f"step_count is {count} after {self._steps} steps"
