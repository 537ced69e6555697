"""A run judged by thresholds that were written before it: accepted, rejected, or not enough evidence."""

from __future__ import annotations

import fnmatch
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dist.record.acceptance import COUNTS, POINTS, SHARES, Acceptance, Threshold
from lightning_dist.record.files import read_record, read_values
from lightning_dist.record.summary import COUNTED

ACCEPT, REJECT, OPEN = "accept", "reject", "not enough evidence"
CONFIRMATION_READ = "confirmation_read.json"
"""In the run's folder, once its untouched set has been looked at."""
_DRAWS, _SEED = 500, 20_240_601
_SHARE_BELOW = 0.025


@dataclass(frozen=True)
class Finding:
    """What one threshold says.

    Args:
        value: The name, its statistic, and by what it is divided.
        demand: In words.
        verdict: ``"accept"``, ``"reject"`` or ``"not enough evidence"``.
        why: In words.
        baseline: The baseline's number.
        run: The run's number.
        final: Whether nothing that the run still does can change a rejection.
    """

    value: str
    demand: str
    verdict: str
    why: str
    baseline: float | None = None
    run: float | None = None
    final: bool = False


@dataclass(frozen=True)
class Judgement:
    """The verdict on a run.

    Args:
        verdict: As in :class:`Finding`.
        findings: One for each threshold and subgroup.
        reasons: Why there is not enough evidence, beside the findings.
        confirmation: Findings on the untouched set, where it has been read.
    """

    verdict: str
    findings: list[Finding]
    reasons: list[str]
    confirmation: list[Finding]


