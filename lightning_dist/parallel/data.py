"""Data parallelism: equal weights to begin with, then whole copies, FSDP2 shards, or both (HSDP)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from lightning_dist import _compat

ReshardAfterForward = bool | int | Literal["auto"]


def equalise_weights(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Gives every rank of ``group`` the parameters and buffers of its first rank, as DDP does.

    Ranks that were not seeded alike would otherwise train a mixture of models: each rank shards its own. Parameters
    that are sharded already (DTensor) are passed over.

    Collectives: broadcasts of every parameter and buffer over ``group`` (None is the world).
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor):
            by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for same_dtype in by_dtype.values():
        _compat.broadcast_flattened(same_dtype, group, 0)


def shard_module(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: ReshardAfterForward = "auto",
    root: bool = False,
    ignored: Collection[nn.Parameter] = (),
) -> None:
    """Shards what is not yet sharded of ``module``, as one unit, over the data axes of ``mesh``.

    Follows ``torch.distributed.fsdp.fully_shard``. With a ``shard`` axis each rank holds 1/shard of every parameter;
    with a ``replicate`` axis beside it this is HSDP; with ``replicate`` alone each rank holds a whole copy.

    Collectives per step: an all-gather over ``shard`` in forward (and in backward where the unit was freed), a
    reduce-scatter over ``shard`` and an all-reduce over ``replicate`` in backward.

    Args:
        module: Its class is swapped by torch for one that gathers and frees parameters.
        mesh: Mesh with axes ``replicate``, ``shard``, or both, maybe beside others.
        reshard_after_forward: Free the parameters after forward (True, ZeRO-3), keep them until backward (False,
            ZeRO-2), or reshard to a smaller group of that many ranks (int); ``"auto"`` is True.
        root: Whether it is the outermost unit. Its parameters are the first that backward needs, so freeing them after
            forward would only gather them twice.
        ignored: Parameters that are left as they are (experts that are spread over ranks).
    """
    axes = tuple(axis for axis in ("replicate", "shard") if axis in (mesh.mesh_dim_names or ()))
    if axes == ("replicate",):
        _compat.replicate_module(module, mesh=mesh["replicate"], ignored_params=set(ignored))
        return
    reshard: bool | int | None = True if reshard_after_forward == "auto" else reshard_after_forward
    if root and reshard is not False:
        reshard = None
    fully_shard(module, mesh=mesh[axes], reshard_after_forward=reshard, ignored_params=set(ignored))


def make_root(root: nn.Module, methods: Iterable[str]) -> None:
    """Lets ``methods`` of ``root`` gather and free its parameters as its forward does."""
    for method in methods:
        register_fsdp_forward_method(root, method)
    _compat.initialise_fsdp_root(root)


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


def set_gradient_sync(units: Iterable[FSDPModule], enabled: bool) -> None:
    """Says whether the next backward exchanges gradients over the data axes, or keeps them for a later one."""
    for unit in units:
        unit.set_requires_gradient_sync(enabled, recurse=False)


def free_gathered(units: Iterable[FSDPModule]) -> None:
    """Frees parameters that a forward without backward (evaluation) has left gathered."""
    for unit in units:
        unit.reshard()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor's storage, sharing memory; no gradient flows through it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
