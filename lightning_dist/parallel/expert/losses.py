"""Losses that keep routers healthy, equal to one process's on the joined batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

FORGOTTEN = 256
"""So many uncollected losses of one layer are no reuse of the layer within a step any more."""


def load_balancing_loss(scores: Tensor, top_k_index: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """``num_experts * sum(f * P)``: choices per token that fell on an expert, times its mean score. Even load gives k.

    Follows the Switch Transformer (arXiv:2101.03961, equations 4 to 6). ``f`` counts the tokens of all ranks, ``P``
    averages those of this rank, so the mean of the ranks' losses is the loss of the joined batch; with ``f`` of each
    rank it would be another one (arXiv:2501.11873).

    Collectives: one all-reduce of ``num_experts + 1`` numbers over ``group``.

    Args:
        scores: Of all experts ``[tokens, num_experts]``; divided by their sum.
        top_k_index: Chosen experts ``[tokens, k]``.
        group: Ranks with other tokens of the same batch; None if there are none.
    """
    tokens, num_experts = scores.shape
    flat = top_k_index.reshape(-1)
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    counts[num_experts] = tokens
    counts = sum_over(counts, group).to(scores.dtype)
    shares = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return num_experts * (counts[:-1] / counts[-1].clamp(min=1) * mean_of_rows(shares)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Mean square of the logarithm of the softmax's sum (ST-MoE, arXiv:2202.08906): keeps logits ``[tokens, experts]``
    small. No collectives."""
    return mean_of_rows(logits.logsumexp(-1).square())


def sum_over(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(counts, group=group)
    return counts


def mean_of_rows(values: Tensor) -> Tensor:
    """The mean over the first dimension, 0 where there is no row."""
    return values.sum(0) / max(values.shape[0], 1)


class PendingLosses:
    """The losses of a layer's calls until they are collected; copies of the layer start with none."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        if len(self._losses) >= FORGOTTEN:
            raise RuntimeError(
                f"The auxiliary losses of {FORGOTTEN} forwards were never collected; add auxiliary_loss(network) to the"
                " loss of each training step, or set balance_coefficient and z_coefficient to 0."
            )
        self._losses.append(loss)

    def collect(self) -> list[Tensor]:
        losses, self._losses = self._losses, []
        return losses

    def __deepcopy__(self, _memo: Any) -> PendingLosses:
        return PendingLosses()

    def __getstate__(self) -> dict[str, Any]:
        return {"_losses": []}


def auxiliary_loss(network: nn.Module) -> Tensor:
    """The sum of the auxiliary losses of all layers since the last call, times their coefficients; 0 if there are none.

    To be added to the loss of a training step, which is a mean over the batch as this is. No collectives.
    """
    losses = [
        loss
        for module in network.modules()
        if isinstance(pending := getattr(module, "pending_losses", None), PendingLosses)
        for loss in pending.collect()
    ]
    if losses:
        return torch.stack(losses).sum()
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    return torch.zeros((), device=device)


def attach_loss(output: Tensor, loss: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Returns ``output``; whatever comes back to it in backward, ``loss`` gets the gradient ``scale``.

    For layers whose loss cannot be added to that of the step: a pipeline stage before the last attaches its auxiliary
    losses to what it hands on, with the factor that the last stage's loss has.

    Args:
        output: What depends on the same forward as the loss; it must get a gradient.
        loss: A scalar.
        scale: Factor of the loss in the backward that is to come.
    """
    return _AttachLoss.apply(output, loss, torch.as_tensor(scale, dtype=loss.dtype, device=loss.device))


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, _loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, ctx.saved_tensors[0], None
