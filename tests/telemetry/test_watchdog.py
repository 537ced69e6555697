"""Who is to blame, how long to wait, and what a rank and its watchdog share."""

import time

import pytest

from lightning_dist.telemetry.clock import Phase
from lightning_dist.telemetry.watchdog.heartbeat import ABORT, ENABLED, KINDS, PHASES, HeartbeatPage
from lightning_dist.telemetry.watchdog.limits import limit_of, limits_from
from lightning_dist.telemetry.watchdog.report import RankState, find_culprits, write_report
from lightning_dist.telemetry.watchdog.start import cause_of


def state(rank, **more):
    return RankState(rank, **{"phase": "forward", "kind": "step", "step": 7, "inside": 1.0, "limit": 5.0, **more})


def waits(rank, group="data", **more):
    given = {"waiting": 9.0, "inside": 9.0, "operation": "allreduce", "phase": "backward", "group": group, **more}
    return state(rank, **given)


def test_phases_are_the_clocks():
    assert tuple(phase.word for phase in Phase) == PHASES


@pytest.mark.parametrize(
    ("states", "ranks", "cause"),
    [
        ([waits(0), state(1, process="T", inside=9.0)], (1,), "stopped process (SIGSTOP)"),
        ([waits(0), state(1, inside=9.0, thread_age=8.0)], (1,), "held interpreter lock (GIL)"),
        ([waits(0), state(1, inside=9.0, process="D")], (1,), "waits for a disk or device"),
        ([waits(0), state(1, inside=9.0, phase="data_wait")], (1,), "waits for data"),
        ([waits(0), state(1, inside=9.0)], (1,), "blocked in the Python line shown"),
        ([waits(0), waits(1), waits(2)], (0, 1, 2), "communication does not get through"),
        # rank 1 has skipped one of "extra" and gone on to backward, where it waits for rank 0
        (
            [
                waits(0, "extra", phase="forward", counts={"extra": 5, "data": 7}),
                waits(1, "data", counts={"extra": 4, "data": 8}),
            ],
            (1,),
            "skipped collective",
        ),
    ],
)
def test_who_is_missing_and_why(states, ranks, cause):
    finding = find_culprits(states)
    assert finding.overdue
    assert finding.ranks == ranks
    assert finding.cause == cause
    report = write_report(states, finding, "warned")
    assert f"missing rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {cause}" in report
    assert "rank 0 (" in report


def test_those_who_wait_for_a_rank_that_may_take_its_time_do_not_raise_the_alarm():
    saving = state(1, phase="checkpoint", kind="checkpoint", inside=100.0, limit=1800.0)
    assert not find_culprits([waits(0, inside=100.0), saving]).overdue
    assert not find_culprits([waits(0), state(1)]).overdue
    assert not find_culprits([waits(0, finished=True)]).overdue
    assert not find_culprits([waits(0, finished=True), state(1, inside=4.0)]).overdue


def test_a_page_is_read_as_it_was_written(tmp_path):
    rank = HeartbeatPage(tmp_path / "page", create=True)
    watchdog = HeartbeatPage(tmp_path / "page")
    rank.set_limits(limits_from({"step": 2.5}))
    rank.set_flags(ABORT | ENABLED)
    rank.set_flags(ABORT, False)
    before = time.monotonic()
    rank.beat(Phase.BACKWARD, KINDS.index("step"), 12)
    rank.begin_collective("allreduce", "shard")
    rank.thread_runs({"shard": 41, "data": 3})
    beat = watchdog.read()
    assert (beat.phase, beat.kind, beat.step, beat.count) == ("backward", "step", 12, 1)
    assert (beat.operation, beat.group, beat.collectives) == ("allreduce", "shard", 1)
    assert beat.counts == {"shard": 41, "data": 3}
    assert before <= beat.since <= beat.waiting_since <= beat.thread <= time.monotonic()
    assert beat.flags == ENABLED
    assert limit_of(beat) == 2.5
    rank.end_collective()
    assert watchdog.read().waiting_since == 0
    watchdog.note_reports(2, 30.0)
    assert rank.reports() == (2, 30.0)
    rank.remove()
    assert not (tmp_path / "page").exists()


def test_a_page_that_nobody_has_written_on_is_of_now(tmp_path):
    before = time.monotonic()
    HeartbeatPage(tmp_path / "page", create=True)
    beat = HeartbeatPage(tmp_path / "page").read()
    assert before <= beat.since <= time.monotonic()
    assert before <= beat.thread <= time.monotonic()
    assert limit_of(beat) == 1800.0


def test_limits_are_learnt_from_the_longest_time_seen(tmp_path):
    page = HeartbeatPage(tmp_path / "page", create=True)
    step = KINDS.index("step")
    page.beat(Phase.FORWARD, step, 0)
    assert limit_of(page.read()) == 600.0
    for number in range(400):
        page.beat(Phase.FORWARD, step, number)
    assert limit_of(page.read()) == 10.0  # ten times microseconds is less than the least
    page._last -= 3.0  # the last beat was three seconds ago
    page.beat(Phase.FORWARD, step, 400)
    assert limit_of(page.read()) == pytest.approx(30.0, rel=0.1)


def test_what_a_hang_timeout_stands_for():
    assert limits_from("auto") == dict.fromkeys(KINDS, 0.0)
    seconds = limits_from(5)
    assert (seconds["step"], seconds["evaluation"], seconds["checkpoint"]) == (5.0, 5.0, 600.0)
    assert limits_from(1000)["checkpoint"] == 1000.0
    assert limits_from({"checkpoint": 30.0})["checkpoint"] == 30.0
    assert limits_from({"checkpoint": 30.0})["step"] == 0.0
    for wrong in (0, -1, True, "soon", {"steps": 3}, None):
        with pytest.raises(ValueError, match="does not fit"):
            limits_from(wrong)


def test_kinds_of_exceptions():
    assert cause_of(SystemExit(0)) == "exited"
    assert cause_of(MemoryError()) == "out of memory"
    assert cause_of(RuntimeError("CUDA out of memory. Tried …")) == "out of memory"
    assert cause_of(ValueError("no")) == "raised"
