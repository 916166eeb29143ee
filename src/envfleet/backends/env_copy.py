"""Whether an env can be moved to another process as it is: pickled, and the copy compared with it, object by object.

A pickle may lose state (EzPickle rebuilds the env, a `__getstate__` leaves things out, a C library keeps its own). So
the copy is made here first and must equal the env in everything that is known to matter: every attribute, array byte,
random state, and which objects are identical. An object of a kind that is not listed here means that the env is not moved.
"""

from __future__ import annotations

import collections
import copyreg
import enum
import functools
import io
import pickle
import random
import struct
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
from gymnasium.utils import EzPickle


class CannotCopy(Exception):
    """Why an env cannot be moved."""


def packed(env: Any) -> bytes:
    """The env as bytes, of which `pickle.loads` makes the same env again. CannotCopy when that is not certain.

    Example:
        >>> import gymnasium as gym
        >>> env = gym.make("CartPole-v1")
        >>> _ = env.reset(seed=1)
        >>> other = pickle.loads(packed(env))
        >>> bool((other.step(0)[0] == env.step(0)[0]).all())
        True
    """
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(env)
        data = buffer.getvalue()
        differ = difference(env, pickle.loads(data))
    except Exception as error:
        raise CannotCopy(f"{type(error).__name__}: {error}"[:200]) from None
    if differ:
        raise CannotCopy(differ)
    return data


class _Pickler(pickle.Pickler):
    """Ordinary instances get their attributes back one by one, as their constructors set them.

    The standard way fills an instance's `__dict__`, which CPython then keeps as a dict of its own: every attribute is found more
    slowly from then on. CartPole's step took 1.1 times as long.
    """

    def reducer_override(self, value: Any) -> Any:
        """Only what the standard way would treat alike; spaces too, whose `__setstate__` is for old pickles."""
        kind = type(value)
        if isinstance(value, type) and value in _SENT_BY_VALUE:
            return class_sent, (_SENT_BY_VALUE[value],)
        own_way = any(getattr(kind, name, None) is not getattr(object, name, None) for name in _PICKLE_METHODS)
        is_space = kind.__module__.startswith("gymnasium.spaces.")
        if (own_way and not is_space) or not kind.__dictoffset__ or not _is_all_python(kind) or any(_slots_of(kind)):
            return NotImplemented
        state = object.__getattribute__(value, "__dict__")
        return copyreg.__newobj__, (kind,), state, None, None, set_attributes  # type: ignore[attr-defined]


#: Classes of a script or notebook, which no worker can import: each was sent by value, with a number that is the same in all processes.
_SENT_BY_VALUE, _SENT = (
    cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS,
    cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID,
)


def class_sent(number: str) -> type:
    """The class of this number, which came to this process with the factory of an environment."""
    if number not in _SENT:
        raise CannotCopy("this process does not know its class, which is not in a module")
    return _SENT[number]  # type: ignore[no-any-return]


_PICKLE_METHODS = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")


def set_attributes(instance: Any, state: dict[str, Any]) -> None:
    """Give an instance its attributes, past any `__setattr__` or property of its class."""
    for name, value in state.items():
        if hasattr(getattr(type(instance), name, None), "__set__"):
            object.__getattribute__(instance, "__dict__")[name] = value
        else:
            object.__setattr__(instance, name, value)


def try_packed(env: Any) -> bytes | str:
    """`packed`, or the reason why not: for use in a worker, whose exceptions would be the env's faults."""
    try:
        return packed(env)
    except CannotCopy as why:
        return str(why)


def difference(one: Any, other: Any) -> str:
    """How two objects differ, or why they cannot be compared; empty when they are equal.

    Example:
        >>> difference({"a": [1, 2.5]}, {"a": [1, 2.5]}), difference({"a": [1, 2]}, {"a": [1, 3]})
        ('', "['a'][1] is not the same in a copy")
    """
    try:
        _Comparison().run(one, other)
    except CannotCopy as why:
        return str(why)
    return ""


