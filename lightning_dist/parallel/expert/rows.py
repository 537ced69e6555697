"""Rows of tokens grouped by expert and back, with gradients that do not depend on the order of additions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def sort_by_expert(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The order in which a token's choices lie grouped by expert, and how many each expert has. No host read.

    Args:
        top_k_index: Expert of each choice ``[tokens, k]``; ``num_experts`` marks a choice that was dropped.
        num_experts: Number of experts.

    Returns:
        Positions in the flattened ``top_k_index``, those dropped last, and counts ``[num_experts]``; both int64.
    """
    flat = top_k_index.reshape(-1)
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    return torch.argsort(flat, stable=True), counts[:num_experts]


def take_rows(hidden: Tensor, positions: Tensor, top_k: int) -> Tensor:
    """The token of each choice: ``hidden[positions // top_k]``.

    In backward the gradients of a token's choices are laid side by side and summed in order: ``index_add`` on CUDA
    would add them in another order in every run.

    Args:
        hidden: ``[tokens, hidden]``.
        positions: Different positions in the flattened choices ``[tokens * top_k]``.
        top_k: Choices of each token.
    """
    return _TakeRows.apply(hidden, positions, top_k)


def combine_rows(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of what the experts made of each token's choices.

    Args:
        rows: ``[choices, hidden]``, as :func:`take_rows` ordered them.
        positions: As given to it; positions that are left out count zero.
        weights: ``[tokens, k]``.

    Returns:
        ``[tokens, hidden]``, of the dtype of ``rows``.
    """
    (tokens, top_k), width = weights.shape, rows.shape[-1]
    chosen = rows.new_zeros(tokens * top_k, width).index_copy(0, positions, rows)
    return (chosen.view(tokens, top_k, width) * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, positions: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.tokens, ctx.top_k = hidden.shape[0], top_k
        return hidden.index_select(0, positions.div(top_k, rounding_mode="floor"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (positions,) = ctx.saved_tensors
        width = gradient.shape[-1]
        choices = gradient.new_zeros(ctx.tokens * ctx.top_k, width).index_copy_(0, positions, gradient)
        return choices.view(ctx.tokens, ctx.top_k, width).sum(1), None, None
