"""The names of meta-learning scripts: `make_env`, `make_parallel_env` and `ParallelEnvManager`, thin views over a fleet.

A task is a value that is drawn in the parent and sent with a reset, to the one environment that it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np

from envfleet.adapters.fleet_view import SingleAgentView
from envfleet.core.batch import Batch
from envfleet.core.construct import make
from envfleet.core.fleet import Fleet
from envfleet.core.fleet_options import BackendName, EnvOptions, StartMethod
from envfleet.envs.varibad import VariBadWrapper
from envfleet.errors import BadArgument
from envfleet.slots.factories import resolve
from envfleet.util.seeding import stream
from envfleet.util.text import short

EnvFns = Sequence[Callable[[], Any]]


class MetaEnv(VariBadWrapper):
    """What `make_env` gives: one environment with its training and evaluation tasks."""

    train_tasks: Sequence[Any] = ()
    eval_tasks: Sequence[Any] = ()

    def sample_task(self, rng: np.random.Generator) -> Any:
        """A training task; where the family is not split, any task."""
        return _sample(self, rng)

    _draw_task = sample_task  # a reset without a task must not run one that is held out


def family(env: Any, episodes_per_task: int = 1, oracle: bool = False, env_kwargs: Mapping[str, Any] | None = None) -> Any:
    """A factory of environments with inner episodes, from a family's name or a callable. A family without tasks is refused.

    Example:
        >>> family("gridnavi", episodes_per_task=2)().observation_space.shape
        (11,)
    """
    return partial(_built, resolve(env, env_kwargs), episodes_per_task, oracle)


def _built(factory: Callable[[], Any], episodes_per_task: int, oracle: bool) -> MetaEnv:
    env = factory()
    try:
        env.get_wrapper_attr("set_task"), env.get_wrapper_attr("task_space")
    except AttributeError:
        raise BadArgument(f"{env} has no tasks: it needs set_task and task_space (see docs/tasks.md)") from None
    return MetaEnv(env, episodes_per_task, oracle)


def split_tasks(env: Any, num_train: int | None, num_eval: int | None, seed: int) -> tuple[list[Any], list[Any]]:
    """Training and evaluation tasks of an environment; two empty lists where no number is given: any task is then drawn."""
    if num_train is None and not num_eval:
        return [], []
    space = env.get_wrapper_attr("task_space")
    if num_train is None:
        raise BadArgument(f"num_eval_tasks={num_eval} without num_train_tasks: they could not be held out. Give both")
    return space.split(num_train, num_eval or 0, seed)  # type: ignore[no-any-return]


def make_env(
    env: Any,
    episodes_per_task: int = 1,
    seed: int = 0,
    oracle: bool = False,
    num_train_tasks: int | None = None,
    num_eval_tasks: int | None = None,
    **env_kwargs: Any,
) -> MetaEnv:
    """One environment of a family, with `episodes_per_task` inner episodes: the single twin of `make_parallel_env`.

    Example:
        >>> env = make_env("GridNavi-v0", 2, seed=1, num_train_tasks=15, num_eval_tasks=6)
        >>> obs, info = env.reset(task=env.train_tasks[0])
        >>> info["task"] == env.train_tasks[0], len(env.eval_tasks)
        (True, 6)
    """
    built: MetaEnv = family(env, episodes_per_task, oracle, env_kwargs)()
    built.train_tasks, built.eval_tasks = split_tasks(built, num_train_tasks, num_eval_tasks, seed)
    built.action_space.seed(seed)
    return built


class ParallelMetaEnv(SingleAgentView):
    """What `make_parallel_env` gives: environments in worker processes, each at its own pace, each reset with a task of its own.

    An environment that is done waits: a reset begins its next episode, and so does a step, which ignores the action.
    """

    def __init__(self, fleet: Fleet, tasks: tuple[list[Any], list[Any]], space: Any, seed: int) -> None:
        super().__init__(fleet)
        self.num_workers = fleet.num_envs
        self.train_tasks, self.eval_tasks = tasks
        self.task_space = space
        self._rng = stream(seed, "reset-tasks")

    def sample_task(self) -> Any:
        """A training task; where the family is not split, any task."""
        return _sample(self, self._rng)

    def reset(self, tasks: Sequence[Any] | None = None, seed: int | None = None) -> Any:
        """First observations of all; `tasks` has one task per environment (default, and for None: a training task is drawn)."""
        tasks = [None] * self.num_envs if tasks is None else tasks
        _check_tasks(tasks, self.num_envs)
        chosen = [self.sample_task() if task is None else task for task in tasks]
        self._drop_leftovers()
        return self.fleet.reset(seed=seed, tasks=chosen).obs

    def reset_one(self, worker_id: int, task: Any = None, seed: int | None = None) -> Any:
        """The first observation of one environment, with a task (default: a training task is drawn)."""
        if isinstance(worker_id, bool) or not isinstance(worker_id, (int, np.integer)) or not 0 <= worker_id < self.num_envs:
            raise BadArgument(f"worker_id={worker_id!r}: give a whole number from 0 to {self.num_envs - 1}")
        chosen = self.sample_task() if task is None else task
        out = self.fleet.is_resetting
        if worker_id in np.flatnonzero(out):  # a reset that was interrupted
            self.fleet.drop([worker_id])
        return self.fleet.reset(slots=[worker_id], tasks=[chosen], seed=None if seed is None else [seed]).obs[0]

    def step_async(self, actions: Any, ids: Sequence[int] | None = None) -> None:
        """Send actions to these environments (default: all). `step_wait` gives what is finished, also of a `step` that was interrupted."""
        self.fleet.send(actions, ids)

    def step_wait(  # type: ignore[override]  # it also says which
        self, at_least: int | None = None, timeout_s: float | None = None
    ) -> tuple[Any, Any, Any, Any, list[dict[str, Any]]]:
        """(ids, obs, rewards, dones, infos) of those that were sent; with `at_least`, of so many or more that are finished."""
        batch = self.fleet.recv(at_least=at_least, timeout_s=timeout_s)
        return batch.slots, *self._result(batch)

    def _result(self, batch: Batch) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        """obs, rewards, dones, infos. `done` is the outer end; `infos[i]["done_mdp"]` is the inner one."""
        infos = _infos(batch)
        for info, over in zip(infos, batch.ended.tolist()):
            info["done_mdp"] = bool(over or info.get("inner_done"))
        return batch.obs, batch.reward, batch.ended, infos

    def current_tasks(self) -> list[Any]:
        """The tasks that run, as the environments themselves say."""
        return list(self.fleet.get_attr("task"))


def make_parallel_env(
    env: Any,
    episodes_per_task: int = 1,
    num_workers: int = 1,
    seed: int = 0,
    oracle: bool = False,
    num_train_tasks: int | None = None,
    num_eval_tasks: int | None = None,
    *,
    backend: BackendName = "shm",
    start_method: StartMethod | None = None,
    **options: Unpack[EnvOptions],
) -> ParallelMetaEnv:
    """`num_workers` environments of a family, each in a worker process of its own; tasks are drawn here and sent with resets.

    Example:
        >>> with make_parallel_env("GridNavi-v0", episodes_per_task=2, num_workers=2, num_train_tasks=15, num_eval_tasks=6) as penv:
        ...     obs = penv.reset(tasks=[(4, 4), (0, 3)])
        ...     obs, rewards, dones, infos = penv.step([0, 0])
        ...     penv.current_tasks()
        [(4, 4), (0, 3)]
    """
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
        raise BadArgument(f"num_workers={num_workers!r}: give a whole number from 1 up")
    factory = family(env, episodes_per_task, oracle, options.pop("env_kwargs", None))
    probe = factory()  # in this process, before any other starts: it has the tasks, and refuses what cannot be
    try:
        tasks, space = split_tasks(probe, num_train_tasks, num_eval_tasks, seed), probe.get_wrapper_attr("task_space")
    finally:
        probe.close()
    workers = None if backend == "serial" else num_workers
    fleet = make(factory, num_workers, backend=backend, num_workers=workers, start_method=start_method, on_end="wait", **options)
    return ParallelMetaEnv(fleet, tasks, space, seed)


def _sample(holder: Any, rng: np.random.Generator) -> Any:
    tasks = holder.train_tasks
    return tasks[int(rng.integers(len(tasks)))] if tasks else _space(holder).sample(rng)


def _check_tasks(tasks: Any, num_envs: int) -> None:
    if not isinstance(tasks, (list, tuple)) or len(tasks) != num_envs:
        got = len(tasks) if isinstance(tasks, (list, tuple)) else short(tasks)
        raise BadArgument(f"tasks: {num_envs} environments need a list with one task each, got {got}")


def _space(holder: Any) -> Any:
    return holder.get_wrapper_attr("task_space") if isinstance(holder, VariBadWrapper) else holder.task_space


def _infos(batch: Batch) -> list[dict[str, Any]]:
    """The infos of a batch; a row that is a fault, not a step or a first observation, has `envfleet.fault`."""
    return [
        {**info, "envfleet.fault": True} if faulted else dict(info) for info, faulted in zip(batch.info, batch.faulted.tolist())
    ]


def _parts(command: str, data: Any, names: str) -> Any:
    if not isinstance(data, (tuple, list)) or len(data) != len(names.split(", ")):
        raise BadArgument(f"({command!r}, {data!r}): the data of this command is ({names})")
    return data


class Remote:
    """One worker as scripts with pipes see it: `send((command, data))`, then `recv()`.

    Commands: `("reset", {"task": …, "seed": …, "options": …})` gives (obs, info); `("step", action)` gives (obs, reward, terminated, truncated,
    info); `("get_attr", name)`, `("set_attr", (name, value))`, `("call", (name, args, kwargs))`, `("render", None)`, `("get_spaces", None)`.
    `("close", None)` has no answer; the last one of all workers ends them.
    """

    def __init__(self, fleet: Fleet, slot: int, closed: set[int]) -> None:
        self._fleet, self._slot = fleet, slot
        self._closed = closed  # workers that were sent "close"; of all remotes
        self._answer: list[Any] = []  # of a command that is done in `send`

    def send(self, message: tuple[str, Any]) -> None:
        """Give the worker something to do. It does it while others do theirs."""
        if not isinstance(message, (tuple, list)) or len(message) != 2:
            raise BadArgument(f"send({message!r}): give a pair (command, data), e.g. ('step', action)")
        command, data = message
        if command == "close":
            self._closed.add(self._slot)
            if len(self._closed) == self._fleet.num_envs:
                self._fleet.close()
            return
        if self._slot in self._closed:
            raise BadArgument(f"worker {self._slot} was closed: nothing can be sent to it")
        if self._is_out or self._answer:
            raise BadArgument(f"worker {self._slot} has an answer that was not received: call recv() first")
        if command == "reset":
            self._reset(data)
        elif command == "step":
            self._fleet.send([data], [self._slot])
        elif command == "get_spaces":
            self._answer.append((self._fleet.single_observation_space, self._fleet.single_action_space))
        elif command in ("get_attr", "render"):
            self._answer += self._fleet.call("render" if command == "render" else data, slots=[self._slot])
        elif command == "set_attr":
            name, value = _parts(command, data, "name, value")
            self._fleet.set_attr(name, [value], slots=[self._slot])
            self._answer.append(None)
        elif command == "call":
            name, args, kwargs = _parts(command, data, "name, args, kwargs")
            self._answer += self._fleet.call(name, *args, slots=[self._slot], **kwargs)
        else:
            raise BadArgument(
                f"there is no command {command!r}: reset, step, get_attr, set_attr, call, render, get_spaces, close"
            )

    def _reset(self, data: Any) -> None:
        given = dict(data or {}) if data is None or isinstance(data, Mapping) else {repr(data): data}
        task, seed, options = (given.pop(name, None) for name in ("task", "seed", "options"))
        if given:
            raise BadArgument(f"reset takes a dict with task, seed and options, not {', '.join(map(str, given))}")
        if isinstance(options, Mapping) and options.get("task") is not None:  # the same: the fleet has to know what runs
            if task is not None:
                raise BadArgument(f"reset: two tasks, {short(task)} and, in options, {short(options['task'])}")
            task, options = options["task"], {name: value for name, value in options.items() if name != "task"} or None
        self._fleet.send_reset([seed], None if task is None else [task], [self._slot], options)

    @property
    def _is_out(self) -> bool:
        # The fleet knows it: a note of our own could be missing after an interrupt.
        return bool(self._fleet.is_out[self._slot])

    def recv(self, timeout_s: float | None = None) -> Any:
        """The answer to what was sent. After an interrupt or a timeout it can be asked for again."""
        if self._answer:
            return self._answer.pop()
        if not self._is_out:
            raise BadArgument(f"nothing was sent to worker {self._slot}: call send((command, data)) first")
        began = bool(self._fleet.is_resetting[self._slot])
        batch = self._fleet.recv([self._slot], timeout_s=timeout_s)
        if began:
            return batch.obs[0], _infos(batch)[0]
        ended = batch.terminated[0], batch.truncated[0]
        return batch.obs[0], float(batch.reward[0]), bool(ended[0]), bool(ended[1]), _infos(batch)[0]

    def poll(self) -> bool:
        """Whether `recv` would return at once."""
        return bool(self._answer) or self._slot in self._fleet.ready()


class ParallelEnvManager(SingleAgentView):
    """Environments in process workers, one each by default; every reset may carry another task.

    `remotes[i]` is worker i as scripts with pipes use it. An environment that is done waits: a reset begins its next episode, and so does a step, which ignores the action.

    Example:
        >>> from envfleet.envs.gridnavi import GridNavi
        >>> with ParallelEnvManager([GridNavi] * 2) as manager:
        ...     for remote, task in zip(manager.remotes, [(2, 2), (4, 0)]):
        ...         remote.send(("reset", {"task": task}))
        ...     [remote.recv()[1]["task"] for remote in manager.remotes]
        [(2, 2), (4, 0)]
    """

    def __init__(
        self,
        env_fns: EnvFns,
        num_workers: int | None = None,
        start_method: StartMethod | None = None,
        *,
        backend: BackendName = "shm",
        **options: Unpack[EnvOptions],
    ) -> None:
        fns = list(env_fns)
        workers = None if backend == "serial" else num_workers or len(fns) or None
        super().__init__(make(fns, backend=backend, num_workers=workers, start_method=start_method, on_end="wait", **options))
        self.num_workers = len(fns)
        closed: set[int] = set()
        self.remotes = [Remote(self.fleet, slot, closed) for slot in range(len(fns))]

    def reset(self, tasks: Sequence[Any] | None = None, seed: int | None = None) -> tuple[Any, list[dict[str, Any]]]:
        """First observations and infos of all; `tasks` has one task per environment, None where it may be any."""
        if tasks is not None:
            _check_tasks(tasks, self.num_envs)
        self._drop_leftovers()
        batch = self.fleet.reset(seed=seed, tasks=None if tasks is None else list(tasks))
        return batch.obs, _infos(batch)

    def _result(self, batch: Batch) -> tuple[Any, Any, Any, Any, list[dict[str, Any]]]:
        """obs, rewards, terminated, truncated, infos."""
        return batch.obs, batch.reward, batch.terminated, batch.truncated, _infos(batch)
