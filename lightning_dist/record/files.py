"""The files of a run's record: events and values as lines that survive a crash, the document written as a whole."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD, PAGE = "run_record.json", "run_record.md"
EVENTS, VALUES = "run_events", "run_values.jsonl"


class RecordFiles:
    """Appends one rank's events, and the first rank's values, to files in the run's folder.

    Args:
        folder: Made where it is missing.
        rank: Each rank has an events file of its own, so ranks never write into the same.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._events = self.folder / f"{EVENTS}.{rank}.jsonl"
        self._values: Any = None

    def add_event(self, event: Mapping[str, Any]) -> None:
        with self._events.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(event, ensure_ascii=False) + "\n")

    def add_values(self, values: Mapping[str, Any]) -> None:
        """Appends a row; numbers that are not finite become the texts ``"nan"``, ``"inf"`` and ``"-inf"``."""
        if self._values is None:
            self._values = (self.folder / VALUES).open("a", encoding="utf-8")
        row = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self._values.write(json.dumps(row) + "\n")

    def flush(self) -> None:
        if self._values is not None:
            self._values.flush()

    def close(self) -> None:
        if self._values is not None:
            self._values.close()
            self._values = None


def read_events(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All ranks' events in the order of time; a line that a crash cut short is left out."""
    events = [event for path in sorted(Path(folder).glob(f"{EVENTS}.*.jsonl")) for event in _lines(path)]
    return sorted(events, key=lambda event: event["time"])


def read_values(folder: str | os.PathLike[str]) -> list[dict[str, float]]:
    """The recorded rows in order: ``step``, ``time`` (seconds since the run began) and values by name."""
    path = Path(folder) / VALUES
    rows = _lines(path) if path.is_file() else []
    return [{name: float(value) for name, value in row.items()} for row in rows]


def read_record(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The record as it was last written, with events that came later.

    Raises:
        FileNotFoundError: If the folder has no record.
    """
    path = Path(folder) / RECORD
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {RECORD}: give the folder that RunRecord wrote into.")
    return {**json.loads(path.read_text(encoding="utf-8")), "events": read_events(folder)}


def write_record(folder: str | os.PathLike[str], record: Mapping[str, Any], page: str) -> None:
    """Replaces both files, each at once."""
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    for name, content in ((RECORD, text), (PAGE, page)):
        beside = Path(folder) / f".{name}.new"
        beside.write_text(content, encoding="utf-8")
        os.replace(beside, Path(folder) / name)


def _lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
