"""Every layout of the data axes trains to the numbers of one process."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from tests.strategies.training import (
    Classifier,
    MaskedClassifier,
    data,
    holdings,
    make,
    masked_data,
    reference,
    train,
    worst,
)

LAYOUTS = ["replicate=2", "shard=2", "replicate=2,shard=2", "shard=4"]


def world(layout: str) -> int:
    return math.prod(int(part.split("=")[1]) for part in layout.split(","))


def global_steps(dataset, batch_size: int, ranks: int, accumulate: int = 1, epochs: int = 1):
    """The batches of each optimizer step over all data ranks: those of one process."""
    shares = [[dataset[i] for i in range(rank, len(dataset), ranks)] for rank in range(ranks)]
    cut = [[share[i : i + batch_size] for i in range(0, len(share), batch_size)] for share in shares]
    batches = [
        [batch for share in cut for batch in share[i : i + accumulate]] for i in range(0, len(cut[0]), accumulate)
    ]
    collated = [[[torch.stack(column) for column in zip(*batch, strict=True)] for batch in step] for step in batches]
    return collated * epochs


def check(pool, layout, dataset, batch_size, wanted, norms=None, tolerance=1e-9, factory=Classifier, **kwargs):
    results = pool.run(train, world(layout), layout, factory, dataset, batch_size, init_process_group=False, **kwargs)
    for result in results:
        assert worst(result["weights"], wanted) < tolerance
        if norms is not None:
            assert result["norms"] == pytest.approx(norms, rel=tolerance)
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weights_and_gradient_norms_equal_one_process(pool, layout, optimizer):
    dataset = data(48)
    wanted, norms = reference(make(Classifier, optimizer=optimizer), global_steps(dataset, 2, world(layout)))
    check(pool, layout, dataset, 2, wanted, norms, factory_kwargs={"optimizer": optimizer})


def test_float32_within_1e_5(pool):
    dataset = data(32, dtype=torch.float32)
    wanted, norms = reference(make(Classifier), global_steps(dataset, 2, 2), dtype=torch.float32)
    check(pool, "shard=2", dataset, 2, wanted, norms, 1e-5, precision="32-true")


@pytest.mark.parametrize("layout", ["shard=2", "replicate=2", "replicate=2,shard=2"])
def test_short_last_window_and_ragged_last_batch_count_every_sample_alike(pool, layout):
    """7 batches of 3 (the last of 2) in windows of 3: the last window holds one short batch (C07)."""
    ranks = world(layout)
    dataset = data(20 * ranks)
    wanted, norms = reference(make(Classifier), global_steps(dataset, 3, ranks, accumulate=3))
    check(pool, layout, dataset, 3, wanted, norms, accumulate_grad_batches=3)


def test_window_longer_than_the_epoch_steps_at_full_size(pool):
    dataset = data(20)
    wanted, norms = reference(make(Classifier), global_steps(dataset, 2, 2, accumulate=8, epochs=3))
    check(pool, "shard=2", dataset, 2, wanted, norms, accumulate_grad_batches=8, max_epochs=3)


@pytest.mark.parametrize("layout", ["shard=2", "replicate=2"])
def test_unequal_samples_on_the_data_ranks_count_alike(pool, layout):
    """Rank 0's last batch has 2 samples, rank 1's has 1."""
    dataset = data(11)
    wanted, norms = reference(make(Classifier), global_steps(dataset, 4, 2))
    check(pool, layout, dataset, 4, wanted, norms)


@pytest.mark.parametrize("layout", ["shard=2", "replicate=2"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_weight_is_exact_with_a_rank_that_counts_nothing(pool, layout, accumulate):
    """1, 7, 3, 0, … valid targets in the batches (C08)."""
    dataset = masked_data([1, 7, 3, 0, 0, 5, 2, 8], batch_size=8)
    steps = global_steps(dataset, 8, 2, accumulate)
    wanted, norms = reference(make(MaskedClassifier), steps)
    check(pool, layout, dataset, 8, wanted, norms, factory=MaskedClassifier, accumulate_grad_batches=accumulate)


def test_loss_weight_is_exact_on_one_device(pool):
    dataset = masked_data([1, 7, 3, 0], batch_size=8)
    wanted, norms = reference(make(MaskedClassifier), global_steps(dataset, 8, 1, 2))
    check(pool, "shard=1", dataset, 8, wanted, norms, factory=MaskedClassifier, accumulate_grad_batches=2)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("layout", ["shard=2", "replicate=2,shard=2"])
def test_clipping_by_norm(pool, layout, norm_type):
    dataset = data(32)
    clip = partial(nn.utils.clip_grad_norm_, max_norm=0.05, norm_type=norm_type)
    wanted, norms = reference(make(Classifier), global_steps(dataset, 2, world(layout)), clip=clip)
    check(
        pool,
        layout,
        dataset,
        2,
        wanted,
        norms,
        gradient_clip_val=0.05,
        strategy_kwargs={"gradient_norm_type": norm_type},
    )


def test_clipping_by_value(pool):
    dataset = data(32)
    clip = partial(nn.utils.clip_grad_value_, clip_value=0.01)
    wanted, norms = reference(make(Classifier), global_steps(dataset, 2, 2), clip=clip)
    check(pool, "shard=2", dataset, 2, wanted, norms, gradient_clip_val=0.01, gradient_clip_algorithm="value")


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_reshard_after_forward(pool, reshard):
    dataset = data(32)
    wanted, norms = reference(make(Classifier), global_steps(dataset, 2, 4))
    check(pool, "shard=4", dataset, 2, wanted, norms, strategy_kwargs={"reshard_after_forward": reshard})


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_changes_no_number(pool, mode):
    dataset = data(32)
    wanted, norms = reference(make(Classifier), global_steps(dataset, 2, 2))
    check(pool, "shard=2", dataset, 2, wanted, norms, strategy_kwargs={"activation_checkpointing": mode})


@pytest.mark.slow
def test_compile_changes_no_number(pool):
    dataset = data(16)
    wanted, norms = reference(make(Classifier), global_steps(dataset, 2, 2))
    check(pool, "shard=2", dataset, 2, wanted, norms, strategy_kwargs={"compile": True})


def test_ranks_seeded_differently_train_one_model(pool):
    dataset = data(32)
    wanted, norms = reference(make(Classifier, seed=0), global_steps(dataset, 2, 2))
    check(pool, "shard=2", dataset, 2, wanted, norms, seed="rank")


@pytest.mark.parametrize(
    ("layout", "share"), [("replicate=2", 1), ("shard=2", 2), ("shard=4", 4), ("replicate=2,shard=2", 2)]
)
def test_each_rank_holds_its_share_and_no_more(pool, layout, share):
    """Bytes of parameters and of AdamW's two moments; FSDP2 pads each tensor's rows to a multiple of the ranks."""
    module = make(Classifier)
    whole = sum(p.numel() * 8 for p in module.parameters())
    most = sum(-(-p.shape[0] // share) * p[0].numel() * 8 for p in module.parameters())
    held = pool.run(holdings, world(layout), layout, Classifier, init_process_group=False)
    assert all(rank["parameters"] <= most and rank["optimizer"] <= 2 * most for rank in held)
    assert sum(rank["optimizer"] for rank in held) == 2 * whole * world(layout) / share
