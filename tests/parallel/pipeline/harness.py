"""Runs a module through the pipeline on every rank, and through plain torch on one, for comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist import _compat
from lightning_dist.layout import ParallelLayout
from lightning_dist.parallel.pipeline import (
    PipelineRunner,
    RandomStreams,
    attach_pipeline,
    plan_pipeline,
    sum_shared_gradients,
)
from lightning_dist.parallel.pipeline.sharding import average_loose_gradients, shard_stages

Step = Callable[[nn.Module, Any], Any]


def train_pipeline(
    factory: Callable[[], nn.Module],
    step: Step,
    batches: list[Any],
    chain: Sequence[str],
    schedule: str = "1F1B",
    layout: str = "pp=2",
    *,
    microbatches: int | str = 4,
    accumulate: int = 1,
    learning_rate: float = 0.1,
    sizes: Sequence[int] | None = None,
    shared: Sequence[str] = (),
    reshard_after_forward: bool = False,
    weight: Callable[[Any], float] | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """SGD over ``batches`` (each split over the data ranks) on a layout; the weights this rank has and the losses."""
    resolved = ParallelLayout.parse(layout).resolve(dist.get_world_size())
    mesh = resolved.build_mesh("cpu")
    coordinate = resolved.data_coordinate(dist.get_rank())
    group = mesh["pipeline"].get_group() if "pipeline" in (mesh.mesh_dim_names or ()) else _alone()
    rank = dist.get_group_rank(group, dist.get_rank())
    module = factory()
    plan = plan_pipeline(chain, resolved.pipeline, schedule, sizes=sizes)
    pipeline = attach_pipeline(module, plan, rank, global_ranks=dist.get_process_group_ranks(group), shared=shared)
    data_axes = tuple(axis for axis in ("replicate", "shard") if axis in (mesh.mesh_dim_names or ()))
    if data_axes:
        shard_stages(pipeline, mesh[data_axes], reshard_after_forward=reshard_after_forward)
    streams = RandomStreams(seed, coordinate, torch.device("cpu")) if seed is not None else None
    runner = PipelineRunner(pipeline, group, group, torch.device("cpu"), streams=streams, microbatches=microbatches)
    parameters = dict(module.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=learning_rate)
    losses = []
    for index, batch in enumerate(batches):
        start = index - index % accumulate
        window = min(accumulate, len(batches) - start)
        last = index == start + window - 1
        mine = _data_part(batch, coordinate, resolved.data_size)
        cut = runner.split(mine)
        weights = [weight(part) for part in cut.parts] if weight else cut.shares
        total = sum(weights)
        if weight and data_axes:
            everyone = torch.tensor(float(total))
            dist.all_reduce(everyone, group=_data_group(mesh, data_axes))
            total = float(everyone) / resolved.data_size
        outputs = runner.train(
            cut,
            lambda part, k: step(module, part),
            scales=[value / total / window for value in weights],
            step_index=index,
            reduce_gradients=last,
        )
        part = torch.tensor(
            runner.share(
                sum(value * float(loss) for value, loss in zip(weights, outputs, strict=True) if value) / total
                if outputs is not None
                else None
            ),
            dtype=torch.float64,
        )
        if data_axes:
            dist.all_reduce(part, group=_data_group(mesh, data_axes))
        losses.append(float(part) / resolved.data_size)
        if last:
            if data_axes:
                average_loose_gradients(pipeline, mesh[data_axes])
            sum_shared_gradients(pipeline.ownership, parameters, group, group)
            optimizer.step()
            optimizer.zero_grad()
    weights_now = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in module.state_dict().items()
    }
    return {"weights": weights_now, "losses": losses, "plan": plan.describe()}


def train_schedules(*args: Any, schedules: Sequence[str], **settings: Any) -> dict[str, dict[str, Any]]:
    """`train_pipeline` under several schedules one after the other, to start processes once."""
    return {schedule: train_pipeline(*args, schedule=schedule, **settings) for schedule in schedules}


def train_reference(
    factory: Callable[[], nn.Module],
    step: Step,
    batches: list[Any],
    *,
    accumulate: int = 1,
    learning_rate: float = 0.1,
) -> dict[str, Any]:
    """The same on whole batches in one process with nothing of ours."""
    module = factory()
    optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate)
    losses = []
    for index, batch in enumerate(batches):
        start = index - index % accumulate
        window = min(accumulate, len(batches) - start)
        result = step(module, batch)
        loss = result["loss"] if isinstance(result, dict) else result
        (loss / window).backward()
        losses.append(float(loss.detach()))
        if index == start + window - 1:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": copy.deepcopy(module.state_dict()), "losses": losses}


def assert_same(ranks: list[dict[str, Any]], reference: dict[str, Any], tolerance: float = 1e-9) -> None:
    """Every weight is on some rank, equal to the reference's wherever it is, and losses are equal everywhere."""
    seen: set[str] = set()
    for result in ranks:
        torch.testing.assert_close(
            torch.tensor(result["losses"], dtype=torch.float64),
            torch.tensor(reference["losses"], dtype=torch.float64),
            rtol=tolerance,
            atol=tolerance,
        )
        for name, value in result["weights"].items():
            seen.add(name)
            expected = reference["weights"][name]
            torch.testing.assert_close(
                value,
                expected,
                rtol=tolerance,
                atol=tolerance * float(expected.abs().max().clamp(min=1e-3)),
                msg=lambda text, name=name: f"{name}: {text}",
            )
    assert seen == set(reference["weights"])


def _data_part(batch: Any, coordinate: int, size: int) -> Any:
    if size == 1:
        return batch
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf[coordinate::size] if isinstance(leaf, Tensor) else leaf, batch
    )


def _data_group(mesh: Any, axes: tuple[str, ...]) -> Any:
    return _compat.flatten_mesh(mesh, axes, "data").get_group()


def _alone() -> Any:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]
