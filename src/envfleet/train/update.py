"""The PPO update: one function of a `Segment` for every kind of network.

While acting only the actor runs. Values, old log-probabilities and states come from one forward pass over the whole
segment here: a pass over a thousand rows costs little more than a pass over eight.

Several policies (many agents) are several learners: each is given the segment whose columns are its own rows, with
`scored` False where an agent was absent. Nothing here assumes that columns are slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from envfleet.networks.actor_critic import ActorCritic, check_flat, flatten_parameters
from envfleet.networks.features import MASK_KEY, Inputs
from envfleet.networks.network_policy import PREVIOUS, NotFinite
from envfleet.rollout.segments.segment import RaggedSegment, Segment
from envfleet.train.advantage import following_values, gae
from envfleet.train.config import PPOConfig
from envfleet.train.fused_step import FusedStep
from envfleet.train.normalise import ObservationNormaliser, RewardNormaliser
from envfleet.train.objective import Coefficients, FlatAdam, Tensors, ppo_gradients, standardise
from envfleet.util.trees import tree_map

ROWS_AT_ONCE = 4096  # pictures are pushed through the network in pieces, or the activations would not fit


class PolicyLearner:
    """A network, its optimiser and its normalisers; `learn(segment, coefficients)` improves the network.

    Example:
        >>> import gymnasium as gym
        >>> from envfleet.networks.actor_critic import NetworkConfig
        >>> net = ActorCritic(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2), NetworkConfig())
        >>> learner = PolicyLearner(net, PPOConfig(preset="none"), num_slots=3, rng=np.random.default_rng(0))
        >>> segment = Segment.empty(8, 3, obs=np.zeros((3, 4), np.float32), action=np.zeros(3, np.int64))
        >>> segment.scored[:] = True
        >>> sorted(learner.learn(segment, Coefficients(3e-4, 0.2, 0.0)))[:3]
        ['approx_kl', 'clip_fraction', 'entropy']
    """

    def __init__(self, net: ActorCritic, config: PPOConfig, num_slots: int, rng: np.random.Generator) -> None:
        self.net, self.config, self.rng = net, config, rng
        self.observations = ObservationNormaliser.of(net, config.normalize_obs)
        self.rewards = RewardNormaliser(num_slots, config.gamma) if config.normalize_reward else None
        self.flat = flatten_parameters(net)
        self.optimiser = FlatAdam(self.flat, config.adam_eps)
        self.fused = FusedStep.of(net, self.flat, config.num_threads)
        self.state = net.initial_state(num_slots)  # [core, slot, width] before the next segment
        self.advantage: NDArray[np.float64] | None = None  # [T, B] of the last segment
        self.num_skipped = 0  # minibatches left out because their loss was not finite

    # -- one segment -----------------------------------------------------------------------------------------------

    def learn(self, segment: Segment, now: Coefficients) -> dict[str, float]:
        """Improve the network on one segment; return the mean losses of the last epoch."""
        check_flat(self.net, self.flat)
        inputs, bad = self._inputs(segment)
        first_time = self.observations is not None and not self.observations.count
        if self.observations is not None:
            there = segment.filled
            rows: Any = slice(None) if there is None else there
            raw_inputs = {name: value[:-1][rows] for name, value in inputs.items()}
            if first_time:
                # Nothing is known of the scale yet. The fresh policy is close to uniform whatever it sees, so
                # scoring its actions under the normalised inputs changes nothing that matters.
                self.observations.take(raw_inputs)
            inputs = self.observations(inputs)
        data, value_target = self._prepare(segment, inputs, bad)
        losses = self._epochs(data, now)
        if self.observations is not None and not first_time:
            self.observations.take(raw_inputs)
        spread = float(np.var(value_target)) if value_target.size else 0.0
        missed = value_target - data["value"].cpu().numpy()[data["scored"].cpu().numpy()]
        losses["explained_variance"] = 1.0 - float(np.var(missed)) / spread if spread > 0 else 0.0
        return losses

    def _inputs(self, segment: Segment) -> tuple[Inputs, NDArray[np.bool_]]:
        """Network inputs [T + 1, B] (the bootstrap last), and which rows [T, B] are not finite."""
        joined = tree_map(lambda obs, last: np.concatenate([obs, last[None]]), segment.obs, segment.bootstrap_obs)
        told = None
        if self.net.previous is not None:
            last = self.net.previous(segment.action[-1], segment.reward[-1], segment.ended[-1])
            told = np.concatenate([segment.extras[PREVIOUS], last[None]])
        inputs = self.net.features(joined, told)
        bad = np.zeros(segment.reward.shape, dtype=bool)
        vector = inputs.get("vector")
        if vector is not None and not np.isfinite(vector.sum(dtype=np.float64)):
            wrong: NDArray[np.bool_] = np.asarray(~np.isfinite(vector).all(axis=-1))
            if wrong.any():
                if self.config.on_nan == "stop":
                    raise NotFinite(_address(segment, wrong))
                bad |= wrong[:-1]
                # The step before a NaN is bootstrapped from it: leave that out too.
                bad |= wrong[1:] & ~segment.ended
                inputs["vector"] = np.where(wrong[..., None], np.float32(0), vector)
        wrong = ~np.isfinite(segment.reward)
        if wrong.any():
            if self.config.on_nan == "stop":
                raise NotFinite(_address(segment, wrong, what="reward"))
            bad |= wrong
            segment.reward[wrong] = 0.0
        return inputs, bad

    def _prepare(self, segment: Segment, inputs: Inputs, bad: NDArray[np.bool_]) -> tuple[Tensors, NDArray[np.float64]]:
        """Run the network over the segment and attach advantages: tensors [T, B, …] (and `state` [C, T, B, W])."""
        steps = segment.num_steps
        device = self.net.device
        ended = segment.ended
        fresh = np.concatenate([segment.step == 0, ended[-1:]])
        tensors = {name: _tensor(value, device) for name, value in inputs.items()}
        fresh_t = torch.from_numpy(fresh).to(device)
        with torch.no_grad():
            outputs, values, states = self._run(tensors, fresh_t)
            final_values = self._final_values(segment, states, bad)
            drawn: NDArray[Any] = segment.extras.get("raw", segment.action)  # type: ignore[assignment]
            raw = _tensor(drawn, device)
            mask = self._mask(segment)
            log_prob, _ = self.net.actions.score(outputs[:steps], self.net.log_std, raw, mask)
        before = torch.cat([self.state.unsqueeze(1), states[:, : steps - 1]], dim=1)  # state entering each step
        if self.net.num_cores:
            self.state = _state_after(segment, before, states)
        reward = segment.reward
        if self.rewards is not None:
            reward = self.rewards(segment.reward, ended, segment.filled)
        value = values.cpu().numpy().astype(np.float64)
        scored = segment.scored & ~bad
        following = following_values(value, final_values, segment.terminated, segment.truncated)
        config = self.config
        advantage, target = gae(reward, value, following, ended, scored, config.gamma, config.gae_lambda)
        self.advantage = advantage
        if segment.learned is not None:
            scored = scored & segment.learned
        data = {name: tensor[:steps] for name, tensor in tensors.items()}
        data |= {
            "raw": raw,
            "log_prob": log_prob,
            "value": values[:steps],
            "advantage": _tensor(advantage.astype(np.float32), device),
            "target": _tensor(target.astype(np.float32), device),
            "scored": torch.from_numpy(scored).to(device),
            "fresh": fresh_t[:steps],
            "state": before,
        }
        if mask is not None:
            data["mask"] = mask
        return data, target[scored]

    def _run(self, tensors: Tensors, fresh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.fused is not None:
            return *self.fused.run(tensors["vector"]), _no_states(fresh)
        rows = fresh.numel()
        if self.net.num_cores or rows <= ROWS_AT_ONCE or not self.net.features.image_shapes:
            out = self.net(tensors, self.state, fresh)
            states = out.states if self.net.num_cores else _no_states(fresh)
            return out.actions, out.value, states
        flat = {name: tensor.flatten(0, 1) for name, tensor in tensors.items()}
        pieces = [
            self.net({name: tensor[at : at + ROWS_AT_ONCE] for name, tensor in flat.items()}, self.state, fresh)
            for at in range(0, rows, ROWS_AT_ONCE)
        ]
        actions = torch.cat([piece.actions for piece in pieces]).view(*fresh.shape, -1)
        values = torch.cat([piece.value for piece in pieces]).view(fresh.shape)
        return actions, values, _no_states(fresh)

    def _final_values(self, segment: Segment, states: torch.Tensor, bad: NDArray[np.bool_]) -> NDArray[np.float64]:
        """V(final_obs) where an episode was truncated, [T, B]; the critic remembers that episode, not the next.

        Where it is not finite the row is `bad`: there is nothing to bootstrap from.
        """
        final = np.zeros(segment.reward.shape)
        if not len(segment.end_index):
            return final
        t, b = segment.end_index[:, 0], segment.end_index[:, 1]
        cut = segment.truncated[t, b] & ~segment.terminated[t, b] & segment.scored[t, b] & ~bad[t, b]
        if not cut.any():
            return final
        t, b = t[cut], b[cut]
        told = None
        if self.net.previous is not None:
            told = self.net.previous(segment.action[t, b], segment.reward[t, b], np.zeros(len(t), bool))
        inputs = self.net.features(tree_map(lambda leaf: np.asarray(leaf)[cut], segment.final_obs), told)
        if "vector" in inputs and (missing := ~np.isfinite(inputs["vector"]).all(axis=-1)).any():
            wrong = np.zeros_like(bad)
            wrong[t[missing], b[missing]] = True
            if self.config.on_nan == "stop":
                raise NotFinite(_address(segment, wrong, what="last observation of the episode"))
            bad |= wrong
            inputs["vector"][missing] = 0.0
        if self.observations is not None:
            inputs = self.observations(inputs)
        device = self.net.device
        tensors = {name: _tensor(value, device).unsqueeze(0) for name, value in inputs.items()}
        state = states[:, torch.from_numpy(t), torch.from_numpy(b)] if self.net.num_cores else self.state
        never = torch.zeros(1, len(t), dtype=torch.bool, device=device)
        final[t, b] = self.net(tensors, state, never).value[0].cpu().numpy()
        return final

    def _mask(self, segment: Segment) -> torch.Tensor | None:
        mask: Any = segment.columns.get(MASK_KEY)
        if mask is None:
            mask = self.net.features.mask(segment.obs)
        if mask is None:
            return None
        return torch.from_numpy(np.asarray(mask).astype(bool)).to(self.net.device)

    # -- epochs and minibatches ------------------------------------------------------------------------------------

    def _epochs(self, data: Tensors, now: Coefficients) -> dict[str, float]:
        config, target_kl = self.config, self.config.target_kl
        shuffled = _Shuffled(data, config, bool(self.net.num_cores))
        if self.fused is not None:
            self.fused.take(data)
        for epoch in range(config.num_epochs):
            measure = target_kl is not None or epoch == config.num_epochs - 1
            if self.fused is not None:
                each = [self._fused_step(index, now, measure) for index in shuffled.pieces(self.rng)]
            else:
                each = [self._step(batch, now, measure) for batch in shuffled.minibatches(self.rng)]
            if target_kl is not None and max((losses.get("approx_kl", 0.0) for losses in each), default=0.0) > 1.5 * target_kl:
                break
        found = [losses for losses in each if losses]  # not of minibatches that were left out
        means = {name: sum(losses[name] for losses in found) / len(found) for name in (found[0] if found else ())}
        return {**means, "epochs": float(epoch + 1), "skipped": float(self.num_skipped)}

    def _step(self, batch: Tensors, now: Coefficients, measure: bool) -> dict[str, float]:
        config = self.config
        out = self.net(batch, batch["state"], batch["fresh"], states_too=False)
        log_prob, entropy = self.net.actions.score(out.actions, self.net.log_std, batch["raw"], batch.get("mask"))
        scored = batch.get("weight")  # None: every row counts
        advantage = batch["advantage"]
        if config.normalize_advantage:
            advantage = standardise(advantage, scored)
        parts = (log_prob, out.value, entropy)
        gradients, report = ppo_gradients(*parts, batch, advantage, scored, now)
        assert self.flat.grad is not None
        self.flat.grad.zero_()
        torch.autograd.backward(parts[: len(gradients)], gradients)  # without a bonus, the entropy has none
        return self._apply(float(self.flat.grad.norm()), report, now, measure)

    def _fused_step(self, index: NDArray[np.int64], now: Coefficients, measure: bool) -> dict[str, float]:
        assert self.fused is not None
        norm, losses = self.fused(index, now, self.config.normalize_advantage)
        if not np.isfinite(losses["value_loss"]):  # the gradient of a huge error is finite where its square is not
            norm = np.nan
        return self._apply(norm, lambda: losses, now, measure)

    def _apply(self, norm: float, report: Callable[[], dict[str, float]], now: Coefficients, measure: bool) -> dict[str, float]:
        """Clip the gradient to the largest norm and make a step with it, or leave it out where it is not finite."""
        config = self.config
        assert self.flat.grad is not None
        if not np.isfinite(norm):
            if config.on_nan == "stop":
                raise NotFinite(f"the loss is not finite: {report()}, gradient norm {norm}")
            self.num_skipped += 1
            return {}
        if norm > config.max_grad_norm:
            self.flat.grad.mul_(config.max_grad_norm / (norm + 1e-6))
        self.optimiser.step(now.learning_rate)
        return {**report(), "grad_norm": norm} if measure else {}


class _Shuffled:
    """Minibatches in a new order every epoch: single rows of a Markov network, whole sequences of one with memory."""

    def __init__(self, data: Tensors, config: PPOConfig, remembers: bool) -> None:
        self.num = config.num_minibatches
        self.remembers = remembers
        scored = data["scored"]
        self.partial = not bool(scored.all())
        steps, rows = scored.shape
        if not remembers:
            self.flat = {name: value.flatten(0, 1) for name, value in data.items() if name != "state"}
            self.indices = np.flatnonzero(scored.cpu().numpy().ravel())
            self.no_state = data["state"][:, 0]
            self.flat.pop("scored")
            self.flat.pop("fresh")
            return
        length = config.sequence_length or _whole(steps, rows, self.num)
        if steps % length:
            raise ValueError(f"sequence_length={length} does not divide the {steps} steps of a segment")
        pieces = steps // length
        # [T, B] → [L, pieces · B]: a sequence is one slot's stretch of L steps.
        self.flat = {}
        for name, value in data.items():
            if name == "state":
                self.flat[name] = value[:, ::length].flatten(1, 2)  # the state entering each stretch
            else:
                split = value.view(pieces, length, rows, *value.shape[2:]).transpose(0, 1)
                self.flat[name] = split.reshape(length, pieces * rows, *value.shape[2:])
        # A minibatch of sequences in which no row counts would still be a step of Adam, by its momentum.
        self.indices = np.flatnonzero(self.flat["scored"].any(dim=0).cpu().numpy())

    def minibatches(self, rng: np.random.Generator) -> Any:
        """Yield dictionaries of tensors."""
        pieces = self.pieces(rng)
        if not pieces:
            return
        if not self.remembers:
            # One gather an epoch, then slices: a quarter of the calls of a gather per minibatch.
            index = torch.from_numpy(np.concatenate(pieces))
            mixed = {name: value[index] for name, value in self.flat.items()}
            bounds = np.cumsum([0, *map(len, pieces)]).tolist()
            for first, last in itertools.pairwise(bounds):
                batch = {name: value[first:last] for name, value in mixed.items()}
                yield {**batch, "state": self.no_state, "fresh": self.no_state}
            return
        for piece in pieces:
            index = torch.from_numpy(piece)
            batch = {name: value[:, index] for name, value in self.flat.items()}
            if self.partial:
                batch["weight"] = batch["scored"].float()
            yield batch

    def pieces(self, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        """The rows (or sequences) of every minibatch, in a new order; none where no row counts: faults, or NaN that is skipped."""
        order = rng.permutation(self.indices)
        num = min(self.num, len(order))
        return [order[len(order) * i // num : len(order) * (i + 1) // num] for i in range(num)]


def _whole(steps: int, rows: int, num_minibatches: int) -> int:
    """The longest stretch that still gives every minibatch a sequence of its own."""
    for pieces in range(1, steps + 1):
        if steps % pieces == 0 and pieces * rows >= num_minibatches:
            return steps // pieces
    return 1


def _state_after(segment: Segment, before: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The state [C, B, W] after the last row of every column."""
    if not isinstance(segment, RaggedSegment):
        return states[:, segment.num_steps - 1].clone()
    # A column of n rows goes on from the state that enters row n; those without a row n, from the end.
    columns, ends = torch.arange(segment.num_slots), torch.from_numpy(segment.lengths)
    every = torch.cat([before, states[:, segment.num_steps - 1 : segment.num_steps]], dim=1)
    return every[:, ends, columns].clone()


def _tensor(value: NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(value)).to(device)


def _no_states(fresh: torch.Tensor) -> torch.Tensor:
    return torch.zeros(0, *fresh.shape, 0, device=fresh.device)


def _address(segment: Segment, wrong: NDArray[np.bool_], what: str = "observation") -> str:
    t, b = (int(axis) for axis in np.argwhere(wrong)[0])
    if t < segment.num_steps:
        where = f"slot {int(segment.slots[b])}, episode {int(segment.episode[t, b])}, step {int(segment.step[t, b])}"
    else:
        where = f"slot {int(segment.slots[b])}, after the last step of the segment"
    return f"the {what} is not finite at {where}; on_nan='skip' leaves such rows out instead of stopping"
