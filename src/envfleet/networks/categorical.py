"""Log-probability and entropy of a categorical distribution as one autograd node, with the gradient by hand."""

from __future__ import annotations

from typing import Any

import torch


class Categorical(torch.autograd.Function):
    """Score drawn indices [...] under logits [..., n].

    With p the probabilities and H the entropy: d log p(a) / d logits = onehot(a) - p, and
    d H / d logits = -p · (log p + H). Eight small nodes of autograd would cost more than the arithmetic.

    Example:
        >>> log_prob, entropy = Categorical.apply(torch.zeros(1, 4), torch.tensor([2]))
        >>> round(log_prob.item(), 4), round(entropy.item(), 4)
        (-1.3863, 1.3863)
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (log-probability, entropy), both [...]."""
        ctx.set_materialize_grads(False)
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        index = raw.unsqueeze(-1)
        # A masked action has probability exactly 0 and a finite (-1e9) logarithm, so 0 * log 0 is 0 here.
        entropy = (p * log_p).sum(-1).neg_()
        ctx.saved = (log_p, p, index, entropy)
        return log_p.gather(-1, index).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the gradient by the logits."""
        by_chosen, by_entropy = grads
        log_p, p, index, entropy = ctx.saved
        slope = torch.zeros_like(p)
        if by_chosen is not None:
            by_chosen = by_chosen.unsqueeze(-1)
            slope = (p * by_chosen).neg_().scatter_add_(-1, index, by_chosen)
        if by_entropy is not None:
            slope -= p * (log_p + entropy.unsqueeze(-1)) * by_entropy.unsqueeze(-1)
        return slope, None
