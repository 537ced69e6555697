"""How updates travel: one weighted mean over the workers, whole or compressed with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Compression = Literal["none", "bf16", "int8"]

BLOCK = 256
"""Elements that share a scale in ``"int8"``."""


class UpdateExchange:
    """Computes the workers' mean update.

    ``"none"`` reduces updates in their own type. ``"bf16"`` and ``"int8"`` (blocks of 256 elements with one float32
    scale) gather each worker's compressed update, and each worker adds what was lost to its next update (error
    feedback, Karimireddy et al. 2019): over all rounds what is sent differs from what was meant by one rounding.
    Workers gather, so a worker receives N - 1 compressed updates, where a reduction sends and receives about two whole
    ones: int8 stops to be worth it at about 8 workers, bf16 at about 4.

    Args:
        group: The workers; None for one alone, whose update is the mean.
        compression: As above.
    """

    def __init__(self, group: dist.ProcessGroup | None, compression: Compression = "none") -> None:
        self._group = group
        self._compression = compression
        self._residual: dict[str, Tensor] = {}

    def mean(self, update: Sequence[Tensor], weights: Sequence[float]) -> list[Tensor]:
        """The mean of all workers' updates, each worker's counting by its weight. All workers must call it.

        Collectives: for each type of tensor, an all-reduce of the update, or an all-gather of the compressed one.

        Args:
            update: This worker's, tensor by tensor; the same shapes and types on all workers.
            weights: Of all workers, in the order of ranks; 0 leaves one out, but not all of them.
        """
        if self._group is None:
            return list(update)
        mine = weights[dist.get_rank(self._group)]
        mean: list[Tensor | None] = [None] * len(update)
        for dtype in sorted({tensor.dtype for tensor in update}, key=str):
            places = [place for place, tensor in enumerate(update) if tensor.dtype == dtype]
            flat = torch.cat([update[place].flatten() for place in places])
            flat = self._mean(str(dtype), flat, mine, weights)
            parts = flat.split([update[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                mean[place] = part.view_as(update[place])
        return mean  # type: ignore[return-value]

    def _mean(self, key: str, flat: Tensor, mine: float, weights: Sequence[float]) -> Tensor:
        total = sum(weights)
        if self._compression == "none":
            # Not 0 x the update: that of a worker left out might hold NaN.
            flat = flat * (mine / total) if mine else torch.zeros_like(flat)
            dist.all_reduce(flat, group=self._group)
            return flat
        if mine:
            flat = flat + self._residual.get(key, 0.0)
            sent = _compress(flat, self._compression)
            self._residual[key] = flat - _expand(sent, flat)
        else:
            sent = _compress(torch.zeros_like(flat), self._compression)
        gathered = [torch.empty_like(sent) for _ in weights]
        dist.all_gather(gathered, sent, group=self._group)
        mean = torch.zeros_like(flat)
        for weight, part in zip(weights, gathered, strict=True):
            if weight:
                mean += _expand(part, flat) * (weight / total)
        return mean

    def state_dict(self) -> dict[str, Any]:
        """What this worker has not sent yet; each worker has its own."""
        return {"residual": dict(self._residual)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._residual = dict(state["residual"])


def _compress(flat: Tensor, compression: Compression) -> Tensor:
    """One tensor that holds everything to be sent: bfloat16, or bytes of numbers and scales."""
    if compression == "bf16":
        return flat.to(torch.bfloat16)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(dim=1, keepdim=True) / 127).to(torch.float32)
    # A block whose scale vanishes in float32 is sent as zeros and waits in the residual.
    numbers = torch.where(scales > 0, blocks / scales, torch.zeros_like(blocks)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.int8).flatten(), numbers.flatten()])


def _expand(sent: Tensor, like: Tensor) -> Tensor:
    if sent.dtype == torch.bfloat16:
        return sent.to(like.dtype)
    count = -(-like.numel() // BLOCK)
    scales = sent[: 4 * count].clone().view(torch.float32)
    numbers = sent[4 * count :].view(count, BLOCK)
    return (numbers.to(like.dtype) * scales.to(like.dtype)[:, None]).flatten()[: like.numel()]
