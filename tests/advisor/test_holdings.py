"""Predicted parameters, gradients and optimizer state against what ranks hold after a real step, and a dry run."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_dist.advisor.candidate import Candidate, StepTime
from lightning_dist.advisor.cluster import Cluster
from lightning_dist.advisor.dry_run import hold
from lightning_dist.advisor.estimator import Estimator
from lightning_dist.advisor.model_reader import build_on_meta, read_model
from lightning_dist.layout import ParallelLayout
from lightning_dist.parallel.data import make_root, shard_module
from lightning_dist.parallel.tensor import apply_tensor_parallel
from lightning_dist.plan.huggingface import find_tensor_plan
from lightning_dist.plan.units import find_units
from tests.advisor import models

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def small():
    return models.llama(length=16, samples=2, **SIZES)


def train_a_step(layout_text):
    """Trains one step and returns the bytes of this rank's parameters, gradients and optimizer state."""
    module, batches = small()
    layout = ParallelLayout.parse(layout_text).resolve(dist.get_world_size())
    mesh = layout.build_mesh("cpu")
    units = find_units(module)
    if layout.tensor > 1:
        apply_tensor_parallel(module.model, mesh, find_tensor_plan(module.model))
    if layout.data_size > 1:
        for name in units:
            shard_module(module.get_submodule(name), mesh)
        shard_module(module, mesh, root=True)
        make_root(module, ["training_step"])
    module.log = lambda *arguments: None
    optimizer = module.configure_optimizers()
    module.training_step(batches[0], 0).backward()
    optimizer.step()
    held = list(module.parameters())

    def size(tensors):
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in local if tensor.dim())

    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return size(held), size(parameter.grad for parameter in held), size(state)


def predicted(layout_text, world_size, zero, schedule=None, microbatches=1):
    module, batch = build_on_meta(small)
    layout = ParallelLayout.parse(layout_text).resolve(world_size)
    candidate = Candidate(layout, zero, "none", schedule, microbatches)
    estimator = Estimator(read_model(module, batch), Cluster(world_size, world_size))
    return candidate, estimator, estimator.memory(candidate)


@pytest.mark.parametrize(
    ("layout", "world_size", "zero"),
    [("shard=2", 2, 3), ("replicate=2", 2, 0), ("tp=2", 2, 0), ("replicate=2,shard=2", 4, 3), ("shard=2,tp=2", 4, 3)],
)
def test_ranks_hold_what_was_predicted(pool, layout, world_size, zero):
    _, _, memory = predicted(layout, world_size, zero)
    for held in pool.run(train_a_step, world_size, layout, timeout=120):
        assert held == pytest.approx((memory.parameters, memory.gradients, memory.optimizer), rel=0.01)


@pytest.mark.parametrize(
    ("layout", "world_size", "zero", "schedule"),
    [
        ("shard=16", 16, 3, None),
        ("replicate=4,shard=4,tp=4", 64, 3, None),
        ("pp=2,shard=2,tp=2", 8, 2, "1F1B"),
        ("pp=3", 3, 0, "1F1B"),
        ("pp=2,replicate=2", 4, 0, "InterleavedZeroBubble"),
    ],
)
def test_a_dry_run_agrees_on_every_rank(layout, world_size, zero, schedule):
    candidate, estimator, memory = predicted(layout, world_size, zero, schedule, 8 if schedule else 1)
    sends = StepTime(intra=1.0, inter=2.0)
    held = {}
    for rank in range(0, world_size, max(1, world_size // 8)):
        holdings = hold(small, candidate, rank, sends=sends)
        held[holdings.coordinate["pipeline"]] = holdings.parameters
        assert holdings.gradients == holdings.parameters and holdings.optimizer == 2 * holdings.parameters
        assert (holdings.intra, holdings.inter) == (1.0, 2.0)
    stages = estimator.ranks(candidate.layout.pipeline, schedule)
    shard, tensor = candidate.layout.shard_size, candidate.layout.tensor
    elements = [stage.total.parameters.over(tensor) / shard for stage in stages]
    assert sorted(held.values()) == pytest.approx(sorted(4 * number for number in elements), rel=0.02)
    assert max(held.values()) >= 0.98 * memory.parameters
    if candidate.layout.pipeline > 1:
        assert any("layers" in name for name in hold(small, candidate, 0, sends=sends).modules)


def test_a_dry_run_of_a_rank_that_is_not_there_is_refused():
    candidate, _, _ = predicted("shard=2", 2, 3)
    with pytest.raises(ValueError, match="rank=2 does not fit"):
        hold(small, candidate, 2, sends=StepTime())
