"""Which part of each sequence a context rank holds, and what that means for batches, losses and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_dist.parallel.tensor.collectives import all_gather_single

Method = Literal["ulysses", "ring", "allgather"]
IGNORED = -100
"""The label that losses pass over, in torch and in Hugging Face."""

_TARGET_NAMES = ("labels", "label", "targets", "target", "y")
_OPERATIONS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_BUCKET = 64 * 2**20  # bytes of gradients in one all-reduce


class ContextParallel:
    """The ranks that share each sequence, and how they do attention.

    ``"ulysses"`` exchanges tokens for heads before attention and back after it (arXiv:2309.14509): each rank sees the
    whole sequence for its heads. Parts are consecutive; heads must divide by the number of ranks. It runs anywhere.

    ``"ring"`` and ``"allgather"`` are torch's own ``context_parallel``, for ``scaled_dot_product_attention`` on CUDA
    without a mask. Each rank holds a piece from the front and its mirror image from the back of the sequence, so that
    causal attention is the same work for all.

    Args:
        mesh: A mesh with an axis ``context``, or a one-dimensional one.
        method: How attention reaches the other ranks' tokens.

    Attributes:
        attentions: Calls of attention since the count was last set to 0.
        attending: Whether attention over whole sequences is being computed just now.
        loss_combined: Whether a Hugging Face network has put its loss together over the ranks itself since this was
            last set to False.
    """

    def __init__(self, mesh: DeviceMesh, method: Method = "ulysses") -> None:
        if method not in ("ulysses", "ring", "allgather"):
            raise ValueError(f"method={method!r} does not fit: give 'ulysses', 'ring' or 'allgather'.")
        self.mesh = mesh["context"] if "context" in (mesh.mesh_dim_names or ()) and mesh.ndim > 1 else mesh
        if method != "ulysses" and self.mesh.device_type != "cuda":
            raise ValueError(
                f"method={method!r} is torch's context_parallel, which runs on CUDA only; use 'ulysses' on"
                f" {self.mesh.device_type}."
            )
        self.method = method
        self.attentions = 0
        self.attending = False
        self.loss_combined = False

    @cached_property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @cached_property
    def size(self) -> int:
        return self.mesh.size()

    @cached_property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def head_tail(self) -> bool:
        return self.method != "ulysses"

    def positions(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """The places of this rank's tokens in a sequence of ``length``, ``[length / size]``; no collectives."""
        return token_positions(length, self.size, self.rank, head_tail=self.head_tail).to(device)


def token_positions(length: int, ranks: int, rank: int, *, head_tail: bool) -> Tensor:
    """The places of a rank's tokens, in its order.

    Args:
        length: Tokens of the whole sequence; must divide by ``ranks``, or by twice that with ``head_tail``.
        ranks: Number of ranks.
        rank: Which of them.
        head_tail: Cut the sequence in ``2 * ranks`` pieces and give rank r pieces r and ``2 * ranks - 1 - r``.
    """
    if not head_tail:
        part = length // ranks
        return torch.arange(rank * part, (rank + 1) * part)
    pieces = torch.arange(length).chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


