"""``lightning-dist doctor``, alone and under torchrun, and what `plan` makes of what it wrote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_dist.cli import app
from lightning_dist.testing.network import can_make_networks, two_networks


def test_alone_it_looks_at_one_process(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    arguments = ["doctor", "--json", "--checkpoint-dir", str(tmp_path), "--checkpoint-size", "1EB"]
    assert CliRunner().invoke(app, arguments).exit_code == 2
    result = CliRunner().invoke(app, [*arguments[:-1], "1000000TB"])
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert any("a new one is written before the old one is deleted" in problem for problem in report["problems"])
    assert len(report["ranks"]) == 1


def test_a_layout_that_does_not_fit_exits_2(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    result = CliRunner().invoke(app, ["doctor", "--layout", "tp=2"])
    assert result.exit_code == 2 and "does not fit the world" in result.stderr


@pytest.mark.slow
def test_under_torchrun_it_writes_links_that_plan_reads(tmp_path):
    scripts = Path(sys.executable).parent
    command = [
        scripts / "torchrun", "--standalone", "--nproc-per-node", "2", "--no-python", scripts / "lightning-dist",
        "doctor", "--layout", "shard=2", "--megabytes", "1", "--checkpoint-dir", tmp_path,
    ]  # fmt: skip
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert "inside nodes" in result.stdout and "axis shard" in result.stdout, result.stderr
    links = json.loads((tmp_path / "links.json").read_text())
    assert links["world_size"] == 2 and links["links"]["inter"] is None
    arguments = ["plan", "tests.advisor.models:mlp", "--devices", "2", "--memory", "16GB", "--flops", "100GFLOPS"]
    planned = CliRunner().invoke(app, [*arguments, "--links", str(tmp_path / "links.json"), "--json"])
    assert json.loads(planned.stdout)["recommended"] is not None


SLOWED = """
import sys
from lightning_dist.cli import app
from lightning_dist.testing.network import slow_down
slow_down(100)
app(["doctor", "--megabytes", "4", "--json", "--output", sys.argv[1]])
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_make_networks(), reason="making network namespaces needs root, ip and tc")
def test_it_finds_a_slow_link_between_two_networks(tmp_path):
    """100 Mbit/s are 12.5 MB/s; both ranks send at once, and Gloo over TCP reaches about half of it each way."""
    (tmp_path / "slowed.py").write_text(SLOWED)
    with two_networks(29872) as launch:
        command = [*launch, str(tmp_path / "slowed.py"), str(tmp_path / "links.json")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    links = json.loads((tmp_path / "links.json").read_text())
    assert 4e6 < links["links"]["inter"]["bandwidth"] < 12.5e6
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem.startswith("The link between nodes 0 and 1 carries 0.0") and "LocalUpdateStrategy" in problem
