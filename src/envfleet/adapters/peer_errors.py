"""Errors that views raise: ours, and at once of the class that the other library would raise for the same event.

They are not in `envfleet.errors`, because importing Gymnasium takes longer than all else that the keeper of the workers imports.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Sequence
from typing import Any

import gymnasium.error

from envfleet.errors import EnvFailed, FleetClosed, FleetError, RecvTimeout, ResetNeeded, SlotBusy


class VectorEnvClosed(FleetClosed, gymnasium.error.ClosedEnvironmentError):
    """The vector environment was used after close()."""


class CallPending(SlotBusy, gymnasium.error.AlreadyPendingCallError):
    """A call was sent while the result of an earlier one was not yet fetched; `name` is the earlier one."""

    name = "step"

    def __init__(self, message: str, name: str, slots: Sequence[int]) -> None:
        gymnasium.error.AlreadyPendingCallError.__init__(self, message, name)
        self.slots = list(slots)


class NoCallPending(FleetError, gymnasium.error.NoAsyncCallError):
    """A result was asked for, and no call was sent; `name` is the call that was to be sent."""


class WaitTimeout(RecvTimeout, multiprocessing.TimeoutError):
    """A result was not there in time. It can still be fetched."""


class EpisodeNeeded(ResetNeeded, gymnasium.error.ResetNeeded):
    """Environments were stepped that have no running episode."""


_GYMNASIUM = {FleetClosed: VectorEnvClosed, SlotBusy: CallPending, RecvTimeout: WaitTimeout, ResetNeeded: EpisodeNeeded}
#: Classes of Python that are made from one text, special ones before general ones.
_PLAIN = (AssertionError, AttributeError, NotImplementedError, RuntimeError, LookupError, ArithmeticError, TypeError, ValueError)


def for_gymnasium(error: FleetError) -> FleetError:
    """The same error as Gymnasium's vector environments would raise it.

    Example:
        >>> isinstance(for_gymnasium(FleetClosed()), gymnasium.error.ClosedEnvironmentError)
        True
    """
    kind = _GYMNASIUM.get(type(error))
    return as_env_raised(error) if kind is None else _recast(error, kind)


def as_env_raised(error: FleetError) -> FleetError:
    """An EnvFailed that is also a ValueError, LookupError …, if the environment raised one; any other error as it is.

    Only classes of Python: one of the environment's own may need more than a text to be made. It is the cause.

    Example:
        >>> failed = EnvFailed("slot 0 failed in step: ValueError: no such door")
        >>> failed.__cause__ = ValueError("no such door")
        >>> isinstance(as_env_raised(failed), ValueError), isinstance(as_env_raised(failed), EnvFailed)
        (True, True)
    """
    raised = type(error.__cause__)
    kind = next((plain for plain in _PLAIN if issubclass(raised, plain)), None) if type(error) is EnvFailed else None
    return error if kind is None else _recast(error, _failed_and(kind))


def _recast(error: FleetError, kind: Any) -> FleetError:
    """The same text, fields, notes and traceback as an object of a subclass."""
    same: FleetError = kind.__new__(kind)
    same.args = error.args
    same.__dict__.update(error.__dict__)
    return same.with_traceback(error.__traceback__)


@functools.cache
def _failed_and(kind: type) -> type:
    """Prints and pickles as EnvFailed does."""
    parts = {"__reduce__": _as_env_failed, "__module__": EnvFailed.__module__}
    return type(EnvFailed.__name__, (EnvFailed, kind), parts)


def _as_env_failed(error: EnvFailed) -> tuple[Any, ...]:
    return EnvFailed, (error.__dict__.get("fault", str(error)),)
