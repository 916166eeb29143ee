"""The life of a slot: the one place that steps an env, notices the end, keeps the last observation, resets with the
next seed and task, writes the row, and turns an exception into a FAULT row.

It is written as generators that *yield the env calls to make* (`(phase, function, args, kwargs)`) and receive the
results. A backend only decides how a call is made: `drive` makes it in this thread, the asyncio backend awaits it.
So there is one autoreset, not one per backend.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

import numpy as np

from envfleet.faults.failure import Failure
from envfleet.slots.action_types import read_wide
from envfleet.slots.env_contract import (
    attribute,
    checked_info,
    number_of,
    reset_parameters,
    snapshot_value,
    task_routes,
    unpack_result,
)
from envfleet.slots.layout import FAULT, READY, REBUILD, RESET, fits, leaves_of, scatter
from envfleet.slots.slab import Slab

#: (phase, function, args, kwargs); the value sent back is what the call returned.
Call = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Calls = Generator[Call, Any, None]

PHASES = ("idle", "init", "reset", "step", "call", "render", "close")


class ManyAgents(Protocol):
    """What the life needs of `envfleet.multiagent`, which is above it: given by the backend that makes the life."""

    def adapt(self, env: Any) -> Any:
        """The env as one with joint spaces, if it has many agents; any other env as it is."""
        ...

    def row(self, slab: Slab, slot: int) -> Any:
        """Writes the row of a slot with many agents."""
        ...


class SlotLife:
    """One slot's env and everything that happens to it.

    `tasks` maps task ids to pickled values and is shared by all slots of a worker. After `advance` the row is written,
    `info` and `final_info` hold what travels beside it (None when empty), and `failure` says what went wrong, if it did.
    """

    def __init__(
        self,
        slot: int,
        make_env: Callable[[], Any],
        on_end: str = "reset",
        tasks: dict[int, bytes] | None = None,
        many_agents: ManyAgents | None = None,
    ) -> None:
        self.slot = slot
        self.make_env = make_env
        self.on_end = on_end
        self.tasks = tasks if tasks is not None else {}
        self.env: Any = None
        self.slab: Slab = None  # type: ignore[assignment]  # known when all spaces are known: see `attach`
        self.info: Any = None  # what `keep` made of it
        self.final_info: Any = None
        self.failure: Failure | None = None
        self.options: dict[str, Any] | None = None  # of the next explicit reset only
        self.turn = 0  # the turn that is being worked on; set by its driver
        self.pid = os.getpid()  # the process it belongs to: a forked child must not answer for it
        self.keep: Callable[[Any], Any] = snapshot_value  # how infos and mailbox objects are kept; workers pickle them
        self.abandoned = False  # set when a call that hangs was given up: its later result is not written
        self.phase = "idle"
        self.runner: Any = None  # the compiled runner that drives this slot, while it does
        self.time_limit: Any = None  # the TimeLimit wrapper absorbed into it
        self._many_agents = many_agents
        self.joint: Any = None  # writes the row where the env has many agents
        self._set_task: Callable[[Any], Any] | None = None
        self._reset_takes_task = False
        self._reset_takes: list[str] = []  # "seed" and "options", if the env's reset has them
        self.reset_needs: list[str] = []  # those without a default

    # -- building -----------------------------------------------------------------------------------------------

    def build(self) -> Calls:
        """Construct the env; closes the previous one."""
        if self.slab is not None:
            # The last env may have failed with its final observation: an object that the parent cannot unpickle would be
            # sent with every row until an episode ends, and be a fault each time.
            self.slab.forget_final_mail(self.slot)
        if self.env is not None:
            old, self.env = self.env, None
            try:
                yield "close", old.close, (), {}
            except Exception as error:  # it is being replaced because it failed: its close may fail too
                self.phase = "init"
                del error
        env = yield "init", self.make_env, (), {}
        if not callable(getattr(env, "step", None)) or not callable(getattr(env, "reset", None)):
            raise TypeError(f"the factory returned {type(env).__name__}, which has no reset and step")
        self.adopt(env)

    def adopt(self, env: Any) -> None:
        """Take an env that is built: here just now, or in another process, from where it was moved."""
        self.drop()
        self._reset_takes_task, self._set_task = task_routes(env)
        self._reset_takes, self.reset_needs = reset_parameters(env)
        self.env = env if self._many_agents is None else self._many_agents.adapt(env)

    def drop(self) -> None:
        """Forget the env without closing it: another process has it now, or it was never built."""
        if self.env is not None:
            self.release()
            self.env = None

    def move_in(self, env: Any) -> None:
        """Take an env that was moved here from another life of the same slot."""
        self.adopt(env)
        self.options = None

    def move_out(self) -> None:
        """Forget an env that was moved to another life of the same slot, and options of a reset that was never sent."""
        self.drop()
        self.options = None

    def attach(self, slab: Slab) -> None:
        """Give the life its rows. Called once the spaces of all envs are known and the slab is laid out."""
        self.slab = slab
        head = slab.scalars
        self._reward, self._ep_return = head["reward"], head["ep_return"]
        self._terminated, self._truncated = head["terminated"], head["truncated"]
        self._active, self._scored, self._over = head["active"], head["scored"], head["over"]
        self._episode, self._step, self._length = head["episode"], head["step"], head["length"]
        self._task, self._seed, self._started = head["task"], head["seed"], head["started"]
        self._now_seed, self._now_task = head["now_seed"], head["now_task"]
        self._now_length, self._now_return, self._waiting = head["now_length"], head["now_return"], head["waiting"]
        self._next_seed, self._next_task = head["next_seed"], head["next_task"]
        self._status, self._command = head["status"], head["command"]
        self._step_ns, self._busy_ns = head["step_ns"], head["busy_ns"]
        self._obs_leaves, self._action_leaves = slab.obs_leaves, slab.action_leaves
        self._obs, self._final_obs = slab.leaf_arrays("obs"), slab.leaf_arrays("final_obs")
        self._actions = slab.leaf_arrays("action")
        self._wide_actions = [slab.arrays.get(f"wide_action/{i}") for i in range(len(self._actions))]
        self._action_type = head["action_type"]
        self._columns = [
            (name, leaves_of(space)[0], slab.arrays[f"column/{name}"]) for name, space in slab.layout.columns.items()
        ]
        if slab.layout.agents:
            assert self._many_agents is not None
            self.joint = self._many_agents.row(slab, self.slot)

    # -- one send -----------------------------------------------------------------------------------------------

    def advance(self) -> Calls:
        """Do what the row's `command` asks: step, reset, or rebuild and reset. Writes the row."""
        slot = self.slot
        self.info = self.final_info = self.failure = None
        self.slab.keep(slot, self.turn)
        command = self._command[slot]
        if command == REBUILD:
            yield from self.build()
            yield from self._begin()
        elif self.env is None:
            # A new worker does not know the episode of the old one: it must not start another in its place.
            raise RuntimeError("its environment is gone, and no new one was asked for")
        elif command == RESET or self._waiting[slot]:
            yield from self._begin()
        else:
            yield from self._advance_step()
        self._status[slot] = READY

    def _advance_step(self) -> Calls:
        result = yield "step", self.env.step, (self.read_action(),), {}
        yield from self.take_step(result)

    def take_step(self, result: Any) -> Calls:
        """Write what a step returned, and begin the next episode if it ended one."""
        if self.joint is not None:
            yield from self._take_joint_step(result, self.joint)
            return
        # The head is written last and `obs` before it: if any part of the result is bad, the row still describes the
        # last good transition.
        slot = self.slot
        obs, reward, terminated, truncated, info = unpack_result(result, 5, "step")
        terminated, truncated, reward, info = bool(terminated), bool(truncated), number_of(reward), checked_info(info)
        self.check_hold()
        step, ep_return = int(self._now_length[slot]), self._now_return[slot, 0] + reward
        episode, task, seed = self._started[slot] - 1, self._now_task[slot], self._now_seed[slot]
        if not (terminated or truncated):
            self.info = self.keep(info) if info else None
            self._write_columns(info)
            self.write_obs(obs, "obs")
        elif self.on_end == "reset":
            self.write_obs(obs, "final_obs")
            self.final_info = self.keep(info) if info else None
            self.info = yield from self._reset_env()
        else:
            self.info = self.keep(info) if info else None
            self._write_columns(info)
            self.write_obs(obs, "final_obs")
            self.write_obs(obs, "obs")
            self._active[slot, 0] = False
            self._waiting[slot] = True
        self.check_hold()
        if not ((terminated or truncated) and self.on_end == "reset"):
            self._now_length[slot], self._now_return[slot, 0] = step + 1, ep_return
        self._write_head(episode, step, reward, ep_return, (terminated, truncated), task, seed)
        self._scored[slot, 0] = True

    def _take_joint_step(self, result: Any, row: Any) -> Calls:
        """`take_step` for many agents: the same order, and the agent env says what happened to each agent."""
        slot, agent_env = self.slot, self.env
        agent_env.take(result)
        head = row.transition(agent_env)
        info = self.keep(agent_env.infos) if any(agent_env.infos.values()) else None
        self.check_hold()
        row.write_final(agent_env)
        if head.over and self.on_end == "reset":
            self.final_info = info
            self.info = yield from self._reset_env()
        else:
            self.info = info
            row.write_obs(agent_env, self.check_hold)
            row.go_on(head)
            self._waiting[slot] = head.over
        row.write_head(head, agent_env)

    def _begin(self) -> Calls:
        """A reset that is a row of its own: no transition, step -1."""
        self.info = yield from self._reset_env(self._reset_takes)
        slot = self.slot
        task, seed = self._now_task[slot], self._now_seed[slot]
        self._write_head(self._started[slot] - 1, -1, 0.0, 0.0, (False, False), task, seed)
        self._scored[slot] = self._over[slot] = False

    def _write_head(
        self, episode: int, step: int, reward: float, ep_return: float, ends: tuple[bool, bool], task: int, seed: int
    ) -> None:
        slot = self.slot
        self._episode[slot], self._step[slot], self._length[slot] = episode, step, step + 1
        self._reward[slot], self._ep_return[slot] = reward, ep_return
        self._terminated[slot], self._truncated[slot] = ends
        self._task[slot], self._seed[slot] = task, seed

    def _reset_env(self, names: list[str] | None = None) -> Generator[Call, Any, Any]:
        """Reset with the next seed and task; writes `obs`. The only reset of an env in this library.

        `names`: arguments to pass in any case. As Gymnasium's vector envs do it, a reset that the caller asked for passes
        `seed` and `options` also when they are None; an automatic one only where the env has no default.
        """
        slot = self.slot
        self.check_hold()
        seed, task = int(self._next_seed[slot]), int(self._next_task[slot])
        self._next_seed[slot] = -1
        self._now_task[slot], self._now_seed[slot] = task, seed  # before the call: a fault in it names them
        kwargs: dict[str, Any] = dict.fromkeys(self.reset_needs if names is None else names)
        if seed >= 0:
            kwargs["seed"] = seed
        options, self.options = self.options, None
        if task >= 0:
            # Unpickled for every episode: an env that changes its task cannot change that of the next episode.
            value = pickle.loads(self.tasks[task])
            if self._reset_takes_task:
                kwargs["task"] = value
            elif self._set_task is not None:
                yield "reset", self._set_task, (value,), {}
            else:
                options = {**(options or {}), "task": value}
        if options is not None:
            kwargs["options"] = options
        result = yield "reset", self.env.reset, (), kwargs
        return self.take_reset(result, task, seed)

    def take_reset(self, result: Any, task: int = -1, seed: int = -1) -> Any:
        """Write what a reset returned; gives the info as it is kept."""
        slot = self.slot
        if self.joint is not None:
            agent_env = self.env
            agent_env.begin(result)
            self.info = self.keep(agent_env.infos) if any(agent_env.infos.values()) else None
            self.joint.write_obs(agent_env, self.check_hold)
            self.joint.begin(agent_env)
        else:
            obs, info = unpack_result(result, 2, "reset")
            info = checked_info(info)
            self.info = self.keep(info) if info else None
            self._write_columns(info)
            self.write_obs(obs, "obs")
            self._now_return[slot, 0], self._active[slot, 0] = 0.0, True
        self._now_task[slot], self._now_seed[slot] = task, seed
        self._now_length[slot] = 0
        self._started[slot] += 1
        self._waiting[slot] = False
        return self.info

    def worked_since(self, begin_ns: int) -> None:
        """Write how long this advance took; every driver calls this last."""
        if self.slab is not None and not self.abandoned:
            self._step_ns[self.slot] = spent_ns = time.monotonic_ns() - begin_ns
            self._busy_ns[self.slot] += spent_ns

    def fail(self, error: BaseException) -> None:
        """Turn an exception of the last call into a FAULT row; the supervisor decides what happens next."""
        if self.slab is not None and not self.abandoned:
            self._status[self.slot] = FAULT  # first: describing the exception runs its own methods
        self.info = self.final_info = None
        self.failure = Failure.of(error, self.phase)
        end_if_forked(self.pid)

    def check_hold(self) -> None:
        """Before anything is written: check that this life still owns the row, and that this is its own process.

        What an env returned is turned into rows by methods of its own (`__array__`, `__float__`, `__reduce__` …), which may
        fork as `step` may, or take so long that the slot is given up meanwhile.
        """
        end_if_forked(self.pid)
        if self.abandoned:
            raise RuntimeError("this call was given up, and its row is not to be written any more")

    # -- for the compiled runner ---------------------------------------------------------------------------------

    @property
    def has_side(self) -> bool:
        """Whether there is something beside the row: an info, a failure, objects of mailbox leaves."""
        return self.failure is not None or self.info is not None or self.final_info is not None or self.slab.has_mail

    def only_infos(self) -> tuple[Any, Any] | None:
        """The infos, of the row and final, if nothing else is beside the row."""
        return None if self.failure is not None or self.slab.has_mail else (self.info, self.final_info)

    def finish_step(self, result: Any) -> bool:
        """Take over from the compiled life a step whose result is not plain; whether something is beside the row."""
        self.info = self.final_info = self.failure = None
        if self.joint is not None:
            self.joint.read_obs(self.env)  # the compiled life has written them
        if drive(self, self.take_step(result), unwatched, phase="step"):
            self._status[self.slot] = READY
        else:
            self.release()
        return self.has_side

    def resume_step(self, result: Any) -> Calls:
        """`finish_step` for a backend that makes the calls itself."""
        self.info = self.final_info = self.failure = None
        yield from self.take_step(result)
        self._status[self.slot] = READY

    def reset_now(self) -> bool:
        """The reset at an end that has a seed or a task; whether it left an info. Errors are raised to the caller."""
        calls = self._reset_env()
        try:
            phase, function, args, kwargs = next(calls)
            while True:
                try:
                    result = function(*args, **kwargs)
                finally:
                    end_if_forked(self.pid)
                self.check_hold()
                phase, function, args, kwargs = calls.send(result)
        except StopIteration:
            return self.info is not None

    def keep_info(self, info: dict[str, Any], final: bool) -> None:
        """Keep the info of a step the compiled life has made."""
        if final:
            self.final_info = self.keep(info)
        else:
            self.info = self.keep(info)
        self.check_hold()

    def fail_in(self, error: BaseException, phase: str) -> None:
        """`fail`, for the compiled life."""
        self.phase = phase
        self.release()
        self.fail(error)
        self.phase = "idle"

    def release(self) -> None:
        """Take the slot back from the compiled life: its counters are written back into the wrappers it absorbed."""
        if self.runner is not None:
            self.runner.disarm(self.slot)
            self.runner = None
            if self.joint is not None:
                self.joint.read_obs(self.env)
        if self.time_limit is not None:
            self.time_limit._elapsed_steps = int(self._now_length[self.slot])
            self.time_limit = None

    # -- between env and row ------------------------------------------------------------------------------------

    def read_action(self) -> Any:
        """The action in the row, as the env expects it: a copy, because envs keep what they are given."""
        if self.joint is not None:
            return self.env.actions(self.joint.actions())
        slot = self.slot
        values: list[Any] = []
        for i, array in enumerate(self._actions):
            if array is None:
                values.append(self.slab.mail["action"][i][slot])
            else:
                wide, number = self._wide_actions[i], int(self._action_type[slot, i])
                value = read_wide(wide, slot, number) if number and wide is not None else array[slot, 0]
                values.append(value.copy() if isinstance(value, np.ndarray) else value)
        return values[0] if self._action_leaves[0].path == () else self.slab.gather_action(values)

    def write_obs(self, obs: Any, kind: str) -> None:
        """Check an observation against the space and copy it into the row, as `obs` or `final_obs`."""
        slot = self.slot
        arrays = self._obs if kind == "obs" else self._final_obs
        values = scatter(self._obs_leaves, obs)
        try:
            checked = [fits(leaf, value) if leaf.is_column else self.keep(value) for leaf, value in zip(self._obs_leaves, values)]
        except (ValueError, TypeError) as error:
            raise type(error)(f"the observation of {self.phase}() has {error}") from None
        self.check_hold()
        for i, (array, value) in enumerate(zip(arrays, checked)):
            if array is None:
                self.slab.mail[kind][i][slot] = value
            else:
                array[slot, 0] = value

    def _write_columns(self, info: dict[str, Any]) -> None:
        # An env may leave a declared value out (many do in reset): the column then holds zeros, never stale data.
        values = [fits(leaf, info[name]) if name in info else 0 for name, leaf, _ in self._columns]
        self.check_hold()
        for (_, _, array), value in zip(self._columns, values):
            array[self.slot, 0] = value

    # -- the rest of the env's interface ------------------------------------------------------------------------

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the env, or read an attribute, through its wrappers."""
        self.release()
        value = attribute(self.env, name)
        return value(*args, **kwargs) if callable(value) else value

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute where the env has it, else on the innermost env."""
        self.release()
        if hasattr(self.env, "set_wrapper_attr"):
            self.env.set_wrapper_attr(name, value)
        else:
            setattr(self.env, name, value)

    def close(self) -> None:
        """Close the env, once."""
        if self.env is not None and self.slab is not None:
            self.release()
        env, self.env = self.env, None
        if env is not None and callable(getattr(env, "close", None)):
            try:
                env.close()
            finally:
                end_if_forked(self.pid)


