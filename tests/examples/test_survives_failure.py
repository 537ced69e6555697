"""The first example under torchrun: a killed rank costs time, and not one bit of the weights."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_dist import checkpoint

SCRIPT = Path(__file__).parents[2] / "examples" / "finetune_code_lm" / "train.py"


def run(data, output, *arguments, restarts=0):
    options = ["--epochs", "1", "--steps-per-epoch", "20", "--layers", "1", "--hidden-size", "32", "--batch-size", "4"]
    options += ["--context-length", "64", "--validation-windows", "8", "--survive", "--data", data, "--output", output]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    return subprocess.run(
        [*torchrun, str(SCRIPT), *map(str, options), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_starts_it_again_and_the_weights_are_those_of_an_undisturbed_run(tmp_path):
    data = tmp_path / "source.txt"
    data.write_text(Path(argparse.__file__).read_text()[:40000])
    killed = run(data, tmp_path / "killed", "--kill-at", "15", restarts=1)
    assert killed.returncode == 0, killed.stdout[-3000:]
    assert "the run starts afresh" in killed.stdout
    assert re.search(r"Going on from a checkpoint: \S+ \(step 10\)", killed.stdout)
    undisturbed = run(data, tmp_path / "whole")
    assert undisturbed.returncode == 0, undisturbed.stdout[-3000:]
    ends = [checkpoint.newest_good(tmp_path / name / "checkpoints") for name in ("killed", "whole")]
    assert [end.step for end in ends] == [20, 20]
    assert checkpoint.diff(ends[0].path, ends[1].path) == []


@pytest.mark.cluster
def test_without_restarts_every_rank_ends(tmp_path):
    data = tmp_path / "source.txt"
    data.write_text(Path(argparse.__file__).read_text()[:40000])
    assert run(data, tmp_path / "killed", "--kill-at", "3").returncode != 0
