"""Turns a whole module into the part of it that one pipeline rank runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_dist.parallel.pipeline.dispatch import ChainDispatcher, install
from lightning_dist.parallel.pipeline.foreign import drop_parameters
from lightning_dist.parallel.pipeline.ownership import Ownership, find_ownership
from lightning_dist.parallel.pipeline.placement import PipelinePlan
from lightning_dist.parallel.pipeline.stage import StageModule


@dataclass(frozen=True)
class AttachedPipeline:
    """What `attach_pipeline` made of a module.

    Args:
        module: The user's module, the same object, without the parameters of other ranks' stages.
        plan: Stages and ranks.
        dispatcher: What stands in every chain module's call.
        stages: This rank's stages in ascending order: the roots for FSDP2.
        ownership: Who has which parameter.
    """

    module: nn.Module
    plan: PipelinePlan
    dispatcher: ChainDispatcher
    stages: tuple[StageModule, ...]
    ownership: Ownership

    @property
    def loose_parameters(self) -> list[nn.Parameter]:
        """Parameters outside the chain or tied between its modules, which FSDP2 can't shard: whole on each rank."""
        return [parameter for name, parameter in self.module.named_parameters() if name in self.ownership.loose]


def attach_pipeline(
    module: nn.Module,
    plan: PipelinePlan,
    rank: int,
    *,
    global_ranks: Sequence[int] | None = None,
    shared: Sequence[str] = (),
) -> AttachedPipeline:
    """Puts the pipeline into a module, in place, and drops the parameters and buffers of other ranks' stages.

    Names, objects and plain attributes stay, so a state dict of the ranks together is that of the whole module.
    Call it before parameters are materialised from meta, sharded or given to an optimizer. No collectives.

    Args:
        module: The module that the chain's names are relative to (the LightningModule).
        plan: Stages and ranks.
        rank: This pipeline rank.
        global_ranks: The global rank of each pipeline rank, for errors; None is the same numbers.
        shared: Full names of parameters that every stage is to have.

    Raises:
        TypeError: If a chain module's class can't be extended (a scripted module).
    """
    ownership = find_ownership(module, plan, rank, shared)
    ranks = list(global_ranks) if global_ranks is not None else list(range(plan.num_ranks))
    dispatcher = ChainDispatcher(plan, rank, ranks)
    links = [module.get_submodule(name) for name in plan.chain]
    kept = {
        id(tensor)
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        if ownership.is_local(name)
    }
    for position, (name, link) in enumerate(zip(plan.chain, links, strict=True)):
        install(link, position, dispatcher)
        if not dispatcher.is_local(position):
            drop_parameters(link, name, dispatcher.owner(position), kept)
    loose = [parameter for name, parameter in module.named_parameters() if name in ownership.loose]
    stages = tuple(
        StageModule(stage, [links[position] for position in plan.positions_of(stage)], loose)
        for stage in plan.stages_of(rank)
    )
    return AttachedPipeline(module, plan, dispatcher, stages, ownership)
