"""Exceptions that are nasty to look at, to copy or to send: the name of each kind -> how an env raises it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

ZOO: dict[str, Callable[[Any], Any]] = {}
#: Kinds that end or stop whoever unpickles them.
BAD_TO_LOAD = ("load_exits", "load_slow", "load_recurses", "load_other", "load_raises_base")
#: Kinds that Python itself gives a meaning to.
CONTROL = ("keyboard_interrupt", "cancelled", "generator_exit", "stop_iteration", "stop_async", "system_exit")


class Hostile(BaseException):
    """What a hostile exception raises when it is looked at: not an Exception, so that no `except Exception` helps."""


def kind(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Enter a kind by the function's name."""
    ZOO[function.__name__] = function
    return function


def _class(name: str, base: type = Exception, meta: type = type, **members: Any) -> Any:
    """A class of this module: it pickles by name where the zoo can be imported."""
    made = meta(name, (base,), {"__module__": __name__, "__qualname__": name, **members})
    globals()[name] = made
    return made


def _raiser(error: Callable[[], BaseException]) -> Callable[..., NoReturn]:
    def look(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise error()

    return look


def _enter(name: str, cls: Any, *args: Any) -> None:
    def act(env: Any) -> NoReturn:
        raise cls(*args)

    act.__name__ = name
    kind(act)


_no = _raiser(lambda: ValueError("not to be looked at"))
_never = _raiser(lambda: Hostile("not to be looked at at all"))
_property = property(_never)

_enter("str_raises", _class("StrRaises", __str__=_no), "x")
_enter("str_raises_base", _class("StrRaisesBase", __str__=_never, __repr__=_never), "x")
_enter("str_exits", _class("StrExits", __str__=_raiser(lambda: SystemExit(3))), "x")
_enter("str_interrupts", _class("StrInterrupts", __str__=_raiser(KeyboardInterrupt)), "x")
_enter("repr_raises", _class("ReprRaises", __repr__=_never), "x")
_enter("str_is_no_str", _class("StrIsNoStr", __str__=lambda self: 5, __repr__=lambda self: None), "x")
_enter("str_huge", _class("StrHuge", __str__=lambda self: "x" * 10_000_000), "x")
_enter("str_slow", _class("StrSlow", __str__=lambda self: time.sleep(0.15) or "slow"), "x")
_enter("notes_raise", _class("NotesRaise", __notes__=_property), "x")
_enter("reduce_raises", _class("ReduceRaises", __reduce__=_no), "x")
_enter("reduce_raises_base", _class("ReduceRaisesBase", __reduce__=_raiser(lambda: SystemExit(3))), "x")
_enter("reduce_ex_raises", _class("ReduceExRaises", __reduce_ex__=_never), "x")
_enter("reduce_lies", _class("ReduceLies", __reduce__=lambda self: ("no", "such", "thing")), "x")
_enter("load_exits", _class("LoadExits", __reduce__=lambda self: (os._exit, (9,))), "x")
_enter("load_other", _class("LoadOther", __reduce__=lambda self: (int, (5,))), "x")
_enter("load_slow", _class("LoadSlow", __reduce__=lambda self: (time.sleep, (20,))), "x")
_enter("args_raise", _class("ArgsRaise", args=_property), "x")
_enter("dict_raises", _class("DictRaises", __dict__=_property), "x")
_enter("cause_raises", _class("CauseRaises", __cause__=_property, __context__=_property), "x")
_enter("cause_is_odd", _class("CauseIsOdd", __cause__=5, __context__="five", __suppress_context__=[]), "x")
_enter("traceback_raises", _class("TracebackRaises", __traceback__=_property), "x")
_enter("class_lies", _class("ClassLies", __class__=property(lambda self: int)), "x")
_enter("class_raises", _class("ClassRaises", __class__=_property), "x")
_enter("getattr_raises", _class("GetattrRaises", __getattr__=_never), "x")
_enter("getattribute_raises", _class("GetattributeRaises", __getattribute__=_never), "x")
_enter("getattr_recurses", _class("GetattrRecurses", __getattr__=lambda self, name: getattr(self, name + "x")), "x")
_enter("add_note_raises", _class("AddNoteRaises", add_note=_never, with_traceback=_never, __setstate__=_never), "x")
_enter("truth_raises", _class("TruthRaises", __bool__=_never, __len__=_never, __eq__=_never, __hash__=_never), "x")
_enter("needs_arguments", _class("NeedsArguments", __init__=lambda self, a, b: None), 1, 2)


def _call_me() -> NoReturn:
    raise Hostile("unpickled")


def _call_me_again(depth: int) -> Any:
    return _call_me_again(depth + 1)


_enter("load_raises_base", _class("LoadRaisesBase", __reduce__=lambda self: (_call_me, ())), "x")
_enter("load_recurses", _class("LoadRecurses", __reduce__=lambda self: (_call_me_again, (0,))), "x")


def _meta(**members: Any) -> Any:
    return type("Meta", (type,), members)


def _odd_class(env: Any, **members: Any) -> NoReturn:
    raise _meta(**members)("Odd", (Exception,), {})("x")


@kind
def name_raises(env: Any) -> None:
    _odd_class(env, __name__=_property, __qualname__=_property, __module__=_property)


@kind
def name_is_no_text(env: Any) -> None:
    odd = property(lambda cls: 5)
    _odd_class(env, __name__=odd, __qualname__=odd, __module__=odd)


def _with_notes(notes: Any) -> NoReturn:
    error = ValueError("x")
    error.__notes__ = notes
    raise error


@kind
def notes_none(env: Any) -> None:
    _with_notes(None)


@kind
def notes_no_list(env: Any) -> None:
    _with_notes(5)


@kind
def notes_no_strings(env: Any) -> None:
    _with_notes([1, object(), ZOO, StrRaisesBase("note")])  # noqa: F821  # made above by `_class`


@kind
def cause_cycle(env: Any) -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


@kind
def context_itself(env: Any) -> None:
    error = ValueError("mine")
    error.__context__ = error
    error.__cause__ = error
    raise error


@kind
def cause_is_hostile(env: Any) -> None:
    raise ValueError("ordinary outside") from StrRaisesBase("x")  # noqa: F821


@kind
def long_chain(env: Any) -> None:
    error = None
    for i in range(3000):
        try:
            raise ValueError(i) from error
        except ValueError as raised:
            error = raised
    raise error


@kind
def group_deep(env: Any) -> None:
    error: Any = ValueError("inmost")
    for _ in range(600):
        error = ExceptionGroup("layer", [error])
    raise error


@kind
def group_wide(env: Any) -> None:
    raise ExceptionGroup("wide", [ValueError(i) for i in range(1000)])


class GroupOfItself(ExceptionGroup[Any]):
    """A group that contains itself."""

    @property
    def exceptions(self) -> Any:
        return (self, self)


@kind
def group_itself(env: Any) -> None:
    raise GroupOfItself("me", [ValueError("x")])


@kind
def base_group(env: Any) -> None:
    raise BaseExceptionGroup("base", [KeyboardInterrupt(), SystemExit(2), Hostile("x")])


@kind
def base_exception(env: Any) -> None:
    raise Hostile("plain base")


@kind
def surrogates(env: Any) -> None:
    raise ValueError("\ud800 \udfff bad text \x00")


@kind
def stop_iteration(env: Any) -> None:
    raise StopIteration(5)


@kind
def stop_async(env: Any) -> None:
    raise StopAsyncIteration


@kind
def generator_exit(env: Any) -> None:
    raise GeneratorExit


@kind
def cancelled(env: Any) -> None:
    raise asyncio.CancelledError


@kind
def system_exit(env: Any) -> None:
    raise SystemExit(object())


@kind
def keyboard_interrupt(env: Any) -> None:
    raise KeyboardInterrupt


@kind
def memory_error(env: Any) -> None:
    raise MemoryError


@kind
def recursion_error(env: Any) -> None:
    recursion_error(env)


@kind
def recursion_at_depth(env: Any) -> None:
    """Catches the RecursionError at the bottom and raises another there."""
    try:
        recursion_at_depth(env)
    except RecursionError:
        raise StrRaises("deep") from None  # noqa: F821


_SHARED = ValueError("one instance for all")


@kind
def shared_instance(env: Any) -> None:
    raise _SHARED


@kind
def holds_env(env: Any) -> None:
    error = ValueError("holds its env")
    error.env, error.itself = env, error
    raise error


@kind
def holds_lock(env: Any) -> None:
    error = ValueError("holds a lock", threading.Lock())
    error.socket = socket.socket()
    error.socket.close()
    raise error


@kind
def local_class(env: Any) -> None:
    class Local(Exception):
        pass

    raise Local("of a function")


@kind
def main_class(env: Any) -> None:
    raise type("OfMain", (Exception,), {"__module__": "__main__"})("x")


@kind
def in_finally(env: Any) -> None:
    """An exception on top of a hostile one, as a cleanup that fails gives."""
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: 1 / 0)
        raise StrRaisesBase("x")  # noqa: F821