def end_if_forked(pid: int) -> None:
    """End this process if it is not `pid`: an env forked, and the child came back out of the env's call.

    The child has the worker's sockets and rows. If it continued, two processes would answer for one slot.
    """
    if os.getpid() != pid:
        os._exit(1)


def drive(life: SlotLife, calls: Calls, enter: Callable[[int, str], None], phase: str = "idle") -> bool:
    """Make a life's calls in this thread. `enter(slot, phase)` writes the pulse.

    Returns False when the calls failed (the row is then a FAULT row) or were given up.
    """
    life.phase = phase
    result: Any = None
    begin_ns = time.monotonic_ns()
    try:
        while True:
            # Only around the generator: a StopIteration of the env (no more data) is a failure like any other.
            try:
                phase, function, args, kwargs = calls.send(result)
            except StopIteration:
                return True
            life.phase = phase
            enter(life.slot, phase)
            try:
                result = function(*args, **kwargs)
            finally:
                end_if_forked(life.pid)
            if life.abandoned:
                return False
    except KeyboardInterrupt as error:  # the env is in an unknown state; the caller decides
        life.fail(error)
        raise
    except BaseException as error:
        life.fail(error)
        return False
    finally:
        life.worked_since(begin_ns)
        life.phase = "idle"
        enter(-1, "idle")


def unwatched(slot: int, phase: str) -> None:
    """For `drive` where calls have no deadline: the caller makes them itself, so nothing could look at a clock meanwhile."""