def cut_batch(batch: Any, sequence_dims: Mapping[str, int], context: ContextParallel) -> Any:
    """This rank's part of the entries of a batch that ``sequence_dims`` names; the others are left whole.

    Every context rank must have been given the same batch. No collectives. Labels that a network shifts by itself
    (Hugging Face's causal language models) are shifted right, see `prepare_network`; labels that a training step
    shifts by hand would lose one target for each rank: shift them in the dataset.

    Args:
        batch: A mapping, or a tuple or list whose entries go by ``"0"``, ``"1"``, …
        sequence_dims: The dimension along which each entry is cut. ``"position_ids"`` is made if a mapping lacks it.
        context: The context ranks.

    Returns:
        A new batch of the same type.

    Raises:
        ValueError: If an entry is missing or its length does not divide, naming what would.
    """
    if isinstance(batch, Mapping):
        entries = dict(batch)
    elif isinstance(batch, list | tuple):
        entries = {str(index): value for index, value in enumerate(batch)}
    else:
        raise ValueError(
            f"sequence_dims names entries of the batch, but the batch is a {type(batch).__name__}: make it a mapping,"
            " a tuple or a list."
        )
    for name, dim in sequence_dims.items():
        if name == "position_ids" and name not in entries and isinstance(batch, Mapping):
            continue
        value = entries.get(name)
        if not isinstance(value, Tensor):
            raise ValueError(
                f"sequence_dims names {name!r}, which is no tensor of the batch; it has {', '.join(entries)}."
            )
        entries[name] = take_part(value, dim, context, name=f"The entry {name!r}")
    if "position_ids" in sequence_dims and "position_ids" not in entries:
        name, dim = next((name, dim) for name, dim in sequence_dims.items() if name in entries)
        part = entries[name]
        places = context.positions(part.shape[dim] * context.size, part.device)
        entries["position_ids"] = places.expand(part.shape[0], -1)
    if isinstance(batch, Mapping):
        return type(batch)(entries)  # type: ignore[call-arg]
    if hasattr(batch, "_fields"):
        return type(batch)(*entries.values())
    return type(batch)(entries.values())


def take_part(x: Tensor, dim: int, context: ContextParallel, *, name: str = "The tensor") -> Tensor:
    """This rank's tokens of ``x`` along ``dim``. No collectives; gradients flow to them only."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{name} has the shape {tuple(x.shape)}, so it has no dimension {dim} to cut along.")
    length, pieces = x.shape[dim], context.size * (2 if context.head_tail else 1)
    if length % pieces:
        raise ValueError(
            f"{name} has {length} tokens along dimension {dim}, which do not divide by {pieces}"
            f" (context_parallel_size={context.size}, {context.method}): pad batches to a multiple of {pieces}."
        )
    if not context.head_tail:
        part = length // context.size
        return x.narrow(dim, context.rank * part, part).contiguous()
    return x.index_select(dim, context.positions(length, x.device))


def gather_sequence(x: Tensor, dim: int, context: ContextParallel) -> Tensor:
    """The whole sequence in its order, from the ranks' equal parts; no gradient flows through it.

    Collectives: one all-gather over the context group.
    """
    part = x.detach().movedim(dim, 0).contiguous()
    joined = part.new_empty((context.size * part.shape[0], *part.shape[1:]))
    all_gather_single(joined, part, group=context.group)
    if context.head_tail:
        length = joined.shape[0]
        places = torch.cat(
            [token_positions(length, context.size, rank, head_tail=True) for rank in range(context.size)]
        )
        joined = torch.empty_like(joined).index_copy_(0, places.to(joined.device), joined)
    return joined.movedim(0, dim).contiguous()


def shift_labels(labels: Tensor, dim: int = 1) -> Tensor:
    """Labels moved so that each place holds the next token's, the last place `IGNORED`. No collectives."""
    after = labels.narrow(dim, 1, labels.shape[dim] - 1)
    last = torch.full_like(labels.narrow(dim, 0, 1), IGNORED)
    return torch.cat([after, last], dim=dim)


def loss_share(batch: Any, sequence_dims: Mapping[str, int], context: ContextParallel) -> Tensor:
    """Which part of the whole mean loss this rank's mean is: its targets by all targets of the batch (C09).

    Targets are the entries named like labels that ``sequence_dims`` cuts, `IGNORED` ones not counted; without any,
    every token counts. No collectives, no wait for the device.

    Args:
        batch: The batch before the cut.
        sequence_dims: See :func:`cut_batch`.
        context: The context ranks.

    Returns:
        A scalar in float64 (float32 on devices without it); the ranks' sum is 1, or 0 if nothing is a target.
    """
    entries = batch if isinstance(batch, Mapping) else {str(index): value for index, value in enumerate(batch)}
    names = [name for name in sequence_dims if name in _TARGET_NAMES and isinstance(entries.get(name), Tensor)]
    if not names:
        anything = next(value for name in sequence_dims if isinstance(value := entries.get(name), Tensor))
        return torch.tensor(1.0 / context.size, dtype=_widest(anything), device=anything.device)
    counted = entries[names[0]] != IGNORED
    own = take_part(counted, sequence_dims[names[0]], context)
    return _ratio(own.sum(), counted.sum(), _widest(counted))


