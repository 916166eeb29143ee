"""What PPO minimises and how: the clipped objective with its gradient by hand, and Adam on one flat parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Coefficients:
    """What the schedules say for this update."""

    learning_rate: float
    clip: float
    entropy: float


@dataclass(frozen=True)
class UpdateSettings:
    """What stays the same over a run; `PPOConfig.update()` builds one from its own fields."""

    num_epochs: int = 4
    num_minibatches: int = 4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    value_coef: float = 0.5
    value_clip: float | None = None
    max_grad_norm: float = 0.5
    target_kl: float | None = None
    normalize_advantage: bool = True
    sequence_length: int | None = None
    adam_eps: float = 1e-5
    on_nan: str = "stop"


class PpoLoss(torch.autograd.Function):
    """The clipped objective with its gradient by hand: a dozen small operations, none of them an autograd node.

    With r the probability ratio, A the advantage and c the clip, the derivative of -min(r·A, clip(r)·A) by the
    log-probability is -r·A where the first term is the smaller one, and 0 where the clipped one is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        log_prob: torch.Tensor,
        entropy: torch.Tensor,
        value: torch.Tensor,
        batch: Tensors,
        advantage: torch.Tensor,
        weight: torch.Tensor | None,
        now: Coefficients,
        settings: UpdateSettings,
        measure: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, and a report (five means) when `measure`."""
        log_ratio = log_prob - batch["log_prob"]
        ratio = log_ratio.exp()
        plain = ratio * advantage
        clipped = ratio.clamp(1.0 - now.clip, 1.0 + now.clip) * advantage
        gain = torch.minimum(plain, clipped)
        gap = value - batch["target"]
        error = gap.square()
        if settings.value_clip is not None:
            old = batch["value"]
            near = old + (value - old).clamp(-settings.value_clip, settings.value_clip) - batch["target"]
            farther = near.square() > error
            # Where the clipped error is the larger one and the clip is active, the value does not move.
            moves = (value - old).abs() <= settings.value_clip
            gap = torch.where(farther, near * moves, gap)
            error = torch.maximum(error, near.square())
        share: Any = 1.0 / gain.numel() if weight is None else weight / weight.sum().clamp(min=1.0)
        ctx.by_log_prob = torch.where(plain <= clipped, plain, 0.0) * -share
        ctx.by_entropy = -now.entropy * share * torch.ones_like(entropy) if now.entropy else None
        ctx.by_value = gap * (settings.value_coef * share)
        policy_loss, value_loss = -weighted_mean(gain, weight), 0.5 * weighted_mean(error, weight)
        loss = policy_loss + settings.value_coef * value_loss
        if now.entropy or measure:
            mean_entropy = weighted_mean(entropy, weight)
            loss = loss - now.entropy * mean_entropy
        report = loss
        if measure:
            distance = weighted_mean(ratio - 1.0 - log_ratio, weight)
            outside = weighted_mean(((ratio - 1.0).abs() > now.clip).float(), weight)
            report = torch.stack([policy_loss, value_loss, mean_entropy, distance, outside])
        ctx.mark_non_differentiable(report)
        return loss.clone(), report

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the gradients that forward has worked out."""
        # The loss is where backward() starts: its own gradient is 1.
        return ctx.by_log_prob, ctx.by_entropy, ctx.by_value, None, None, None, None, None, None


class FlatAdam:
    """Adam on one flat parameter: the same arithmetic as `torch.optim.Adam`, a quarter of its fixed cost per step.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> weight.grad = torch.ones(1)
        >>> FlatAdam(weight, eps=1e-8).step(0.1)
        >>> round(weight.item(), 3)
        -0.1
    """

    def __init__(self, flat: torch.nn.Parameter, eps: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.flat, self.eps, self.betas = flat, eps, betas
        self.count = 0
        self.mean, self.square = torch.zeros_like(flat.data), torch.zeros_like(flat.data)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply the gradient that stands in `flat.grad`."""
        grad = self.flat.grad
        assert grad is not None
        first, second = self.betas
        self.count += 1
        self.mean.lerp_(grad, 1.0 - first)
        self.square.mul_(second).addcmul_(grad, grad, value=1.0 - second)
        root = self.square.sqrt().mul_((1.0 - second**self.count) ** -0.5).add_(self.eps)
        self.flat.data.addcdiv_(self.mean, root, value=-learning_rate / (1.0 - first**self.count))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {"count": self.count, "mean": self.mean.clone(), "square": self.square.clone()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint stored."""
        self.count = int(state["count"])
        self.mean.copy_(state["mean"])
        self.square.copy_(state["square"])


def weighted_mean(values: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Mean over the rows that count (all of them without a weight)."""
    return values.mean() if weight is None else (values * weight).sum() / weight.sum().clamp(min=1.0)


def standardise(advantage: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Shift and scale to mean 0 and standard deviation 1 over the rows that count."""
    if advantage.numel() < 2:
        return advantage
    if weight is None:
        std, mean = torch.std_mean(advantage)
        return (advantage - mean) / (std + 1e-8)
    mean = weighted_mean(advantage, weight)
    std = weighted_mean((advantage - mean).square(), weight).sqrt()
    return (advantage - mean) / (std + 1e-8)
