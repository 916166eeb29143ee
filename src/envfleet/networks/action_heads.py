"""Action distributions as plain functions: sampled in NumPy while acting, scored in PyTorch while learning.

`torch.distributions` builds objects at every call, which makes a whole update of a small network about 10 % slower even
without its validation; the families that PPO needs are a few lines each.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.errors import BadArgument

if TYPE_CHECKING:
    import torch

FORBIDDEN = -1e9  # added to the logit of a masked action: exp() of it is exactly 0 in float32
LOG_2PI = math.log(2 * math.pi)
LOG_STD_MIN, LOG_STD_MAX = -8.0, 2.0


class Actions:
    """How the outputs of a policy network become actions of a space, and how likely those actions were.

    `raw` is what was drawn, and what learning scores; `env` is what the environment gets. They differ for Box only:
    without `squash` the environment gets `raw` clipped to the bounds; with it, tanh(raw) stretched over the bounds,
    and the log-probability carries the change of variables.

    Example:
        >>> actions = Actions(gym.spaces.Discrete(2))
        >>> actions.num_outputs
        2
        >>> actions.draw(np.array([[9.0, -9.0], [-9.0, 9.0]], np.float32), None, None).tolist()
        [0, 1]
    """

    def __init__(self, space: gym.Space[Any], std: str = "free", squash: bool = False) -> None:
        self.space = space
        self.squash = squash
        self.counts: tuple[int, ...] = ()
        self.dim = 0
        self.state_std = False
        self.num_free = 0  # free parameters (log std) that belong to the distribution, not to the network's output
        spaces = gym.spaces
        if isinstance(space, spaces.Discrete):
            self.kind, self.counts = "discrete", (int(space.n),)
            self.start = np.array([int(space.start)])
        elif isinstance(space, spaces.MultiDiscrete):
            self.kind, self.counts = "multi", tuple(int(count) for count in space.nvec.ravel())
            self.start = np.asarray(space.start).ravel().astype(np.int64)
        elif isinstance(space, spaces.MultiBinary):
            self.kind, self.counts = "multi", (2,) * int(np.prod(space.shape))
            self.start = np.zeros(len(self.counts), dtype=np.int64)
        elif isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
            self._init_box(space, std)
        else:
            raise BadArgument(f"PPO cannot act in {space}: it knows Discrete, MultiDiscrete, MultiBinary and float Box spaces")
        self.num_outputs = sum(self.counts) if self.counts else self.dim * (2 if self.state_std else 1)
        self.offsets = np.cumsum((0, *self.counts))
        # Whether the environment gets exactly what was drawn, so that nothing else has to be kept.
        self.raw_is_env = self.kind == "discrete" and not self.start[0] and space.dtype == np.int64

    def _init_box(self, space: gym.spaces.Box, std: str) -> None:
        self.kind, self.dim, self.state_std = "box", int(np.prod(space.shape)), std == "state"
        self.num_free = 0 if self.state_std else self.dim
        self.low = space.low.ravel().astype(np.float32)
        self.high = space.high.ravel().astype(np.float32)
        if self.squash and not (np.isfinite(self.low).all() and np.isfinite(self.high).all()):
            raise BadArgument(f"squash=True needs finite action bounds; the space is {space}")

    # -- acting, in NumPy ------------------------------------------------------------------------------------------

    def draw(
        self,
        outputs: NDArray[np.float32],
        log_std: NDArray[np.float32] | None,
        rng: np.random.Generator | None,
        mask: NDArray[np.bool_] | None = None,
    ) -> Any:
        """Draw raw actions [k] or [k, n]; without a generator, the mode."""
        if self.kind == "box":
            mean, log_std = self._split(outputs, log_std)
            if rng is None:
                return mean
            noise = rng.standard_normal(mean.shape, dtype=np.float32)
            return mean + np.exp(log_std) * noise
        logits = outputs if mask is None else np.where(mask, outputs, np.float32(FORBIDDEN))
        if rng is not None:
            # The largest of logit - log(Exponential) is a draw from softmax(logits): no normalising needed.
            # (An exact 0, which float32 does give now and then, would win over everything, masks included.)
            noise = np.maximum(rng.standard_exponential(logits.shape, dtype=np.float32), np.float32(1e-30))
            logits = logits - np.log(noise)
        if self.kind == "discrete":
            return logits.argmax(axis=-1)
        parts = [logits[..., first:last].argmax(axis=-1) for first, last in itertools.pairwise(self.offsets)]
        return np.stack(parts, axis=-1)

    def to_env(self, raw: NDArray[Any]) -> Any:
        """Turn raw actions into what the environment gets."""
        if self.kind == "discrete":
            return raw if self.raw_is_env else (raw + self.start[0]).astype(self.space.dtype)
        if self.kind == "multi":
            shaped = (raw + self.start).reshape(*raw.shape[:-1], *self.space.shape)  # type: ignore[misc]
            return shaped.astype(self.space.dtype, copy=False)
        if self.squash:
            value = self.low + (np.tanh(raw) + 1.0) * 0.5 * (self.high - self.low)
        else:
            value = np.clip(raw, self.low, self.high)
        shape = (*raw.shape[:-1], *self.space.shape)  # type: ignore[misc]
        return value.astype(self.space.dtype, copy=False).reshape(shape)

    def raw_dtype(self) -> np.dtype[Any]:
        """Return the dtype of raw actions."""
        return np.dtype(np.float32 if self.kind == "box" else np.int64)

    def raw_shape(self) -> tuple[int, ...]:
        """Return the shape of one raw action."""
        return () if self.kind == "discrete" else (self.dim or len(self.counts),)

    def _split(self, outputs: Any, log_std: Any) -> tuple[Any, Any]:
        if not self.state_std:
            return outputs, log_std
        mean, log_std = outputs[..., : self.dim], outputs[..., self.dim :]
        return mean, log_std.clip(LOG_STD_MIN, LOG_STD_MAX)

    # -- learning, in PyTorch --------------------------------------------------------------------------------------

    def score(
        self, outputs: torch.Tensor, log_std: torch.Tensor | None, raw: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probability and entropy of raw actions, with the leading axes of `outputs`.

        The entropy of a squashed Box is that of the Gaussian before the tanh: the exact one has no closed form.
        """
        if self.kind == "box":
            return self._score_box(outputs, log_std, raw)
        if mask is not None:
            outputs = outputs.masked_fill(~mask, FORBIDDEN)
        if self.kind == "discrete":
            return _score_categorical(outputs, raw)
        scores = [
            _score_categorical(outputs[..., first:last], raw[..., index])
            for index, (first, last) in enumerate(itertools.pairwise(self.offsets))
        ]
        log_prob, entropy = scores[0]
        for more_log_prob, more_entropy in scores[1:]:
            log_prob, entropy = log_prob + more_log_prob, entropy + more_entropy
        return log_prob, entropy

    def _score_box(
        self, outputs: torch.Tensor, log_std: torch.Tensor | None, raw: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self._split(outputs, log_std)
        assert log_std is not None
        z = (raw - mean) * (-log_std).exp()
        log_prob = (-0.5 * z * z - log_std).sum(-1) - 0.5 * LOG_2PI * self.dim
        entropy = log_std.sum(-1) + 0.5 * (1.0 + LOG_2PI) * self.dim
        if self.squash:
            import torch.nn.functional as F

            # log(1 - tanh(x)^2) written so that it stays finite where tanh saturates, plus the stretch.
            stretch = float(np.log((self.high - self.low) / 2).sum())
            slope = (2.0 * (math.log(2.0) - raw - F.softplus(-2.0 * raw))).sum(-1)
            log_prob = log_prob - slope - stretch
        return log_prob, entropy.expand_as(log_prob)


def _score_categorical(logits: torch.Tensor, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = logits.log_softmax(-1)
    # A masked action has probability exactly 0 and a finite (-1e9) logarithm, so 0 * log 0 is 0 here.
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, raw.unsqueeze(-1)).squeeze(-1), entropy
