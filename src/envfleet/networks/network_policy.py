"""A network that acts: batched over slots, with the memory of every slot. On a CPU the actor runs in NumPy.

Acting is a pass over a few rows at every step of the environments, and PyTorch spends more on each call than the
arithmetic takes. CPU time of `Policy.choose` with the default network (two layers of 64; GRU: 64 units), one thread:

==========  ========  =========================  ==========
rows        here      here, tanh not compiled    in PyTorch
==========  ========  =========================  ==========
8           10 µs     12 µs                      31 µs
64          18 µs     19 µs                      51 µs
8, GRU      17 µs                                69 µs
64, GRU     41 µs                                119 µs
==========  ========  =========================  ==========

Dense tanh layers are one compiled call (`NumpyLayers`): 15 instead of 17 µs with 8 rows, 232 instead of 258 with 1,024 (on a busy
machine), and no threads of BLAS that spin between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from envfleet.errors import BadArgument, FleetError
from envfleet.networks import recurrent
from envfleet.networks.actor_critic import ActorCritic
from envfleet.networks.features import MASK_KEY, Inputs
from envfleet.networks.numpy_layers import Array, NumpyLayers
from envfleet.rollout.policy_protocol import Answer, Ask

PREVIOUS = "previous"  # the extra of an answer that holds what the network was told of the step before


class NotFinite(FleetError):
    """An observation, an action or a loss is NaN or infinite. `rows` are the rows of the batch it was seen in."""

    def __init__(self, what: str, rows: list[int] | None = None) -> None:
        self.rows = rows or []
        super().__init__(what)


class Policy:
    """Chooses actions for any subset of slots and remembers each slot's state.

    On CPU and without pictures the actor runs in NumPy (`NumpyActor`), elsewhere in PyTorch.

    Example:
        >>> import gymnasium as gym
        >>> from envfleet.networks.actor_critic import NetworkConfig
        >>> net = ActorCritic(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2), NetworkConfig())
        >>> policy = Policy(net, num_slots=3, rng=np.random.default_rng(0))
        >>> env_action, raw = policy.choose(np.zeros((3, 4), np.float32))
        >>> env_action.shape
        (3,)
    """

    answers_fit = True  # actions are always of the space, one per row: the collector need not check them
    num_threads = 1  # for large batches in NumPy; the same bits with any number

    def __init__(
        self,
        net: ActorCritic,
        num_slots: int,
        rng: np.random.Generator | None,
        normaliser: Callable[[Inputs], Inputs] | None = None,
        skip_nan: bool = False,
    ) -> None:
        self.net = net
        self.rng = rng  # None: always the mode
        self.normaliser = normaliser
        self.skip_nan = skip_nan
        self.remembers = net.num_cores == 2
        width = net.state_width if self.remembers else 0
        self.state: Array = np.zeros((num_slots, width), np.float32)
        self.needs_reward = net.previous is not None
        # [slot, ...] what each slot did last, where the network is told it
        self.last_action = net.previous.actions(num_slots) if net.previous is not None else np.zeros((num_slots, 0))
        self._told: Array | None = None  # what the network was told of the step before, in the last call
        self.version = 0  # counts updates; the collector writes it beside every action
        self._same = net.actions.raw_is_env
        self._numpy_actor = NumpyActor(net) if NumpyActor.fits(net) else None

    def fork(self, num_slots: int, rng: np.random.Generator | None) -> Policy:
        """Return a policy with the same network and statistics, and with memory and random numbers of its own."""
        policy = Policy(self.net, num_slots, rng, self.normaliser, self.skip_nan)
        policy.num_threads = self.num_threads
        return policy

    def arrive(self, rng: np.random.Generator, before: Policy | None) -> None:
        """Go on from another copy in a worker (see `FragmentCollector`): with its memory, and with random numbers of the worker's own."""
        self.rng, self.num_threads = rng if self.rng is not None else None, 1
        if before is not None and (before.state.shape, before.last_action.shape) == (self.state.shape, self.last_action.shape):
            self.state, self.last_action = before.state, before.last_action

    def act(self, ask: Ask) -> Answer:
        """Answer a collector: actions, and beside them what was drawn where that is not the same."""
        slots = None if len(ask) == len(self.state) else ask.slots
        try:
            actions, raw = self.choose(ask.obs, slots, ask.first, ask.columns.get(MASK_KEY), ask.reward)
        except NotFinite as error:
            row = error.rows[0] if error.rows else 0
            where = f"slot {int(ask.slots[row])}, episode {int(ask.episode[row])}, step {int(ask.step[row])}"
            raise NotFinite(f"{error} at {where}: the observation or the network holds NaN", error.rows) from error
        extras = {} if self._same else {"raw": raw}
        if self._told is not None:
            extras[PREVIOUS] = self._told
        return Answer(actions, extras)

    def choose(
        self,
        observation: Any,
        slots: NDArray[np.int64] | None = None,
        fresh: NDArray[np.bool_] | None = None,
        mask: NDArray[np.bool_] | None = None,
        reward: NDArray[Any] | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return (what the environments get, what was drawn) for the rows of `slots` (all, without it).

        `fresh` marks rows whose observation is the first of an episode: their memory restarts. `reward` is that of the step
        before, for a network with `previous_step`.
        """
        if self.net.previous is not None:
            self._told = self._tell(slots, fresh, reward)
        inputs = self.net.features(observation, self._told)
        if mask is not None:
            mask = mask.astype(bool, copy=False)
        elif self.net.features.has_mask:
            mask = self.net.features.mask(observation)
        if self.skip_nan and "vector" in inputs:
            inputs["vector"] = np.nan_to_num(inputs["vector"], nan=0.0, posinf=0.0, neginf=0.0)
        if self.normaliser is not None:
            inputs = self.normaliser(inputs)
        state = None
        if self.remembers:
            state = self.state if slots is None else self.state[slots]
            if fresh is not None and fresh.any():
                state = np.where(fresh[:, None], np.float32(0), state)
        outputs, state = self._run(inputs, state)
        # One sum finds a NaN anywhere; which row it is in is asked only when there is one.
        if not np.isfinite(outputs.sum()):
            bad = np.flatnonzero(~np.isfinite(outputs.reshape(len(outputs), -1)).all(axis=1)).tolist()
            raise NotFinite("the policy's output is not finite", bad)
        if self.remembers and state is not None:
            if slots is None:
                self.state = state
            else:
                self.state[slots] = state
        log_std = self.net.log_std.detach().cpu().numpy() if self.net.log_std is not None else None
        raw = self.net.actions.draw(outputs, log_std, self.rng, mask)
        chosen = self.net.actions.to_env(raw)
        if self.net.previous is not None:
            self.last_action[... if slots is None else slots] = chosen
        return chosen, raw

    def _tell(self, slots: Any, fresh: NDArray[np.bool_] | None, reward: NDArray[Any] | None) -> Array:
        assert self.net.previous is not None
        last = self.last_action if slots is None else self.last_action[slots]
        if reward is None or fresh is None:
            if fresh is None or not fresh.all():
                raise BadArgument(
                    "this network is told its previous step: give choose() fresh=… and reward=…, as a collector does"
                )
            reward = np.zeros(len(last))
        return self.net.previous(last, reward, fresh)

    def _run(self, inputs: Inputs, state: Array | None) -> tuple[Array, Array | None]:
        if self._numpy_actor is not None:
            return self._numpy_actor(inputs["vector"], state, self.num_threads)
        device = self.net.device
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(np.ascontiguousarray(value)).to(device) for name, value in inputs.items()}
            rows = next(iter(tensors.values())).shape[0]
            before = torch.zeros(rows, 0, device=device) if state is None else torch.from_numpy(state).to(device)
            outputs, after = self.net.act(tensors, before)
            return outputs.cpu().numpy(), after.cpu().numpy()


class NumpyActor:
    """The actor of a network, on the memory of its PyTorch parameters: nothing is copied when they change."""

    @staticmethod
    def fits(net: ActorCritic) -> bool:
        """Say whether the actor can run here: on CPU, without pictures, with memory only where it is compiled."""
        has_step = net.num_cores < 2 or recurrent.COMPILED is not None
        return net.device.type == "cpu" and not net.features.image_shapes and has_step

    def __init__(self, net: ActorCritic) -> None:
        assert net.actor_encoder.layers is not None
        before, after = [*net.actor_encoder.layers], [*net.actor_layers, net.actor_head]
        self._core: recurrent.CompiledStep | None = None
        if net.num_cores == 2:
            assert net.core is not None
            self._core = recurrent.CompiledStep(net.core, 0)
        else:
            before, after = [], before + after  # one call for all layers
        self._before, self._after = NumpyLayers(before), NumpyLayers(after)

    def __call__(self, x: Array, state: Array | None, num_threads: int = 1) -> tuple[Array, Array | None]:
        """Run rows [k, D] with the actor's states [k, W]; return its outputs and the new states."""
        x = self._before(x, num_threads)
        if self._core is not None:
            assert state is not None
            x, state = self._core(np.ascontiguousarray(x), state)
        return self._after(x, num_threads), state
