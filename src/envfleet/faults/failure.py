"""What is known about a fault: a `Failure` is what a worker saw, a `Fault` is the full record in the parent."""

from __future__ import annotations

import dataclasses
import io
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

from envfleet.errors import EnvAbandoned, EnvFailed, EnvTimeout, FaultError, WorkerLost

KINDS: dict[str, type[FaultError]] = {"failed": EnvFailed, "timeout": EnvTimeout, "lost": WorkerLost, "abandoned": EnvAbandoned}
#: What happened to a slot, by kind.
VERBS = {"failed": "failed", "timeout": "timed out", "lost": "lost its worker", "abandoned": "was abandoned"}

#: The most that is kept: characters of an exception's text and traceback, bytes of its pickle.
_MAX_SUMMARY, _MAX_TRACEBACK, _MAX_PICKLE = 2_000, 32_000, 1 << 20
#: How many exceptions of a chain, and frames of each, are kept.
_MAX_CHAIN, _MAX_FRAMES = 8, 30


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception as a worker reports it: plain text, always picklable."""

    phase: str
    summary: str  # "ValueError: bad move"
    traceback: str
    pickled: bytes | None = None  # the exception itself, if it can be pickled
    kind: str = "failed"  # or "timeout": the call did not return in time

    @classmethod
    def of(cls, error: BaseException, phase: str) -> Failure:
        """Record an exception. Never raises, whatever the exception's own methods do.

        Example:
            >>> Failure.of(ValueError("bad move"), "step").summary
            'ValueError: bad move'
        """
        name = _class_name(type(error))
        words = words_of(error)
        notes = _attempt(lambda: [note for note in error.__notes__ if isinstance(note, str)], [])
        summary = _cut(" ".join([f"{name}: {words}" if words else name, *notes]), _MAX_SUMMARY)
        text = _attempt(lambda: _story(error), "")
        return cls(phase, summary, _cut(text, _MAX_TRACEBACK) or summary, _attempt(lambda: _pickled(error), None))

    @property
    def exception(self) -> BaseException:
        """The exception, or a substitute with the same text if it could not be pickled."""
        note = f"in the environment's worker:\n{self.traceback}"
        error = _attempt(lambda: _unpickled(self.pickled, note), None)
        return error if isinstance(error, BaseException) else _noted(RuntimeError(self.summary), note)


def _attempt(function: Callable[[], Any], otherwise: Any) -> Any:
    """The result of a function, or `otherwise`: user code runs inside, and may raise or return anything."""
    try:
        result = function()
    except BaseException:  # KeyboardInterrupt and SystemExit too: a `__str__` may raise those
        return otherwise
    return result if otherwise is None or type(result) is type(otherwise) else otherwise


def words_of(error: BaseException) -> str:
    """The text of an exception, whatever its own methods do.

    Example:
        >>> words_of(ValueError("bad move"))
        'bad move'
    """
    words: str = _attempt(lambda: str(error), "<its text could not be read>")
    return words


def _class_name(kind: type[BaseException]) -> str:
    # Through `type` itself: a metaclass may define these attributes as anything.
    name: str = type.__dict__["__qualname__"].__get__(kind)
    module = _attempt(lambda: type.__dict__["__module__"].__get__(kind), None)
    return name if module in ("builtins", "__main__") or type(module) is not str else f"{module}.{name}"


def _story(error: BaseException) -> str:
    """The traceback of an exception and of those it came from, oldest first, as Python prints them.

    Not by `traceback.format_exception`: that follows chains and groups without limit, and these may contain themselves.
    """
    parts: list[str] = []
    link, following = error, ""
    for _ in range(_MAX_CHAIN):
        frames = traceback.format_tb(_own(link, "__traceback__"), -_MAX_FRAMES)
        head = "Traceback (most recent call last):\n" if frames else ""
        parts.insert(0, f"{head}{''.join(frames)}{_line(link)}\n{following}")
        cause, context = _own(link, "__cause__"), _own(link, "__context__")
        if cause is not None:
            following, link = "\nThe above exception was the direct cause of the following exception:\n\n", cause
        elif context is not None and not _own(link, "__suppress_context__"):
            following, link = "\nDuring handling of the above exception, another exception occurred:\n\n", context
        else:
            break
        parts[0] = following + parts[0]
        following = ""
    return "".join(parts)


def _line(error: BaseException) -> str:
    """The last line of a traceback; for a group, its members' too."""
    name = _class_name(type(error))
    line = f"{name}: {words_of(error)}"
    if isinstance(error, BaseExceptionGroup):
        members = BaseExceptionGroup.__dict__["exceptions"].__get__(error)[:_MAX_CHAIN]
        line += "".join(f"\n  + {_class_name(type(member))}: {words_of(member)}" for member in members)
    return _cut(line, _MAX_SUMMARY)


