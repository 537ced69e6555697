"""Builds one rank of a layout in one process, among ranks that do not exist, and weighs what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_dist.advisor.candidate import Candidate, StepTime
from lightning_dist.advisor.model_reader import build_on_meta, measure_optimizer
from lightning_dist.parallel.data import shard_module
from lightning_dist.parallel.pipeline.costs import module_costs
from lightning_dist.parallel.pipeline.placement import plan_pipeline
from lightning_dist.parallel.tensor import apply_tensor_parallel
from lightning_dist.plan import ModelPlan
from lightning_dist.plan.chain import find_chain
from lightning_dist.plan.huggingface import find_tensor_plan
from lightning_dist.plan.units import find_network, find_units


@dataclass(frozen=True)
class RankHoldings:
    """What one rank of a layout holds and sends.

    Args:
        rank: The rank.
        coordinate: Where it stands on each mesh axis.
        parameters: Bytes of its parameters, measured on the module built for it.
        gradients: Bytes of its sharded gradients.
        optimizer: Bytes of its optimizer state.
        modules: Modules of the chain that it owns under a pipeline.
        intra, inter: Bytes that it is predicted to send in a step, inside its node and to others.
    """

    rank: int
    coordinate: dict[str, int]
    parameters: int
    gradients: int
    optimizer: float
    modules: tuple[str, ...]
    intra: float
    inter: float

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "modules": list(self.modules)}

    def lines(self, write: Callable[[float], str]) -> list[str]:
        """The same for people; ``write`` turns bytes into text."""
        where = ", ".join(f"{axis} {place}" for axis, place in self.coordinate.items())
        lines = [
            f"Rank {self.rank} ({where}) holds {write(self.parameters)} of parameters, {write(self.gradients)} of"
            f" gradients and {write(self.optimizer)} of optimizer state, and sends {write(self.intra)} inside its node"
            f" and {write(self.inter)} to other nodes in a step.",
        ]
        if self.modules:
            lines.append(f"Its modules: {', '.join(self.modules)}.")
        return lines


def hold(
    factory: Callable[[], Any],
    candidate: Candidate,
    rank: int,
    *,
    sends: StepTime,
    dtype: torch.dtype = torch.float32,
) -> RankHoldings:
    """Builds the module as ``rank`` of the candidate's layout would, on the meta device, and counts what it holds.

    Uses the same functions that training uses, with a process group of ranks that do not exist: no collective is sent,
    no memory taken.

    Args:
        factory: Returns the LightningModule (or it and batches).
        candidate: The layout.
        rank: The rank to build.
        sends: The prediction for the candidate, from which the bytes sent are taken.
        dtype: Of the parameters as the optimizer sees them.

    Raises:
        ValueError: If there is no such rank, or a process group exists already.
    """
    layout = candidate.layout
    if rank >= layout.world_size:
        raise ValueError(f"rank={rank} does not fit: the layout {layout} has ranks 0 to {layout.world_size - 1}.")
    if layout.expert > 1:
        raise ValueError(f"A dry run can't spread experts yet; the layout {layout} has expert={layout.expert}.")
    module, _ = build_on_meta(factory)
    module.to(dtype)
    own_plan = getattr(module, "parallel_plan", None)
    plan: ModelPlan | None = own_plan() if callable(own_plan) else None
    optimizer_bytes, _ = measure_optimizer(module)
    owned: tuple[str, ...] = ()
    with _imagined_ranks(rank, layout.world_size):
        mesh = layout.build_mesh("cpu")
        units = find_units(module, plan)
        if layout.pipeline > 1:
            assert candidate.schedule is not None
            chain = find_chain(module, plan)
            costs = module_costs(module, chain.names)
            pipeline = plan_pipeline(chain.names, layout.pipeline, candidate.schedule, costs=costs, sizes=chain.sizes)
            place = layout.coordinate(rank)["pipeline"]
            owned = tuple(name for stage in pipeline.stages_of(place) for name in pipeline.modules_of(stage))
            units = list(chain.names)
        if layout.tensor > 1:
            _, network = find_network(module, plan)
            written = dict(plan.tensor) if plan is not None and plan.tensor is not None else find_tensor_plan(network)
            apply_tensor_parallel(network, mesh, written)
        foreign = {
            parameter
            for name in units
            if owned and name not in owned
            for parameter in module.get_submodule(name).parameters()
        }
        own = {parameter for name in owned for parameter in module.get_submodule(name).parameters()}
        if layout.data_size > 1:
            for name in units:
                if not owned or name in owned:
                    shard_module(module.get_submodule(name), mesh, reshard_after_forward=candidate.zero == 3)
            if not owned:
                shard_module(module, mesh, reshard_after_forward=candidate.zero == 3, root=True)
                foreign = set()
        if owned and layout.data_size > 1:  # FSDP2 has replaced this rank's parameters, the foreign ones are untouched
            own = {parameter for name in owned for parameter in module.get_submodule(name).parameters()}
        held = [p for p in module.parameters() if p not in foreign or p in own]
        parameters = sum(_local_bytes(parameter) for parameter in held)
        trainable = sum(_local_bytes(parameter) for parameter in held if parameter.requires_grad)
    return RankHoldings(
        rank,
        layout.coordinate(rank),
        parameters,
        trainable,
        trainable * optimizer_bytes / 4,
        owned,
        sends.intra,
        sends.inter,
    )


def _local_bytes(parameter: nn.Parameter) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()


@contextmanager
def _imagined_ranks(rank: int, world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("A dry run imagines its ranks and needs a process without a process group.")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
