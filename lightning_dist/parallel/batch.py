"""What a batch holds: its number of samples, and whether ranks hold the same one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor


def sample_count(batch: Any) -> int:
    """The number of samples in a batch: the size of dimension 0 of its first tensor that has one, else 1."""
    for _, leaf in _leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return leaf.shape[0]
    return 1


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """What a batch holds and where; also in dataclasses, and in mappings that are no dictionaries (tokenizers)."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _leaves(entry, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _leaves(entry, f"{place}({index})")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{place}.{field.name}")
    else:
        yield place, value


def hash_batch(batch: Any) -> int:
    """A 63-bit hash of a batch's structure, shapes, types and values. Reads the values on the host."""
    digest = xxhash.xxh3_64()
    for place, leaf in _leaves(batch):
        digest.update(place.encode())
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(leaf).encode())
    return digest.intdigest() >> 1


def check_same_batch(batch: Any, group: dist.ProcessGroup, what: str) -> None:
    """Raises on all ranks of ``group``, with the same sentence, if they do not hold the same batch.

    Collectives: an all-gather of one integer over ``group``, a CPU group.

    Raises:
        RuntimeError: Naming the ranks that differ from the group's first.
    """
    mine = torch.tensor([hash_batch(batch)])
    hashes = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(hashes, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    others = [rank for rank, value in zip(ranks, hashes, strict=True) if value != hashes[0]]
    if others:
        raise RuntimeError(
            f"The ranks of one model replica hold different batches ({what}): rank{'s' * (len(others) > 1)}"
            f" {', '.join(map(str, others))} differ{'s' * (len(others) == 1)} from rank {ranks[0]}. Build the sampler"
            " on the data coordinate (Lightning does so for map-style data), seed random data alike, or set"
            " batch_check='broadcast'."
        )


def broadcast_batch(batch: Any, group: dist.ProcessGroup) -> Any:
    """Gives every rank of ``group``, a CPU group, the batch of its first rank. Costs a pickle of the batch."""
    box = [batch if dist.get_group_rank(group, dist.get_rank()) == 0 else None]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]