class RecordedRun:
    """A run's numbers: of each step only the newest, where a restart or a rollback has repeated it.

    Args:
        folder: What ``RunRecord`` wrote into.
        price_per_device_hour: What ``cost`` is counted by.
    """

    def __init__(self, folder: str | Path, price_per_device_hour: float | None = None) -> None:
        self.record = read_record(folder)
        rows = read_values(folder)
        newest = {(row["step"], row.get("evaluation", 0.0)): row for row in rows}
        self.points: dict[str, list[tuple[float, float]]] = {}
        for (step, _), row in sorted(newest.items()):
            for name in row.keys() - set(COUNTED):
                self.points.setdefault(name, []).append((step, row[name]))
        self.counts = self._count(rows)
        if price_per_device_hour is not None:
            self.counts["cost"] = price_per_device_hour * self.counts["device_hours"]

    def _count(self, rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
        """An attempt's first step, and what came before it, is not in its rows, and not counted."""
        seconds, before, steps = 0.0, None, 0.0
        for row in rows:
            if before is None:
                seconds += row["time"] * row.get("devices", 1.0)
            elif row["time"] >= before:
                seconds += (row["time"] - before) * row.get("devices", 1.0)
            before, steps = row["time"], max(steps, row["step"])
        bad = {(e["step"], e["kind"]) for e in self.record["events"] if e["kind"] in ("failure", "stall", "hang")}
        restarts = float(self.record["run"]["attempts"] - 1)
        return {"failures": float(len(bad)), "restarts": restarts, "device_hours": seconds / 3600, "steps": steps}

    def names(self, pattern: str) -> list[str]:
        """The recorded names that fit a pattern, or the name itself."""
        if pattern in COUNTS or pattern in self.points:
            return [pattern]
        return sorted(name for name in self.points if fnmatch.fnmatchcase(name, pattern))

    def values(self, threshold: Threshold) -> list[float]:
        """What a threshold is about, a count as one value; what is not finite becomes the worst there is."""
        if threshold.value in COUNTS:
            own = [self.counts[threshold.value]]
        else:
            points = self.points.get(threshold.value, [])
            own = [value for step, value in points if step >= threshold.from_step]
        worst = math.inf if threshold.lower else -math.inf
        own = [value if math.isfinite(value) else worst for value in own]
        if threshold.per_step:
            own = [value / self.counts["steps"] for value in own] if self.counts["steps"] else []
        return own


def compare(baseline: str | Path, run: str | Path, acceptance: Acceptance) -> Judgement:
    """Judges a run that is over.

    Accepted is what was finished, by thresholds that the run's record names as written before it, with all of them
    reached, and those of the untouched set, which is read for this only and once.
    """
    of_baseline = RecordedRun(baseline, acceptance.price_per_device_hour)
    of_run = RecordedRun(run, acceptance.price_per_device_hour)
    findings = _findings(acceptance.thresholds, of_baseline, of_run, acceptance.least_values)
    reasons = []
    if of_run.record["run"]["state"] != "finished":
        reasons.append(f"the run is not finished: {of_run.record['run']['state']}")
    before = [file.get("xxh3_128") for file in of_run.record["versions"].get("acceptance", [])]
    if acceptance.digest not in before:
        reasons.append("the thresholds are not those that the run began with (RunRecord(acceptance=...))")
    verdicts = {finding.verdict for finding in findings}
    if REJECT in verdicts:
        return Judgement(REJECT, findings, reasons, [])
    if OPEN in verdicts or reasons:
        return Judgement(OPEN, findings, reasons, [])
    if acceptance.confirmation is None:
        return Judgement(ACCEPT, findings, reasons, [])
    confirmation, problem = _confirm(Path(run), acceptance)
    if problem is not None:
        return Judgement(OPEN, findings, [problem], [])
    verdicts = {finding.verdict for finding in confirmation}
    verdict = next((verdict for verdict in (REJECT, OPEN) if verdict in verdicts), ACCEPT)
    return Judgement(verdict, findings, reasons, confirmation)


def certain_rejections(baseline: str | Path, run: str | Path, acceptance: Acceptance) -> list[Finding]:
    """Of a run under way: the thresholds that it can't reach any more, whatever it still does."""
    runs = [RecordedRun(folder, acceptance.price_per_device_hour) for folder in (baseline, run)]
    findings = _findings(acceptance.thresholds, runs[0], runs[1], acceptance.least_values)
    return [finding for finding in findings if finding.verdict == REJECT and finding.final]


def _findings(thresholds: Sequence[Threshold], baseline: RecordedRun, run: RecordedRun, least: int) -> list[Finding]:
    findings = []
    for threshold in thresholds:
        names = run.names(threshold.value)
        if threshold.worse_by_at_most is not None:
            names = sorted({*names, *baseline.names(threshold.value)})
        for name in names or [threshold.value]:
            own = replace(threshold, value=name)
            relative = threshold.worse_by_at_most is not None
            findings.append(judge(own, run.values(own), baseline.values(own) if relative else None, least))
    return findings


def judge(threshold: Threshold, run: Sequence[float], baseline: Sequence[float] | None, least: int) -> Finding:
    """Judges one threshold by the values of a run, and of a baseline where it is relative.

    A statistic of a distribution is accepted or rejected where a 95 % interval lies on one side of the threshold. The
    interval is that of a moving-block bootstrap (Künsch 1989), since values of neighbouring steps are alike.
    """
    name = threshold.value if threshold.value in COUNTS else f"{threshold.statistic} of {threshold.value}"
    name += " per step" if threshold.per_step else ""
    is_point = threshold.value in COUNTS or threshold.statistic in POINTS
    wanted = 1 if is_point else max(least, math.ceil(round(1 / (1 - SHARES.get(threshold.statistic, 0.0)), 6)))
    for whose, values in (("run", run), ("baseline", baseline)):
        if values is not None and len(values) < wanted:
            why = f"the {whose} has {len(values)} values, {wanted} are needed"
            return Finding(name, threshold.demand, OPEN, why)
    statistic = _statistic(threshold)
    of_run = statistic(np.asarray(run))
    of_baseline = statistic(np.asarray(baseline)) if baseline is not None else None
    excess = _excess(threshold, of_run, of_baseline)
    low = high = excess
    if not is_point:
        low, high = _interval(threshold, statistic, np.asarray(run), None if baseline is None else np.asarray(baseline))
    verdict = OPEN
    if high <= 0:
        verdict = ACCEPT
    elif low > 0:
        verdict = REJECT
    why = {ACCEPT: "reached", REJECT: "missed", OPEN: "the interval lies on both sides of the threshold"}[verdict]
    if math.isnan(excess):
        verdict, why = OPEN, "neither the baseline's nor the run's values are finite"
    final = verdict == REJECT and baseline is None and not threshold.per_step and _only_worsens(threshold)
    return Finding(name, threshold.demand, verdict, why, of_baseline, of_run, final)


def _only_worsens(threshold: Threshold) -> bool:
    if threshold.value in COUNTS:
        return threshold.lower
    return threshold.statistic == ("max" if threshold.lower else "min")


def _excess(threshold: Threshold, run: float, baseline: float | None) -> float:
    """By how much a number misses the threshold; 0 and less reaches it."""
    if threshold.at_most is not None:
        return run - threshold.at_most
    if threshold.at_least is not None:
        return threshold.at_least - run
    assert baseline is not None and threshold.worse_by_at_most is not None
    margin = threshold.worse_by_at_most * (abs(baseline) if threshold.share else 1.0)
    if math.isinf(margin):
        return math.nan
    return (run - baseline if threshold.lower else baseline - run) - margin


def _statistic(threshold: Threshold) -> Callable[[np.ndarray], float]:
    name = "last" if threshold.value in COUNTS else threshold.statistic
    share = SHARES.get(name)
    if share is not None:
        # The tail that is looked at is that of the worse values.
        share, worse = (share, "higher") if threshold.lower else (1 - share, "lower")

        def tail(values: np.ndarray) -> float:
            method: Any = worse if np.isinf(values).any() else "linear"
            return float(np.quantile(values, share, method=method))

        return tail
    functions: dict[str, Callable[[np.ndarray], float]] = {
        "last": lambda values: float(values[-1]),
        "min": lambda values: float(values.min()),
        "max": lambda values: float(values.max()),
        "mean": lambda values: float(values.mean()),
    }
    return functions[name]


def _interval(
    threshold: Threshold,
    statistic: Callable[[np.ndarray], float],
    run: np.ndarray,
    baseline: np.ndarray | None,
) -> tuple[float, float]:
    generator = np.random.default_rng(_SEED)
    drawn = []
    for _ in range(_DRAWS):
        of_baseline = statistic(_resampled(baseline, generator)) if baseline is not None else None
        drawn.append(_excess(threshold, statistic(_resampled(run, generator)), of_baseline))
    ordered = sorted(drawn, key=lambda value: math.inf if math.isnan(value) else value)
    cut = int(_SHARE_BELOW * _DRAWS)
    return ordered[cut], ordered[-1 - cut]


def _resampled(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """As many values, put together from stretches of the series."""
    length = max(1, round(len(values) ** 0.5))
    starts = generator.integers(0, len(values) - length + 1, size=math.ceil(len(values) / length))
    return values[(starts[:, None] + np.arange(length)).ravel()[: len(values)]]


def _confirm(run: Path, acceptance: Acceptance) -> tuple[list[Finding], str | None]:
    """Findings on the untouched set, or why there are none. Whoever reads it says so first, in the run's folder."""
    assert acceptance.confirmation is not None
    note = run / CONFIRMATION_READ
    if note.is_file():
        earlier = json.loads(note.read_text(encoding="utf-8"))
        if earlier["acceptance"] != acceptance.digest:
            return [], "the untouched set has been read before, for other thresholds, so it is none any more"
        if earlier["findings"] is None:
            return [], "the untouched set has been read before, and what it said was lost"
        return [Finding(**finding) for finding in earlier["findings"]], None
    if not acceptance.confirmation.is_file():
        return [], f"the untouched set's results are missing: {acceptance.confirmation}"
    mark: dict[str, Any] = {"time": time.time(), "acceptance": acceptance.digest, "findings": None}
    note.write_text(json.dumps(mark), encoding="utf-8")
    results = json.loads(acceptance.confirmation.read_text(encoding="utf-8"))
    findings = []
    for threshold in acceptance.confirming:
        own = results.get(threshold.value, [])
        worst = math.inf if threshold.lower else -math.inf
        values = [float(value) for value in (own if isinstance(own, list) else [own])]
        values = [value if math.isfinite(value) else worst for value in values]
        findings.append(judge(threshold, values, None, acceptance.least_values))
    mark["findings"] = [vars(finding) for finding in findings]
    note.write_text(json.dumps(mark, indent=2), encoding="utf-8")
    return findings, None
