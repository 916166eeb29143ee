"""A client from what users pass: addresses, our clients, objects of the official packages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, Unpack

from envfleet import errors
from envfleet.errors import BadArgument, ResetNeeded
from envfleet.remote import wire
from envfleet.remote.answer_check import AnswerChecker
from envfleet.remote.client_config import ClientOptions
from envfleet.remote.result import Fields, StepResult

_CODE = re.compile(r"\(code: ([A-Z_]+)\)")
T = TypeVar("T")


class Stepped(Protocol):
    """Anything with `reset` and `step`."""

    reset: Any
    step: Any


ClientLike = str | Sequence[str] | Mapping[str, Any] | Stepped


def as_client(client: ClientLike, **options: Unpack[ClientOptions]) -> Any:
    """A client from an address, a list of them, a mapping with `env_url`, or anything with `reset` and `step`.

    Clients of `openenv` and `openenv-core`, async or `.sync()`, are wrapped in `OfficialClient`, which gives them the
    session guard they lack. `options` are the client options for addresses.

    Example:
        >>> from envfleet.remote import EchoClient
        >>> client = EchoClient()
        >>> as_client(client) is client
        True
    """
    from envfleet.remote.client import AsyncEnvClient
    from envfleet.remote.sync_client import HttpEnvClient

    if isinstance(client, (str, Mapping)) or (
        isinstance(client, Sequence) and client and all(isinstance(each, str) for each in client)
    ):
        return HttpEnvClient(client, **options)
    if options:
        raise BadArgument(f"client options {sorted(options)} go with an address, not with a client object")
    if isinstance(client, AsyncEnvClient):
        return HttpEnvClient(client._arguments[0], **client._arguments[1])
    if type(client).__module__.partition(".")[0] in ("openenv", "openenv_core") or hasattr(client, "_step_payload"):
        return OfficialClient(client)
    if callable(getattr(client, "reset", None)) and callable(getattr(client, "step", None)):
        return client
    raise BadArgument(f"{type(client).__name__} is no client: it needs reset() and step(), or be a server's address")


class OfficialClient:
    """A client of the official packages with our results, our errors and our session guard.

    Their clients continue after a timeout (0.3.0 pairs answers with the wrong requests, 0.10.0 steps a new
    environment without a reset); here any such failure ends the episode.
    """

    def __init__(self, client: Any) -> None:
        # An async client has .sync(); a sync one is used as it is.
        self._client = client.sync() if callable(getattr(client, "sync", None)) else client
        self._running = False
        self._steps = 0
        self._checker = AnswerChecker()

    def reset(self, **kwargs: Any) -> StepResult:
        """Start an episode."""
        self._running = False
        self._checker.began()
        result = _result(self._guarded(lambda: self._client.reset(**kwargs)))
        self._running, self._steps = True, 0
        return result

    def step(self, action: Any) -> StepResult:
        """Act, with whatever the official client takes as an action."""
        if not self._running:
            raise ResetNeeded(hint="call reset() first (also after an interruption)")
        try:
            result = _result(self._guarded(lambda: self._client.step(action)))
        except errors.ServerError:
            self._checker.failed()
            raise
        self._steps += 1
        self._checker.stepped()
        if result.done:
            self.confirm()
        return result

    def confirm(self) -> None:
        """Make sure, as far as the server counts, that every answer of this episode belonged to its request."""
        if not self._running or not callable(getattr(self._client, "state", None)):
            return
        try:
            state = self.state()
        except errors.ServerError:
            return  # an environment without a usable state cannot be asked
        wrong = self._checker.disagrees(state)
        if "observation" in state and "step_count" not in state:  # their clients do not look at an answer's type
            wrong = "state was answered with an observation"
        if wrong is not None:
            self._end_session()
            raise errors.ProtocolBroken("the server", f"{wrong}: an answer was duplicated or lost", self._steps)

    def state(self) -> Fields:
        """The server's state of the episode."""
        return _fields(self._guarded(self._client.state))

    def close(self) -> None:
        """End the session."""
        self._running = False
        self._client.close()

    def __enter__(self) -> OfficialClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except BaseException as error:
            found = _CODE.search(str(error)) if isinstance(error, RuntimeError) else None
            if not found or found[1] not in ("EXECUTION_ERROR", "VALIDATION_ERROR", "INVALID_JSON", "UNKNOWN_TYPE"):
                self._end_session()
            if found:
                raise wire.error_in({"code": found[1], "message": str(error)}, "the server") from error
            if isinstance(error, TimeoutError):
                raise errors.MessageTimeout("the server", str(error) or "no answer", self._steps) from error
            if isinstance(error, OSError) or "ConnectionClosed" in type(error).__name__:
                raise errors.SessionLost("the server", str(error), self._steps) from error
            raise

    def _end_session(self) -> None:
        self._running = False
        try:
            self._client.disconnect()
        except Exception:
            pass  # it has no such method, or its connection just failed; what matters is that it is not used again


def _fields(value: Any) -> Fields:
    if isinstance(value, Mapping):
        return Fields(value)
    dump = getattr(value, "model_dump", None)
    return Fields(dump() if dump is not None else vars(value))


def _result(result: Any) -> StepResult:
    fields = _fields(result.observation)
    nested = fields.pop("metadata", None)
    # A typed observation repeats reward and done among its fields; the result has them once.
    if not isinstance(result.observation, Mapping):
        fields.pop("reward", None)
        fields.pop("done", None)
    metadata = getattr(result, "metadata", None) or nested or {}
    reward = None if result.reward is None else float(result.reward)
    return StepResult(fields, reward, bool(result.done), metadata)
