"""Every schedule, with every data axis and accumulation, trains an unchanged module to one process's weights."""

from __future__ import annotations

import pytest

from lightning_dist.parallel.pipeline import SCHEDULES
from lightning_dist.testing import WorkerError, WorkerPool
from tests.parallel.pipeline import networks
from tests.parallel.pipeline.harness import assert_same, train_pipeline, train_reference, train_schedules
from tests.parallel.pipeline.networks import CHAIN, language_model, language_step, token_batches

ALL = tuple(SCHEDULES)


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        ("pp=2", 2),
        pytest.param("pp=2,replicate=2", 4, marks=pytest.mark.slow),
        pytest.param("pp=2,shard=2", 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_schedules_equal_one_process(pool: WorkerPool, layout: str, world: int, accumulate: int) -> None:
    batches = token_batches([8] * 5)  # five batches: the last window of three is short
    reference = train_reference(language_model, language_step, batches, accumulate=accumulate)
    ranks = pool.run(
        train_schedules, world, language_model, language_step, batches, CHAIN,
        schedules=ALL, layout=layout, accumulate=accumulate, timeout=120,
    )  # fmt: skip
    for schedule in ALL:
        assert_same([rank[schedule] for rank in ranks], reference)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "world"), [("pp=4", 4), ("pp=2,replicate=2,shard=2", 8)])
def test_more_ranks(pool: WorkerPool, layout: str, world: int) -> None:
    batches = token_batches([16] * 3)
    reference = train_reference(language_model, language_step, batches)
    schedules = ALL if world == 4 else ("1F1B",)  # eight modules make eight stages
    ranks = pool.run(
        train_schedules, world, language_model, language_step, batches, CHAIN,
        schedules=schedules, layout=layout, microbatches=8, timeout=160,
    )  # fmt: skip
    for schedule in ranks[0]:
        assert_same([rank[schedule] for rank in ranks], reference)


def test_ragged_batches_and_changing_lengths(pool: WorkerPool) -> None:
    """7 samples in 4 microbatches, 3 samples (fewer than microbatches), 1 (fewer than stages), other lengths, again."""
    batches = token_batches([8, 7, 3, 1, 8, 2], [5, 5, 9, 4, 3, 5])
    reference = train_reference(language_model, language_step, batches)
    ranks = pool.run(
        train_schedules, 2, language_model, language_step, batches, CHAIN, schedules=ALL, layout="pp=2", timeout=120
    )
    for schedule in ALL:
        assert_same([rank[schedule] for rank in ranks], reference)


@pytest.mark.parametrize("sizes", [[1, 7], pytest.param([7, 1], marks=pytest.mark.slow), [3, 1, 2, 2]])
def test_uneven_stages_by_hand(pool: WorkerPool, sizes: list[int]) -> None:
    batches = token_batches([4, 4])
    reference = train_reference(language_model, language_step, batches)
    schedule = "1F1B" if len(sizes) == 2 else "Interleaved1F1B"
    ranks = pool.run(
        train_pipeline, 2, language_model, language_step, batches, CHAIN, schedule, "pp=2", sizes=sizes, timeout=60
    )
    assert_same(ranks, reference)


def test_last_stage_is_on_rank_zero(pool: WorkerPool) -> None:
    batches = token_batches([4])
    for schedule in ALL:
        plan = networks.plan_for(schedule, 2)
        assert plan.last_rank == 0
    ranks = pool.run(train_pipeline, 2, language_model, language_step, batches, CHAIN, "1F1B", "pp=2", timeout=60)
    assert "model.head.weight" in ranks[0]["weights"] and "model.head.weight" not in ranks[1]["weights"]
    assert "model.embed.weight" in ranks[1]["weights"] and "model.embed.weight" not in ranks[0]["weights"]


@pytest.mark.slow
def test_zero_bubble_refuses_resharding_because_it_would_be_wrong(pool: WorkerPool) -> None:
    """Refused with a reason; and without the refusal the weights are wrong, so the refusal is what keeps them right."""
    batches = token_batches([8] * 3)
    arguments = (language_model, language_step, batches, CHAIN, "InterleavedZeroBubble", "pp=2,shard=2")
    with pytest.raises(WorkerError, match="reshard_after_forward=True does not fit"):
        pool.run(train_pipeline, 4, *arguments, reshard_after_forward=True, timeout=60)
    reference = train_reference(language_model, language_step, batches)
    ranks = pool.run(networks.train_resharding, 4, *arguments, timeout=60)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ranks, reference)


@pytest.mark.slow
def test_schedules_with_a_whole_backward_may_reshard(pool: WorkerPool) -> None:
    batches = token_batches([8] * 3)
    reference = train_reference(language_model, language_step, batches)
    schedules = ("GPipe", "1F1B", "Interleaved1F1B")
    ranks = pool.run(
        train_schedules, 4, language_model, language_step, batches, CHAIN,
        schedules=schedules, layout="pp=2,shard=2", reshard_after_forward=True, timeout=120,
    )  # fmt: skip
    for schedule in schedules:
        assert_same([rank[schedule] for rank in ranks], reference)
