"""Single files for everybody else, and looking into a checkpoint on any machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors.torch import load_file

from lightning_dist import checkpoint
from lightning_dist.checkpoint.inspect import Content
from lightning_dist.testing import faults
from tests.checkpoint.state import save_step, visible


class Regression(LightningModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width))


@pytest.fixture
def module(tmp_path: Path) -> Regression:
    torch.manual_seed(3)
    module = Regression(width=7)
    state = {
        "global_step": 8,
        "hparams_name": "kwargs",
        "hyper_parameters": dict(module.hparams),
        "pytorch-lightning_version": "2.6.0",
        "loops": None,
    }
    checkpoint.save(tmp_path / "one", {"state_dict": module.state_dict(), "averaged": {"w": torch.ones(2)}}, state)
    return module


def test_load_from_checkpoint_reads_the_single_file(module: Regression, tmp_path: Path) -> None:
    checkpoint.consolidate(tmp_path / "one", tmp_path / "one.ckpt")
    loaded = Regression.load_from_checkpoint(tmp_path / "one.ckpt", weights_only=True)
    assert loaded.hparams.width == 7
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    plain = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert plain["global_step"] == 8 and torch.equal(plain["averaged"]["w"], torch.ones(2))
    assert "optimizer_states" not in plain


def test_safetensors_hold_the_weights(module: Regression, tmp_path: Path) -> None:
    checkpoint.export_safetensors(tmp_path / "one", tmp_path / "one.safetensors")
    found = load_file(tmp_path / "one.safetensors")
    assert found.keys() == module.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("export", [checkpoint.consolidate, checkpoint.export_safetensors])
def test_a_damaged_checkpoint_is_not_exported(export, module: Regression, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "there").write_text("before")
    faults.flip_bit(tmp_path / "one" / "data" / "__0_0.distcp")
    with pytest.raises(checkpoint.DamagedCheckpointError):
        export(tmp_path / "one", tmp_path / "there")
    assert (tmp_path / "there").read_text() == "before" and visible(str(tmp_path)) == ["one", "there"]
    for file, message in ((tmp_path, "is a directory"), (tmp_path / "no" / "x.ckpt", "there is no directory")):
        with pytest.raises(checkpoint.CheckpointError, match=message):
            export(tmp_path / "one", file)


MEMORY = """
import re, sys
import torch
from lightning_dist import checkpoint
def peak():  # of this program; getrusage inherits that of the process which started it
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
checkpoint.save(sys.argv[1] + "/small", {"state_dict": {"w": torch.ones(9)}}, {})
checkpoint.consolidate(sys.argv[1] + "/small", sys.argv[1] + "/small.ckpt")
before = peak()
checkpoint.consolidate(sys.argv[1] + "/big", sys.argv[1] + "/big.ckpt")
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_consolidating_takes_one_copy_and_a_piece_of_memory(tmp_path: Path) -> None:
    """Lightning#20312; in a process of its own, whose peak is known."""
    checkpoint.save(tmp_path / "big", {"state_dict": {f"w{i}": torch.full((4_000_000,), 1.0) for i in range(8)}}, {})
    size, piece = 8 * 16_000_000, 32 * 1024 * 1024
    ended = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert 0.9 * size < int(ended.stdout) < size + piece + 16_000_000


def test_the_overview_lists_good_and_broken_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(
            tmp_path / f"step_{step}", {"state_dict": {"w": torch.ones(3)}}, {}, info={"step": step, "layout": "pp=2"}
        )
    (tmp_path / "step_2" / "trainer.pt").unlink()
    (tmp_path / "step_3" / "COMMITTED").unlink()
    rows = checkpoint.overview(tmp_path)
    assert [(row.step, row.world_size, row.layout) for row in rows] == [(3, None, None), (2, 1, "pp=2"), (1, 1, "pp=2")]
    assert "no file COMMITTED" in str(rows[0].problem)
    assert rows[1].problem == "trainer.pt: the file is missing" and rows[2].problem is None
    files = [path for path in (tmp_path / "step_1").rglob("*") if path.is_file()]
    known = sum(path.stat().st_size for path in files if path.name not in ("COMMITTED", "manifest.json"))
    assert rows[2].size == known
    assert [row.path for row in checkpoint.overview(tmp_path / "step_1")] == [str(tmp_path / "step_1")]
    assert checkpoint.overview(tmp_path / "nowhere") == []


def test_verifying_a_folder_verifies_each_and_nothing_there_is_a_problem(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(str(tmp_path), step)
    faults.flip_bit(tmp_path / "step_00000001" / "ranks" / "rank_00000.pt")
    assert [report.intact for report in checkpoint.verify_all(tmp_path)] == [True, False]
    assert [report.intact for report in checkpoint.verify_all(tmp_path, full=False)] == [True, True]
    (one,) = checkpoint.verify_all(tmp_path / "step_00000001")
    assert [problem.file for problem in one.problems] == ["ranks/rank_00000.pt"]
    (nothing,) = checkpoint.verify_all(tmp_path / "nowhere")
    assert [problem.file for problem in nothing.problems] == ["COMMITTED"]


def test_contents_are_listed(module: Regression, tmp_path: Path) -> None:
    found = checkpoint.contents(tmp_path / "one")
    assert found[0] == Content("state_dict.layers.0.weight", (7, 4), "float32", 112, 1)
    assert found[-1].name == "averaged.w" and len(found) == len(module.state_dict()) + 1


def test_a_difference_is_named_and_measured(tmp_path: Path) -> None:
    one = {
        "state_dict": {"same": torch.tensor([1.0, float("nan")]), "a": torch.arange(4.0), "b": torch.ones(2)},
        "n": 1,
    }
    other = {
        "state_dict": {"same": torch.tensor([1.0, float("nan")]), "a": torch.arange(4.0), "b": torch.ones(3)},
        "n": 2,
    }
    other["state_dict"]["a"][2] = 2.25
    other["state_dict"]["c"] = torch.ones(1)
    checkpoint.save(tmp_path / "one", one, {})
    checkpoint.save(tmp_path / "other", other, {})
    found = {difference.name: difference for difference in checkpoint.diff(tmp_path / "one", tmp_path / "other")}
    assert set(found) == {"state_dict.a", "state_dict.b", "state_dict.c", "n"}
    assert found["state_dict.a"].what == "1 of 4 values differ" and found["state_dict.a"].largest == 0.25
    assert found["state_dict.b"].what == "shapes (2,) and (3,)"
    assert found["state_dict.c"].what == f"only in {tmp_path / 'other'}"
    assert found["n"].what == "1 and 2"
    assert checkpoint.diff(tmp_path / "one", tmp_path / "one") == []
