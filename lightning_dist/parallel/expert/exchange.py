"""Tokens travel to the ranks that hold their experts, and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dist.parallel.expert.rows import combine_rows, sort_by_expert, take_rows

Group = dist.ProcessGroup
Moment = float | torch.cuda.Event
"""Seconds on the host's clock, or an event of a GPU's stream, which nobody has to wait for."""


class Exchange(NamedTuple):
    """What the exchange of one forward took."""

    sent_bytes: int
    """What this rank sent to others."""
    spans: tuple[tuple[Moment, Moment], ...]
    """When the rows' all-to-alls began and ended, waiting for the other ranks included."""


def seconds_of(spans: Iterable[tuple[Moment, Moment]]) -> float:
    """How long the spans are together; on a GPU the host waits until they are over."""
    total = 0.0
    for begin, end in spans:
        if isinstance(begin, float):
            total += end - begin  # type: ignore[operator]
        else:
            end.synchronize()  # type: ignore[union-attr]
            total += begin.elapsed_time(end) / 1000  # type: ignore[arg-type]
    return total


def _moment(device: torch.device) -> Moment:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def exchange_tokens(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    num_experts: int,
    group: Group,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Exchange]:
    """The weighted sum of the chosen experts' outputs, where each rank of ``group`` holds an equal part of them.

    Nothing is dropped or padded. A rank that sends or receives nothing takes part in every collective, in backward
    too. The host reads once how many rows go where.

    Collectives over ``group``, in this order on all ranks: an all-to-all of counts, one of the tokens' rows, one of
    the outputs' rows; in backward the last two again, the other way round.

    Args:
        hidden: This rank's tokens ``[tokens, hidden]``.
        top_k_index: Chosen experts ``[tokens, k]``, int64, numbered over all ranks; ``num_experts`` for a choice that
            was dropped, which travels nowhere.
        top_k_weights: Their weights ``[tokens, k]``; they stay here.
        num_experts: Number of experts of all ranks.
        group: Its rank ``r`` holds the experts from ``r * num_experts / size`` on.
        compute: This rank's experts, called with rows ``[rows, hidden]``, at least one, the expert of each row
            ``[rows, 1]``, numbered from 0, and ones ``[rows, 1]``.

    Returns:
        ``[tokens, hidden]``, and what the exchange took.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    order, counts = sort_by_expert(top_k_index, num_experts)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    by_source = arriving.view(ranks, -1)
    leaving_rows, arriving_rows = torch.stack([counts.view(ranks, -1).sum(1), by_source.sum(1)]).tolist()

    positions = order[: sum(leaving_rows)]
    leaving = take_rows(hidden, positions, top_k_index.shape[-1])
    begin = _moment(hidden.device)
    rows = _AllToAll.apply(leaving, leaving_rows, arriving_rows, group)
    there = (begin, _moment(hidden.device))
    numbers = torch.arange(by_source.shape[1], device=hidden.device).repeat(ranks)
    expert_of_row = numbers.repeat_interleave(by_source.reshape(-1), output_size=sum(arriving_rows))
    outputs = _compute_some(compute, rows, expert_of_row)
    begin = _moment(hidden.device)
    returned = _AllToAll.apply(outputs, arriving_rows, leaving_rows, group)
    back = (begin, _moment(hidden.device))

    travelled = sum(leaving_rows) - leaving_rows[rank] + sum(arriving_rows) - arriving_rows[rank]
    output = combine_rows(returned, positions, top_k_weights)
    return output, Exchange(travelled * hidden.shape[-1] * hidden.element_size(), (there, back))


def _compute_some(compute: Callable[[Tensor, Tensor, Tensor], Tensor], rows: Tensor, expert_of_row: Tensor) -> Tensor:
    """Computes on a row of zeros where there is none: the experts keep zero gradients, and the rank its place in the
    backward exchange."""
    count = rows.shape[0]
    if count == 0:
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        expert_of_row = expert_of_row.new_zeros(1)
    outputs = compute(rows, expert_of_row.unsqueeze(1), rows.new_ones(len(rows), 1))
    return outputs[:count]


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of a group, in forward and, for their gradients, back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, leaving: list[int], arriving: list[int], group: Group) -> Tensor:
        ctx.leaving, ctx.arriving, ctx.group = leaving, arriving, group
        return _all_to_all(rows, leaving, arriving, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_to_all(gradient, ctx.arriving, ctx.leaving, ctx.group), None, None, None


def _all_to_all(rows: Tensor, leaving: list[int], arriving: list[int], group: Group) -> Tensor:
    received = rows.new_empty((sum(arriving), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), arriving, leaving, group=group)
    return received
