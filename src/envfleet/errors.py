"""Every error and warning envfleet raises, under one base. One event has one type, wherever it happens.

::

    FleetError
    ├── BadArgument (ValueError)      refused before anything starts
    │   ├── NotPicklable              an environment or a task that cannot be sent to a worker
    │   ├── SpacesDiffer (RuntimeError)  environments of one fleet whose spaces are not equal
    │   ├── NotABatch (TypeError)     one action where a batch of them is needed
    │   ├── RunExists                 the run folder holds a run, and resume is not set
    │   └── DeviceMissing             cuda or mps was asked for and is not there
    ├── MissingExtra (ImportError)    an optional package is not installed, or a backend is not possible here
    ├── SlotBusy                      sent again before it was received
    ├── ResetNeeded                   stepped before the first reset, or after an end without a reset
    ├── FleetClosed                   used after close()
    ├── KeeperLost                    the process that starts and ends the workers is gone: make a new fleet
    ├── RecvTimeout (TimeoutError)    recv(timeout_s=…): nothing is lost, receive again
    ├── FaultError                    an environment or its worker failed; in a fleet, `.fault` is the record
    │   ├── EnvFailed                 the environment raised, or returned a wrong result
    │   ├── EnvTimeout (TimeoutError) the environment overran its deadline
    │   ├── EnvAbandoned              the caller gave the slot's call up: `fleet.abandon`
    │   └── WorkerLost                the worker's process ended
    ├── RemoteError                   an environment behind a server
    │   ├── ConnectFailed (ConnectionError)  no server answered; `.url`
    │   │   └── Unauthorized          it answered 401 or 403: the token is missing or wrong
    │   ├── CapacityReached           no session became free in time; `.active`, `.max`
    │   ├── ClientBusy                two calls at once on one client
    │   ├── SessionInterrupted        the episode is over, call reset(); `.reason`, `.steps`
    │   │   ├── MessageTimeout (EnvTimeout)    no answer within the message's deadline
    │   │   ├── SessionLost (ConnectionError)  the connection ended
    │   │   ├── MessageTooBig         a message over the limit of this client or of the server
    │   │   └── ProtocolBroken        the server sent something that is not an answer
    │   └── ServerError               the server answered with an error; `.code`
    │       ├── EnvError (EnvFailed)  EXECUTION_ERROR: the environment raised; the session goes on
    │       ├── BadRequest            VALIDATION_ERROR: the message does not fit; the session goes on
    │       ├── BadMessage            INVALID_JSON, UNKNOWN_TYPE: not understood; the session goes on
    │       └── SessionRefused        FACTORY_ERROR, SESSION_ERROR: no environment; the session is over
    ├── RolloutError                  has `.rollouts`: everything that was collected
    │   ├── RolloutFailed             one episode failed: `.env_name`, `.phase`, `.step`; the cause is chained
    │   │   ├── AgentFailed           the agent raised, or returned no valid action (`.value`)
    │   │   ├── ClientFailed (EnvFailed)       the client raised, or returned no valid result
    │   │   └── RolloutTimeout (EnvTimeout)    the episode ran longer than rollout_timeout_s
    │   ├── RolloutsFailed            some of several episodes failed; `.failed` lists them
    │   └── DatasetError              a dataset that cannot be read or continued as asked
    ├── CheckpointError               a checkpoint that cannot be read, or does not fit
    │   └── CheckpointMissing         it is not there
    ├── FolderBusy                    another process is writing to the folder: `.owner`
    ├── FileDamaged                   a file is not what was written: `.path`, `.problem`
    │   ├── DatasetDamaged (DatasetError)
    │   └── CheckpointDamaged (CheckpointError)
    ├── WriteFailed (OSError)         the disk is full or fails; the message says what is safe
    └── TrainingStopped               NaN: where it was seen, and the checkpoint that was written

Views for other libraries raise subclasses of these that are also what that library would raise: an EnvFailed that is the
ValueError of the environment too, a FleetClosed that is Gymnasium's ClosedEnvironmentError too (`envfleet.adapters`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envfleet.faults.failure import Fault
    from envfleet.rollout.episodes.episode import Rollout


class FleetError(Exception):
    """The base of every error envfleet raises."""


class BadArgument(FleetError, ValueError):
    """An argument that cannot work, refused before any process started."""


class NotPicklable(BadArgument):
    """Something that has to travel to a worker cannot be pickled; the message names it."""


class SpacesDiffer(BadArgument, RuntimeError):
    """Two environments of one fleet have different spaces; `what` says which."""

    def __init__(self, message: str, what: str = "observation_space") -> None:
        self.what = what
        super().__init__(message)


class NotABatch(BadArgument, TypeError):
    """A single action was given to a view that steps all environments."""


class MissingExtra(FleetError, ImportError):
    """A backend or an optional part is not installed or not possible here.

    Example:
        >>> raise MissingExtra("ray", extra="ray")
        Traceback (most recent call last):
        ...
        envfleet.errors.MissingExtra: 'ray' is not available here. Install it: pip install "envfleet[ray]"
    """

    def __init__(self, what: str, extra: str | None = None, why: str | None = None) -> None:
        remedy = f'Install it: pip install "envfleet[{extra}]"' if extra else (why or "")
        super().__init__(f"'{what}' is not available here. {remedy}".strip())


class SlotBusy(FleetError):
    """Slots were sent (or reset, or called) while an earlier send had not been received."""

    def __init__(self, slots: Sequence[int], hint: str = "recv() them (in a view: step_wait()) before sending again") -> None:
        self.slots = [int(slot) for slot in slots]
        super().__init__(f"slots {_short(self.slots)} are busy: {hint}")


class ResetNeeded(FleetError, AssertionError):
    """Slots were stepped that have no running episode."""

    def __init__(self, slots: Sequence[int] = (), hint: str = "call reset() first") -> None:
        self.slots = [int(slot) for slot in slots]
        where = f"slots {_short(self.slots)} have" if self.slots else "there is"
        super().__init__(f"{where} no running episode: {hint}")


class FleetClosed(FleetError):
    """The fleet was used after close()."""

    def __init__(self, what: str = "the fleet", hint: str = "make a new one") -> None:
        super().__init__(f"{what} is closed: {hint}")


class KeeperLost(FleetError):
    """The process that starts and ends a fleet's workers is gone, and the workers with it."""

    def __init__(self, why: str = "the process that starts workers ended (killed from outside, or out of memory)") -> None:
        super().__init__(f"{why}, and all workers with it: close() this fleet and make a new one")


