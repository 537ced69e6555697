"""Data parallelism inside a pipeline: FSDP2 on the stages, and an average for what FSDP2 leaves whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_dist import _compat
from lightning_dist.parallel.pipeline.attach import AttachedPipeline


def shard_stages(
    pipeline: AttachedPipeline,
    mesh: DeviceMesh,
    *,
    units: Sequence[str] = (),
    reshard_after_forward: bool = False,
    ignored: Iterable[nn.Parameter] = (),
) -> None:
    """Shards this rank's stages over the data axes: each chain module is a unit, each stage a root.

    Parameters outside the chain, and those tied between its modules, stay whole (`average_loose_gradients`).

    Collectives: as ``fully_shard``: an all-gather for each unit and batch, a reduce-scatter or all-reduce for each
    unit and optimizer step.

    Args:
        pipeline: The attached module.
        mesh: Mesh with axes ``replicate``, ``shard``, or both.
        units: Full names of modules inside chain modules to gather one at a time as well.
        reshard_after_forward: Whether a unit's parameters are freed between forward and backward, which costs an
            all-gather for each microbatch.
        ignored: Parameters that are left as they are (experts that are spread over ranks).

    Raises:
        ValueError: If parameters are to be freed after forward under a schedule that splits the backward: torch 2.13
            computes wrong gradients then; or if a unit holds more than one chain module.
    """
    plan = pipeline.plan
    if reshard_after_forward and plan.schedule.splits_backward:
        raise ValueError(
            f"reshard_after_forward=True does not fit pipeline_schedule={plan.schedule.name!r}: torch computes wrong"
            " gradients when parameters are freed before a backward that is split in two; use 'auto' or False, or one"
            " of GPipe, 1F1B, Interleaved1F1B."
        )
    axes = mesh.mesh_dim_names or ()
    loose = {*pipeline.loose_parameters, *ignored}

    def shard(module: nn.Module) -> None:
        if isinstance(module, FSDPModule):
            return
        if axes == ("replicate",):
            _compat.replicate_module(module, mesh=mesh, ignored_params=loose)
        else:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, ignored_params=loose)

    local = [name for position, name in enumerate(plan.chain) if pipeline.dispatcher.is_local(position)]
    for unit in sorted(units, key=lambda name: -name.count(".")):
        spans = [name for name in plan.chain if name.startswith(f"{unit}.")]
        if len(spans) > 1 or not unit:
            raise ValueError(
                f"The FSDP unit {unit!r} holds {len(spans)} modules of the pipeline's chain, so it would span a cut;"
                " name the chain's modules, or modules inside them, in ModelPlan.shard."
            )
        if any(unit.startswith(f"{name}.") for name in local):
            shard(pipeline.module.get_submodule(unit))
    for name in local:
        link = pipeline.module.get_submodule(name)
        if any(parameter not in loose for parameter in link.parameters()):
            shard(link)
    for stage in pipeline.stages:
        shard(stage)


def average_loose_gradients(pipeline: AttachedPipeline, mesh: DeviceMesh) -> None:
    """Averages over the data ranks the gradients of parameters that FSDP2 does not manage.

    Collectives: one all-reduce of all of them for each type, on the group of ``mesh``'s axes taken together.
    """
    names = mesh.mesh_dim_names or ()
    group = _compat.flatten_mesh(mesh, names, "data").get_group()
    size = dist.get_world_size(group)
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in pipeline.loose_parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for same in by_dtype.values():
        flat = torch.cat(
            [
                (parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)).reshape(-1)
                for parameter in same
            ]
            + [
                torch.tensor(
                    [parameter.grad is not None for parameter in same], dtype=same[0].dtype, device=same[0].device
                )
            ]
        )
        dist.all_reduce(flat, group=group)
        *parts, used = flat.split([parameter.numel() for parameter in same] + [len(same)])
        for parameter, part, count in zip(same, parts, used.tolist(), strict=True):
            if count:
                parameter.grad = (part / size).view_as(parameter)
