"""``lightning-dist checkpoint``: exit codes, names of what is damaged, and files that others read."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from lightning_dist import checkpoint
from lightning_dist.cli import app
from lightning_dist.testing.faults import flip_bit


def run(*arguments):
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    """Two checkpoints of the same weights, one of which moved by 0.5 in one place."""
    weights = {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.zeros(3)}
    state = {"global_step": 10, "pytorch-lightning_version": "2.6.0"}
    checkpoint.save(tmp_path / "step_10", {"state_dict": weights}, state, rank_state={"a": 1}, info={"layout": "one"})
    weights["bias"][1] = 0.5
    checkpoint.save(tmp_path / "step_20", {"state_dict": weights}, state | {"global_step": 20}, rank_state={"a": 1})
    return tmp_path


def test_ls_lists_the_newest_first(folder):
    done = run("ls", folder, "--json")
    rows = json.loads(done.stdout)
    assert done.exit_code == 0 and [row["step"] for row in rows] == [20, 10] and rows[1]["layout"] == "one"
    assert "step_20" in run("ls", folder).stdout
    names = {row["name"]: row for row in json.loads(run("ls", folder / "step_10", "--tensors", "--json").stdout)}
    assert names["state_dict.weight"]["shape"] == [3, 4] and names["state_dict.weight"]["size"] == 48


def test_nothing_there_is_exit_code_1(tmp_path):
    for command in (("ls",), ("verify",), ("ls", "--tensors")):
        assert run(*command, tmp_path).exit_code == 1
    assert run("export", tmp_path / "no", tmp_path / "file.ckpt").exit_code == 1
    assert not (tmp_path / "file.ckpt").exists()


def test_verify_finds_one_flipped_bit_in_any_file(folder):
    assert run("verify", folder).exit_code == 0
    files = [Path(root, name) for root, _, names in os.walk(folder / "step_10") for name in names]
    assert {"COMMITTED", "manifest.json", "trainer.pt", "rank_00000.pt", ".metadata"} <= {file.name for file in files}
    for file in files:
        flip_bit(file)
        done = run("verify", folder)
        assert done.exit_code == 1, file
        assert "DAMAGED" in done.stdout and file.name in done.stdout
        flip_bit(file)
    assert run("verify", folder / "step_10").exit_code == 0


def test_export_writes_what_others_read(folder):
    assert run("export", folder / "step_20", folder / "all.ckpt").exit_code == 0
    assert torch.load(folder / "all.ckpt")["state_dict"]["bias"].tolist() == [0, 0.5, 0]
    assert run("export", folder / "step_20", folder / "weights.safetensors").exit_code == 0
    assert load_file(folder / "weights.safetensors")["bias"].tolist() == [0, 0.5, 0]
    done = run("export", folder / "step_20", folder / "weights.bin")
    assert done.exit_code == 2 and "does not fit" in done.stderr


def test_diff_names_what_differs(folder):
    done = run("diff", folder / "step_10", folder / "step_20")
    assert done.exit_code == 1 and "state_dict.bias" in done.stdout and "0.5" in done.stdout
    assert "weight" not in done.stdout
    assert run("diff", folder / "step_10", folder / "step_10").exit_code == 0


def test_wrong_use_is_exit_code_2(folder):
    assert run("diff", folder / "step_10").exit_code == 2
    assert run("nothing").exit_code == 2