class RecvTimeout(FleetError, TimeoutError):
    """recv() reached its timeout. Nothing is lost: the slots are still out and can be received later."""

    def __init__(self, busy: Sequence[int], timeout_s: float) -> None:
        self.slots = [int(slot) for slot in busy]
        super().__init__(
            f"after {timeout_s:g} s slots {_short(self.slots)} had not finished; "
            "what is ready is kept: ready() lists it, recv() again returns it"
        )


class FaultError(FleetError):
    """An environment or its worker failed.

    Of a fleet, `fault` holds slot, episode, step, seed, task, phase, cause and the last actions. An executor or a
    client has no slots: there is no `fault` then, only the message.
    """

    fault: Fault

    def __init__(self, fault: Fault | str) -> None:
        if not isinstance(fault, str):
            self.fault = fault
        super().__init__(str(fault))

    def __getattr__(self, name: str) -> Any:
        # error.slot, error.phase, error.step …: users look for these first.
        if name.startswith("__") or name == "fault":
            raise AttributeError(name)
        return getattr(self.fault, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.__dict__.get("fault", str(self)),)


class EnvFailed(FaultError):
    """The environment raised, or returned something that is not a valid result."""


class EnvTimeout(FaultError, TimeoutError):
    """The environment overran init_timeout_s, reset_timeout_s or step_timeout_s."""


class WorkerLost(FaultError):
    """The worker process of the slot ended: by exit, by a signal, or killed from outside."""


class EnvAbandoned(FaultError):
    """The caller gave up what the slot was doing (`fleet.abandon`): reset the slot to use it again."""


class RemoteError(FleetError):
    """The base of the errors of remote environments."""


class ConnectFailed(RemoteError, ConnectionError):
    """No session could be opened because no server answered (or not as an OpenEnv server would)."""

    def __init__(self, url: str, why: str) -> None:
        self.url, self.why = url, why
        super().__init__(f"cannot connect to {url}: {why}")


