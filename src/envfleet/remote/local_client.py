"""The OpenEnv client's interface over an environment in this process: no server, no socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium

from envfleet.envs.connect4 import Connect4
from envfleet.envs.echo import Echo
from envfleet.errors import ResetNeeded
from envfleet.remote.result import Fields, StepResult, action_payload
from envfleet.remote.space_codec import Dialect, to_lists


class LocalEnvClient:
    """An OpenEnv-style client whose environment is in this process: `reset`, `step`, `state`, `close`.

    The keyword arguments of `reset` other than `seed` and `episode_id` become Gymnasium's reset options, as
    they do behind a server of ours, so code written against one runs against the other.

    Args:
        env: a Gymnasium environment, or a function that makes one.

    Example:
        >>> client = LocalEnvClient(Echo)
        >>> _ = client.reset(seed=1)
        >>> client.step({"message": "hi"}).observation
        {'echoed': 'hi', 'n': 1}
    """

    def __init__(self, env: gymnasium.Env[Any, Any] | Callable[[], gymnasium.Env[Any, Any]]) -> None:
        self.env = env if isinstance(env, gymnasium.Env) else env()
        self.dialect = Dialect.of(self.env)
        self._episode_id: str | None = None
        self._step_count = -1  # -1: no episode is running

    def reset(self, *, seed: int | None = None, episode_id: str | None = None, **options: Any) -> StepResult:
        """Start an episode."""
        obs, info = self.env.reset(seed=seed, options=options or None)
        self._episode_id, self._step_count = episode_id, 0
        return StepResult(Fields(self.dialect.observation(obs, info, to_lists)), None, False, self.dialect.metadata(info))

    def step(self, action: Any) -> StepResult:
        """Act: a mapping of fields, a dataclass, a pydantic model, or the value of a one-field action."""
        if self._step_count < 0:
            raise ResetNeeded()
        fields = action_payload(action, self.dialect.action_name)
        obs, reward, terminated, truncated, info = self.env.step(self.dialect.action(fields))
        self._step_count += 1
        metadata = self.dialect.metadata(info)
        if truncated and not terminated:
            metadata["truncated"] = True
        observation = Fields(self.dialect.observation(obs, info, to_lists))
        return StepResult(observation, float(reward), bool(terminated or truncated), metadata)

    def state(self) -> Fields:
        """The episode's id and how many steps it has had."""
        return Fields(episode_id=self._episode_id, step_count=max(self._step_count, 0))

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def __enter__(self) -> LocalEnvClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class EchoClient(LocalEnvClient):
    """Echo with the interface of an OpenEnv client, in this process.

    Example:
        >>> from envfleet.envs.echo import EchoAction
        >>> client = EchoClient(horizon=3)
        >>> _ = client.reset()
        >>> result = client.step(EchoAction("hello"))
        >>> result.observation.echoed, result.reward, result.done
        ('hello', 0.5, False)
    """

    def __init__(self, horizon: int = 10, latency_s: float = 0.0, max_length: int = 256) -> None:
        super().__init__(Echo(horizon, latency_s, max_length))


class Connect4Client(LocalEnvClient):
    """Connect4 with the interface of an OpenEnv client, in this process.

    Example:
        >>> from envfleet.envs.connect4 import Connect4Action
        >>> client = Connect4Client(opponent="random")
        >>> _ = client.reset(seed=1)
        >>> client.step(Connect4Action(3)).observation.legal_actions
        [0, 1, 2, 3, 4, 5, 6]
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(Connect4(**kwargs))
