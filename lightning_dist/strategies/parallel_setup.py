"""From a LightningModule and a layout to this rank's part of it: the plan completed, then applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_dist.layout import ParallelLayout
from lightning_dist.parallel.apply import ParallelModule, ParallelSettings, parallelise, parallelise_stages
from lightning_dist.parallel.expert import check_beside_other_axes, experts_within, find_experts, leave_experts_out
from lightning_dist.parallel.pipeline import PipelinePlan, plan_pipeline
from lightning_dist.parallel.pipeline.checks import find_refusal
from lightning_dist.parallel.pipeline.costs import module_costs
from lightning_dist.parallel.pipeline.trace import Tracer
from lightning_dist.plan import ModelPlan, expand_names
from lightning_dist.plan.chain import find_chain
from lightning_dist.plan.huggingface import complete_tensor_plan
from lightning_dist.plan.units import find_network, find_units
from lightning_dist.strategies.context_steps import prepare_context
from lightning_dist.strategies.process_groups import ProcessGroups

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


@dataclass(frozen=True)
class ModuleSetup:
    """What was made of a module, and what its first step is still to be checked with under a pipeline."""

    made: ParallelModule
    tracer: Tracer | None = None
    shared: tuple[str, ...] = ()


def make_parallel(
    module: LightningModule,
    written: ModelPlan | None,
    layout: ParallelLayout,
    groups: ProcessGroups,
    settings: ParallelSettings,
    device: torch.device,
    *,
    pipeline_schedule: str,
    convert: Callable[[nn.Module], nn.Module],
) -> ModuleSetup:
    """Finds what the plan leaves open, refuses what does not fit, and turns the module into this rank's part of it.

    Collectives: those of :func:`~lightning_dist.parallel.apply.parallelise` or ``parallelise_stages``.

    Args:
        module: The whole module.
        written: The user's plan; None asks the module's ``parallel_plan()``, or finds everything.
        layout: The resolved layout.
        groups: Its process groups.
        settings: How units are treated.
        device: This rank's device.
        pipeline_schedule: Name of the schedule, where there is a pipeline.
        convert: Changes a module's precision.

    Raises:
        ValueError: On every rank alike, before anything is changed.
    """
    plan = written
    if plan is None and callable(getattr(module, "parallel_plan", None)):
        plan = module.parallel_plan()  # type: ignore[operator]
    units = find_units(module, plan)
    experts = _experts(module, plan, layout.expert) if layout.expert > 1 else []
    tensor_plan = _tensor_plan(module, plan, experts) if layout.tensor > 1 else None
    check_beside_other_axes(module, layout, experts, tensor_plan)
    stages = _Stages.find(module, plan or ModelPlan(), layout, pipeline_schedule) if layout.pipeline > 1 else None
    context = None
    if layout.context > 1:
        assert groups.mesh is not None
        context = prepare_context(find_network(module, plan)[1], plan, groups.mesh)
    if stages is not None:
        assert groups.mesh is not None
        made = parallelise_stages(
            module,
            units,
            stages.plan,
            layout,
            groups.mesh,
            device,
            settings,
            convert=convert,
            tensor_plan=tensor_plan,
            experts=experts,
            token_group=groups.tokens,
            stage_group=groups.stage,
            shared=stages.shared,
        )
    else:
        made = parallelise(
            module,
            units,
            layout,
            groups.mesh,
            device,
            settings,
            convert=convert,
            tensor_plan=tensor_plan,
            experts=experts,
            token_group=groups.tokens,
            roots=_roots(module) if layout.data_size > 1 else [],
            root_methods=[step for step in STEPS if is_overridden(step, module)],
        )
    if context is not None and plan is not None:
        made = replace(made, context=context, sequence_dims=plan.sequence_dims)
    if stages is None:
        return ModuleSetup(made)
    return ModuleSetup(made, stages.tracer, stages.shared)


@dataclass(frozen=True)
class _Stages:
    """The pipeline's stages, and a copy of the module as it was before anything was cut, to trace its first step."""

    plan: PipelinePlan
    tracer: Tracer
    shared: tuple[str, ...]

    @staticmethod
    def find(module: LightningModule, plan: ModelPlan, layout: ParallelLayout, schedule: str) -> _Stages:
        chain = find_chain(module, plan)
        costs = module_costs(module, chain.names)
        stages = plan_pipeline(chain.names, layout.pipeline, schedule, costs=costs, sizes=chain.sizes)
        refusal = find_refusal(module, stages)
        if refusal is not None:
            raise ValueError(refusal)
        prefix, _ = find_network(module, plan)
        shared = tuple(f"{prefix}.{name}" if prefix else name for name in plan.shared or ())
        return _Stages(stages, Tracer(module, chain.names, keep=[module.trainer]), shared)


def _experts(module: LightningModule, plan: ModelPlan | None, size: int) -> list[str]:
    """Full names of the modules that hold experts: the plan's, or those that are found."""
    prefix, network = find_network(module, plan)
    written = plan.experts if plan is not None else None
    if written is not None:
        found = experts_within(network, expand_names(network, written, "experts"))
    else:
        found = find_experts(network)
    if not found:
        raise ValueError(
            f"expert_parallel_size={size}: no experts were found in {type(network).__name__}; name the modules in"
            " ModelPlan.experts (a MixtureOfExperts of lightning_dist.parallel.expert, or stacked experts of a Hugging"
            " Face model)."
        )
    return [f"{prefix}.{name}" if prefix else name for name in found]


def _tensor_plan(module: LightningModule, plan: ModelPlan | None, experts: Sequence[str]) -> dict[str, Any]:
    """The plan's styles, or those that are found, by names relative to the module; experts see to themselves."""
    prefix, network = find_network(module, plan)
    found = complete_tensor_plan(network, plan.tensor if plan is not None else None)
    styles = {".".join(filter(None, (prefix, name))): style for name, style in found.items()}
    return leave_experts_out(module, styles, experts) if experts else styles


def _roots(module: LightningModule) -> list[nn.Module]:
    """What FSDP2 sees as outermost: the module, so that its steps may use any part of it; its parts where a step
    calls backward by itself, for FSDP2 must have left the root's forward by then."""
    if module.automatic_optimization:
        return [module]
    loose = [name for name, _ in module.named_parameters(recurse=False)]
    if loose:
        raise ValueError(
            f"{type(module).__name__} uses manual optimization and holds parameters itself ({', '.join(loose)}),"
            " which can't be sharded; put them into a submodule."
        )
    return [child for child in module.children() if any(True for _ in child.parameters())]