class Unauthorized(ConnectFailed):
    """The server needs a token, or another one."""


class CapacityReached(RemoteError):
    """All sessions of the servers were in use until the caller's timeout.

    Example:
        >>> CapacityReached("http://a:8000", active=2, max=2).max
        2
    """

    def __init__(self, url: str, active: int | None = None, max: int | None = None, waited_s: float = 0.0) -> None:
        self.url, self.active, self.max, self.waited_s = url, active, max, waited_s
        seen = f"{active}/{max} sessions are taken" if max is not None else "every session is taken"
        waited = f" and none came free in {waited_s:g} s" if waited_s else ""
        super().__init__(f"{url} is full: {seen}{waited}. Raise the server's session limit, add servers, or ask for fewer")


class SessionInterrupted(RemoteError):
    """The session ended in an episode; it is not known what the environment did after the last answer."""

    def __init__(self, url: str, reason: str, steps: int = 0) -> None:
        self.url, self.reason, self.steps = url, reason, steps
        super().__init__(f"the episode at {url} was interrupted after {steps} steps: {reason}. reset() starts a new episode")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.reason, self.steps)


class MessageTimeout(SessionInterrupted, EnvTimeout):
    """A request was not answered in time."""


class SessionLost(SessionInterrupted, ConnectionError):
    """The connection ended while an episode was running, or while an answer was due."""


class MessageTooBig(SessionInterrupted):
    """A message was larger than `max_message_bytes` here, or than the server accepts."""


class ProtocolBroken(SessionInterrupted):
    """The server sent something that is not an answer to the request."""


class ClientBusy(RemoteError):
    """A client is one session; it cannot run two calls at once."""

    def __init__(self) -> None:
        super().__init__("this client is in the middle of another call: one client is one session, use one each")


