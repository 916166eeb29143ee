"""Another number of workers while a fleet runs: environments are copied from worker to worker as they are, so results do not change.

For backends whose rows travel by value: a worker then needs only the environments of its slots. Every step can fail or be
interrupted, and leaves each slot with exactly one worker that has its environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from envfleet.backends.env_copy import try_packed
from envfleet.backends.worker_handle import WorkerHandle
from envfleet.errors import BadArgument, FleetClosed, FleetError
from envfleet.faults.failure import Failure
from envfleet.workers.protocol import UP, ToWorker

if TYPE_CHECKING:
    from envfleet.backends.pipe import PipeBackend

_CLOSE_S = 4.0


def resize(backend: PipeBackend, num_workers: int, has_env: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    """Let the slots be stepped by so many workers. All slots are the caller's; those without an env (`has_env`) are built anew there."""
    if backend.slab.has_mail:
        raise BadArgument("resize(): observations or actions of this fleet are Python objects, which stay with their worker")
    # If the last one was interrupted, some workers may still be there without slots.
    before = backend.num_workers = max(int(backend.worker_of.max()) + 1, backend.num_workers)
    _end_empty(backend)
    owners = balanced(backend.worker_of, num_workers)
    moving = [slot for slot in np.flatnonzero(owners != backend.worker_of).tolist() if has_env[slot]]
    blobs = _packed(backend, moving)  # before anything changes: what cannot be copied is refused here
    try:
        for index in range(before, num_workers):
            _add_worker(backend, index, np.flatnonzero(owners == index).tolist())
        _wait_for_places(backend, sorted({*owners[moving].tolist(), *range(before, num_workers)}))
        _move(backend, owners, blobs)
    finally:
        backend.num_workers = max(int(backend.worker_of.max()) + 1, min(before, num_workers))
        _end_empty(backend)


def balanced(worker_of: np.ndarray[Any, Any], num_workers: int) -> np.ndarray[Any, Any]:
    """[slot] -> worker, shares of nearly equal size, with as few moves as possible.

    Example:
        >>> balanced(np.array([0, 0, 0, 0, 1, 1, 1]), 3).tolist()
        [0, 0, 0, 2, 1, 1, 2]
        >>> balanced(np.array([0, 0, 1, 1, 2, 2]), 2).tolist()
        [0, 0, 1, 1, 0, 1]
    """
    share, more = divmod(len(worker_of), num_workers)
    counts = np.bincount(worker_of, minlength=num_workers)[:num_workers]
    # The larger shares go to those that have most already.
    room = np.full(num_workers, share)
    room[np.argsort(-counts, kind="stable")[:more]] += 1
    owners = worker_of.copy()
    homeless = []
    for slot, worker in enumerate(worker_of.tolist()):
        if worker < num_workers and room[worker] > 0:
            room[worker] -= 1
        else:
            homeless.append(slot)
    for slot in homeless:
        owners[slot] = int(np.argmax(room))
        room[owners[slot]] -= 1
    return owners


def _packed(backend: PipeBackend, slots: list[int]) -> dict[int, bytes]:
    limit_s = backend.recipe.step_timeout_s
    answers = backend.ask(slots, "__apply__", [(try_packed,)] * len(slots), backend.worker_of, limit_s)
    blobs: dict[int, bytes] = {}
    if backend.has_trouble:
        raise FleetError("resize(): a worker was lost while environments were copied; nothing was changed: call resize() again")
    for slot in slots:
        data = answers.get(slot, f"its worker did not answer within step_timeout_s={limit_s:g}")
        if not isinstance(data, bytes):
            why = data.summary if isinstance(data, Failure) else data
            raise BadArgument(
                f"resize(): the environment of slot {slot} cannot be copied to another worker ({why}), so its episode could not go "
                "on: nothing was changed; make a new fleet with the other number of workers instead"
            )
        blobs[slot] = data
    return blobs


def _add_worker(backend: PipeBackend, index: int, slots: list[int]) -> None:
    pulse = backend.new_pulse(index)
    worker = WorkerHandle(index, slots, [pulse], backend.keeper)
    backend.workers.append(worker)
    backend.launch(worker)


def _wait_for_places(backend: PipeBackend, indices: list[int]) -> None:
    """Workers that get environments must be there before anything is moved: new ones, and those that have ended are started again."""
    wanted = [backend.workers[index] for index in indices]
    for worker in wanted:
        if not worker.alive:
            backend.launch(worker)
    while any(worker.alive and not backend.has_place(worker) for worker in wanted) and not backend.is_broken:
        backend.poll(0.05)
        if backend.is_closing:
            raise FleetClosed
    if backend.is_broken:
        raise backend.broken()
    for worker in wanted:
        if not worker.alive:
            why = next((why for index, why in backend.placings if index == worker.index and why), "could not be started")
            why = next((loss.how for loss in backend.losses if loss.worker == worker.index), why)
            raise FleetError(f"resize(): worker {worker.index} {why}; the fleet goes on as it was")


def _move(backend: PipeBackend, owners: np.ndarray[Any, Any], blobs: dict[int, bytes]) -> None:
    """Put copies into their new workers. Once `worker_of` names a worker, the copy in the old one is unused."""
    moving = np.flatnonzero(owners != backend.worker_of)
    for worker in backend.workers:
        mine = moving[owners[moving] == worker.index]
        if len(mine):
            rows = backend.slab.pack(mine, backend.slab.names(*UP))
            backend.message(worker, ToWorker.ADD, mine.tolist(), rows)
    with_env = [slot for slot in moving.tolist() if slot in blobs]
    limit_s = backend.recipe.init_timeout_s
    answers = backend.ask(with_env, "__adopt__", [(blobs[slot],) for slot in with_env], owners, limit_s)
    for slot in moving.tolist():
        answer = answers.get(slot, "no answer: call resize() again") if slot in blobs else None
        if answer is not None:
            why = answer.summary if isinstance(answer, Failure) else answer
            raise FleetError(
                f"resize(): slot {slot} stays with worker {backend.worker_of[slot]}: its new worker could not take it ({why})"
            )
        old = int(backend.worker_of[slot])
        backend.worker_of[slot] = owners[slot]
        _note_slots(backend, (old, int(owners[slot])))
        backend.message(backend.workers[old], ToWorker.FORGET, slot)


def _note_slots(backend: PipeBackend, workers: Sequence[int]) -> None:
    for index in workers:
        backend.workers[index].slots = np.flatnonzero(backend.worker_of == index).tolist()


def _end_empty(backend: PipeBackend) -> None:
    """End workers at the end of the list that have no slots."""
    empty = backend.workers[backend.num_workers :]
    for worker in empty:
        worker.loss_told = True  # its end is no fault
        backend.message(worker, ToWorker.CLOSE)
    backend.wait_for_ends(empty, _CLOSE_S)
    del backend.workers[backend.num_workers :]
    del backend.pulses[backend.num_workers :]