def _own(error: BaseException, name: str) -> Any:
    # Through BaseException itself: a class may redefine these names as anything.
    return BaseException.__dict__[name].__get__(error)


def _noted(error: BaseException, note: str) -> BaseException:
    str(error), repr(error)  # it must be possible to print it
    error.add_note(note)
    return error


def _pickled(error: BaseException) -> bytes | None:
    data = pickle.dumps(error)
    return data if len(data) <= _MAX_PICKLE else None


def _cut(text: str, most: int) -> str:
    # Text that is not valid Unicode is kept readable: it goes to terminals and files.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


class _ExceptionReader(pickle.Unpickler):
    """Reads an exception back. Only exception classes and plain values: nothing else is called in the parent."""

    _PLAIN = frozenset(
        f"{module}.{name}"
        for module, names in {
            "builtins": "set frozenset bytearray complex range slice dict list tuple int float str bytes bool",
            "collections": "OrderedDict deque",
            "datetime": "date datetime time timedelta timezone",
            "decimal": "Decimal",
            "fractions": "Fraction",
            "pathlib": "Path PurePath PosixPath PurePosixPath",
            "uuid": "UUID",
            "numpy": "ndarray dtype",
            "numpy.core.multiarray": "_reconstruct scalar",
            "numpy._core.multiarray": "_reconstruct scalar",
            "envfleet.faults.failure": "Fault Failure",
            "envfleet.errors": "_rebuild",
        }.items()
        for name in names.split()
    )

    def find_class(self, module: str, name: str) -> Any:
        """An exception class, or one of the plain types."""
        found = super().find_class(module, name)
        if f"{module}.{name}" in self._PLAIN or (isinstance(found, type) and issubclass(found, BaseException)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not an exception")


def _unpickled(data: bytes | None, note: str) -> BaseException | None:
    error = None if data is None else _ExceptionReader(io.BytesIO(data)).load()
    return _noted(error, note) if isinstance(error, BaseException) else None


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault of one slot: where it happened, what caused it, and what was last done there.

    Example:
        >>> print(Fault(slot=1, kind="failed", phase="step", cause="ValueError: no key", episode=4, step=2, seed=9, worker=0))
        slot 1 failed in step (episode 4, step 2, seed 9, worker 0): ValueError: no key
    """

    slot: int
    kind: str  # "failed": the env raised; "timeout": past its deadline; "lost": its worker's process ended; "abandoned": given up by the caller
    phase: str
    cause: str
    episode: int = -1
    step: int = -1
    seed: int | None = None
    task: Any = None
    worker: int | None = None
    exit_code: int | None = None  # negative: the signal that ended the worker
    traceback: str = ""  # of the env's exception, in its worker
    stack: str = ""  # Python stacks of a worker that was stuck
    last_actions: tuple[Any, ...] = ()
    shared_with: int | None = None  # the slot whose fault ended this slot's worker
    time_s: float = 0.0
    turn: int = dataclasses.field(default=-1, repr=False, compare=False)  # the turn of the slot it belongs to
    failure: Failure | None = dataclasses.field(default=None, repr=False)

    def error(self) -> FaultError:
        """The fault as an exception to raise, caused by the environment's own where there is one."""
        error = KINDS[self.kind](self)
        if self.failure is not None:
            error.__cause__ = self.failure.exception
        return error

    def __str__(self) -> str:
        where = f"slot {self.slot} {VERBS[self.kind]} in {self.phase}"
        details = []
        if self.episode >= 0:
            details.append(f"episode {self.episode}")
        if self.step >= 0:
            details.append(f"step {self.step}")
        details.append(f"seed {self.seed}" if self.seed is not None else "no seed of its own")
        if self.task is not None:
            details.append(f"task {_attempt(lambda: _cut(repr(self.task), 200), '(its repr cannot be read)')}")
        if self.worker is not None:
            details.append(f"worker {self.worker}")
        lines = [f"{where} ({', '.join(details)}): {self.cause}"]
        if self.last_actions:
            lines.append(f"  last actions: {', '.join(str(action) for action in self.last_actions)}")
        for title, text in (("traceback", self.traceback), ("stack of the stuck worker", self.stack)):
            if text:
                kept = text.strip().splitlines()[-12:]
                lines.append(f"  {title}:")
                lines.extend(f"    {line}" for line in kept)
        return "\n".join(lines)


def load_value(data: bytes | Failure | None, phase: str) -> Any:
    """A value that an env made and its worker pickled; a Failure when it cannot be read here.

    Reading runs code of the value's classes, which may raise anything. An exception may also be a signal handler's (Ctrl-C).
    No handler runs in another thread: if it can be read there, the exception came from a handler, and is raised.
    """
    if data is None or isinstance(data, Failure):
        return data
    try:
        return pickle.loads(data)
    except BaseException:
        found: list[Failure] = []

        def again() -> None:
            try:
                pickle.loads(data)
            except BaseException as error:
                failure = Failure.of(error, phase)
                words = f"what it returned cannot be unpickled in the parent process: {failure.summary}"
                found.append(Failure(phase, words, failure.traceback))

        thread = threading.Thread(target=again, daemon=True)
        thread.start()
        thread.join()
        if not found:
            raise
        return found[0]


def exit_words(exit_code: int | None) -> str:
    """An exit code in words.

    Example:
        >>> exit_words(-9), exit_words(3)
        ('was killed by signal 9 (SIGKILL)', 'exited with code 3')
    """
    if exit_code is None:
        return "ended (its exit code is not known)"
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = "unknown"
        return f"was killed by signal {-exit_code} ({name})"
    return f"exited with code {exit_code}"


@dataclasses.dataclass(frozen=True)
class Loss:
    """A worker whose process ended: which slot it was in, and how it ended."""

    worker: int
    exit_code: int | None
    slot: int  # -1: it was idle
    phase: str
    #: Set when it was ended because of that slot: why, the Python stacks it was in, and the kind of fault.
    ended_because: str = ""
    stack: str = ""
    kind: str = "timeout"  # or "abandoned"
    words: str = ""  # how it ended, where that is known better than by an exit code
    is_final: bool = False  # nothing can replace it: its slots are quarantined

    @property
    def how(self) -> str:
        """How the process ended, in words."""
        return self.words or exit_words(self.exit_code)


def init_fault(slot: int, what: Failure | Loss, worker: int | None = None) -> Fault:
    """A constructor's failure as a fault record."""
    if isinstance(what, Loss):
        shared = what.slot not in (slot, -1)
        cause = f"the worker process {what.how}"
        if shared:
            cause = f"it shared worker {what.worker} with slot {what.slot}: {cause}"
        culprit = what.slot if shared else None
        return Fault(slot, "lost", "init", cause, worker=what.worker, exit_code=what.exit_code, shared_with=culprit)
    if what.kind == "timeout":
        return Fault(slot, what.kind, "init", what.summary, worker=worker, stack=what.traceback)
    return Fault(slot, what.kind, "init", what.summary, worker=worker, failure=what, traceback=what.traceback)
