"""What docs/plans.md shows runs as it stands there."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_dist import ModelPlan, testing
from lightning_dist.cli import app
from lightning_dist.parallel.tensor import STYLES
from lightning_dist.parallel.tensor.resolve import PARAMETERS

PAGE = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE, re.DOTALL))
OUTPUTS = dict(re.findall(r"```python\n# (\S+\.py)\n[^`]*```\n\n```text\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The current folder, with every Python block of the page under the file name in its first line."""
    for name, code in BLOCKS.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_block_prints_what_stands_below_it(written, name):
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(BLOCKS[name], name, "exec"), {})
    assert printed.getvalue() == OUTPUTS[name]


def test_the_planned_module_keeps_its_numbers(pool, written, monkeypatch):
    commands = re.findall(r"^\$ lightning-dist (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    own = testing.compare_with_one_process
    monkeypatch.setattr(testing, "compare_with_one_process", lambda *a, **k: own(*a, **k, pool=pool))
    for command in commands:
        result = CliRunner().invoke(app, command.split())
        assert result.exit_code == 0 and "SAME: layout " in result.stdout, result.output


def test_the_page_names_every_field_and_style():
    """Words of the tables that are none, and what the tables lack."""
    named = set(re.findall(r"`([a-z_]+)`", "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))))
    assert set(ModelPlan.__dataclass_fields__) <= named
    assert {*STYLES, *PARAMETERS} <= named
