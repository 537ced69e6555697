"""Stages are balanced, placed and checked by arithmetic alone."""

from __future__ import annotations

import itertools

import pytest

from lightning_dist.parallel.pipeline.placement import (
    SCHEDULES,
    balance_stages,
    choose_microbatches,
    fit_microbatches,
    place_stages,
    plan_pipeline,
)
from lightning_dist.parallel.pipeline.runner import forward_order

NAMES = [f"m{index}" for index in range(8)]


@pytest.mark.parametrize(
    "costs", [[1, 1, 1, 1, 1, 1], [9, 1, 1, 1, 1, 1], [0, 5, 5, 5, 5, 12], [3, 1, 4, 1, 5, 9, 2, 6]]
)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_balance_is_as_good_as_trying_everything(costs: list[float], stages: int) -> None:
    sizes = balance_stages(costs, stages)
    assert sum(sizes) == len(costs) and min(sizes) >= 1

    def worst(cut: list[int]) -> float:
        ends = list(itertools.accumulate(cut))
        return max(sum(costs[end - size : end]) for end, size in zip(ends, cut, strict=True))

    every = [
        [b - a for a, b in itertools.pairwise([0, *ends, len(costs)])]
        for ends in itertools.combinations(range(1, len(costs)), stages - 1)
    ]
    assert worst(sizes) == min(map(worst, every))


def test_a_costly_head_gets_a_stage_of_fewer_layers() -> None:
    plan = plan_pipeline(["embed", *(f"l{i}" for i in range(8)), "head"], 2, costs=[0, *[10.0] * 8, 40.0])
    assert [len(plan.modules_of(stage)) for stage in (0, 1)] == [7, 3]


def test_chain_shorter_than_stages() -> None:
    with pytest.raises(ValueError, match="chain has 3 modules, fewer than its 4 stages"):
        plan_pipeline(NAMES[:3], 2, "Interleaved1F1B")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_schedule_ends_on_rank_zero(schedule: str, ranks: int) -> None:
    plan = plan_pipeline(NAMES, ranks, schedule)
    assert plan.last_rank == 0
    assert sorted(stage for rank in range(ranks) for stage in plan.stages_of(rank)) == list(range(plan.num_stages))
    assert len({len(plan.stages_of(rank)) for rank in range(ranks)}) == 1


def test_placements() -> None:
    assert place_stages("loop", 2, 4) == [1, 0, 1, 0]
    assert place_stages("v", 2, 4) == [0, 1, 1, 0]
    with pytest.raises(ValueError, match="3 stages do not fit 2"):
        place_stages("loop", 2, 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"schedule": "1F2B"}, "is no schedule; there are GPipe"),
        ({"sizes": [4, 3]}, "do not fit its chain of 8"),
        ({"sizes": [8, 0]}, "at least one module"),
        ({"sizes": [3, 3, 2]}, "has 3 stages, but 1F1B on 2 pipeline ranks needs 2"),
        ({"sizes": [3, 3, 2], "schedule": "Interleaved1F1B"}, "needs a multiple of 2"),
        ({"stages_per_rank": 3, "schedule": "DualPipeV"}, "runs 2 stages on each rank, not 3"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan_pipeline(NAMES, 2, **arguments)


def test_microbatches_fit_every_schedule() -> None:
    one, inter = plan_pipeline(NAMES, 4, "1F1B"), plan_pipeline(NAMES, 4, "Interleaved1F1B")
    assert fit_microbatches(one, 8, 100) == ("1F1B", 8)
    assert fit_microbatches(one, 8, 3) == ("GPipe", 3)
    assert fit_microbatches(plan_pipeline(NAMES, 2, "DualPipeV"), 8, 3) == ("ZBVZeroBubble", 3)
    assert fit_microbatches(inter, 9, 100) == ("Interleaved1F1B", 8)  # 9 microbatches are no multiple of 2 rounds
    assert fit_microbatches(inter, 7, 100) == ("Interleaved1F1B", 7)
    assert choose_microbatches(one, 64) == 16
    assert choose_microbatches(one, 36) == 12  # equal ones where they can be had
    assert choose_microbatches(one, 5) == 5


@pytest.mark.parametrize("owners", [[0], [1, 0], [1, 0, 1, 0], [0, 1, 1, 0], [0, 1, 2, 3, 3, 2, 1, 0]])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_forward_order_never_waits_for_itself(owners: list[int], number: int) -> None:
    order = forward_order(owners, number)
    assert {rank: sorted(todo) for rank, todo in order.items()} == {
        rank: [(stage, k) for stage, owner in enumerate(owners) if owner == rank for k in range(number)]
        for rank in sorted(set(owners))
    }
    done: set[tuple[int, int]] = set()
    queues = {rank: list(todo) for rank, todo in order.items()}
    while any(queues.values()):
        ready = [
            rank for rank, todo in queues.items() if todo and (todo[0][0] == 0 or (todo[0][0] - 1, todo[0][1]) in done)
        ]
        assert ready
        done |= {queues[rank].pop(0) for rank in ready}
