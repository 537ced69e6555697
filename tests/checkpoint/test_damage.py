"""Whatever happens to a file of a checkpoint is found, named, and never loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_dist import checkpoint
from lightning_dist.checkpoint import format as layout
from lightning_dist.testing import WorkerPool, faults
from tests.checkpoint.state import check_is_step, save_step, tensors_at

FILES = ["COMMITTED", "manifest.json", "trainer.pt", "ranks/rank_00000.pt", "data/.metadata", "data/__0_0.distcp"]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with files of several blocks."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", 1024)
    save_step(str(tmp_path), 4)
    directory = tmp_path / "step_00000004"
    assert sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()) == sorted(FILES)
    return directory


def read_everything(directory: Path) -> None:
    """All that a resume reads."""
    target = tensors_at(0)
    checkpoint.load_into(directory, target)
    checkpoint.read_trainer_state(directory)
    checkpoint.read_rank_state(directory, 0)
    assert torch.equal(target["state_dict"]["weight"], tensors_at(4)["state_dict"]["weight"])


@pytest.mark.parametrize("file", FILES)
def test_every_flipped_bit_is_found(file: str, saved: Path) -> None:
    """In the small files each single bit; in the larger ones a bit of every 23rd byte, the first and the last."""
    path = saved / file
    bits = path.stat().st_size * 8
    positions = range(bits) if file == "COMMITTED" else [*range(0, bits, 23 * 8 + 1), bits - 1]
    for bit in positions:
        faults.flip_bit(path, bit)
        report = checkpoint.verify(saved, threads=1)
        assert [problem.file for problem in report.problems] == [file], f"bit {bit}"
        faults.flip_bit(path, bit)
    assert checkpoint.verify(saved).intact
    faults.flip_bit(path)
    with pytest.raises(checkpoint.DamagedCheckpointError, match=file.split("/")[-1].replace(".", r"\.")):
        read_everything(saved)


def cut(path: Path) -> None:
    faults.truncate(path)


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    faults.truncate(path, 0)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def swap_for_another(path: Path) -> None:
    """The same file of another checkpoint: whole in itself, and foreign here."""
    root = path.parents[len(path.parts) - path.parts.index("step_00000004") - 2].parent
    save_step(str(root), 5)
    shutil.copy(root / "step_00000005" / path.relative_to(root / "step_00000004"), path)


@pytest.mark.parametrize("damage", [cut, remove, empty, lengthen, swap_for_another])
@pytest.mark.parametrize("file", FILES)
def test_a_truncated_missing_or_foreign_file_is_found(file: str, damage: Callable[[Path], None], saved: Path) -> None:
    damage(saved / file)
    report = checkpoint.verify(saved)
    # With the COMMITTED of another checkpoint it is the manifest that does not fit.
    blamed = "manifest.json" if (file, damage) == ("COMMITTED", swap_for_another) else file
    assert {problem.file for problem in report.problems} == {blamed}
    assert not checkpoint.verify(saved, full=False).intact or damage is swap_for_another
    with pytest.raises(checkpoint.CheckpointError):
        read_everything(saved)


def test_a_file_that_does_not_belong_is_named_and_does_no_harm(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    (saved / "data" / "__9_0.distcp").write_bytes(b"stray")
    report = checkpoint.verify(saved)
    assert report.intact and set(report.foreign) == {"notes.txt", "data/__9_0.distcp"}
    assert "notes.txt: not part of the checkpoint" in str(report)
    read_everything(saved)


def test_the_damaged_tensor_is_named_not_its_neighbours(tmp_path: Path) -> None:
    tensors = {"state_dict": {f"layer{i}.weight": torch.full((100,), float(i)) for i in range(9)}}
    checkpoint.save(tmp_path / "one", tensors, {})
    file = tmp_path / "one" / "data" / "__0_0.distcp"
    value = torch.full((100,), 6.0).numpy().tobytes()
    faults.flip_bit(file, file.read_bytes().index(value) * 8 + 3)
    (problem,) = checkpoint.verify(tmp_path / "one").problems
    assert problem.what.endswith("it holds state_dict.layer6.weight")
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"__0_0\.distcp.*it holds state_dict\.layer6\.weight$"):
        checkpoint.load_into(tmp_path / "one", tensors)


def test_another_version_of_the_format_is_refused_not_guessed_at(saved: Path) -> None:
    manifest = (saved / "manifest.json").read_bytes().replace(b'"version": 1', b'"version": 2')
    (saved / "manifest.json").write_bytes(manifest)
    (saved / "COMMITTED").write_bytes(layout.encode_commit(layout.Commit(layout.digest(manifest), 4, 1)))
    with pytest.raises(checkpoint.CheckpointError, match=r"version 2; this version reads .* version 1"):
        checkpoint.read_manifest(saved)
    assert not checkpoint.verify(saved).intact


def test_what_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        checkpoint.CheckpointError, match="nothing is not a complete checkpoint: it has no file COMMITTED"
    ):
        checkpoint.load_into(tmp_path / "nothing", {})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    (tmp_path / "file.ckpt").write_text("x")
    with pytest.raises(checkpoint.CheckpointError, match=r"is not a checkpoint \(it holds thesis.tex\)"):
        checkpoint.save(tmp_path / "mine", {}, {})
    with pytest.raises(checkpoint.CheckpointError, match="is a file"):
        checkpoint.save(tmp_path / "file.ckpt", {}, {})
    with pytest.raises(checkpoint.CheckpointError, match="is not a checkpoint"):
        checkpoint.delete(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()


def load_damaged(directory: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    tensors = {"state_dict": {"weight": distribute_tensor(torch.arange(64.0), mesh, [Shard(0)])}}
    checkpoint.save(directory, tensors, {})
    dist.barrier()
    if dist.get_rank() == 0:
        faults.flip_bit(os.path.join(directory, "data", "__1_0.distcp"))
    dist.barrier()
    with pytest.raises(checkpoint.DamagedCheckpointError) as caught:
        checkpoint.load_into(directory, tensors)
    return str(caught.value)


def test_damage_that_one_rank_meets_is_raised_on_all(tmp_path: Path, pool: WorkerPool) -> None:
    first, second = pool.run(load_damaged, 2, str(tmp_path / "one"))
    assert first == second
    assert "rank 1: data/__1_0.distcp is damaged" in first and "state_dict.weight" in first and "rank 0" not in first


def test_a_good_checkpoint_beside_it_is_untouched_by_a_failed_load(saved: Path) -> None:
    faults.flip_bit(saved / "data" / "__0_0.distcp")
    save_step(str(saved.parent), 7)
    check_is_step(str(saved.parent / "step_00000007"), 7)
