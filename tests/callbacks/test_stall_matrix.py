"""The long series: every fault told apart, five times; ten thousand silent steps. Writes the table in docs/stalls.md.

LIGHTNING_DIST_FAULT_RUNS sets how often each fault is run.
"""

import os
import re
import statistics
from pathlib import Path

import pytest

from lightning_dist.testing.network import can_make_networks, two_networks
from lightning_dist.testing.stall_job import CRASHED, FAULTS, HUNG, run_job

pytestmark = pytest.mark.cluster
RUNS = int(os.environ.get("LIGHTNING_DIST_FAULT_RUNS", "5"))
DOCUMENT = Path(__file__).parents[2] / "docs" / "stalls.md"
BEGIN, END = "<!-- generated: confusion matrix -->", "<!-- end -->"
LIMIT = 3.0


def run_fault(folder, fault, port):
    if fault == "slow link":
        with two_networks(port) as launch:
            return run_job(folder, fault, launch=launch, timeout=170)
    if fault == "disk":
        return run_job(folder, fault, strategy="shard=2", steps=200, more=["--save-every", "10"], timeout=170)
    steps = 190 if fault == "garbage collection" else 240
    return run_job(folder, fault, steps=steps, hang_timeout=LIMIT, timeout=170)


def who(fault):
    return "the data group's link" if fault == "slow link" else "rank 1"


@pytest.mark.timeout(3600)
def test_every_fault_is_told_apart(tmp_path):
    seen: dict[str, list] = {}
    latencies: dict[str, list[float]] = {}
    for fault in FAULTS:
        if fault == "slow link" and not can_make_networks():
            continue
        for run in range(RUNS):
            outcome = run_fault(tmp_path / f"{fault}-{run}".replace(" ", "-"), fault, 29871 + run)
            seen.setdefault(fault, []).append(outcome.causes)
            if outcome.fault_at is not None and outcome.reported_at is not None:
                latencies.setdefault(fault, []).append(outcome.reported_at - outcome.fault_at)
    write_table(seen, latencies)
    wrong = {fault: runs for fault, runs in seen.items() if any(run != [(fault, who(fault))] for run in runs)}
    assert not wrong
    for fault in HUNG:
        assert max(latencies[fault]) < LIMIT + 15.0
    for fault in CRASHED:
        assert max(latencies[fault]) < 5.0


def write_table(seen, latencies):
    """Rows are what was done, columns what was said; a run counts in each cause that it was given."""
    columns = [*FAULTS, "other", "silent"]
    short = "".join(f" {name} |" for name in columns)
    lines = [f"| injected | runs |{short}", "|---|---|" + "---|" * len(columns)]
    for fault, runs in seen.items():
        cells = dict.fromkeys(columns, 0)
        for run in runs:
            if not run:
                cells["silent"] += 1
            for cause, blamed in run:
                cells[cause if cause in FAULTS and blamed == who(fault) else "other"] += 1
        row = "".join(f" {cells[name] or ''} |" for name in columns)
        lines.append(f"| {fault} | {len(runs)} |{row}")
    lines += ["", "| fault | seconds to the report, median | longest |", "|---|---|---|"]
    for fault, values in latencies.items():
        lines.append(f"| {fault} | {statistics.median(values):.2f} | {max(values):.2f} |")
    text = DOCUMENT.read_text()
    table = "\n".join(lines)
    DOCUMENT.write_text(re.sub(f"{BEGIN}.*?{END}", f"{BEGIN}\n\n{table}\n\n{END}", text, flags=re.S))


@pytest.mark.timeout(1800)
def test_ten_thousand_healthy_steps_are_silent(tmp_path):
    """With a slow first step, epochs with new workers and validation, checkpoints, and full garbage collections."""
    more = ["--epoch-steps", "1000", "--workers", "1", "--save-every", "500", "--every", "50", "--bumps"]
    more += ["--straggler-seconds", "10"]  # as it is by default
    outcome = run_job(tmp_path, None, steps=10_000, hang_timeout="auto", timeout=1500, more=more, on_hang="warn")
    assert "killed after" not in outcome.output
    assert outcome.causes == [], outcome.output[-3000:]
    assert outcome.reports == []
    assert outcome.output.count("done\n") == 2
