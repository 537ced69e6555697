"""Which checkpoint a restart takes, and which ones may go."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_dist import checkpoint
from lightning_dist.checkpoint import storage, write
from lightning_dist.testing import WorkerPool, faults
from tests.checkpoint.state import check_is_step, hidden, save_step, visible


@pytest.fixture
def root(tmp_path: Path) -> str:
    for step in (10, 20, 30):
        save_step(str(tmp_path), step)
    return str(tmp_path)


def damage(root: str, step: int, file: str = "data/__0_0.distcp") -> None:
    faults.flip_bit(os.path.join(root, f"step_{step:08d}", file))


def test_the_newest_good_one_is_taken_and_the_cost_is_told(root: str) -> None:
    assert checkpoint.newest_good(root) == checkpoint.Choice(f"{root}/step_00000030", 30)
    damage(root, 30)
    choice = checkpoint.newest_good(root)
    assert choice is not None and (choice.step, choice.steps_lost) == (20, 10)
    assert "falling back to" in str(choice) and "10 steps are lost" in str(choice)
    assert "data/__0_0.distcp" in str(choice) and "state_dict.weight" in str(choice)
    damage(root, 20, "COMMITTED")
    choice = checkpoint.newest_good(root)
    assert choice is not None and (choice.step, choice.steps_lost) == (10, 20)
    damage(root, 10, "manifest.json")
    assert checkpoint.newest_good(root) is None
    assert checkpoint.newest_good(root + "/nowhere") is None


def test_without_full_verification_only_missing_and_cut_files_are_found(root: str) -> None:
    damage(root, 30)
    assert checkpoint.newest_good(root, full=False).step == 30  # type: ignore[union-attr]
    os.unlink(f"{root}/step_00000030/trainer.pt")
    assert checkpoint.newest_good(root, full=False).step == 20  # type: ignore[union-attr]


@pytest.mark.parametrize("file", ["COMMITTED", "manifest.json"])
def test_steps_lost_are_known_though_the_newest_cannot_be_read(root: str, file: str) -> None:
    shutil.move(f"{root}/step_00000030", f"{root}/unnamed")
    os.unlink(f"{root}/unnamed/{file}")
    choice = checkpoint.newest_good(root)
    assert choice is not None and (choice.step, choice.steps_lost) == (20, 10)


def test_order_is_that_of_saving_when_the_clock_goes_backwards(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Backwards(write.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(1999, 12, 31, tzinfo=tz)

    monkeypatch.setattr(write, "datetime", Backwards)
    save_step(root, 40)
    os.utime(f"{root}/step_00000040", (0, 0))
    assert checkpoint.read_manifest(f"{root}/step_00000040").saved_at.startswith("1999")
    assert checkpoint.newest_good(root).step == 40  # type: ignore[union-attr]
    assert checkpoint.retain(root, 1) == [f"{root}/step_000000{step}" for step in (30, 20, 10)]
    check_is_step(f"{root}/step_00000040", 40)


def test_after_a_roll_back_the_later_save_is_newer_though_its_step_is_lower(root: str) -> None:
    save_step(root, 15)
    assert [entry.step for entry in checkpoint.list_checkpoints(root)] == [15, 30, 20, 10]
    assert checkpoint.newest_good(root).step == 15  # type: ignore[union-attr]


def test_the_last_good_one_cannot_be_deleted(root: str) -> None:
    damage(root, 30)
    assert checkpoint.delete(f"{root}/step_00000010")
    assert not checkpoint.delete(f"{root}/step_00000020"), "30 is damaged, so 20 is all there is"
    check_is_step(f"{root}/step_00000020", 20)
    assert checkpoint.delete(f"{root}/step_00000030"), "20 is good, and the damaged one may go"
    assert checkpoint.delete(f"{root}/step_00000030"), "it is gone already"
    os.unlink(f"{root}/step_00000020/COMMITTED")
    assert checkpoint.delete(f"{root}/step_00000020"), "what was never committed is no checkpoint"
    assert os.listdir(root) == []


def test_retention_counts_good_ones_only(root: str) -> None:
    damage(root, 30)
    assert checkpoint.retain(root, 2) == []
    assert checkpoint.retain(root, 1, keep=[f"{root}/step_00000010"]) == []
    assert checkpoint.retain(root, 1) == [f"{root}/step_00000010"]
    assert visible(root) == ["step_00000020", "step_00000030"]
    damage(root, 20)
    assert checkpoint.retain(root, 1) == [], "no good one: nothing is removed"
    with pytest.raises(ValueError, match="keep_last is 0"):
        checkpoint.retain(root, 0)


def test_leftovers_of_crashes_are_swept_and_cut_short_replacements_finished(root: str) -> None:
    for name in (".step_00000040.writing-0123456789ab", ".step_00000005.deleting-0123456789ab"):
        shutil.copytree(f"{root}/step_00000010/data", f"{root}/{name}/data")
    shutil.move(f"{root}/step_00000030", f"{root}/.step_00000030.replaced-0123456789ab")
    (Path(root) / ".mine").mkdir()
    removed = checkpoint.sweep(root)
    assert len(removed) == 2 and hidden(root) == [".mine"]
    assert checkpoint.newest_good(root).step == 30  # type: ignore[union-attr]


def choose_blind(root: str) -> tuple[Any, Any]:
    """Rank 1's file system shows an old listing, and rank 2's shows nothing at all (Lightning#19932)."""
    original = storage.LocalStorage.names

    def stale(self: storage.LocalStorage, path: str) -> list[str]:
        if path != root:
            return original(self, path)
        return original(self, path)[:1] if dist.get_rank() == 1 else []

    if dist.get_rank() > 0:
        storage.LocalStorage.names = stale  # type: ignore[method-assign]
    try:
        return checkpoint.agree_on_newest(root), checkpoint.agree_on_newest(root + "/empty")
    finally:
        storage.LocalStorage.names = original  # type: ignore[method-assign]


def test_rank_0_decides_for_all(root: str, pool: WorkerPool) -> None:
    results = pool.run(choose_blind, 3, root)
    assert [(choice.step, nothing) for choice, nothing in results] == [(30, None)] * 3
    damage(root, 30)
    results = pool.run(choose_blind, 3, root)
    assert results[0] == results[1] == results[2]
    choice = results[0][0]
    assert (choice.step, choice.steps_lost) == (20, 10) and "state_dict.weight" in str(choice)


def verify_in_parts(directory: str) -> tuple[Any, int]:
    from lightning_dist.checkpoint.verify import verify_part

    part = verify_part(directory, dist.get_rank(), dist.get_world_size())
    return checkpoint.verify_together(directory), part.bytes_checked


def test_ranks_share_the_verification(root: str, pool: WorkerPool) -> None:
    whole = checkpoint.verify(f"{root}/step_00000030")
    results = pool.run(verify_in_parts, 3, f"{root}/step_00000030")
    assert all(report.intact and report.bytes_checked == whole.bytes_checked for report, _ in results)
    assert sum(count for _, count in results) == whole.bytes_checked > max(count for _, count in results)
