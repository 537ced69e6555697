"""The fault table of docs/checkpoints.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TABLES = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def test_every_test_that_the_fault_table_names_exists() -> None:
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    rows = [line for line in TABLES.read_text().splitlines() if line.startswith("|") and "`" in line]
    named = [name for row in rows for name in re.findall(r"`([a-z0-9]+(?:_[a-z0-9]+){3,})(?:\[[^\]]*\])?`", row)]
    assert len(named) > 25
    assert [name for name in named if f"def test_{name}" not in tests] == []
