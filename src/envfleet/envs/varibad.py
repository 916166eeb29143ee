"""`VariBadWrapper`: several episodes of one task as one episode, so that exploring in the first pays in the others.

The inner episodes are those of the environment. The outer episode is what a fleet, a collector and a trainer see: one task, k inner
episodes, one return. Memory and returns are therefore cut at outer ends only, without any code for it elsewhere.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.errors import BadArgument


class VariBadWrapper(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """k inner episodes of one task; the outer episode ends, terminated, after the last.

    The observation is flat: the environment's, then with `oracle` the task as numbers, then with several inner episodes a flag that is 1
    at the first observation of inner episodes 2 to k. That observation is the fresh one, so that the first action of an inner episode is
    chosen from where it begins. Declared columns, with every row:

    * `inner_episode`: which inner episode the observation belongs to, from 0;
    * `inner_done`: an inner episode ended with this step (at outer ends `terminated` says it);
    * `inner_final_obs`: the last observation of the inner episode that ended, where `inner_done`;
    * `inner_returns`: the returns of the inner episodes so far, NaN for those without a step; in the first row of an outer episode, those of
      the one before (NaN: there was none, because the environment is new).

    `reset(options=…)`: the options other than `task` also reach the resets of the inner episodes that follow.

    Example:
        >>> from envfleet.envs.gridnavi import GridNavi
        >>> env = VariBadWrapper(GridNavi(horizon=2), episodes_per_task=2)
        >>> obs, info = env.reset(seed=0, options={"task": (3, 3)})
        >>> ends = [env.step(np.int64(2)) for _ in range(4)]
        >>> [(end[4]["inner_done"], end[2]) for end in ends]
        [(False, False), (True, False), (False, False), (False, True)]
        >>> float(ends[1][0][-1]), int(np.argmax(ends[1][4]["inner_final_obs"][:5])), int(np.argmax(ends[1][0][:5]))
        (1.0, 2, 0)
    """

    def __init__(self, env: gym.Env[Any, Any], episodes_per_task: int = 1, oracle: bool = False) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, episodes_per_task=episodes_per_task, oracle=oracle)
        gym.Wrapper.__init__(self, env)
        if isinstance(episodes_per_task, bool) or not isinstance(episodes_per_task, int) or episodes_per_task < 1:
            raise BadArgument(f"episodes_per_task={episodes_per_task!r}: give a whole number from 1 up")
        inner = env.observation_space
        if not isinstance(inner, gym.spaces.Box):
            raise BadArgument(
                f"VariBadWrapper needs a Box observation; {inner} can be flattened by gymnasium's FlattenObservation"
            )
        self.episodes_per_task, self.oracle = episodes_per_task, oracle
        self._size = int(np.prod(inner.shape, dtype=int))
        self._task_size = 0
        if oracle:
            try:
                self._task_size = int(env.get_wrapper_attr("task_space").vector_size)
            except AttributeError:
                raise BadArgument(f"oracle=True: {env} has no task_space, so its task cannot be shown") from None
            if not self._task_size:
                raise BadArgument(f"oracle=True: the tasks of {env} have no numbers (its task_space has no vector)")
        extra = self._task_size + (episodes_per_task > 1)
        low = np.concatenate([np.ravel(inner.low), np.full(extra, -np.inf)]).astype(np.float32)
        high = np.concatenate([np.ravel(inner.high), np.full(extra, np.inf)]).astype(np.float32)
        self.observation_space = gym.spaces.Box(low, high, dtype=np.float32)
        self.envfleet_columns = {
            "inner_episode": gym.spaces.Box(0, episodes_per_task - 1 or 1, (), np.int64),
            "inner_done": gym.spaces.Box(0, 1, (), np.uint8),
            "inner_final_obs": gym.spaces.Box(-np.inf, np.inf, (self._size,), np.float32),
            "inner_returns": gym.spaces.Box(-np.inf, np.inf, (episodes_per_task,), np.float64),
        }
        self._space = env.get_wrapper_attr("task_space") if env.has_wrapper_attr("task_space") else None
        self._rng = np.random.default_rng()
        self._given = False  # whether the caller has given a task: it stays until it is replaced
        self._nothing = np.zeros(self._size, np.float32)
        self._returns = np.full(episodes_per_task, np.nan)
        self._options: dict[str, Any] | None = None  # of the outer episode, for its inner ones
        self._number, self._begins = -1, True  # the inner episode (-1: there was no reset), and whether it has no step yet

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None, task: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        """A new outer episode: with this task, the one that was given before, or one that is drawn here."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        asked = None if options is None else options.get("task")
        task = task if asked is None else asked
        self._given |= task is not None
        if not self._given and self._space is not None:
            task = self._draw_task(self._rng)  # here, not by the environment: that would draw one for each inner episode
        if task is not None:
            self.env.get_wrapper_attr("set_task")(task)
        obs, info = self.env.reset(seed=seed, options=options)
        self._options = {name: value for name, value in (options or {}).items() if name != "task"} or None
        self._number, self._begins, before = 0, True, self._returns
        self._returns = np.full(self.episodes_per_task, np.nan)
        return self._observation(obs, False), {**info, **self._columns(False, self._nothing, before)}

    def _draw_task(self, rng: np.random.Generator) -> Any:
        assert self._space is not None
        return self._space.sample(rng)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step of the running inner episode; at its end the next one begins, with the same task."""
        if self._number < 0:
            raise BadArgument("step() before reset(): reset the environment first")
        obs, reward, terminated, truncated, info = self.env.step(action)
        so_far = 0.0 if self._begins else self._returns[self._number]
        self._returns[self._number], self._begins = so_far + float(reward), False
        over = bool(terminated or truncated)
        last = over and self._number == self.episodes_per_task - 1
        final = self._nothing
        if over and not last:
            final = np.array(obs, np.float32).reshape(-1)
            self._number, self._begins = self._number + 1, True
            obs, more = self.env.reset(options=self._options)
            info = {**info, **more}
        info |= self._columns(over and not last, final, self._returns)
        return self._observation(obs, over and not last), reward, last, False, info

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether it or the environment has an attribute. The state of the environment is not that of an outer episode: it is not offered."""
        return name not in ("get_state", "set_state") and super().has_wrapper_attr(name)

    def _observation(self, obs: Any, flag: bool) -> NDArray[np.float32]:
        out = np.zeros(self._size + self._task_size + (self.episodes_per_task > 1), np.float32)
        out[: self._size] = np.ravel(obs)
        if self._task_size:
            out[self._size : self._size + self._task_size] = self.env.get_wrapper_attr("task_vector")
        if self.episodes_per_task > 1:
            out[-1] = flag
        return out

    def _columns(self, done: bool, final: NDArray[np.float32], returns: NDArray[np.float64]) -> dict[str, Any]:
        return {"inner_episode": self._number, "inner_done": done, "inner_final_obs": final, "inner_returns": returns.copy()}
