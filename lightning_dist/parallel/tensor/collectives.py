"""Collectives between the ranks of a tensor or context group, each with the backward that belongs to it.

A tensor is *replicated* where every rank holds the same values and *cut* where each holds its part along a dimension
(sizes as ``torch.chunk`` makes them). Names say what happens in forward; backward is the mirror image. After
Megatron-LM's ``f`` and ``g`` operators (arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Group = dist.ProcessGroup

# Their names up to torch 2.12, which 2.13 deprecates.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def part_sizes(size: int, parts: int) -> list[int]:
    """How ``torch.chunk`` and ``Shard`` cut ``size`` elements in ``parts``: the first ones are the longest."""
    longest = -(-size // parts)
    return [max(0, min(longest, size - index * longest)) for index in range(parts)]


def sum_gradients_of(x: Tensor, group: Group) -> Tensor:
    """Returns ``x``; in backward, sums its gradient over ``group``: the entry of replicated values into sharded work.

    A tensor that enters several times (the input of query, key and value projections) is summed once: the first
    entry is remembered on the tensor.

    Collectives: in backward, one all-reduce of ``x``'s size over ``group``.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if torch.compiler.is_compiling():
        return _SumGradient.apply(x, group)
    remembered = getattr(x, "_entered_tensor_group", None)
    if remembered is not None and remembered[0] == x._version and remembered[1] is group:
        return remembered[2]
    entered = _SumGradient.apply(x, group)
    if x.is_leaf:  # the entry's graph holds a leaf, which must not hold the entry in turn: nobody would free them
        return entered
    x._entered_tensor_group = (x._version, group, entered)  # type: ignore[attr-defined]
    return entered


def sum_parts(x: Tensor, group: Group) -> Tensor:
    """Sums ``x`` over ``group``; the gradient, equal on all ranks, is handed on as it is.

    Collectives: one all-reduce of ``x``'s size over ``group``.
    """
    return _SumParts.apply(x, group)


def gather(x: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """Joins the ranks' parts along ``dim`` to ``size`` elements; in backward each rank takes its part of the gradient.

    For results that every rank uses in the same way, so that the gradient is equal on all ranks.

    Collectives: one all-gather over ``group``.
    """
    return _Gather.apply(x, dim % x.dim(), size, group)


def gather_for_both(x: Tensor, dim: int, group: Group) -> Tensor:
    """Joins the ranks' parts along ``dim``, for work that is partly replicated and partly sharded over ``group``.

    The result has a twin that :func:`sum_gradients_of` finds: gradients that come back through it are partial and are
    reduced and scattered in one collective, while those of the result itself are complete and are only cut.

    Collectives: one all-gather; in backward, one reduce-scatter if the twin was used, over ``group``.
    """
    whole, entered = _GatherForBoth.apply(x, dim % x.dim(), group)
    if not torch.compiler.is_compiling():
        whole._entered_tensor_group = (whole._version, group, entered)
    return whole


def cut(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part of a replicated ``x`` along ``dim``; in backward the parts of the gradient are joined.

    Collectives: in backward, one all-gather over ``group``.
    """
    return _Cut.apply(x, dim % x.dim(), group)


def sum_and_cut(x: Tensor, dim: int, group: Group) -> Tensor:
    """Sums ``x`` over ``group`` and keeps this rank's part along ``dim``; needs equal parts.

    Collectives: one reduce-scatter; in backward, one all-gather, over ``group``.
    """
    return _SumAndCut.apply(x, dim % x.dim(), group)


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x: Tensor, dim: int, size: int, group: Group) -> Tensor:
    ranks = dist.get_world_size(group)
    sizes = part_sizes(size, ranks)
    part = x.movedim(dim, 0).contiguous()
    if sizes[-1] != sizes[0]:  # the collective wants equal parts
        padded = part.new_zeros((sizes[0], *part.shape[1:]))
        padded[: part.shape[0]] = part
        part = padded
    joined = part.new_empty((ranks * sizes[0], *part.shape[1:]))
    all_gather_single(joined, part, group=group)
    # Only the last parts are short, so what is beyond ``size`` is padding wherever the parts were uneven.
    return _drop_padding(joined, sizes).movedim(0, dim).contiguous()


def _drop_padding(joined: Tensor, sizes: list[int]) -> Tensor:
    if sizes[-1] == sizes[0]:
        return joined
    return torch.cat([block[:size] for block, size in zip(joined.split(sizes[0]), sizes, strict=True)])


def _reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    ranks = dist.get_world_size(group)
    whole = x.movedim(dim, 0).contiguous()
    part = whole.new_empty((whole.shape[0] // ranks, *whole.shape[1:]))
    reduce_scatter_single(part, whole, group=group)
    return part.movedim(0, dim).contiguous()


def _own_part(x: Tensor, dim: int, group: Group) -> Tensor:
    sizes = part_sizes(x.shape[dim], dist.get_world_size(group))
    rank = dist.get_rank(group)
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.detach()  # not a view, for a view holds its base, and the base remembers the entry

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_reduce(gradient, ctx.group), None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather(x, dim, size, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _own_part(gradient, ctx.dim, ctx.group).contiguous(), None, None, None


class _GatherForBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> tuple[Tensor, Tensor]:
        ctx.dim, ctx.group = dim, group
        ctx.set_materialize_grads(False)
        whole = _all_gather(x, dim, x.shape[dim] * dist.get_world_size(group), group)
        return whole, whole.detach()  # no view either

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, complete: Tensor | None, partial: Tensor | None) -> Any:
        gradient = None if complete is None else _own_part(complete, ctx.dim, ctx.group)
        if partial is not None:
            summed = _reduce_scatter(partial, ctx.dim, ctx.group)
            gradient = summed if gradient is None else gradient + summed
        return gradient, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, x.shape[dim]
        return _own_part(x, dim, group).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_gather(gradient, ctx.dim, ctx.size, ctx.group), None, None


class _SumAndCut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, x.shape[dim]
        return _reduce_scatter(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_gather(gradient, ctx.dim, ctx.size, ctx.group), None, None
