"""Experts spread over ranks train to the numbers of one process on the joined batch."""

import pytest

from tests.parallel.expert.compare import expert_parity, gradient_ratios, norm_over_stages

EXACT = 1e-9
LOSSES = {"balance_coefficient": 0.1, "z_coefficient": 0.01, "shared_size": 6}
ROUTINGS = ("balanced", "skewed", "all_to_one")


def assert_equal_to_one_process(outcomes):
    for outcome in outcomes:
        assert outcome["loss"] <= EXACT
        assert outcome["norm"] <= EXACT
        assert outcome["gradient"][0] <= EXACT, outcome["gradient"]
        assert outcome["weight"][0] <= EXACT, outcome["weight"]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, "shard=2,ep=2"), (4, "shard=4,ep=4"), (4, "replicate=2,shard=2,ep=2"), (4, "shard=4,ep=2")],
)
def test_two_and_four_ranks_equal_one(pool, world, layout, routing):
    outcomes = pool.run(expert_parity, world, layout, routing, LOSSES)
    assert_equal_to_one_process(outcomes)
    if routing == "all_to_one":  # the first and the last rank of an expert group take turns to have nothing to do
        for outcome in outcomes:
            held = outcome["experts"]["blocks.0.moe.experts"]
            assert outcome["idle"] == [0 not in held, 7 not in held] * 2


def test_ranks_of_a_tensor_group_share_each_expert(pool):
    outcomes = pool.run(expert_parity, 4, "shard=2,tp=2,ep=2", "skewed", LOSSES)
    assert_equal_to_one_process(outcomes)
    assert outcomes[0]["cut_inside"] == ["blocks.0.moe.experts", "blocks.1.moe.experts"]


@pytest.mark.slow
def test_shards_of_experts_that_tensor_ranks_share(pool):
    assert_equal_to_one_process(pool.run(expert_parity, 8, "shard=4,tp=2,ep=2", "balanced", LOSSES, steps=2))


@pytest.mark.parametrize(
    ("world", "layout", "settings"),
    [
        (4, "shard=4,ep=2", {"num_experts": 2, "top_k": 1}),  # one expert on each rank, cut along its width
        (4, "shard=2,cp=2,ep=4", {}),  # experts over all ranks that see different tokens
        (2, "shard=2,ep=2", {"capacity_factor": 0.6} | LOSSES),
        (2, "shard=2,ep=2", {"score": "sigmoid", "scale": 2.5, "normalise": False}),
    ],
    ids=["one_expert_for_two_ranks", "context", "capacity", "sigmoid"],
)
def test_other_settings_equal_one_process(pool, world, layout, settings):
    assert_equal_to_one_process(pool.run(expert_parity, world, layout, "balanced", settings))


def test_accumulated_gradients_equal_one_process(pool):
    assert_equal_to_one_process(pool.run(expert_parity, 4, "shard=4,ep=2", "all_to_one", LOSSES, accumulation=2))


def test_biases_move_once_a_step_by_the_load_of_all_ranks(pool):
    """Also under recomputation, which must not count a load twice (torchtitan#1593, #1304)."""
    outcomes = pool.run(
        expert_parity, 2, "shard=2,ep=2", settings={"top_k": 1}, accumulation=2, update=True, checkpointing=True
    )
    assert_equal_to_one_process(outcomes)
    for outcome in outcomes:
        assert outcome["bias"].tolist() == outcome["expected_bias"].tolist()
        assert outcome["bias"].abs().max().item() > 0.015  # more than one step of 0.01


def test_expert_gradients_are_not_multiplied_by_the_expert_size(pool):
    """pytorch#160285: the ratio to one process was exactly the expert size, unseen by Adam."""
    for world, layout in ((2, "shard=2,ep=2"), (4, "shard=4,ep=4"), (4, "shard=4,ep=2")):
        for ratios in pool.run(gradient_ratios, world, layout):
            for name, ratio in ratios.items():
                assert ratio == pytest.approx(1, rel=1e-9), name


def test_one_norm_where_a_rank_has_no_expert_gradients(pool):
    """torchtitan#1541: a pipeline stage without experts, and one with every parameter frozen, join the norm."""
    for outcome in pool.run(norm_over_stages, 4):
        assert outcome["norm"] == pytest.approx(outcome["expected"], rel=1e-9)
        assert outcome["frozen_norm"] == pytest.approx(outcome["frozen_expected"], rel=1e-9)
