"""A block of hand-written code on DTensors: it sees whole shapes, each rank holds and computes its part.

Attention written by hand often names its full sizes (``view(batch, length, self.heads, width // self.heads)``), which
fails or, worse, passes on a part. On DTensors the same code means what it meant on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lightning_dist.parallel.tensor.shards import Forward, as_dtensor, distribute_parameter, override_forward
from lightning_dist.parallel.tensor.styles import TensorGroup, matrix_dims

_scaled_dot_product_attention = F.scaled_dot_product_attention  # by its own name: context parallelism replaces it
_DROPOUTS = (F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout)


def run_on_dtensors(block: nn.Module, group: TensorGroup, placements: Mapping[str, Mapping[str, Placement]]) -> None:
    """Distributes the block's parameters and runs its forward on DTensors, with plain tensors at its border.

    Inputs, buffers and tensors made inside count as replicated. Where code mixes parts in a way that needs the whole
    (a fused projection split in three), torch gathers it: right, if slower. What DTensor cannot do raises.

    Collectives per call: an all-reduce for each matrix that is cut by its inputs, in backward one for each input of a
    matrix that is cut by its outputs, and what torch adds to make shapes meet.

    Args:
        block: The module; all parameters inside are distributed.
        group: The tensor group.
        placements: For modules inside, by name: the placement of each of their parameters; the rest is replicated.
    """
    for name, module in block.named_modules():
        for parameter in list(module._parameters):
            placement = placements.get(name, {}).get(parameter, Replicate())
            distribute_parameter(module, parameter, group.mesh, placement)

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        args, kwargs = tree_map(partial(_replicated, mesh=group.mesh), (args, kwargs))
        with _GlobalShapes(group):
            output = original(*args, **kwargs)
        return tree_map(_plain, output)

    override_forward(block, forward)


def run_on_plain_tensors(module: nn.Module, group: TensorGroup) -> None:
    """Gives a module inside such a block, whose own style works on plain tensors, plain inputs; no collectives
    beyond what makes an input whole."""

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        args, kwargs = tree_map(_plain, (args, kwargs))
        return tree_map(partial(_replicated, mesh=group.mesh), original(*args, **kwargs))

    override_forward(module, forward)


def column_placements(module: nn.Module) -> dict[str, Placement]:
    """A matrix cut by its outputs, an embedding by its columns."""
    if isinstance(module, nn.Embedding):
        return {"weight": Shard(1)}
    return {"weight": Shard(matrix_dims(module)[0]), "bias": Shard(0)}


def row_placements(module: nn.Module) -> dict[str, Placement]:
    """A matrix cut by its inputs."""
    return {"weight": Shard(matrix_dims(module)[1]), "bias": Replicate()}


def _replicated(value: Any, mesh: DeviceMesh) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.redistribute(placements=[Replicate()]).to_local()
    return value


class _GlobalShapes(TorchFunctionMode):
    """Meets torch's functions before autograd does: plain tensors become replicated beside DTensors, attention runs
    on this rank's heads, and dropout draws its own numbers where its input is cut."""

    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        distributed = [False]

        def look(value: Any) -> None:
            distributed[0] = distributed[0] or isinstance(value, DTensor)

        tree_map(look, (args, kwargs))
        if not distributed[0]:
            return func(*args, **kwargs)
        if func is _scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in _DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        args, kwargs = tree_map(self._replicated, (args, kwargs))
        return func(*args, **kwargs)

    def _replicated(self, value: Any) -> Any:
        return _replicated(value, self._group.mesh)

    def _dropout(self, func: Callable, x: DTensor, *args: Any, **kwargs: Any) -> Any:
        (placement,) = x.placements
        if placement.is_partial():  # what is dropped must be the sum
            x = x.redistribute(placements=[Replicate()])
            (placement,) = x.placements
        local = x.to_local()
        if placement.is_replicate():
            output = func(local, *args, **kwargs)
        else:
            with self._group.random.on(local.device):
                output = func(local, *args, **kwargs)
        return as_dtensor(output, self._group.mesh, placement, x.shape)

    def _attention(
        self,
        query: DTensor,
        key: DTensor,
        value: DTensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> DTensor:
        # Batches and heads are independent of each other; anything else has to be whole.
        query, key, value = (self._replicated(x) for x in (query, key, value))
        placement = query.placements[0]
        whole = query.dim() - 2
        if not (isinstance(placement, Shard) and placement.dim < whole) or any(
            x.shape[:whole] != query.shape[:whole] for x in (key, value)
        ):
            placement = Replicate()
        query, key, value = (x.redistribute(placements=[placement]) for x in (query, key, value))
        mask = attn_mask
        if mask is not None:
            mask = self._replicated(mask)
            dim = placement.dim - query.dim() + mask.dim() if isinstance(placement, Shard) else -1
            along = dim >= 0 and mask.shape[dim] > 1
            # A mask that all heads share, if it is learnt, gets its gradient from all of them: torch sums it.
            mask = mask.redistribute(placements=[Shard(dim) if along else Replicate()])
            mask = mask.to_local(grad_placements=None if along or placement.is_replicate() else [Partial()])
        local = (query.to_local(), key.to_local(), value.to_local(), mask, dropout_p, *args)
        if dropout_p and placement.is_shard():
            with self._group.random.on(query.device):
                output = F.scaled_dot_product_attention(*local, **kwargs)
        else:
            output = F.scaled_dot_product_attention(*local, **kwargs)
        return as_dtensor(output, self._group.mesh, placement, (*query.shape[:-1], value.shape[-1]))
