"""What can be seen of a module before anything runs that a pipeline could not do exactly: refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule

from lightning_dist.parallel.pipeline.placement import PipelinePlan


def find_refusal(module: nn.Module, plan: PipelinePlan) -> str | None:
    """The first thing in ``module`` that a pipeline can't do exactly, as a sentence, or None. The same on every rank.

    Args:
        module: The whole module (the LightningModule), as the user made it.
        plan: Stages and ranks.
    """
    checks: tuple[Callable[[nn.Module, PipelinePlan], str | None], ...] = (
        _own_backward,
        _statistics_outside,
        _unit_across_a_cut,
        _hooks,
    )
    return next((sentence for check in checks if (sentence := check(module, plan)) is not None), None)


def _own_backward(module: nn.Module, plan: PipelinePlan) -> str | None:
    if getattr(module, "automatic_optimization", True) is False:
        return (
            f"{type(module).__name__} uses manual optimization, which a pipeline can't run: its schedule decides when"
            " each stage goes backward. Use automatic optimization, or another layout."
        )
    for kind in type(module).__mro__:
        if "backward" in vars(kind):
            if kind.__module__.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_dist"):
                return None
            return (
                f"{type(module).__name__} overrides backward, which a pipeline's schedule would never call; move what"
                " it does into training_step or on_after_backward, or use another layout."
            )
    return None


def _statistics_outside(module: nn.Module, plan: PipelinePlan) -> str | None:
    links = tuple(f"{name}." for name in plan.chain)
    for name, inner in module.named_modules():
        if getattr(inner, "running_mean", None) is None or f"{name}.".startswith(links):
            continue
        return (
            f"{name} keeps running statistics but is in no module of the pipeline's chain, so stages that do not have"
            " its input would spoil them; name it, or the module that holds it, in ModelPlan.pipeline."
        )
    return None


def _unit_across_a_cut(module: nn.Module, plan: PipelinePlan) -> str | None:
    for name, inner in module.named_modules():
        stages = {
            stage
            for link, stage in zip(plan.chain, plan.stage_of, strict=True)
            if not name or link.startswith(f"{name}.")
        }
        if len(stages) < 2:
            continue
        kind = (
            "compiled"
            if getattr(inner, "_compiled_call_impl", None) is not None or hasattr(inner, "_orig_mod")
            else "checkpointed"
            if isinstance(inner, CheckpointWrapper)
            else "sharded (FSDP)"
            if isinstance(inner, FSDPModule)
            else "scripted"
            if type(inner).__name__ in ("RecursiveScriptModule", "ScriptModule")
            else None
        )
        if kind is not None:
            return (
                f"{name or type(module).__name__} is {kind} as one unit, but a cut of the pipeline goes through it;"
                " leave that to the strategy, which does it for each module of the chain."
            )
    return None


def _hooks(module: nn.Module, plan: PipelinePlan) -> str | None:
    for link, stage in zip(plan.chain, plan.stage_of, strict=True):
        if stage == plan.num_stages - 1:
            continue
        for name, inner in module.get_submodule(link).named_modules():
            for hook in _users_hooks(inner):
                where = ".".join(filter(None, (link, name)))
                return (
                    f"{where} has a hook ({getattr(hook, '__qualname__', type(hook).__name__)}), but it is on stage"
                    f" {stage} of the pipeline, and the step ends on stage {plan.num_stages - 1}, where the hook never"
                    " runs; put what it does into the module, or remove it."
                )
    return None


def _users_hooks(module: nn.Module) -> Iterator[Any]:
    """Hooks of the user's; those of torch's own (weight_norm, parametrisations) work inside their module."""
    for registry in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        for hook in getattr(module, registry).values():
            if not (getattr(hook, "__module__", None) or type(hook).__module__ or "").startswith("torch."):
                yield hook
