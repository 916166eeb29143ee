"""`PPOTrainer`: a fleet, a collector, a learner, checkpoints and logs."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict, deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from envfleet.core.construct import make
from envfleet.errors import BadArgument, FaultError, FleetError, TrainingStopped, WriteFailed
from envfleet.networks.network_policy import NotFinite
from envfleet.rollout.collector import Collector
from envfleet.rollout.segments.segment import Segment
from envfleet.slots.factories import env_name
from envfleet.tasks.task_source import TaskSource
from envfleet.train.build import choose_device, env_list, training_factories
from envfleet.train.config import PPOConfig
from envfleet.train.evaluate import Evaluation, Evaluator
from envfleet.train.objective import Coefficients
from envfleet.train.run_folder import RunFolder
from envfleet.train.task_board import TaskBoard
from envfleet.train.task_training import few_tasks, steps_for_rollouts, task_numbers, tasks_of
from envfleet.train.team_learner import TeamLearner, check_policies
from envfleet.train.terminal import View
from envfleet.util.text import Hint, first_line

RECENT = 100  # episodes that the shown return and length are the mean of


class OldNames:
    """The spellings of earlier scripts, as properties."""

    num_episodes: int
    steps_per_s: float
    n_completed_episodes = property(lambda self: self.num_episodes)
    sps = property(lambda self: self.steps_per_s)


@dataclass(frozen=True)
class UpdateResult(OldNames):
    """One rollout and one update."""

    update: int
    num_steps: int  # environment steps so far
    num_episodes: int  # episodes so far
    returns: list[float]  # of the episodes that ended in this rollout
    lengths: list[int]
    losses: dict[str, float]
    steps_per_s: float  # environment steps per second, collecting and learning together
    collect_s: float
    learn_s: float


@dataclass
class TrainResult(OldNames):
    """A whole call of `train`."""

    num_steps: int
    num_updates: int
    num_episodes: int
    returns: list[float]  # of the most recent episodes
    wall_s: float
    steps_per_s: float
    stopped: bool
    num_faults: int = 0  # over the whole run
    quarantined: list[int] = field(default_factory=list)  # slots that failed too often and did not take part to the end
    out: Path | None = None
    report: Path | None = None

    @property
    def mean_return(self) -> float:
        """Mean return of the most recent episodes; NaN when none has ended."""
        return float(np.mean(self.returns)) if self.returns else float("nan")


@dataclass
class Counters:
    """What a run has done so far; stored in checkpoints."""

    update: int = 0
    num_steps: int = 0
    num_episodes: int = 0
    num_faults: int = 0
    wall_s: float = 0.0
    collect_s: float = 0.0
    learn_s: float = 0.0
    best: float = float("-inf")
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        return {**values, "returns": list(self.returns), "lengths": list(self.lengths)}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint stored."""
        for name, value in state.items():
            setattr(self, name, deque(value, maxlen=RECENT) if name in ("returns", "lengths") else value)


