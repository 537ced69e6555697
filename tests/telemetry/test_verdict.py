"""The judge names the rank, the cause and what it costs."""

import json
from dataclasses import replace

import pytest

from lightning_dist.telemetry.clock import Phase
from lightning_dist.telemetry.collectives import GroupTraffic
from lightning_dist.telemetry.links import read_bandwidths
from lightning_dist.telemetry.verdict import PERSISTENT, WARM_UP, StragglerJudge, windows_needed
from lightning_dist.telemetry.window import RankWindow

STEPS = 10


def window(compute=0.1, wait=0.0, data=0.0, other=0.0, save=0.0, **more):
    """A rank's window from seconds of a step."""
    seconds = [0.0] * len(Phase)
    seconds[Phase.FORWARD], seconds[Phase.EXPOSED_COMM] = compute * STEPS, wait * STEPS
    seconds[Phase.DATA_WAIT], seconds[Phase.OTHER], seconds[Phase.CHECKPOINT] = data * STEPS, other * STEPS, save
    given = {"elements": 1000.0, "wait_low": wait, **more}
    return RankWindow(STEPS, tuple(seconds), compute=given.pop("bare", compute), **given)


def verdicts(judge, windows, times):
    return [judge.judge(windows) for _ in range(times)]


def four(faulty, wait):
    """Ranks 0, 1 and 3 wait for rank 2."""
    return [window(wait=wait), window(wait=wait), faulty, window(wait=wait)]


@pytest.mark.parametrize(
    ("faulty", "cause"),
    [
        (window(compute=0.15), "slow device"),
        (window(compute=0.15, elements=1500.0), "input imbalance"),
        (window(data=0.05), "data wait"),
        (window(compute=0.15, bare=0.1, collecting=0.5), "garbage collection"),
        (window(compute=0.15, run_delay=0.5), "busy host"),
        (window(other=0.05), "other work"),
    ],
)
def test_each_cause_is_told_apart(faulty, cause):
    judge = StragglerJudge(least_seconds=0.0)
    said = verdicts(judge, four(faulty, 0.05), WARM_UP + windows_needed(cause))
    assert not any(said[:-1])
    (verdict,) = said[-1]
    assert (verdict.cause, verdict.rank) == (cause, 2)
    # a step takes 150 ms now, and would take 100 ms
    assert verdict.gain == pytest.approx(1 / 3)
    assert verdict.ratio == pytest.approx(1.5)
    sentence = verdict.sentence(4)
    assert "straggler: rank 2" in sentence
    assert cause in sentence
    assert "33 % less (32.0 device-hours a day)" in sentence


def test_a_verdict_is_not_repeated_at_once():
    judge = StragglerJudge(least_seconds=0.0)
    said = verdicts(judge, four(window(compute=0.15), 0.05), WARM_UP + PERSISTENT + 10)
    assert sum(map(len, said)) == 1


def test_a_straggler_is_named_once_it_has_lasted():
    judge = StragglerJudge(least_seconds=10.0)  # windows take 1.5 s: the seventh is over after 10.5 s
    said = verdicts(judge, four(window(compute=0.15), 0.05), WARM_UP + 7)
    assert [len(it) for it in said] == [0] * (WARM_UP + 6) + [1]


def test_what_is_not_persistent_is_not_said():
    judge = StragglerJudge(least_seconds=0.0)
    for _ in range(20):
        assert judge.judge(four(window(compute=0.15), 0.05)) == []
        assert judge.judge(four(window(), 0.0)) == []


def test_a_rank_that_nobody_waits_for_is_no_straggler():
    judge = StragglerJudge(least_seconds=0.0)
    assert not any(verdicts(judge, four(window(compute=0.15, wait=0.05), 0.05), 8))


def test_stages_of_a_pipeline_are_compared_with_their_own_kind_and_their_past():
    judge = StragglerJudge(least_seconds=0.0, roles=[0, 1])
    even = [window(compute=0.1, wait=0.1), window(compute=0.2)]
    assert not any(verdicts(judge, even, 6))
    slower = [window(compute=0.1, wait=0.2), window(compute=0.3)]
    said = verdicts(judge, slower, PERSISTENT)
    assert [(v.cause, v.rank) for v in said[-1]] == [("slow device", 1)]


def test_a_disk_is_compared_with_its_own_past_and_silent_windows_do_not_matter():
    judge = StragglerJudge(least_seconds=0.0)
    good = [window(save=0.02, saves=1.0), window(wait=0.002)]
    for _ in range(4):
        assert judge.judge(good) == []
        assert judge.judge([window(), window()]) == []
    slow = [window(save=0.5, saves=1.0), window(wait=0.05)]
    assert judge.judge(slow) == []
    assert judge.judge([window(), window()]) == []
    (verdict,) = judge.judge(slow)
    assert (verdict.cause, verdict.rank) == ("disk", 0)


def link(wait, payload=1e6):
    windows = [window(wait=wait), window(wait=wait * 1.1)]
    return [replace(it, traffic={"shard": GroupTraffic(wait * STEPS, payload * STEPS, STEPS)}) for it in windows]


def test_a_link_is_compared_with_its_own_best():
    judge = StragglerJudge(least_seconds=0.0)
    assert not any(verdicts(judge, link(0.01), 6))
    said = verdicts(judge, link(0.1), windows_needed("slow link"))
    (verdict,) = said[-1]
    assert (verdict.cause, verdict.rank, verdict.group) == ("slow link", None, "shard")
    assert verdict.ratio == pytest.approx(10.0)
    assert verdict.gain == pytest.approx(0.09 / 0.205)  # of the median step, 205 ms
    assert "10 MB/s" in verdict.evidence


def test_a_link_is_compared_with_what_was_measured(tmp_path):
    file = tmp_path / "links.json"
    file.write_text(json.dumps({"axes": [{"axis": "shard", "size": 2, "bandwidth": 1e8, "latency": 1e-5}]}))
    judge = StragglerJudge(least_seconds=0.0, link_bandwidth=read_bandwidths(file))
    said = verdicts(judge, link(0.1), WARM_UP + windows_needed("slow link"))
    (verdict,) = said[-1]
    assert verdict.ratio == pytest.approx(10.0)  # 1 MB at 100 MB/s is 10 ms
    with pytest.raises(ValueError, match=r"no\.json' does not fit"):
        read_bandwidths(tmp_path / "no.json")


def test_one_slow_window_of_a_link_does_not_become_its_best():
    judge = StragglerJudge(least_seconds=0.0)
    assert not any(verdicts(judge, link(0.01), 6))
    verdicts(judge, link(0.1), 30)
    assert judge.judge(link(0.01)) == []
    said = verdicts(judge, link(0.1), windows_needed("slow link"))
    assert [len(it) for it in said] == [0, 0, 0, 1]
    assert said[-1][0].ratio == pytest.approx(10.0)
