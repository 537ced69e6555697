"""A limit on how many tokens an expert takes; what is beyond it is dropped, and counted."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.parallel.tensor.collectives import all_gather_single


def drop_beyond_capacity(
    top_k_index: Tensor, num_experts: int, factor: float, group: dist.ProcessGroup | None
) -> Tensor:
    """Marks the choices that find their expert full: an expert takes ``ceil(factor * tokens * k / num_experts)``.

    First choices are served before second ones, and among these earlier tokens before later ones (GShard,
    arXiv:2006.16668). Tokens are those of all ranks of ``group``, in the order of ranks, so that the same are dropped
    as in one process with the joined batch. No host read.

    Collectives: one all-gather of ``num_experts * k`` numbers over ``group``.

    Args:
        top_k_index: Chosen experts ``[tokens, k]``, int64.
        num_experts: Number of experts.
        factor: 1.0 is what perfectly even routing needs.
        group: Ranks with other tokens of the same batch; None if there are none.

    Returns:
        ``top_k_index`` with ``num_experts`` where a choice is dropped.
    """
    top_k = top_k_index.shape[-1]
    buckets = (top_k_index * top_k + torch.arange(top_k, device=top_k_index.device)).reshape(-1)
    order = torch.argsort(buckets, stable=True)
    counts = buckets.new_zeros(num_experts * top_k).scatter_add_(0, buckets, torch.ones_like(buckets))
    # The place of a choice in its bucket (expert, number of the choice), on this rank.
    starts = counts.cumsum(0) - counts
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - starts[buckets[order]]
    everyone, rank = counts.unsqueeze(0), 0
    if group is not None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        everyone = counts.new_empty(ranks * len(counts))
        all_gather_single(everyone, counts, group=group)
    everyone = everyone.view(-1, num_experts, top_k)
    total = everyone.sum(0)
    before = total.cumsum(-1) - total + everyone[:rank].sum(0)
    place = place + before.reshape(-1)[buckets]
    capacity = torch.ceil(total.sum() * (factor / num_experts))
    return torch.where((place < capacity).view_as(top_k_index), top_k_index, num_experts)
