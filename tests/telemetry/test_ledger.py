"""Goodput over a run's whole life."""

import pytest

from lightning_dist.telemetry.ledger import Ledger, read_life


def test_goodput_counts_restarts_and_what_was_done_again(tmp_path):
    file = tmp_path / "deep" / "goodput.jsonl"
    first = Ledger(file)
    first.begin(0, now=1000.0)
    first.note(10, 50.0, now=1060.0)
    first.note(20, 100.0, now=1120.0)  # then it dies; the last checkpoint is of step 15
    assert first.life(now=1120.0).goodput == pytest.approx(100 / 120)
    second = Ledger(file)
    second.begin(15, now=1200.0)
    second.note(25, 50.0, now=1260.0)
    life = second.life(now=1300.0)
    assert life.restarts == 1
    assert life.lost == pytest.approx(25.0)  # steps 16 to 20
    assert life.productive == pytest.approx(75.0 + 50.0)
    assert life.wall == pytest.approx(300.0)
    assert life.goodput == pytest.approx(125 / 300)
    assert read_life(file).wall == pytest.approx(260.0)


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path):
    file = tmp_path / "goodput.jsonl"
    ledger = Ledger(file)
    ledger.begin(0, now=0.0)
    ledger.note(5, 4.0, now=8.0)
    with file.open("a") as stream:
        stream.write('{"attempt": 0, "ti')
    assert read_life(file).goodput == pytest.approx(0.5)
    assert Ledger(file).life(now=16.0).goodput == pytest.approx(0.25)


def test_a_run_without_entries(tmp_path):
    assert read_life(tmp_path / "none.jsonl").goodput == 0.0
