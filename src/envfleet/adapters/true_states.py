"""The true states of all environments of a fleet in one call: from their memory, from the rows, or by asking them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from envfleet.core.fleet import Fleet
from envfleet.envs.cage2.face import Face
from envfleet.envs.cage2.native_cage2 import NativeCage2Env
from envfleet.envs.cage2.scenario import NUM_BITS
from envfleet.envs.cage2.true_state import STATE, true_states
from envfleet.errors import BadArgument, ResetNeeded, SlotBusy

#: What a slot has: CAGE 2 in C++, CAGE 2 in Python, another environment with `true_state()`, or one without.
NATIVE, PYTHON, OTHER, NONE = "native", "python", "other", "none"
_STATE_IN_OBS = (NUM_BITS + STATE.itemsize,)


class TrueStates:
    """Reads the true states of a fleet: records of `TRUE_STATE` for CAGE 2, else what the environments' `true_state()` give.

    CAGE 2 costs no message: on `native` its state is in this process, and with `state_in_obs` it came with the observations.

    Example:
        >>> import envfleet as ef
        >>> with ef.make("cage2", 3, backend="serial") as fleet:
        ...     batch = fleet.reset(seed=0)
        ...     TrueStates(fleet).read()["access"].shape
        (3, 13)
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._memory: NDArray[Any] | None = None  # [slot]: records of STATE where native environments keep them
        self._kinds: set[str] = set()
        self._num_faults = -1  # a fault may put another environment into a slot: then everything is looked up again

    def read(self) -> Any:
        """The true states after the last step; where an episode has just ended, those of the next one."""
        fleet = self._fleet
        if not fleet.seeds_per_slot:
            raise BadArgument(f"{fleet.plan.backend!r} runs a batch engine, which has no true states")
        fleet.ready()  # refuses a fleet that is closed, and completes a call that was interrupted
        if fleet.is_out.any():
            raise SlotBusy(np.flatnonzero(fleet.is_out).tolist(), "recv() them before asking for true states")
        if not (begun := fleet.slab.head["started"] > 0).all():
            raise ResetNeeded(np.flatnonzero(~begun).tolist())
        if len(fleet.faults) != self._num_faults:
            self._look_up()
        if self._memory is not None:
            return true_states(self._memory)
        if self._kinds <= {NATIVE, PYTHON}:
            if fleet.single_observation_space.shape == _STATE_IN_OBS:
                return true_states(fleet.slab.arrays["obs/0"][:, 0, NUM_BITS:].copy().view(STATE)[:, 0])
            return true_states(np.stack(fleet.call("state")))
        if NONE in self._kinds:
            raise BadArgument("get_true_states() needs environments with a method true_state(), and these have none")
        return np.stack(fleet.call("true_state"))

    def _look_up(self) -> None:
        fleet = self._fleet
        self._memory, num_faults = None, len(fleet.faults)
        self._kinds = set(fleet.call("__apply__", _kind))
        if fleet.plan.backend == "native" and self._kinds == {NATIVE}:
            self._memory = _as_one([env.record["state"] for env in fleet.call("__apply__", _innermost)])
        self._num_faults = num_faults


def _as_one(records: list[NDArray[Any]]) -> NDArray[Any] | None:
    """Records that lie at equal distances as one array over the same memory; None if they do not."""
    addresses = np.array([record.ctypes.data for record in records])
    stride = int(addresses[1] - addresses[0]) if len(records) > 1 else STATE.itemsize
    if stride < STATE.itemsize or (np.diff(addresses) != stride).any():
        return None
    # The first record keeps the block of all alive: it is a view of it.
    return np.lib.stride_tricks.as_strided(records[0].reshape(1), (len(records),), (stride,), writeable=False)


def _innermost(env: Any) -> Any:
    return getattr(env, "unwrapped", env)


def _kind(env: Any) -> str:
    inner = _innermost(env)
    if isinstance(inner, Face):
        return NATIVE if isinstance(inner, NativeCage2Env) else PYTHON
    return OTHER if callable(getattr(env, "true_state", None) or getattr(inner, "true_state", None)) else NONE
