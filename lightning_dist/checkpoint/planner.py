"""Which bytes of which tensor a rank writes: torch's own plan, made early, in pieces, and the same every time."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan, WriteItem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor

PIECE_BYTES = 32 * 1024 * 1024
"""Larger shards are written in pieces of about this size. torch holds the interpreter's lock while it serialises one
item, and a reader of another layout reads whole items."""


@dataclasses.dataclass(frozen=True)
class LocalPlan:
    """What one rank could write, and what the others have to know about it.

    `unequal` names plain tensors that may differ between the ranks that have them (buffers, such as the statistics of
    a batch normalisation): of those only the lowest rank's are written. DTensors, optimizer state and the parameters
    that an optimizer holds are equal on all ranks that have them, and are shared out among them.
    """

    plan: SavePlan
    names: tuple[str, ...]
    unequal: frozenset[str]


class SnapshotPlanner(DefaultSavePlanner):
    """A save planner over a state dict as it is now; `data` holds what each item of the plan refers to.

    Args:
        tensors: Nested state dict of tensors, DTensors and plain values, as this rank holds them. Tensors are
            referred to; plain values are pickled at once.
        like: An earlier planner; where names and layout are still the same, its plan is taken over (`local_plan` is
            then the same object) and planning costs next to nothing.
    """

    def __init__(self, tensors: dict[str, Any], like: SnapshotPlanner | None = None) -> None:
        super().__init__()
        self.set_up_planner(tensors)
        held = {name: _held(value) for name, value in self.state_dict.items()}
        unequal = frozenset(_unequal(self.state_dict))
        self.layout = {name: layout for name, (layout, _) in held.items()}
        self.local_plan: LocalPlan
        self._cuts: list[_Cut]
        if like is not None and (like.layout, like.local_plan.unequal) == (self.layout, unequal):
            self.plan, self.local_plan, self._cuts = like.plan, like.local_plan, like._cuts
        else:
            self._cuts = [
                cut for item in super().create_local_plan().items for cut in _cuts(item, held[item.index.fqn][1])
            ]
            self.plan = SavePlan([cut.item for cut in self._cuts], planner_data=self.mappings)
            self.local_plan = LocalPlan(self.plan, tuple(self.state_dict), unequal)
        self.data: dict[MetadataIndex, torch.Tensor | bytes] = {}
        for cut in self._cuts:
            if cut.item.tensor_data is None:
                pickled = super().resolve_data(cut.item)
                assert isinstance(pickled, io.BytesIO)
                self.data[cut.item.index] = pickled.getvalue()
            else:
                value = held[cut.item.index.fqn][1]
                self.data[cut.item.index] = value if cut.narrow is None else value.narrow(*cut.narrow)

    def create_local_plan(self) -> SavePlan:
        return self.plan

    def copy_into(self, buffers: dict[MetadataIndex, torch.Tensor], only: SavePlan | None = None) -> None:
        """Copies the tensors that are to be written to host memory, all of them, those that are there already too.

        Returns when the copies are complete. Later changes of the tensors do not reach them.

        Args:
            buffers: Memory to copy into, reused from call to call and filled up here; one that no longer fits is
                replaced. New memory costs far more than the copy.
            only: Leave out what is not in this plan.
        """
        wanted = [item.index for item in (only or self.plan).items if item.tensor_data is not None]
        for gone in buffers.keys() - set(wanted):
            del buffers[gone]
        devices = set()
        copied: dict[MetadataIndex, torch.Tensor | bytes] = {
            index: value for index, value in self.data.items() if isinstance(value, bytes)
        }
        for index in wanted:
            value = self.data[index]
            assert isinstance(value, torch.Tensor)
            buffer = buffers.get(index)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = buffers[index] = host_buffer(value)
            buffer.copy_(value, non_blocking=value.device.type != "cpu")
            devices.add(value.device)
            copied[index] = buffer
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
        self.data = copied
        self.state_dict = {}  # the tensors themselves may go: nobody but their owner decides how long they live

    def create_plans(self, ranks: Iterable[LocalPlan]) -> tuple[list[SavePlan], Metadata]:
        """On rank 0, what every rank is to write, each item once, and torch's index of the whole."""
        ranks = list(ranks)
        unequal = frozenset().union(*(rank.unequal for rank in ranks))
        return self.create_global_plan(_write_once([rank.plan for rank in ranks], unequal))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self.data[write_item.index]
        return io.BytesIO(value) if isinstance(value, bytes) else value.contiguous()


def host_buffer(like: torch.Tensor) -> torch.Tensor:
    """Memory of the host for one tensor: pinned for a tensor on a device, so that the copy runs at full speed."""
    pinned = like.device.type == "cuda"
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)


def _held(value: Any) -> tuple[Any, Any]:
    """How a value is laid out, comparable with that of an earlier state, and the part of it that this rank holds."""
    if isinstance(value, DTensor):
        local = value.to_local().detach()
        return (value.shape, value.dtype, value.placements, value.device_mesh, local.shape), local
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype), value.detach()
    return None, value


@dataclasses.dataclass(frozen=True)
class _Cut:
    """One item of a plan, and the part of the local tensor that it is: dimension, start, length; None is all."""

    item: WriteItem
    narrow: tuple[int, int, int] | None = None


def _cuts(item: WriteItem, value: Any) -> Iterator[_Cut]:
    """Cuts a shard along its first dimension that is long enough; leaves out one that holds nothing.

    A rank whose shard is empty reports it at an offset where another rank's shard may really begin; of two items at
    one offset only one is written (pytorch#150862), so the empty one must not be there at all.
    """
    data = item.tensor_data
    if data is None:
        yield _Cut(item)
        return
    if math.prod(data.chunk.sizes) == 0 and math.prod(data.size) > 0:
        return
    count = min(math.ceil(value.nbytes / PIECE_BYTES), max(value.shape, default=1))
    if count <= 1:
        yield _Cut(dataclasses.replace(item, type=WriteItemType.SHARD))
        return
    dim = next(dim for dim, size in enumerate(value.shape) if size >= count)
    length = math.ceil(value.shape[dim] / count)
    for start in range(0, value.shape[dim], length):
        offsets, sizes = list(data.chunk.offsets), list(value.shape)
        offsets[dim] += start
        sizes[dim] = min(length, value.shape[dim] - start)
        tensor_data = dataclasses.replace(data, chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        index = MetadataIndex(item.index.fqn, offsets)
        yield _Cut(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=tensor_data), (dim, start, sizes[dim]))


def _unequal(state_dict: dict[str, Any]) -> Iterator[str]:
    from lightning_dist.checkpoint.optimizer_state import names_in_optimizers

    trained = names_in_optimizers(state_dict)
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and name not in trained:
            yield name


def _write_once(plans: list[SavePlan], unequal: frozenset[str]) -> list[SavePlan]:
    """Leaves each item with one of the ranks that have it: the lowest, or the one with the least to write so far."""
    owners: dict[MetadataIndex, list[int]] = {}
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            owners.setdefault(item.index, []).append(rank)
            sizes[item.index] = item.tensor_storage_size() or 1
    load = [0] * len(plans)
    writer: dict[MetadataIndex, int] = {}
    for index, ranks in owners.items():
        if len(ranks) == 1 or index.offset is None or index.fqn in unequal:
            writer[index] = ranks[0]
            load[ranks[0]] += sizes[index]
    for index in sorted(owners.keys() - writer.keys(), key=lambda index: (-sizes[index], index.fqn, index.offset)):
        writer[index] = min(owners[index], key=lambda rank: load[rank])
        load[writer[index]] += sizes[index]
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if writer[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]