class ServerError(RemoteError):
    """The server answered with an error frame."""

    def __init__(self, code: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        self.code, self.message, self.details = code, message, dict(details or {})
        listed = self.details.get("errors")
        told = [str(each.get("msg", each)) if isinstance(each, Mapping) else str(each) for each in listed or ()]
        super().__init__(f"{code}: {message}" + (f" ({'; '.join(told)[:500]})" if isinstance(listed, list) else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.message, self.details)


class EnvError(ServerError, EnvFailed):
    """The environment raised in a reset or a step; the session is still there."""


class BadRequest(ServerError):
    """The server did not accept the fields of the request; `details["errors"]` lists them."""


class BadMessage(ServerError):
    """The server could not read the message at all."""


class SessionRefused(ServerError):
    """The server could not give (or keep) an environment for this session."""


class RolloutError(FleetError):
    """The base of errors of rollouts; `rollouts` holds what was collected."""

    rollouts: Sequence[Rollout] = ()


class RolloutFailed(RolloutError):
    """One episode failed. The message says where; the chained cause says why."""

    def __init__(self, message: str, *, env_name: str = "", phase: str = "", step: int = -1, value: Any = None) -> None:
        self.message = message
        self.env_name = env_name
        self.phase = phase
        self.step = step
        self.value = value
        where = f"environment {env_name!r}, {phase}" + (f" at step {step}" if step >= 0 else "")
        super().__init__(f"{where}: {message}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.env_name, self.phase, self.step, _portable(self.value))


class AgentFailed(RolloutFailed):
    """The agent raised, returned None, or returned an action outside the action space."""


class ClientFailed(RolloutFailed, EnvFailed):
    """The environment client raised, or returned something that is not a step result."""


class RolloutTimeout(RolloutFailed, EnvTimeout):
    """The episode ran longer than `rollout_timeout_s`."""


class RolloutsFailed(RolloutError):
    """Some episodes failed; the others ran to their end first and are in `rollouts`, in submission order."""

    def __init__(self, rollouts: Sequence[Rollout], failed: Sequence[Rollout]) -> None:
        self.rollouts = rollouts
        self.failed = list(failed)
        first = self.failed[0].error if self.failed else None
        super().__init__(
            f"{len(self.failed)} of {len(rollouts)} rollouts failed; the others are in error.rollouts. "
            f"First failure: {first}. To go on without them: on_error='skip' or 'retry'"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rollouts, self.failed)


class DatasetError(RolloutError):
    """A dataset directory cannot be read, or cannot be continued as asked."""


class RunExists(BadArgument):
    """The run folder already holds a run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder} already holds a run: add --resume (resume=True) to go on with it, or choose another folder")


class DeviceMissing(BadArgument):
    """The device that was asked for is not available."""

    def __init__(self, device: str, available: list[str]) -> None:
        super().__init__(f"device={device!r} is not available here; available: {', '.join(available)}")


class CheckpointError(FleetError):
    """A checkpoint cannot be read, or belongs to another kind of run."""


class CheckpointMissing(CheckpointError):
    """There is no such file."""


class FolderBusy(FleetError):
    """Another process holds the folder; `owner` has its `pid`, `host` and `since`, as far as they are known."""

    def __init__(self, what: str, folder: Path, owner: dict[str, Any]) -> None:
        self.folder, self.owner = folder, owner
        who = f"process {owner['pid']} on {owner['host']}, since {owner['since']}" if owner else "its owner is not known"
        super().__init__(f"another process is {what} {folder} ({who}): wait for it or end it, or use another folder")


class FileDamaged(FleetError):
    """A file is not what was written (changed bytes, cut short). Nothing of it was deleted.

    Example:
        >>> raise CheckpointDamaged(Path("run/checkpoints/best.pt"), "its digest is another one")
        Traceback (most recent call last):
        ...
        envfleet.errors.CheckpointDamaged: run/checkpoints/best.pt is damaged: its digest is another one. Use ...
    """

    remedy = "Take it from a copy"

    def __init__(self, path: Path, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path} is damaged: {problem}. {self.remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.problem)


class DatasetDamaged(FileDamaged, DatasetError):
    """A file of a dataset is damaged."""

    remedy = (
        "Take it from a copy, or continue the dataset (the same `envfleet collect`, or DatasetWriter(…, resume=True)): "
        "the file is then kept under another name, with what can be read saved"
    )


class CheckpointDamaged(FileDamaged, CheckpointError):
    """A checkpoint file is damaged."""

    remedy = "Use another checkpoint of the run, or a copy of this one"


class WriteFailed(FleetError, OSError):
    """A file could not be written (disk full, quota, a failing disk); `errno` is the system's number.

    Example:
        >>> raise WriteFailed(Path("run/a.pt"), OSError(28, "No space left on device"), "nothing was there before")
        Traceback (most recent call last):
        ...
        envfleet.errors.WriteFailed: run/a.pt cannot be written (No space left on device); nothing was there before
    """

    def __init__(self, path: Path, error: OSError, safe: str) -> None:
        # Some libraries (HDF5) put pages into the text; the system's own words for the number are one line.
        why = os.strerror(error.errno) if error.errno else (str(error).splitlines() or ["no reason given"])[0]
        super().__init__(f"{path} cannot be written ({why}); {safe}")
        self.path = path
        self.errno = error.errno
        self.safe = safe

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, OSError(self.errno, os.strerror(self.errno or 0)), self.safe)


class TrainingStopped(FleetError):
    """Training found a value that is not finite. `checkpoint` is the one that was saved (None without a run folder)."""

    def __init__(self, why: str, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint
        saved = f" The state before this update is saved in {checkpoint}." if checkpoint else ""
        super().__init__(f"training stopped: {why}.{saved}")


class LedgerWarning(UserWarning):
    """Fewer episodes were returned than started; the message says how many and why."""


class SplitsDifferWarning(UserWarning):
    """Tasks that one object holds out for evaluation are training tasks of another that works with it."""


class DamagedWarning(UserWarning):
    """A damaged file was found and kept under another name; the message has both names and what was saved."""


class UncheckedWarning(UserWarning):
    """A file was written before files had checksums, so damage to it cannot be noticed."""


def _short(slots: Sequence[int], most: int = 12) -> str:
    shown = ", ".join(str(slot) for slot in slots[:most])
    return f"[{shown}, … {len(slots)} in all]" if len(slots) > most else f"[{shown}]"


def _rebuild(kind: type[RolloutFailed], message: str, env_name: str, phase: str, step: int, value: Any) -> RolloutFailed:
    return kind(message, env_name=env_name, phase=phase, step=step, value=value)


def _portable(value: Any) -> Any:
    """Keep simple values; anything else is sent as its text, because it may not be picklable."""
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)
