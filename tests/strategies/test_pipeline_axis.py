"""Every schedule and data layout trains an unchanged module to the numbers of one process, through the Trainer."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from tests.strategies.test_data_axes import global_steps
from tests.strategies.training import (
    Classifier,
    MaskedClassifier,
    data,
    make,
    masked_data,
    merged,
    reference,
    train,
    worst,
)

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


class Deep(Classifier):
    """Enough layers for two stages on each of two ranks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        from tests.strategies.training import Network

        self.model = Network(depth=6)


class DeepMasked(Deep, MaskedClassifier):
    pass


def sizes(layout: str) -> tuple[int, int]:
    parts = {name: int(size) for name, size in (part.split("=") for part in layout.split(","))}
    parts.pop("ep", None)  # experts share the ranks of other axes
    return math.prod(parts.values()), parts.get("replicate", 1) * parts.get("shard", 1)


def check(pool, layout, dataset, batch_size, wanted, norms=None, factory=Deep, tolerance=1e-9, **kwargs):
    world, _ = sizes(layout)
    results = pool.run(
        train, world, layout, factory, dataset, batch_size, init_process_group=False, timeout=120, **kwargs
    )
    assert worst(merged(results), wanted) < tolerance
    if norms is not None:
        for result in results:
            assert result["steps"] == len(norms)
    return results


@pytest.mark.parametrize("layout", ["pp=2", "pp=2,replicate=2", "pp=2,shard=2"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_equal_one_process(pool, schedule, layout, accumulate):
    """5 batches of 8 in windows of 1 or 3; the last window is short. Clipping makes the norm count."""
    _, data_ranks = sizes(layout)
    dataset = data(40 * data_ranks)
    clip = partial(nn.utils.clip_grad_norm_, max_norm=0.1)
    wanted, norms = reference(make(Deep), global_steps(dataset, 8, data_ranks, accumulate), clip=clip)
    check(
        pool,
        layout,
        dataset,
        8,
        wanted,
        norms,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.1,
        strategy_kwargs={"pipeline_schedule": schedule, "microbatches": 4},
    )


@pytest.mark.slow
def test_eight_ranks(pool):
    dataset = data(32)
    wanted, norms = reference(make(Deep), global_steps(dataset, 4, 4))
    check(pool, "pp=2,replicate=2,shard=2", dataset, 4, wanted, norms)


@pytest.mark.parametrize("norm_type", [1.0, math.inf])
@pytest.mark.parametrize("layout", ["pp=2", "pp=2,shard=2"])
def test_one_norm_over_stages_of_very_different_gradients(pool, layout, norm_type):
    """C01: the first factor makes one stage's gradients about 100 times the other's."""
    _, data_ranks = sizes(layout)
    dataset = data(16 * data_ranks)
    clip = partial(nn.utils.clip_grad_norm_, max_norm=1.0, norm_type=norm_type)
    wanted, norms = reference(make(Steep), global_steps(dataset, 4, data_ranks), clip=clip)
    settings = {"gradient_norm_type": norm_type}
    check(pool, layout, dataset, 4, wanted, norms, factory=Steep, gradient_clip_val=1.0, strategy_kwargs=settings)


class Steep(Deep):
    def loss(self, batch):
        x, y = batch
        return super().loss((x * 100, y))


@pytest.mark.parametrize("layout", ["pp=2", "pp=2,replicate=2"])
def test_loss_weight_over_microbatches_accumulation_and_ranks(pool, layout):
    """C08: 1, 7, 3, 0, … valid targets; some microbatches and ranks count nothing."""
    _, data_ranks = sizes(layout)
    dataset = masked_data([1, 7, 3, 0, 0, 5, 2, 8], batch_size=8)
    if data_ranks == 1:
        order = [row for start in range(0, 64, 2) for row in (start, start + 1)]
        dataset = torch.utils.data.Subset(dataset, order)
    wanted, norms = reference(make(DeepMasked), global_steps(dataset, 8, data_ranks, 2))
    check(pool, layout, dataset, 8, wanted, norms, factory=DeepMasked, accumulate_grad_batches=2)


class Tied(Deep):
    """Embedding and head are one matrix, on the first and the last stage (C13)."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model.embed = nn.Linear(6, 10, bias=False)
        self.model.head = Head(self.model.embed)


class Head(nn.Module):
    def __init__(self, embed):
        super().__init__()
        self.weight = embed.weight  # [10, 6]

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("layout", ["pp=2", "pp=2,replicate=2", "pp=2,shard=2"])
def test_tied_weights_across_stages_are_one(pool, layout):
    _, data_ranks = sizes(layout)
    dataset = data(24 * data_ranks)
    clip = partial(nn.utils.clip_grad_norm_, max_norm=0.1)
    wanted, norms = reference(make(Tied), global_steps(dataset, 4, data_ranks), clip=clip)
    results = check(pool, layout, dataset, 4, wanted, norms, factory=Tied, gradient_clip_val=0.1)
    copies = [
        result["weights"]["model.embed.weight"] for result in results if "model.embed.weight" in result["weights"]
    ]
    assert len(copies) > 1
    assert all(torch.equal(copies[0], copy) for copy in copies)
