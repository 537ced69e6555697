"""Bubbles and microbatches in flight: the formulas against torch's own orders, run on a clock."""

import pytest

from lightning_dist.advisor.schedules import held_microbatches, idle_time, refusal
from lightning_dist.parallel.pipeline.placement import SCHEDULES
from tests.advisor.schedule_simulation import simulate


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("inputs", [1.0, 1.5, 2.0, 2.5])
def test_the_idle_time_is_that_of_torchs_order(name, ranks, inputs):
    microbatches = 4 * ranks
    total, _ = simulate(name, ranks, microbatches, 1.0, inputs, 1.0)
    assert idle_time(SCHEDULES[name], ranks, 1.0, inputs, 1.0) == pytest.approx(total - microbatches * (2 + inputs))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_rank_holds_as_many_microbatches_as_in_torchs_order(name, ranks):
    microbatches = 4 * ranks
    _, held = simulate(name, ranks, microbatches, 1.0, 1.0, 1.0)
    predicted = {rank: held_microbatches(SCHEDULES[name], ranks, rank, microbatches) for rank in range(ranks)}
    assert predicted == held


def test_textbook_bubbles():
    one_f_one_b = SCHEDULES["1F1B"]
    # 4 ranks, 12 microbatches of 3 s: (4 - 1) x 3 s idle in (12 + 3) x 3 s
    assert idle_time(one_f_one_b, 4, 1, 1, 1) / (12 * 3 + idle_time(one_f_one_b, 4, 1, 1, 1)) == pytest.approx(3 / 15)
    assert idle_time(SCHEDULES["Interleaved1F1B"], 4, 1, 1, 1) == pytest.approx(3 * 3 / 2)
    assert idle_time(SCHEDULES["InterleavedZeroBubble"], 4, 1, 1, 1) == pytest.approx(3 * 1 / 2)


def test_too_few_microbatches_are_refused_with_the_number_that_fits():
    assert refusal(SCHEDULES["1F1B"], 4, 4) == ""
    assert "at least 4 microbatches" in refusal(SCHEDULES["1F1B"], 4, 3)
    assert "at least 8 microbatches" in refusal(SCHEDULES["DualPipeV"], 4, 7)
    assert "rounds" in refusal(SCHEDULES["Interleaved1F1B"], 4, 9) and refusal(SCHEDULES["Interleaved1F1B"], 4, 8) == ""
