"""All messages between parent, keeper and workers over their channels, by name.

A frame between parent and worker begins with one byte for its kind. ADVANCE and DONE are on the step path and carry arrays;
everything else is pickled. Frames contain rows only for `pipe`; with `shm` and the compiled core slot numbers go through
rings (`compiled/exchange.c`), and frames carry only side parts: infos, mailbox objects and failures.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

# -- parent to worker ---------------------------------------------------------------------------------------------

ADVANCE = (
    b"S"  # slots (int32 …) and their turns (uint32 …), then for `pipe` what to do, see `Slab.pack_actions`: work on these slots
)
MESSAGE = b"M"  # a pickled (name, *arguments), names as in ToWorker

# -- worker to parent ---------------------------------------------------------------------------------------------

DONE = b"D"  # slots that are done, their turns, for `pipe` their rows, and a pickled side part where there is one
SIDE = b"I"  # the side part of one slot alone, for `shm`: a pickled (slot, turn, part), sent before the slot is done
REPLY = b"R"  # a pickled (name, *arguments), names as in FromWorker
PULSE = b"P"  # what a worker without shared memory is doing: see `pack_pulse`


class ToWorker:
    """Names of messages to a worker."""

    ATTACH = "attach"  # layout, number of slots, shared memory map: lay out the rows
    TASKS = "tasks"  # id -> pickled task
    OPTIONS = "options"  # slot -> options of the next reset
    MAIL = "mail"  # leaf -> slot -> object: actions that are no arrays
    CALL = "call"  # slot, number of the call, phase, name, args, kwargs: call the env's interface
    FORGET = "forget"  # slot: its env was moved to the parent
    ADD = "add"  # slots, their rows: slots that come from another worker; their envs follow by CALL
    RUN = "run"  # function: call it with a way to ask the parent, reply RAN; for process executors
    ANSWER = "answer"  # the answer to ASKED
    CLOSE = "close"  # close the envs, reply BYE, end


class FromWorker:
    """Names of replies of a worker."""

    BUILT = "built"  # slot, description or Failure
    CALLED = "called"  # slot, number of the call, answer or Failure
    CLOSED = "closed"  # slot, Failure: its close has failed
    RAN = "ran"  # result or Failure
    ASKED = "asked"  # a question of a function that runs; it waits for ANSWER
    BYE = "bye"


class ToKeeper:
    """Names of messages to the keeper: pickled dicts, the name under "what"."""

    SETUP = "setup"  # path: sys.path of the parent
    START = "start"  # number of the start, num_fds: start a worker; its descriptors follow


class FromKeeper:
    """Names of messages of the keeper: pickled (name, key, value)."""

    STARTED = "started"  # number of the start, pid
    REFUSED = "refused"  # number of the start, why
    EXIT = "exit"  # pid, exit code
    LATE = "late"  # number of the start: it has no place yet; only of workers that something else places


#: Kinds of arrays that a worker writes and the parent reads, where rows travel by value.
UP = ("head", "obs", "final_obs", "column")

_COUNT = struct.Struct("=cI")  # how both of these begin
_ADVANCE_HEAD = struct.Struct("=cI?")  # the kind, number of slots, whether heads of rows follow
_DONE_HEAD = struct.Struct("=cII")  # the kind, number of slots, bytes of rows
_PULSE_HEAD = struct.Struct("=cqqqq")  # the kind, the three words of `Pulse`, nanoseconds in this call

Array = np.ndarray[Any, Any]


def pack_advance(slots: Array, turns: Array, rows: bytes = b"", heads: bool = True) -> bytes:
    """An ADVANCE frame.

    Example:
        >>> frame = pack_advance(np.array([3, 5]), np.array([1, 7], np.uint32), b"rows")
        >>> slots, turns, heads, at = unpack_advance(frame)
        >>> slots.tolist(), turns.tolist(), heads, frame[at:]
        ([3, 5], [1, 7], True, b'rows')
    """
    return _ADVANCE_HEAD.pack(ADVANCE, len(slots), heads) + slots.astype(np.int32).tobytes() + turns.tobytes() + rows


def unpack_advance(frame: bytes) -> tuple[Array, Array, bool, int]:
    """(slots, turns, whether heads of rows follow, where that begins) of an ADVANCE frame."""
    _, count, heads = _ADVANCE_HEAD.unpack_from(frame)
    at = _ADVANCE_HEAD.size
    slots = np.frombuffer(frame, np.int32, count, at).astype(np.int64)
    return slots, np.frombuffer(frame, np.uint32, count, at + 4 * count), heads, at + 8 * count


def num_rows(frame: bytes) -> int:
    """How many rows a frame asks for, or brings.

    Example:
        >>> num_rows(pack_advance(np.array([3, 5]), np.array([1, 7], np.uint32))), num_rows(MESSAGE + b"x")
        (2, 0)
    """
    return int(_COUNT.unpack_from(frame)[1]) if frame[:1] in (ADVANCE, DONE) else 0


def pack_done(slots: Array, turns: Array, rows: bytes, side: bytes) -> bytes:
    """A DONE frame.

    Example:
        >>> slots, turns, at, end = unpack_done(frame := pack_done(np.array([2]), np.array([9]), b"row", b"side"))
        >>> slots.tolist(), turns.tolist(), bytes(frame[at:end]), frame[end:]
        ([2], [9], b'row', b'side')
    """
    head = _DONE_HEAD.pack(DONE, len(slots), len(rows))
    return b"".join((head, slots.astype(np.int32).tobytes(), turns.astype(np.uint32).tobytes(), rows, side))


def unpack_done(frame: bytes | memoryview) -> tuple[Array, Array, int, int]:
    """(slots, turns, where the rows begin, where they end and the side part begins) of a DONE frame."""
    _, count, row_bytes = _DONE_HEAD.unpack_from(frame)
    at = _DONE_HEAD.size
    slots = np.frombuffer(frame, np.int32, count, at).astype(np.int64)
    turns = np.frombuffer(frame, np.uint32, count, at + 4 * count)
    return slots, turns, at + 8 * count, at + 8 * count + row_bytes


def pack_pulse(words: tuple[int, int, int], elapsed_ns: int, stack: str) -> bytes:
    """A PULSE frame: (slot, number of the phase, when it began on the worker's clock), how long ago that is, its Python stacks."""
    return _PULSE_HEAD.pack(PULSE, *words, elapsed_ns) + stack.encode(errors="replace")


def unpack_pulse(frame: bytes | memoryview) -> tuple[tuple[int, int, int], int, str]:
    """What `pack_pulse` was given.

    Example:
        >>> unpack_pulse(pack_pulse((3, 1, 5_000), 700, "in step"))
        ((3, 1, 5000), 700, 'in step')
    """
    _, slot, phase, since, elapsed_ns = _PULSE_HEAD.unpack_from(frame)
    return (slot, phase, since), elapsed_ns, bytes(frame[_PULSE_HEAD.size :]).decode(errors="replace")
