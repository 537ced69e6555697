"""Which bytes of which tensor a rank writes: torch's own plan, made early and without shards that hold nothing."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan, WriteItem


class SnapshotPlanner(DefaultSavePlanner):
    """A save planner over a state dict that may be copied first, so that it can be written while training goes on.

    Args:
        tensors: Nested state dict of tensors, DTensors and plain values, as this rank holds them.
    """

    def __init__(self, tensors: dict[str, Any]) -> None:
        super().__init__()
        self.set_up_planner(tensors)
        plan = super().create_local_plan()
        # A rank whose shard is empty reports it at an offset where another rank's shard may really begin; of two
        # items at one offset only one is written (pytorch#150862), so the empty one must not be there at all.
        self.plan = dataclasses.replace(plan, items=[item for item in plan.items if not _is_empty_shard(item)])
        # Only what a rank holds as a plain value is pickled; it is pickled now, since it may change at any time.
        self._values = {item.index: self._pickle(item) for item in self.plan.items if item.tensor_data is None}

    def create_local_plan(self) -> SavePlan:
        return self.plan

    @property
    def names(self) -> list[str]:
        """Names of everything in the state dict, nested keys joined by dots, in its own order."""
        return list(self.state_dict)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.tensor_data is None:
            return io.BytesIO(self._values[dataclasses.replace(write_item.index, index=None)])
        data = super().resolve_data(write_item)
        assert isinstance(data, torch.Tensor)
        return data.detach().contiguous()

    def _pickle(self, item: WriteItem) -> bytes:
        data = super().resolve_data(item)
        assert isinstance(data, io.BytesIO)
        return data.getvalue()


def _is_empty_shard(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and math.prod(data.chunk.sizes) == 0 and math.prod(data.size) > 0
