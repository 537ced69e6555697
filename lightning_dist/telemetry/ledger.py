"""Goodput over the whole life of a run, its restarts included, in one local file that is only ever appended to."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LifeOfRun:
    """What a ledger says.

    Args:
        wall: Seconds from the first start to the last entry, time between attempts included.
        productive: Seconds in steps that the run still has the use of.
        lost: Seconds in steps that were done again after a restart.
        restarts: Attempts after the first.
    """

    wall: float
    productive: float
    lost: float
    restarts: int

    @property
    def goodput(self) -> float:
        """Productive ÷ wall time."""
        return self.productive / self.wall if self.wall > 0 else 0.0


class Ledger:
    """Keeps count of productive time; rank 0 has one.

    A line of JSON is written for each attempt's beginning and every now and then; a line cut short by a crash is left
    out when the file is read.

    Args:
        path: The file; the attempts of a run share it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._attempt = 0
        self._entries = _read(self.path)

    def begin(self, step: int, now: float | None = None) -> None:
        """An attempt begins at a step: 0, or where the checkpoint that it resumes from was taken."""
        self._attempt = 1 + max((entry["attempt"] for entry in self._entries), default=-1)
        self._append(step, 0.0, now)

    def note(self, step: int, productive: float, now: float | None = None) -> None:
        """Writes down how far the attempt has come.

        Args:
            step: Steps done.
            productive: Seconds of this attempt spent in steps.
            now: Seconds since the epoch; None reads the clock.
        """
        self._append(step, productive, now)

    def life(self, now: float | None = None) -> LifeOfRun:
        """The run's life up to now."""
        return life_of(self._entries, time.time() if now is None else now)

    def _append(self, step: int, productive: float, now: float | None) -> None:
        entry = {
            "attempt": self._attempt,
            "time": time.time() if now is None else now,
            "step": step,
            "productive": productive,
        }
        self._entries.append(entry)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def read_life(path: str | os.PathLike[str]) -> LifeOfRun:
    """The life of a run that has ended, from its ledger."""
    entries = _read(Path(path))
    return life_of(entries, entries[-1]["time"] if entries else 0.0)


def life_of(entries: list[dict[str, Any]], now: float) -> LifeOfRun:
    """Adds up a ledger's entries.

    Each attempt goes on from its first step; what the attempt before had done beyond that step is lost. Productive
    time between two entries is taken as spread evenly over their steps.
    """
    if not entries:
        return LifeOfRun(0.0, 0.0, 0.0, 0)
    points: list[tuple[int, float]] = []  # steps done, and productive seconds that led there
    lost = 0.0
    attempt = entries[0]["attempt"]
    base = 0.0
    for entry in entries:
        if entry["attempt"] != attempt:
            attempt = entry["attempt"]
            kept = _at(points, entry["step"])
            lost += (points[-1][1] if points else 0.0) - kept
            points = [point for point in points if point[0] < entry["step"]] + [(entry["step"], kept)]
            base = kept
        points.append((entry["step"], base + entry["productive"]))
    return LifeOfRun(now - entries[0]["time"], points[-1][1], lost, len({e["attempt"] for e in entries}) - 1)


def _at(points: list[tuple[int, float]], step: int) -> float:
    """Productive seconds at a step, between two points by line."""
    before = (0, 0.0)
    for point in points:
        if point[0] >= step:
            span = point[0] - before[0]
            return point[1] if not span else before[1] + (point[1] - before[1]) * (step - before[0]) / span
        before = point
    return before[1]


def _read(path: Path) -> list[dict[str, Any]]:
    entries = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return entries
