"""Turns a module into this rank's part of it: the order of everything that is done to it, in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lightning_dist.checkpoint.huggingface import awaits_weights, load_awaited_weights
from lightning_dist.layout import ParallelLayout
from lightning_dist.parallel import data, meta
from lightning_dist.parallel.activation import ActivationCheckpointing, checkpoint_activations
from lightning_dist.parallel.context import ContextParallel
from lightning_dist.parallel.expert import apply_expert_parallel, build_expert_mesh, share_tokens
from lightning_dist.parallel.pipeline import AttachedPipeline, PipelinePlan, attach_pipeline
from lightning_dist.parallel.pipeline.ownership import equalise_shared
from lightning_dist.parallel.pipeline.sharding import shard_stages
from lightning_dist.parallel.tensor import TensorParallelReport, apply_tensor_parallel


@dataclass(frozen=True)
class ParallelSettings:
    """How units are treated, whatever the layout."""

    reshard_after_forward: data.ReshardAfterForward = "auto"
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: bool = False


@dataclass(frozen=True)
class ParallelModule:
    """What was made of a module, kept with it from fit to test.

    Args:
        layout: The layout it was made for.
        settings: How units were treated.
        units: The modules that are gathered one at a time.
        fsdp_modules: All modules that FSDP2 manages, the roots among them.
        names: The names of the whole module's state, in its order, of which a pipeline rank has a part.
        pipeline: The pipeline that was attached, if any.
        tensor: What tensor parallelism did, if any.
        context: The ranks that share each sequence, if any.
        sequence_dims: The entries of a batch that they cut, and along which dimension.
    """

    layout: ParallelLayout
    settings: ParallelSettings
    units: dict[str, nn.Module]
    fsdp_modules: list[FSDPModule] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    pipeline: AttachedPipeline | None = None
    tensor: TensorParallelReport | None = None
    context: ContextParallel | None = None
    sequence_dims: Mapping[str, int] | None = None


def parallelise(
    module: nn.Module,
    unit_names: Sequence[str],
    layout: ParallelLayout,
    mesh: DeviceMesh | None,
    device: torch.device,
    settings: ParallelSettings,
    *,
    convert: Callable[[nn.Module], nn.Module],
    tensor_plan: Mapping[str, Any] | None,
    experts: Sequence[str],
    token_group: dist.ProcessGroup | None,
    roots: Sequence[nn.Module],
    root_methods: Sequence[str],
) -> ParallelModule:
    """Unit by unit: memory, precision, equal weights, checkpointing, compile, shard; then what is left.

    Tensor and expert parallelism need all layers in memory before the first is cut or spread, for initial weights must
    not depend on the layout. Layers that get theirs from a folder are cut without memory.

    Collectives: broadcasts of all parameters and buffers over the world.

    Args:
        module: The whole module, its parameters real or on the meta device.
        unit_names: The modules that are gathered and freed one at a time, relative to ``module``.
        layout: The resolved layout.
        mesh: Its mesh, or None in a world of one.
        device: This rank's device.
        settings: How units are treated.
        convert: Changes a module's precision.
        tensor_plan: Tensor-parallel style of modules, relative to ``module``; None without tensor parallelism.
        experts: Names of the modules whose experts are spread over ranks.
        token_group: The ranks that see other tokens, which routers count together; None if there is only one.
        roots: The outermost modules to shard: ``module`` itself, or parts that cover it.
        root_methods: Methods of ``module`` that use its parameters as its forward does, where it is the root.
    """
    names = list(module.state_dict())
    units = {name: module.get_submodule(name) for name in unit_names}
    initialise = meta.initialiser_of(module)
    sharded = mesh is not None and layout.data_size > 1

    def make_real(part: nn.Module, name: str) -> None:
        if meta.has_meta_tensors(part):
            meta.materialise(part, device, initialise, name)
        convert(part)
        part.to(device)
        if dist.is_initialized():
            data.equalise_weights(part)

    report = None
    ignored: list[nn.Parameter] = []
    if experts or (tensor_plan is not None and not awaits_weights(module)):
        make_real(module, "")
    if experts:
        ignored = _spread_experts(module, experts, layout, device, settings.reshard_after_forward)
    if tensor_plan is not None:
        assert mesh is not None
        report = apply_tensor_parallel(module, mesh, tensor_plan)
        _refuse_experts_on_dtensors(report, experts)
    if token_group is not None:
        share_tokens(module, token_group)
    for name, unit in units.items():
        make_real(unit, name)
        # Checkpointing inside compile, so that the compiler sees what is computed again; both inside FSDP2's hooks.
        checkpoint_activations([unit], settings.activation_checkpointing)
        if settings.compile:
            unit.compile()
        if sharded:
            assert mesh is not None
            data.shard_module(unit, mesh, reshard_after_forward=settings.reshard_after_forward, ignored=ignored)
    make_real(module, "")
    if not sharded:
        load_awaited_weights(module)
        return ParallelModule(layout, settings, units, names=names, tensor=report)
    assert mesh is not None
    for root in roots:
        if not isinstance(root, FSDPModule):
            data.shard_module(
                root, mesh, reshard_after_forward=settings.reshard_after_forward, root=True, ignored=ignored
            )
        data.make_root(root, root_methods if root is module else ())
    load_awaited_weights(module)
    return ParallelModule(layout, settings, units, data.fsdp_modules(module), names, tensor=report)


def parallelise_stages(
    module: nn.Module,
    unit_names: Sequence[str],
    plan: PipelinePlan,
    layout: ParallelLayout,
    mesh: DeviceMesh,
    device: torch.device,
    settings: ParallelSettings,
    *,
    convert: Callable[[nn.Module], nn.Module],
    tensor_plan: Mapping[str, Any] | None,
    experts: Sequence[str],
    token_group: dist.ProcessGroup | None,
    stage_group: dist.ProcessGroup | None,
    shared: Sequence[str],
) -> ParallelModule:
    """Keeps this rank's stages: attach, memory, precision, equal weights, checkpointing, compile, shard.

    Collectives: broadcasts of this rank's parameters and buffers over the ranks of its stages, and those of
    :func:`~lightning_dist.parallel.pipeline.ownership.equalise_shared`.

    Args:
        module: The whole module, its parameters real or on the meta device.
        unit_names: Modules inside the chain's modules that are gathered one at a time as well.
        plan: Stages and ranks.
        layout: The resolved layout.
        mesh: Its mesh.
        device: This rank's device.
        settings: How units are treated; ``reshard_after_forward="auto"`` is False here, for every microbatch would
            gather again.
        convert: Changes a module's precision.
        tensor_plan: Tensor-parallel style of modules, relative to ``module``; None without tensor parallelism.
        experts: Names of the modules whose experts are spread over ranks, inside modules of the chain.
        token_group: The ranks that see other tokens, which routers count together; None if there is only one.
        stage_group: The ranks that have the same stages; None if this rank alone has them.
        shared: Full names of parameters that every stage is to have.
    """
    rank = mesh.get_local_rank("pipeline")
    own_experts = _experts_of(plan, rank, experts)
    reshard = settings.reshard_after_forward is True
    names = list(module.state_dict())
    report = None
    ignored: list[nn.Parameter] = []
    if tensor_plan is not None:
        # Layers are cut before stages drop theirs, for the plan is one of the whole network.
        if experts or not awaits_weights(module):
            if meta.has_meta_tensors(module):
                meta.materialise(module, device, meta.initialiser_of(module))
            convert(module)
            module.to(device)
            data.equalise_weights(module)
        if experts:
            ignored = _spread_experts(module, own_experts, layout, device, reshard)
        report = apply_tensor_parallel(module, mesh, tensor_plan)
        _refuse_experts_on_dtensors(report, experts)
    group = mesh["pipeline"].get_group()
    initialise = meta.initialiser_of(module)
    pipeline = attach_pipeline(module, plan, rank, global_ranks=dist.get_process_group_ranks(group), shared=shared)
    if meta.has_meta_tensors(module):
        meta.materialise(module, device, initialise)
    convert(module)
    module.to(device)
    if stage_group is not None:
        data.equalise_weights(module, stage_group)
    if tensor_plan is None:  # else the whole module has been made equal before it was cut
        equalise_shared(pipeline.ownership, module, group)
        if experts:
            ignored = _spread_experts(module, own_experts, layout, device, reshard)
    if token_group is not None:
        share_tokens(module, token_group)
    local = [name for position, name in enumerate(plan.chain) if pipeline.dispatcher.is_local(position)]
    inner = [unit for unit in unit_names if any(unit.startswith(f"{name}.") for name in local)]
    treated = [module.get_submodule(name) for name in (inner or local)]
    checkpoint_activations(treated, settings.activation_checkpointing)
    if settings.compile:
        for unit in treated:
            unit.compile()
    axes = tuple(axis for axis in ("replicate", "shard") if axis in (mesh.mesh_dim_names or ()))
    if axes:
        shard_stages(pipeline, mesh[axes], units=inner, reshard_after_forward=reshard, ignored=ignored)
        for stage in pipeline.stages:
            data.make_root(stage, ())
    load_awaited_weights(module)
    managed = [unit for stage in pipeline.stages for unit in data.fsdp_modules(stage)]
    return ParallelModule(layout, settings, {}, managed, names, pipeline, report)


def _spread_experts(
    module: nn.Module,
    names: Sequence[str],
    layout: ParallelLayout,
    device: torch.device,
    reshard_after_forward: data.ReshardAfterForward,
) -> list[nn.Parameter]:
    """Spreads experts, averaging as the data axes do; returns the parameters that FSDP2 must leave alone."""
    mesh = build_expert_mesh(layout, device.type)
    return apply_expert_parallel(
        module, names, mesh, gradient_divisor=layout.data_size, reshard_after_forward=reshard_after_forward
    ).whole_parameters


def _experts_of(plan: PipelinePlan, rank: int, experts: Sequence[str]) -> list[str]:
    """The experts inside chain modules of pipeline rank ``rank``."""
    owners = {
        name: next((link for link in plan.chain if name == link or name.startswith(f"{link}.")), None)
        for name in experts
    }
    outside = [name for name, link in owners.items() if link is None]
    if outside:
        raise ValueError(
            f"{outside[0]} holds experts outside the pipeline's chain ({', '.join(plan.chain)}), where every stage"
            " would have them; name the module around them in ModelPlan.pipeline."
        )
    own = {name for stage in plan.stages_of(rank) for name in plan.modules_of(stage)}
    return [name for name, link in owners.items() if link in own]


def _refuse_experts_on_dtensors(report: TensorParallelReport, experts: Sequence[str]) -> None:
    for name in experts:
        block = next((block for block in report.on_dtensors if not block or name.startswith(f"{block}.")), None)
        if block is not None:
            raise ValueError(
                f"The tensor plan runs {block or 'the whole network'} on DTensors, which spread experts inside it"
                f" ({name}) can't take; let its code take sizes from its tensors, or give it the style 'local_shapes'."
            )
