"""Experts spread over ranks train to the numbers of one process on the joined batch."""

import pytest

from tests.parallel.expert.compare import expert_parity

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
