"""`TaskSource`: deals the tasks of a curriculum to the episodes of a run, the same ones however fast each slot is.

An episode's task is chosen when the episode is assigned, one ahead of the running one. What a curriculum knows by then must not depend on
which results have arrived by chance. So results wait in an inbox, and the curriculum sees them at moments that are the same in every run:

* between two segments, where a trainer calls `advance`;
* with `lag` (episodes in the order of tickets), when ticket t is assigned: it sees exactly the results of tickets below t - lag. Tickets are assigned in
  order, and a ticket for which a result is still missing has to wait (`ready`).

Every ticket has random numbers of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from envfleet.errors import BadArgument
from envfleet.tasks.curriculum import Curriculum, TaskResult
from envfleet.tasks.list_curricula import DomainRandomisation
from envfleet.util.seeding import stream


class TaskSource:
    """Which task each ticket gets, and what became of it.

    Args:
        tasks: a curriculum, or what `as_task_space` takes: all its tasks are then equally likely.
        seed: of the draws.
        success_return: an episode with this return is a success, where a result does not say itself; None: above 0.

    Example:
        >>> source = TaskSource(["easy", "hard"], seed=0)
        >>> [source.task(ticket) for ticket in (0, 1, 2)] == [source.task(ticket) for ticket in (0, 1, 2)]
        True
        >>> source.add(TaskResult(0, source.task(0), 1.0, 10)).success is None
        True
        >>> source.advance()
        1
    """

    def __init__(self, tasks: Any, seed: int = 0, success_return: float | None = None) -> None:
        self.curriculum = tasks if isinstance(tasks, Curriculum) else DomainRandomisation(tasks)
        self.seed, self.success_return = seed, success_return
        self._dealt: dict[int, Any] = {}  # tickets that may be asked for again: their tasks
        self._trains: dict[int, bool] = {}
        self._inbox: dict[int, TaskResult] = {}
        self.num_results = 0
        self.lag: int | None = None
        self._next = 0  # with a lag: the ticket that is assigned next
        self._low = 0  # with a lag: the results of all tickets below are in
        self._in: set[int] = set()  # those above whose results are in

    def in_order(self, first: int, lag: int) -> None:
        """Assign in the order of tickets from `first` on, each `lag` behind in what the curriculum knows.

        Tickets below `first` are not waited for. One that was assigned and not handed over keeps its task.
        """
        if self.lag is None:
            self._dealt, self._trains = {}, {}  # of segments, if there are any
            self._next = self._low = first
        elif first < self._next and first not in self._dealt:
            raise BadArgument(
                f"the task source is at ticket {self._next}, and ticket {first} is done: give first_ticket={self._next}"
            )
        self.lag = lag
        self._next, self._low = max(self._next, first), max(self._low, first)
        for ticket in [ticket for ticket in self._dealt if ticket < first]:
            self.forget(ticket)
        self._in = {ticket for ticket in self._in if ticket >= self._low}
        self._note(self._low, result=False)

    def in_any_order(self) -> None:
        """Assign whatever ticket is asked for, as segments need it. Their tickets are others than those of episodes."""
        if self.lag is not None:
            self.lag = None
            self._dealt, self._trains, self._in = {}, {}, set()

    def ready(self, ticket: int) -> bool:
        """Whether the ticket can be assigned: all results it must know are in."""
        return self.lag is None or self._low >= ticket - self.lag

    def task(self, ticket: int) -> Any:
        """The task of a ticket: chosen when it is first asked for, and the same ever after."""
        if self.lag is None:
            self._assign(ticket)
        else:
            while self._next <= ticket:
                self.advance(below=self._next - self.lag)
                self._assign(self._next)
                self._next += 1
        if ticket not in self._dealt:
            raise BadArgument(f"ticket {ticket} is done: another collector of this task source is at ticket {self._next}")
        return self._dealt[ticket]

    def _assign(self, ticket: int) -> None:
        if ticket not in self._dealt:
            (chosen,) = self.curriculum.assign([ticket], stream(self.seed, "curriculum", ticket))
            self._dealt[ticket] = chosen
            self._trains[ticket] = self.curriculum.trains_on(chosen)

    __call__ = task

    def trains_on(self, ticket: int) -> bool:
        """Whether the ticket's episode is learned from, as the curriculum said when it was assigned."""
        return self._trains.get(ticket, True)

    def add(self, result: TaskResult) -> TaskResult:
        """Take a result; the curriculum sees it at the next `advance`. A ticket that is collected again has one result, its first.

        Returns it, with its success where `success_return` says which returns are one.
        """
        if result.success is None and self.success_return is not None:
            result = replace(result, success=float(result.episode_return >= self.success_return))
        if self.lag is None or (result.ticket >= self._low and result.ticket not in self._in):
            self._inbox[result.ticket] = result
        self._note(result.ticket)
        return result

    def _note(self, ticket: int, result: bool = True) -> None:
        if self.lag is not None and ticket >= self._low:
            if result:
                self._in.add(ticket)
            while self._low in self._in:
                self._in.remove(self._low)
                self._low += 1

    def advance(self, below: int | None = None) -> int:
        """Give the curriculum the results of tickets below a number (default: all), in the order of tickets; how many there were."""
        ready = sorted(ticket for ticket in self._inbox if below is None or ticket < below)
        results = [self._inbox.pop(ticket) for ticket in ready]
        self.curriculum.update(results)
        if self.lag is None:  # with a lag, the collector says when
            for ticket in ready:
                self.forget(ticket)
        self.num_results += len(results)
        return len(results)

    def drop(self, tickets: Iterable[int]) -> None:
        """Do not wait for tickets that will have no result: their episodes failed, or were left."""
        for ticket in tickets:
            if self.lag is None:
                self.forget(ticket)
            self._note(ticket)

    def forget(self, ticket: int) -> None:
        """The caller has the ticket's episode: it will not be asked for again."""
        self._dealt.pop(ticket, None)
        self._trains.pop(ticket, None)

    def out(self) -> list[int]:
        """The tickets that have a task and may be asked for again."""
        return sorted(self._dealt)

    def probabilities(self) -> dict[str, float]:
        """Of the curriculum."""
        return self.curriculum.probabilities()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores: the curriculum, tickets that are out, results that wait."""
        return {
            "curriculum": self.curriculum.state_dict(),
            "dealt": [[ticket, task, self._trains[ticket]] for ticket, task in self._dealt.items()],
            "inbox": [[r.ticket, r.task, r.episode_return, r.length, r.success, r.value_error] for r in self._inbox.values()],
            "num_results": self.num_results,
            "lag": self.lag,
            "next": self._next,
            "low": self._low,
            "in": sorted(self._in),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; what it cannot have given is refused, and nothing of it is taken."""
        try:
            dealt = {int(ticket): (task, bool(trains)) for ticket, task, trains in state["dealt"]}
            inbox = {int(row[0]): TaskResult(int(row[0]), *row[1:]) for row in state["inbox"]}
            lag = None if state["lag"] is None else int(state["lag"])
            num_results, following, low = int(state["num_results"]), int(state["next"]), int(state["low"])
            known = {int(ticket) for ticket in state["in"]}
            if min(num_results, following, low) < 0:
                raise ValueError("a count is below 0")
            self.curriculum.load_state_dict(state["curriculum"])  # the last that can fail: it takes all or nothing too
        except BadArgument:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BadArgument(
                f"the stored tasks are damaged ({type(error).__name__}: {error}): resume from another checkpoint"
            ) from None
        self._dealt = {ticket: task for ticket, (task, _) in dealt.items()}
        self._trains = {ticket: trains for ticket, (_, trains) in dealt.items()}
        self._inbox, self.num_results = inbox, num_results
        self.lag, self._next, self._low, self._in = lag, following, low, known