def combine_loss(loss: Tensor, share: Tensor, context: ContextParallel) -> Tensor:
    """The loss of the whole sequence on every rank, out of each rank's mean over its own tokens.

    Its gradient reaches this rank's part, so that the parameters' gradients are parts of a sum over the context group
    (see :func:`sum_context_gradients`). A rank without targets takes no part, even if its mean is 0/0. Where a Hugging
    Face network has combined its loss already (``context.loss_combined``), the loss is returned as it is.

    Collectives: one all-reduce of a scalar over the context group.

    Args:
        loss: A scalar.
        share: What :func:`loss_share` gave for this batch.
        context: The context ranks.
    """
    if context.loss_combined:
        return loss
    own = torch.where(share > 0, loss * share.to(loss.dtype), torch.zeros_like(loss))
    return sum_losses(own, context)


def combine_value(value: Tensor, share: Tensor, context: ContextParallel, how: str = "mean") -> Tensor:
    """What a value that each rank took over its own tokens is over the whole sequences. No gradient.

    Collectives: one all-reduce of a scalar over the context group.

    Args:
        value: A scalar.
        share: What :func:`loss_share` gave for this batch: the weight of this rank's tokens.
        context: The context ranks.
        how: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``.
    """
    value = value.detach()
    if how == "mean":
        value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
        value = torch.where(share > 0, value * share.to(value.dtype), torch.zeros_like(value))
    total = value.clone()
    dist.all_reduce(total, op=_OPERATIONS[how], group=context.group)
    return total


def sum_losses(own: Tensor, context: ContextParallel) -> Tensor:
    """The sum of the ranks' parts of a loss; each rank's gradient is that of its own part.

    Collectives: one all-reduce of a scalar over the context group.
    """
    return _SumLosses.apply(own, context.group)


def sum_context_gradients(parameters: Iterable[Tensor], context: ContextParallel) -> None:
    """Sums all gradients over the context group, in place; once per optimizer step, after the last backward.

    Collectives: one all-reduce for each 64 MiB of gradients of one type, over the context group. Parameters without a
    gradient are passed over, so the ranks must have the same ones. Experts that are spread over ranks are passed over
    too: the exchange of tokens has summed theirs.

    Args:
        parameters: This rank's parameters; of a DTensor its own part is summed with the same part of the others.
    """
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and not _is_spread(parameter):
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            if local.numel():
                by_type.setdefault((local.dtype, local.device), []).append(local)
    for same in by_type.values():
        for bucket in _buckets(same):
            joined = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(joined, group=context.group)
            parts = joined.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view(g.shape) for part, g in zip(parts, bucket, strict=True)])


def _is_spread(parameter: Tensor) -> bool:
    """Whether it belongs to experts on a mesh of their own, whose axes cross those of the context."""
    return isinstance(parameter, DTensor) and "expert" in (parameter.device_mesh.mesh_dim_names or ())


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    held = _BUCKET
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if held + size > _BUCKET:
            buckets.append([])
            held = 0
        buckets[-1].append(tensor)
        held += size
    return buckets


def _ratio(part: Tensor, whole: Tensor, dtype: torch.dtype) -> Tensor:
    return part.to(dtype) / whole.clamp(min=1).to(dtype)


def _widest(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


class _SumLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None
