"""What docs/testing.md shows runs as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "testing.md"


@pytest.fixture
def written(tmp_path):
    """The folder with every Python block of the page, under the file name in its first line."""
    for name, code in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        (tmp_path / name).write_text(code)
    return tmp_path


def run(folder, *command):
    settings = os.environ | {"COLUMNS": "120"}
    return subprocess.run(command, cwd=folder, env=settings, stdout=subprocess.PIPE, text=True, timeout=150, check=True)


@pytest.mark.slow
def test_the_page_does_what_it_says(written):
    (command,) = re.findall(r"^\$ (lightning-dist .*)$", DOCUMENT.read_text(), re.MULTILINE)
    script = Path(sys.executable).with_name("lightning-dist")
    assert "SAME: layout shard=2" in run(written, script, *command.split()[1:]).stdout
    assert run(written, sys.executable, "check_model.py").stdout.count("SAME: layout ") == 2
    sums, failure, who = run(written, sys.executable, "ranks.py").stdout.splitlines()
    assert sums == "[33, 33, 33]" and who == "1 ValueError"
    assert failure.startswith("Ranks 1, 0 of 2 failed: rank 1: ValueError: no luck; rank 0: ")
