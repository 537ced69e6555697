"""Folders as RunRecord leaves them, with values of one's own."""

from __future__ import annotations

import math

from lightning_dist.record import document
from lightning_dist.record.files import RecordFiles, read_events, write_record

ABOUT = {"state": "finished", "attempts": 1, "from_step": 0, "began": "2026-01-01T00:00:00+00:00"}


def write_run(folder, rows, events=(), versions=None, **about):
    """``rows``: values of steps 1, 2, …, or (values, True) for an evaluation after the step before."""
    files = RecordFiles(folder, 0)
    step, evaluations = 0, 0
    for row in rows:
        values, evaluation = row if isinstance(row, tuple) else (row, False)
        step, evaluations = step + (not evaluation), evaluations + evaluation
        counts = {"step": step, "time": step * 60.0, "evaluations": evaluations, "devices": 2}
        files.add_values({**counts, **values, "evaluation": float(evaluation)})
    for at, kind, evidence in events:
        files.add_event({"time": float(at), "step": at, "rank": 0, "kind": kind, "evidence": evidence})
    files.close()
    stages = document.empty_stages()
    stages["partition"]["outputs"] = {"strategy": "HybridParallelStrategy", "layout": "shard=2"}
    questions = dict.fromkeys(document.QUESTIONS, "not stated")
    record = {
        "format": 1,
        "run": {**ABOUT, "folder": str(folder), **about},
        "versions": {"acceptance": [], **(versions or {})},
        "stages": stages,
        "questions": {**questions, "operations": {"devices": 2, "device_hours": step / 30}},
    }
    record = document.with_events(record, read_events(folder))
    write_record(folder, record, document.as_page(record))
    return folder


def losses(*values, name="train_loss"):
    return [{name: math.nan if value is None else value} for value in values]