class PPOTrainer:
    """Trains a PPO agent on a fleet of environments.

    Deterministic: with one seed the weights are the same, bit for bit, on every backend and with any number of
    workers, because all random numbers come from streams of the seed, and rows are always in slot order.

    Example:
        >>> config = PPOConfig(env="CartPole-v1", num_envs=2, num_steps=32, total_steps=128, backend="serial")
        >>> with PPOTrainer(config) as trainer:
        ...     first = trainer.train_episode_vectorized()
        ...     result = trainer.train()
        >>> first.num_steps, result.num_steps, result.num_updates
        (64, 128, 2)
    """

    def __init__(self, config: PPOConfig, *, view: View | None = None, tasks: Any = None) -> None:
        if not isinstance(config, PPOConfig):
            raise BadArgument(f"config={config!r}: give a PPOConfig, e.g. PPOTrainer(PPOConfig(env='CartPole-v1'))")
        self.envs = env_list(config.env)
        if config.num_rollouts_per_iter is not None:
            config = dataclasses.replace(config, num_steps=steps_for_rollouts(config, self.envs[0]), num_rollouts_per_iter=None)
        self.config = config
        self.view = view or View()
        self.eval_tasks: list[Any] = []
        if tasks is None and config.env_type == "meta":
            found = tasks_of(config, self.envs[0])
            tasks, self.eval_tasks = found.source, found.held_out
        elif tasks is None and (config.oracle or config.curriculum != "uniform" or config.num_train_tasks):
            raise BadArgument("oracle, curriculum and num_train_tasks need env_type=meta: a family of tasks (docs/tasks.md)")
        self.tasks = tasks
        self.counters = Counters()
        self.device = choose_device(config.device)
        self.folder = RunFolder(config) if config.out else None
        self._stop = False
        self._closed = False
        self._evaluator: Evaluator | None = None
        stored = self.folder.open() if self.folder else None
        # One thread while the networks are built, whose first weights would depend on the number in the last bit. `_build` allows more.
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._limits = threadpool_limits(1)
        try:
            check_policies(config, self.envs[0])
            self._build()
            if stored is not None:
                self._load(stored)
            if self.folder:
                self.folder.start(self.counters.update, self.counters.num_steps, stored)
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        config = self.config
        factories = training_factories(config)
        self.fleet = make(
            [factories[slot % len(factories)] for slot in range(config.num_envs)],  # the slots take the environments in turn
            backend="shm" if config.start_method is not None and config.backend == "auto" else config.backend,
            num_workers=config.num_workers,
            start_method=config.start_method,
            ray_address=config.ray_address,
            resources=config.ray_resources or None,
            transport=config.ray_transport,
            on_fault=config.on_fault,
            init_timeout_s=config.init_timeout_s,
            reset_timeout_s=config.reset_timeout_s,
            step_timeout_s=config.step_timeout_s,
            columns=config.columns or None,
            with_state=config.centralised_critic,
        )
        self.learner = TeamLearner(config, self.fleet, self.device)
        if not self.learner.is_fused:
            # Compiled code has threads of its own. Those of PyTorch and BLAS would spin between calls (24 instead of 6 us of CPU per
            # sample of 256 CartPoles, with 2 of them), and PyTorch's logarithms change in the last bit with their number.
            torch.set_num_threads(config.num_threads)
            threadpool_limits(config.num_threads)
        self.policy = self.learner.policy
        source = self.tasks
        if isinstance(source, TaskSource) and source.success_return is None:  # one that the caller made
            source.success_return = config.success_return
        # A task source, an object with `task`, a callable number → task, or a list.
        deal = source if isinstance(source, TaskSource) else getattr(source, "task", source)
        self.collector = Collector(self.fleet, self.policy, seed=config.seed, tasks=deal, timing=False, resumable=True)
        self._began: dict[str, Any] | None = None  # which episodes ran when the update in progress began
        self.board = TaskBoard()  # how well each task goes
        self._seen_tasks: dict[str, float] = {}  # the newest numbers of every task and inner episode
        self._told: tuple[int, int] | None = None  # faults and quarantined slots that the view was told of; None: nothing yet

    def _show_header(self) -> None:
        """Once, before the first update: what is run, where, and where it is saved."""
        if self._told is not None:
            return
        self._told = (0, 0)
        config, done, folder = self.config, self.counters, self.folder
        goal = f"{config.num_episodes:,} episodes" if config.num_episodes else f"{config.total_steps:,} steps"
        size = f"{config.num_envs} environments" if config.num_envs > 1 else "1 environment"
        lines = [f"PPO on {config.env_name}: {goal}, {size} × {config.num_steps} steps per update, seed {config.seed}"]
        lines += [f"fleet: {self.fleet.plan}", f"device: {self.device}"]
        lines[-1] += f"; saved in {folder.path}" if folder else "; nothing is saved: --out DIR (out=…) keeps checkpoints and logs"
        if done.update:
            lines.append(f"resumed: {done.num_steps:,} steps and {done.num_episodes:,} episodes are done")
        if self.finished:
            lines.append(f"this run has reached its {goal}: a higher --total-steps or --num-episodes goes on")
        self.view.start(lines)

    # -- training --------------------------------------------------------------------------------------------------

    def train_episode_vectorized(self) -> UpdateResult:
        """Collect one segment from all environments and learn from it."""
        self._show_header()
        self._began = self.collector.segment_state(running=False)
        begin, coefficients = time.perf_counter(), self._coefficients()
        try:
            segment = self.collector.segment(self.config.num_steps, results=False)
            middle = time.perf_counter()
            losses = self.learner.learn(segment, coefficients)
        except BaseException as error:
            # What the learner remembers of the running episodes may be from before this segment: they are not continued.
            self.collector.drop_segments()
            self.learner.forget(np.arange(self.config.num_envs))
            if isinstance(error, Exception):
                raise self._explained(error) from error
            raise
        result = self._result(segment, losses, middle - begin, time.perf_counter() - middle)
        self._record(segment, result, coefficients.learning_rate)
        return result

    def train(self) -> TrainResult:
        """Train until the steps or episodes of the config are reached, or `stop()` is called."""
        counters, config = self.counters, self.config
        self._show_header()
        try:
            while not self._stop and not self.finished:
                self.train_episode_vectorized()
                if self.folder and config.checkpoint_every and counters.update % config.checkpoint_every == 0:
                    self.save()
        finally:
            self.view.close()
        if self.folder and counters.update:
            self.save()
        return self._finish()

    @property
    def finished(self) -> bool:
        """Whether the run has reached its end."""
        if self.config.num_episodes is not None:
            return self.counters.num_episodes >= self.config.num_episodes
        return self.counters.num_steps >= self.config.total_steps

    def _coefficients(self) -> Coefficients:
        """By steps, not updates: after faults a run takes more updates to its end."""
        return self.config.coefficients(self.counters.num_steps / self.config.steps_per_update)

    def stop(self) -> None:
        """End `train` after the update in progress. Safe to call from a signal handler or another thread."""
        self._stop = True

    def _result(self, segment: Segment, losses: dict[str, float], collect_s: float, learn_s: float) -> UpdateResult:
        counters, steps = self.counters, segment.num_scored
        t, b = segment.end_index[:, 0], segment.end_index[:, 1]
        real = segment.scored[t, b]  # the return of an episode that a fault cut short means nothing
        returns, lengths = segment.end_return[real].tolist(), segment.end_length[real].tolist()
        counters.update += 1
        counters.num_steps += steps
        counters.num_episodes += len(returns)
        counters.wall_s += collect_s + learn_s
        counters.collect_s += collect_s
        counters.learn_s += learn_s
        counters.returns.extend(returns)
        counters.lengths.extend(lengths)
        rate = steps / max(collect_s + learn_s, 1e-9)
        done = (counters.update, counters.num_steps, counters.num_episodes)
        return UpdateResult(*done, returns, lengths, losses, rate, collect_s, learn_s)

    def _record(self, segment: Segment, result: UpdateResult, learning_rate: float) -> None:
        """Numbers of the update to the view and the logs; evaluation and video when they are due."""
        config, counters = self.config, self.counters
        self._tell_faults()
        row: dict[str, float] = {"update": result.update, "n_completed_episodes": counters.num_episodes}
        if counters.returns:
            row |= {"return": float(np.mean(counters.returns)), "length": float(np.mean(counters.lengths))}
        row |= result.losses
        row |= {
            "learning_rate": learning_rate,
            "wall_s": counters.wall_s,
            "sps": result.steps_per_s,
            "sps_collect": segment.num_scored / max(result.collect_s, 1e-9),
            "sps_learn": segment.num_scored / max(result.learn_s, 1e-9),
            "num_faults": counters.num_faults,
        }
        source = self.collector.source
        if source is not None:
            results = self.collector.give_results(segment, self.learner.advantage)
            self.board.add(results)
            row |= task_numbers(source, self.board, segment, results)
        else:
            row |= self.learner.metrics(segment) if self.fleet.agents else self._returns_by_env(segment)
        if config.eval_every and result.update % config.eval_every == 0:
            row |= self._evaluate_now()
        if self.folder:
            self.folder.log(row, counters.num_steps)
            self.folder.film(self, segment)
        done = counters.num_steps / config.total_steps
        if config.num_episodes is not None:  # episodes are what ends the run
            done = counters.num_episodes / config.num_episodes
        about = {
            "step": counters.num_steps,
            "total_steps": config.total_steps,
            "num_episodes": config.num_episodes,
            "done": done,
            "left_s": counters.wall_s * max(1 / done - 1, 0.0) if done else 0.0,
            "num_quarantined": len(self.fleet.quarantined),
            "env": config.env_name,
            "collect_share": result.collect_s / max(result.collect_s + result.learn_s, 1e-9),
            "sps": counters.num_steps / max(counters.wall_s, 1e-9),
        }
        shown: dict[str, Any] = {**row, **about}
        if source is not None:  # those of earlier updates too: the box keeps its height
            kept = ("return/", "inner_return/", "task_return/")
            self._seen_tasks |= {name: value for name, value in row.items() if name.startswith(kept)}
            shown |= self._seen_tasks
            if not few_tasks(source):
                shown |= {"best_tasks": self.board.best(4), "worst_tasks": self.board.worst(4)}
        self.view.show(shown)

    def _tell_faults(self) -> None:
        """Count the faults of this update and hand them to the view, a line each."""
        faults, quarantined = self.fleet.faults, self.fleet.quarantined
        known, known_quarantined = self._told or (0, 0)
        self.counters.num_faults += len(faults) - known
        for fault in faults[known:]:
            self.view.fault(first_line(fault))
        if len(quarantined) > known_quarantined:
            left = self.config.num_envs - len(quarantined)
            slots = ", ".join(map(str, quarantined.tolist()))
            self.view.note(
                f"quarantined after repeated faults, slots: {slots}. The run goes on with {left} of {self.config.num_envs}"
            )
        self._told = len(faults), len(quarantined)

    def _returns_by_env(self, segment: Segment) -> dict[str, float]:
        """Mean return of the episodes that ended in this segment, per environment or task."""
        given = self.config.env.split(",") if isinstance(self.config.env, str) else self.envs
        names = [env.strip() if isinstance(env, str) else env_name(env) for env in given]
        groups: dict[str, list[float]] = defaultdict(list)
        for (t, b), total in zip(segment.end_index.tolist(), segment.end_return.tolist()):
            if segment.scored[t, b]:
                task = int(segment.task[t, b])
                groups[str(self.fleet.task_value(task)) if task >= 0 else names[b % len(names)]].append(total)
        return {f"return/{name}": float(np.mean(totals)) for name, totals in sorted(groups.items())}

    # -- evaluation, checkpoints, the end --------------------------------------------------------------------------

    def evaluate(
        self, num_episodes: int = 100, deterministic: bool = True, opponents: Any = None, *, episodes: int | None = None
    ) -> Evaluation:
        """Play episodes with the present policy, on environments and seeds of their own.

        `opponents` play some of many agents: see `Evaluator.run`. `episodes` is an old spelling of `num_episodes`.
        """
        num_episodes = num_episodes if episodes is None else episodes
        if self._evaluator is None:
            self._evaluator = Evaluator(self.envs, self.config, tasks=self.eval_tasks)
        return self._evaluator.run(self.learner.policies, num_episodes, deterministic, opponents)

    def _evaluate_now(self) -> dict[str, float]:
        # The return of a policy against itself says nothing about how good it is.
        try:
            found = self.evaluate(self.config.eval_episodes, opponents="random" if self.config.self_play else None)
        except FaultError as error:
            if self.config.on_fault == "raise":
                raise
            self.view.note(f"this evaluation is left out, because its environment failed: {first_line(error)}")
            self._close_evaluator()
            return {}
        if self.folder and found.mean_return > self.counters.best:
            self.counters.best = found.mean_return
            self.save(best=True)
        inner = {f"eval/inner_return/{i + 1}": value for i, value in enumerate(found.mean_inner_returns)}
        return {"eval/mean_return": found.mean_return, "eval/mean_length": found.mean_length, **inner}

    def _close_evaluator(self) -> None:
        evaluator, self._evaluator = self._evaluator, None
        if evaluator is not None:
            evaluator.close()

    def save(self, best: bool = False, running: bool = True) -> Path:
        """Write a checkpoint; the run folder keeps the last few and the best."""
        if self.folder is None:
            raise BadArgument("there is no run folder to save into: set out=…")
        counters = self.counters
        if not self.config.eval_every and counters.returns:
            # Without evaluation the best checkpoint is the one with the best mean return of training episodes, or,
            # in self-play, where that means little, with the best rating.
            recent = float(np.mean(counters.returns))
            if self.learner.pool is not None:
                recent = self.learner.pool.rating
            best, counters.best = recent > counters.best, max(recent, counters.best)
        return self.folder.save(counters.update, self.state(running), best)

    def state(self, running: bool = True) -> dict[str, Any]:
        """Return everything a run consists of, as plain values, arrays and tensors."""
        return {
            "config": self.config.to_dict(),
            "update": self.counters.update,
            "counters": self.counters.state(),
            "running": self.collector.segment_state() if running else self._began,
            "team": self.learner.state(),
            "tasks": self._task_state(),
            "board": self.board.state(),
        }

    def _task_state(self) -> Any:
        if self.collector.results is not None:
            return self.collector.results.state()
        return self.tasks.state_dict() if hasattr(self.tasks, "state_dict") else None

    def _load(self, state: dict[str, Any]) -> None:
        self.counters.load(state["counters"])
        if state["tasks"] is not None and self.collector.results is not None:
            self.collector.results.load(state["tasks"])
        elif state["tasks"] is not None and hasattr(self.tasks, "load_state_dict"):
            self.tasks.load_state_dict(state["tasks"])
        self.board.load(state.get("board", {}))  # checkpoints of earlier versions have none
        self.learner.load(state["team"])
        ended = self.collector.restore_segments(state["running"], self.config.restore)
        self.learner.forget(ended)

    def _explained(self, error: Exception) -> Exception:
        """A NaN becomes an error that says where; a fault stays what it is. With both, what was learned before is saved."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, NotFinite):
            cause = cause.__cause__
        if cause is None and not isinstance(error, FleetError):
            return error
        explained: Exception = error
        saved, note = None, None
        try:
            saved = self.save(running=False) if self.folder and self.counters.update else None
        except WriteFailed as failed:
            note = str(failed)
        if cause is not None:
            explained = TrainingStopped(str(cause), saved)
        elif saved is not None:
            note = f"what was learned before is saved in {saved}: --resume goes on from there"
        if note is not None:
            explained.add_note(Hint(note))
        return explained

    def _finish(self) -> TrainResult:
        counters = self.counters
        report = self.folder.finish(self) if self.folder and self.config.report else None
        return TrainResult(
            num_steps=counters.num_steps,
            num_updates=counters.update,
            num_episodes=counters.num_episodes,
            returns=list(counters.returns),
            wall_s=counters.wall_s,
            steps_per_s=counters.num_steps / max(counters.wall_s, 1e-9),
            stopped=self._stop and not self.finished,
            num_faults=counters.num_faults,
            quarantined=self.fleet.quarantined.tolist(),
            out=self.folder.path if self.folder else None,
            report=report,
        )

    def close(self) -> None:
        """Close fleet, evaluation and logs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as closing:  # close everything, even if one part fails
            closing.callback(torch.set_num_threads, self._threads)
            closing.callback(self._limits.restore_original_limits)
            if hasattr(self, "fleet"):
                closing.callback(self.fleet.close)
            if self.folder:
                closing.callback(self.folder.close)
            closing.callback(self._close_evaluator)

    def __enter__(self) -> PPOTrainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: Any) -> None:
        if kind is None:
            self.close()
        else:
            with suppress(WriteFailed):  # the caller gets the first error
                self.close()
