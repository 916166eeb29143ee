"""`Collector`: episodes and segments from a fleet and a policy."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
from collections.abc import Collection, Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from envfleet.core.fleet import Fleet
from envfleet.errors import BadArgument, FleetError
from envfleet.rollout.engine import Engine, Mode
from envfleet.rollout.episodes.collect_episodes import EpisodeRun
from envfleet.rollout.episodes.episode import Rollout, Rollouts
from envfleet.rollout.ledger import Ledger
from envfleet.rollout.segments.collect_segments import SegmentRun
from envfleet.rollout.segments.segment import Floats, Segment
from envfleet.rollout.segments.segment_results import SegmentResults
from envfleet.rollout.stats import Stats, StatsBuilder
from envfleet.rollout.tickets import TicketOffice, numbers_for, task_source
from envfleet.rollout.timing import Clock, Verdict
from envfleet.tasks.curriculum import TaskResult
from envfleet.tasks.task_source import TaskSource


class Collector:
    """Collect episodes or segments from a fleet, on any backend.

    The policy is a callable `policy(obs) -> actions` over a batch, or an object with `act(ask)` that is
    given an `Ask` (slots, episode, step, declared columns, reproducible random numbers). Either may return
    `(actions, {"logprob": …})`; the arrays are kept beside the actions. Its attribute `version`, if it has
    one, is written to every step.

    Args:
        fleet: from `envfleet.make`; the caller closes it.
        policy: see above; not needed with `random_actions=True`.
        seed: of the run: every episode's seed is spawned from it and its ticket.
        mode: "sync", "overlap" (two halves alternate) or "async" (the slots that are ready).
        at_least: async: wait until this many slots are ready (default: a quarter of them).
        tasks: a callable ticket → task, a sequence that is used in turn, or a `TaskSource` (a curriculum), which gets the results too.
        max_steps: cut episodes off (truncated) after so many steps.
        max_retries: start an episode again, same seed, after a fault (needs a fleet with on_fault="restart").
        random_actions: ignore the policy.
        warmup_steps: random actions for the first so many steps, spread over the slots.
        max_ahead: how many tickets fast slots may run ahead of the oldest unfinished one.
        keep_infos: store the info dicts.
        env_name: what rollouts are called (default: the id of the environment).
        timing: measure for `verdict()`.
        resumable: keep the actions of running episodes, for `segment_state()`.
        first_ticket: the number of the first episode; seeds and tasks follow from numbers.
        part_of: (first, total): for segments, the fleet has the slots from `first` on of a run with so many in all.

    Example:
        >>> import envfleet as ef
        >>> with ef.make("CartPole-v1", num_envs=4, backend="serial") as fleet:
        ...     collector = Collector(fleet, random_actions=True, seed=0)
        ...     rollouts = collector.collect(10)
        >>> len(rollouts), collector.ledger.used
        (10, 10)
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: Any = None,
        *,
        seed: int = 0,
        mode: Mode = "sync",
        at_least: int | None = None,
        tasks: Any = None,
        max_steps: int | None = None,
        max_retries: int = 2,
        random_actions: bool = False,
        warmup_steps: int = 0,
        max_ahead: int | None = None,
        keep_infos: bool = False,
        env_name: str | None = None,
        timing: bool = True,
        resumable: bool = False,
        first_ticket: int = 0,
        part_of: tuple[int, int] | None = None,
    ) -> None:
        if policy is None and not random_actions:
            raise BadArgument("give a policy, or random_actions=True")
        for name, value in (("max_steps", max_steps), ("at_least", at_least), ("max_ahead", max_ahead)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
                raise BadArgument(f"{name}={value!r}: give a whole number from 1 up")
        self.fleet = fleet
        self.seed = seed
        self.ledger = Ledger()
        self.max_steps, self.max_retries, self.keep_infos = max_steps, max_retries, keep_infos
        self.resumable = resumable
        self.max_ahead = max(64, 4 * fleet.num_envs) if max_ahead is None else max(max_ahead, fleet.num_envs)
        spec = getattr(fleet, "spec", None)
        self.env_name = str(getattr(spec, "id", "") or "env") if env_name is None else env_name
        self.source = tasks if isinstance(tasks, TaskSource) else None  # it also takes the results
        self.results = None if self.source is None else SegmentResults(self.source, fleet.num_envs)  # of segments
        self.tasks = task_source(tasks)
        self._clock = Clock(fleet, timing, mode)
        used = None if random_actions else policy
        self.engine = Engine(fleet, used, mode, at_least, seed, warmup_steps, self._clock, part_of)
        self.stats_builder = StatsBuilder()
        self._seconds = 0.0
        self._next_ticket = first_ticket
        self._segments: SegmentRun | None = None
        self._left: npt.NDArray[np.int64] | None = None  # the episodes that ran when segments were left
        self._streaming = False

    @property
    def policy(self) -> Any:
        """What chooses the actions; may be replaced between two calls."""
        return self.engine.policy

    @policy.setter
    def policy(self, policy: Any) -> None:
        self.engine.use(policy)

    def episodes(
        self,
        num_episodes: int | None = None,
        *,
        num_steps: int | None = None,
        skip: Collection[int] = (),
        order: Literal["ticket", "finish"] = "ticket",
        yield_failed: bool = False,
        progress: bool = False,
    ) -> Iterator[Rollout]:
        """Yield complete episodes as they come, until so many episodes, or so many steps, were yielded.

        `order="ticket"` yields them in the order of their tickets: any number of them is unbiased.
        `order="finish"` yields each at once; then only the complete set is unbiased. `skip` leaves out tickets
        that are done already (to continue a dataset). Numbers continue from call to call.
        """
        if num_episodes is None and num_steps is None:
            raise BadArgument("say how many: episodes(1000), or episodes(num_steps=10_000)")
        if order not in ("ticket", "finish"):
            raise BadArgument(f"order={order!r}: choose 'ticket' or 'finish'")
        numbers = numbers_for(self._next_ticket, num_episodes, skip)
        end = 0 if num_episodes is None else self._next_ticket + num_episodes
        stream = self._episodes(numbers, end, num_steps, order == "ticket", yield_failed)
        total = None if isinstance(numbers, itertools.count) else len(numbers)
        return _with_progress(stream, total, num_steps) if progress else stream

    def _episodes(self, numbers: Any, end: int, num_steps: int | None, ordered: bool, yield_failed: bool) -> Iterator[Rollout]:
        self._refuse_while_streaming()
        self.drop_segments()
        lost_before = self.ledger.lost
        source = self.source
        if source is not None:
            first = self._next_ticket if isinstance(numbers, itertools.count) or not len(numbers) else int(numbers[0])
            source.in_order(first, 2 * self.fleet.num_envs)
            source.drop(set(range(first, numbers[-1])) - set(numbers) if isinstance(numbers, list) else ())
        ready = None if source is None else source.ready
        shared = self.fleet.plan.backend == "joined"
        office = TicketOffice(numbers, self.fleet.num_envs, self.seed, self.tasks, ready, shared)
        steps = 0
        began = time.perf_counter()
        self._clock.start()
        self._streaming = True
        stream = iter(EpisodeRun(self, office, ordered, yield_failed))
        try:
            for rollout in stream:
                self.stats_builder.add(rollout)
                self._next_ticket = max(self._next_ticket, rollout.episode + 1)
                if source is not None:
                    source.forget(rollout.episode)
                steps += len(rollout)
                self._clock.book_s += self._clock.lap()
                yield rollout
                self._clock.lap()  # the time of the caller is not counted
                if num_steps is not None and steps >= num_steps:
                    break
        finally:
            stream.close()  # type: ignore[attr-defined]
            self._streaming = False
            self._clock.pause()
            self._seconds += time.perf_counter() - began
        self._next_ticket = max(self._next_ticket, end)
        self.ledger.warn_if_lost(lost_before)

    def collect(self, num_episodes: int | None = None, *, num_steps: int | None = None, progress: bool = False) -> Rollouts:
        """The same as a list, in ticket order."""
        return Rollouts(self.episodes(num_episodes, num_steps=num_steps, progress=progress))

    def segment(self, num_steps: int, results: bool = True) -> Segment:
        """The next `num_steps` steps of every slot as [T, B] arrays; episodes go on from segment to segment.

        A `TaskSource` gets the results of the episodes that ended. A caller that will know advantages, which PLR needs, says
        `results=False` and calls `give_results(segment, advantage)` before the next segment.
        """
        if num_steps < 1:
            raise BadArgument(f"num_steps={num_steps}: give 1 or more")
        self._refuse_while_streaming()
        run = self._open_segments()
        began = time.perf_counter()
        self._clock.start()
        try:
            segment = run.collect(num_steps)
        except BaseException:
            self.drop_segments()
            raise
        finally:
            self._clock.book_s += self._clock.lap()
            self._clock.pause()
            self._seconds += time.perf_counter() - began
        if self.results is not None:
            segment.learned = self.results.learned(segment)
        if results:
            self.give_results(segment)
        return segment

    def give_results(self, segment: Segment, advantage: Floats | None = None) -> list[TaskResult]:
        """Give the task source, if there is one, the results of a segment that was collected with `results=False`.

        `advantage` is [T, B]. Call it once, before the next segment.
        """
        return [] if self.results is None else self.results.give(segment, advantage)

    def segment_state(self, running: bool = True) -> dict[str, Any] | None:
        """Everything `restore_segments` needs to go on after the last segment; None if there was none.

        Without `running` the running episodes are left out: a collector restored from it starts the next ones.
        """
        if self._segments is None:
            return None if self._left is None else {"episode": self._left.copy(), "ledger": self.ledger.state()}
        return self._segments.state(running)

    def restore_segments(self, state: dict[str, Any] | None, how: str = "replay") -> npt.NDArray[np.int64]:
        """Restore what `segment_state` returned, also in another process; return the slots that could not be restored.

        Running episodes are replayed and compared; one that differs is ended, and the slot starts its
        next episode. `how="end"` ends all of them.
        """
        if state is None:
            return np.zeros(0, dtype=np.int64)
        run = self._open_segments(state["episode"])
        ended = run.restore(state, how)
        if self.results is not None:
            self.results.forget(ended)
            self.results.drop_before(run.episode)
        return ended

    def begin_at(self, episode: npt.NDArray[np.int64]) -> None:
        """Drop the episodes of segments that run: the next segment begins with these, one per slot, or with later ones that are new here."""
        self.drop_segments()
        self._left = episode - 1 if self._left is None else np.maximum(self._left, episode - 1)

    @property
    def running(self) -> SegmentRun:
        """The state of every slot between two segments."""
        return self._open_segments()

    def _open_segments(self, episode: npt.NDArray[np.int64] | None = None) -> SegmentRun:
        if self._segments is None:
            if self.source is not None:
                self.source.in_any_order()
            after = None if self._left is None else self._left + 1
            self._segments = SegmentRun(self, after if episode is None else episode)
        return self._segments

    def _refuse_while_streaming(self) -> None:
        if self._streaming:
            raise FleetError("another episodes() of this collector is not finished: take all of it, or close() it first")

    def drop_segments(self) -> None:
        """Do not continue the episodes that run: the next segment begins new ones."""
        if self._segments is not None:
            self._segments.give_up()
            self._left = self._segments.episode.copy()  # the next segments go on behind these: seeds and tickets are used once
            self._segments = None
            if self.results is not None:
                self.results.forget(np.arange(self.fleet.num_envs))
                self.results.drop_before(self._left + 1)

    def stats(self) -> Stats:
        """Statistics of all episodes so far (of segments: those that ended)."""
        return self.stats_builder.stats(self._seconds or None)

    def verdict(self) -> Verdict:
        """Where the time went, slot by slot, and one sentence on what to do about it."""
        return self._clock.verdict()


def _with_progress(stream: Iterator[Rollout], num_episodes: int | None, num_steps: int | None) -> Iterator[Rollout]:
    """Pass rollouts on; in a terminal, draw a bar with their count or steps and the mean return."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:  # a missing bar must not be an error
        return stream
    return _draw_progress(stream, num_episodes, num_steps)


def _draw_progress(stream: Iterator[Rollout], num_episodes: int | None, num_steps: int | None) -> Iterator[Rollout]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}"), TimeRemainingColumn())
    unit, total = ("steps", num_steps) if num_episodes is None else ("episodes", num_episodes)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(unit, total=total)
        returns = 0.0
        try:
            for count, rollout in enumerate(stream, 1):
                returns += rollout.episode_return
                advance = len(rollout) if unit == "steps" else 1
                bar.update(task, advance=advance, description=f"{unit}, mean return {returns / count:.4g}")
                yield rollout
        finally:
            stream.close()  # type: ignore[attr-defined]
