"""What is known of a fault: a `Failure` is what a worker saw, a `Fault` is the parent's full record of it."""

from __future__ import annotations

import dataclasses
import pickle
import signal
import traceback
from typing import Any

from envfleet.errors import EnvFailed, EnvTimeout, FaultError, WorkerLost

KINDS: dict[str, type[FaultError]] = {"failed": EnvFailed, "timeout": EnvTimeout, "lost": WorkerLost}


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception as a worker tells it: always picklable, with the traceback as text."""

    phase: str
    summary: str  # "ValueError: bad move"
    traceback: str
    pickled: bytes | None = None  # the exception itself, when it can travel

    @classmethod
    def of(cls, error: BaseException, phase: str) -> Failure:
        """Record an exception.

        Example:
            >>> Failure.of(ValueError("bad move"), "step").summary
            'ValueError: bad move'
        """
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # many exceptions pickle but do not come back
        except Exception:
            pickled = None
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        kind = type(error)
        name = (
            kind.__qualname__
            if kind.__module__ in ("builtins", "__main__")
            else f"{kind.__module__}.{kind.__qualname__}"
        )
        words = [f"{name}: {error}" if str(error) else name, *getattr(error, "__notes__", ())]
        return cls(phase, " ".join(words), text, pickled)

    @property
    def exception(self) -> BaseException:
        """The exception, or a stand-in with the same words when it could not travel."""
        if self.pickled is not None:
            error = pickle.loads(self.pickled)  # written by our own worker over our own pipe
        else:
            error = RuntimeError(self.summary)
        assert isinstance(error, BaseException)
        error.add_note(f"in the environment's worker:\n{self.traceback}")
        return error


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault of one slot: where it happened, what caused it, and what was last done there."""

    slot: int
    kind: str  # "failed": the env raised; "timeout": past its deadline; "lost": its worker's process ended
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
    shared_with: int | None = None  # the slot whose fault took this slot's worker down
    time_s: float = 0.0
    failure: Failure | None = dataclasses.field(default=None, repr=False)

    def error(self) -> FaultError:
        """The fault as an exception to raise, caused by the environment's own where there is one."""
        error = KINDS[self.kind](self)
        if self.failure is not None:
            error.__cause__ = self.failure.exception
        return error

    def __str__(self) -> str:
        verb = {"failed": "failed", "timeout": "timed out", "lost": "lost its worker"}[self.kind]
        where = f"slot {self.slot} {verb} in {self.phase}"
        details = []
        if self.episode >= 0:
            details.append(f"episode {self.episode}")
        if self.step >= 0:
            details.append(f"step {self.step}")
        details.append(f"seed {self.seed}" if self.seed is not None else "no seed of its own")
        if self.task is not None:
            details.append(f"task {self.task!r}")
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


def exit_words(exit_code: int | None) -> str:
    """An exit code in words.

    Example:
        >>> exit_words(-9), exit_words(3)
        ('was killed by signal 9 (SIGKILL)', 'exited with code 3')
    """
    if exit_code is None:
        return "ended (its exit code could not be learnt)"
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = "unknown"
        return f"was killed by signal {-exit_code} ({name})"
    return f"exited with code {exit_code}"