#: Compared by value; whether two of them are one object cannot matter.
_PLAIN = (type(None), bool, int, str, bytes, type(Ellipsis), type(NotImplemented), range, slice)
#: Pickled by name: the copy is the very same object.
_BY_NAME = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    type(np.random.Generator.random),
    types.ModuleType,
    np.ufunc,
    enum.Enum,
)

Pairs = Iterator[tuple[str, Any, Any]]


class _Comparison:
    """One walk over two object graphs, side by side."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # id of one -> both, which keeps them alive
        self._taken: dict[int, int] = {}  # id of other -> id of one
        self._spans: list[tuple[int, int, str]] = []  # memory of the arrays of one

    def run(self, one: Any, other: Any) -> None:
        """CannotCopy at the first difference."""
        todo = [("", one, other)]
        while todo:
            where, a, b = todo.pop()
            for step, x, y in self._compare(where, a, b):
                if type(x) is not type(y) or type(x) not in _PLAIN or x != y:  # most are plain and equal: the fast path
                    todo.append((where + step, x, y))
        self._spans.sort()
        for (_, end, first), (start, _, second) in zip(self._spans, self._spans[1:]):
            if start < end:
                raise CannotCopy(f"{first} and {second} share memory, which copies do not")

    def _compare(self, where: str, a: Any, b: Any) -> Pairs:
        """Check the two themselves; gives the parts that are to be equal too."""
        kind = type(a)
        if kind is not type(b):
            raise CannotCopy(f"{where or 'it'} is not the same in a copy")
        if kind in _PLAIN:
            _demand(a == b, where)
        elif kind in (float, complex):
            _demand(_bits(a) == _bits(b), where)
        elif isinstance(a, _BY_NAME):
            _demand(a is b and (not isinstance(a, types.BuiltinFunctionType) or _is_of_module(a)), where)
        elif isinstance(a, np.generic):
            _demand(a.dtype == b.dtype and not a.dtype.hasobject and a.tobytes() == b.tobytes(), where)
        elif isinstance(a, np.dtype):
            _demand(a == b, where)
        elif self._is_new(where, a, b):
            return self._parts(where, a, b)
        return iter(())

    def _is_new(self, where: str, a: Any, b: Any) -> bool:
        """Whether this pair is new. Identical objects on one side must be identical on the other."""
        _demand(self._taken.setdefault(id(b), id(a)) == id(a), where)
        if id(a) in self._known:
            _demand(self._known[id(a)][1] is b, where)
            return False
        # Identical in both graphs: it was not copied, so it is shared with something outside.
        _demand(a is not b or (type(a) in (tuple, frozenset) and not a), where)
        self._known[id(a)] = (a, b)
        return True

    def _parts(self, where: str, a: Any, b: Any) -> Pairs:
        kind = type(a)
        if kind is np.ndarray:
            return self._array(where, a, b)
        if kind in _PARTS:
            return _PARTS[kind](where, a, b)
        if isinstance(a, (np.random.BitGenerator, np.random.SeedSequence)) and kind.__module__.startswith("numpy."):
            return _numpy_random(where, a, b)
        if isinstance(a, tuple) and not hasattr(a, "__dict__"):  # a named one
            return _items(where, a, b)
        return _attributes(where, a, b)

    def _array(self, where: str, a: Any, b: Any) -> Pairs:
        _demand(a.dtype == b.dtype and a.shape == b.shape, where)
        _demand((not a.size or a.strides == b.strides) and a.flags.writeable == b.flags.writeable, where)
        if a.dtype.hasobject:
            raise CannotCopy(f"{where} is an array of objects")
        base = a
        while isinstance(base, np.ndarray) and base.base is not None:
            base = base.base
        if not isinstance(base, (np.ndarray, bytes, bytearray)):
            raise CannotCopy(f"{where} is an array over memory of {type(base).__name__}")
        _demand(a.tobytes() == b.tobytes(), where)
        if a.size:
            self._spans.append((*np.lib.array_utils.byte_bounds(a), where))
        return iter(())


def _demand(good: bool, where: str) -> None:
    if not good:
        raise CannotCopy(f"{where or 'it'} is not the same in a copy")


def _bits(number: Any) -> bytes:
    return struct.pack("dd", number.real, number.imag)


def _is_of_module(function: Any) -> bool:
    return isinstance(function.__self__, (types.ModuleType, type(None)))


def _items(where: str, a: Any, b: Any) -> Pairs:
    _demand(len(a) == len(b), where)
    return ((f"[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b)))


def _deque(where: str, a: Any, b: Any) -> Pairs:
    _demand(a.maxlen == b.maxlen, where)
    return _items(where, a, b)


def _bytearray(where: str, a: Any, b: Any) -> Pairs:
    _demand(a == b, where)
    return iter(())


def _mapping(where: str, a: Any, b: Any) -> Pairs:
    _demand(len(a) == len(b), where)
    for (key, x), (key_there, y) in zip(a.items(), b.items()):  # in the same order
        yield f".key {key!r}", key, key_there
        yield f"[{key!r}]", x, y


def _defaultdict(where: str, a: Any, b: Any) -> Pairs:
    yield ".default_factory", a.default_factory, b.default_factory
    yield from _mapping(where, a, b)


def _set(where: str, a: Any, b: Any) -> Pairs:
    # The order a set is walked in hangs on hashes, and those of text differ from process to process.
    if not all(type(item) is int for item in a):
        raise CannotCopy(f"{where} is a set of other things than numbers")
    return _items(where, list(a), list(b))


def _numpy_random(where: str, a: Any, b: Any) -> Pairs:
    yield ".state", a.state, b.state
    if isinstance(a, np.random.BitGenerator):
        yield ".seed_seq", a.seed_seq, b.seed_seq


_PARTS: dict[type, Callable[[str, Any, Any], Pairs]] = {
    list: _items,
    tuple: _items,
    dict: _mapping,
    collections.OrderedDict: _mapping,
    collections.defaultdict: _defaultdict,
    collections.deque: _deque,
    bytearray: _bytearray,
    set: _set,
    frozenset: _set,
    types.MethodType: lambda _, a, b: iter((
        (".__func__", a.__func__, b.__func__), (".__self__", a.__self__, b.__self__),
    )),
    functools.partial: lambda _, a, b: iter((
        (".func", a.func, b.func), (".args", a.args, b.args),
        (".keywords", a.keywords, b.keywords), (".__dict__", a.__dict__, b.__dict__),
    )),
    np.random.Generator: lambda _, a, b: iter(((".bit_generator", a.bit_generator, b.bit_generator),)),
    np.random.RandomState: lambda _, a, b: iter(((".state", a.get_state(False), b.get_state(False)),)),
    random.Random: lambda _, a, b: iter(((".state", a.getstate(), b.getstate()),)),
}  # fmt: skip


def _attributes(where: str, a: Any, b: Any) -> Pairs:
    """An instance of a class written in Python: all it has is in its `__dict__` and `__slots__`."""
    kind, name = type(a), f"{where or 'it'} ({type(a).__name__})"
    if isinstance(a, EzPickle):
        raise CannotCopy(f"{name} is rebuilt when it is copied (EzPickle)")
    if kind is object or not _is_all_python(kind):
        raise CannotCopy(f"{name} is of a kind we do not know")  # a C struct behind it, or a mere mark
    for slot, member in _slots_of(kind):
        has = [_has(member, x) for x in (a, b)]
        _demand(has[0] == has[1], f"{where}.{slot}")
        if has[0]:
            yield f".{slot}", member.__get__(a), member.__get__(b)
    if kind.__dictoffset__:
        mine, theirs = (object.__getattribute__(x, "__dict__") for x in (a, b))
        _demand(mine.keys() == theirs.keys(), where)
        for key, value in mine.items():
            yield f".{key}", value, theirs[key]


def _is_all_python(kind: type) -> bool:
    """Whether instances are a head, a `__dict__`, a list of weak references and slots: no C struct, no items."""
    words = 2 + (kind.__dictoffset__ != 0) + (kind.__weakrefoffset__ != 0) + len([*_slots_of(kind)])
    return kind.__itemsize__ == 0 and kind.__basicsize__ <= words * struct.calcsize("P")


def _slots_of(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType):
                yield name, member


def _has(member: Any, instance: Any) -> bool:
    try:
        member.__get__(instance)
    except AttributeError:
        return False
    return True
