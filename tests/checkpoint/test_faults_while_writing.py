"""A save that is killed or fails, at every operation it makes: a good checkpoint is left, and only whole ones."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_dist import checkpoint
from lightning_dist.testing import WorkerPool, faults
from tests.checkpoint import forked
from tests.checkpoint.state import check_is_step, hidden, save_step, visible

Case = tuple[Callable[[str], None], Callable[[str], None], set[int]]


def save_two(root: str) -> None:
    save_step(root, 2)


def replace_last(root: str) -> None:
    save_step(root, 2, name="last")


def save_last(root: str) -> None:
    save_step(root, 1, name="last")


def save_one(root: str) -> None:
    save_step(root, 1)


def save_one_and_two(root: str) -> None:
    save_step(root, 1)
    save_step(root, 2)


def delete_one(root: str) -> None:
    checkpoint.delete(os.path.join(root, "step_00000001"))


def retain_one(root: str) -> None:
    checkpoint.retain(root, 1)


# What is there before, what is interrupted, and the steps that the newest good one may then be of.
CASES: dict[str, Case] = {
    "a new checkpoint": (save_one, save_two, {1, 2}),
    "a replacement": (save_last, replace_last, {1, 2}),
    "a deletion": (save_one_and_two, delete_one, {2}),
    "retention": (save_one_and_two, retain_one, {2}),
}


@pytest.fixture(params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[Path, Callable[[], str], Callable[[str], None], set[int]]:
    before, interrupted, steps = CASES[request.param]
    (tmp_path / "before").mkdir()
    before(str(tmp_path / "before"))

    def fresh() -> str:
        shutil.rmtree(tmp_path / "root", ignore_errors=True)
        return str(shutil.copytree(tmp_path / "before", tmp_path / "root"))

    return tmp_path, fresh, interrupted, steps


def count_operations(fresh: Callable[[], str], function: Callable[[str], None]) -> int:
    root = fresh()
    with faults.recorded_storage_calls() as calls:
        function(root)
    return len(calls)


def is_killed_at(rank: int, function: Callable[[str], None], root: str, nth: int, victim: int = 0) -> None:
    if rank != victim:
        function(root)
        return
    with faults.storage_fault("any", faults.kill_this_process, nth=nth):
        function(root)


def check_folder(root: str, steps: set[int], ranks: int = 1) -> int:
    """What a restart does: it finds a whole checkpoint, cleans up, and saves again."""
    choice = checkpoint.newest_good(root)
    assert choice is not None and choice.step in steps, choice
    check_is_step(choice.path, choice.step, ranks)
    checkpoint.sweep(root)
    assert hidden(root) == []
    for name in visible(root):  # whatever can be seen is whole or is not taken for a checkpoint
        path = os.path.join(root, name)
        assert checkpoint.verify(path).intact or not checkpoint.is_checkpoint(path)
    assert checkpoint.newest_good(root) == choice
    return choice.step


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_operation(case: Any, stride: int) -> None:
    folder, fresh, function, steps = case
    count = count_operations(fresh, function)
    assert count > 5
    found = []
    for nth in range(count, 0, -stride):
        root = fresh()
        (ended,) = forked.run(folder, is_killed_at, function, root, nth)
        assert ended.code == -signal.SIGKILL
        found.append(check_folder(root, steps))
        save_step(root, 3)
        check_is_step(checkpoint.newest_good(root).path, 3)  # type: ignore[union-attr]
    assert found == sorted(found, reverse=True), "once the new checkpoint counts, no later crash takes it back"


@pytest.mark.parametrize(
    "number",
    [errno.EIO, pytest.param(errno.ENOSPC, marks=pytest.mark.slow), pytest.param(errno.EACCES, marks=pytest.mark.slow)],
)
def test_an_error_at_every_operation(case: Any, number: int) -> None:
    _, fresh, function, steps = case
    for nth in range(1, count_operations(fresh, function) + 1):
        root = fresh()
        failed = False
        with faults.storage_fault("any", faults.fail(number), nth=nth):
            try:
                function(root)
            except (checkpoint.CheckpointError, OSError):
                failed = True
        step = check_folder(root, steps)
        if not failed:
            assert step == max(steps), "it returned, so the new checkpoint must be there"


def fails_at_each_operation(root: str, victim: int) -> list[str]:
    """Rank `victim` fails at its first, second, … operation until it has made them all; every rank's messages."""
    with faults.recorded_storage_calls() as calls:
        save_step(root, 2)
    counts: list[Any] = [None, None]
    dist.all_gather_object(counts, len(calls))
    messages = []
    for nth in range(1, counts[victim] + 1):
        fault = faults.storage_fault("any", faults.fail(errno.EIO), nth=nth)
        with fault if dist.get_rank() == victim else contextlib.nullcontext():
            try:
                save_step(root, 3, name=f"step_{nth + 2}")
                messages.append("saved")
            except checkpoint.CheckpointError as error:
                messages.append(str(error))
    return messages


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails_is_named_on_every_rank(victim: int, tmp_path: Path, pool: WorkerPool) -> None:
    root = str(tmp_path)
    pool.run(save_one_on_all, 2, root)
    messages = pool.run(fails_at_each_operation, 2, root, victim)
    assert messages[0] == messages[1]
    failed = [text for text in messages[0] if text != "saved"]
    assert len(failed) > 3
    assert all(f"rank {victim}: " in text and "Input/output error" in text for text in failed)
    for nth, text in enumerate(messages[0], start=1):
        assert checkpoint.is_checkpoint(tmp_path / f"step_{nth + 2}") == (text == "saved")
    check_is_step(str(tmp_path / "step_00000001"), 1, ranks=2)
    check_is_step(str(tmp_path / "step_00000002"), 2, ranks=2)


def save_one_on_all(root: str) -> None:
    save_step(root, 1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_every_operation(victim: int, tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    forked.run(tmp_path, _save, str(before), 1, ranks=2)
    scratch = shutil.copytree(before, tmp_path / "scratch")
    counts = [ended.result for ended in forked.run(tmp_path, _count, str(scratch), ranks=2)]
    for nth in range(1, counts[victim] + 1):
        root = str(shutil.copytree(before, tmp_path / f"root{nth}"))
        ended = forked.run(tmp_path, is_killed_at, save_two, root, nth, victim, ranks=2)
        assert ended[victim].code == -signal.SIGKILL
        survivor = ended[1 - victim]
        assert survivor.error is None or isinstance(survivor.error, checkpoint.CheckpointError), survivor.error
        if survivor.error is None:
            check_is_step(os.path.join(root, "step_00000002"), 2, ranks=2)
        check_folder(root, {1, 2}, ranks=2)


def _save(rank: int, root: str, step: int) -> None:
    save_step(root, step)


def _count(rank: int, root: str) -> int:
    with faults.recorded_storage_calls() as calls:
        save_step(root, 2)
    return len(calls)


def test_everything_is_durable_before_it_is_named_and_named_before_it_is_committed(tmp_path: Path) -> None:
    """What a power failure keeps is what was synced: no kill can show this, the order of operations does."""
    with faults.recorded_storage_calls() as calls:
        save_step(str(tmp_path), 1)
    order = [(call.operation, os.path.basename(call.path)) for call in calls]
    named = next(i for i, (what, name) in enumerate(order) if what == "rename" and ".writing-" in name)
    created = {call.path for call in calls[:named] if call.operation == "create"}
    synced = {call.path for call in calls[:named] if call.operation == "sync"}
    assert created == synced and len(created) == 5
    assert {name for what, name in order[:named] if what == "sync_directory"} == {"data", "ranks", order[named][1]}
    assert order[named + 1] == ("sync_directory", tmp_path.name)
    assert [name for what, name in order[named + 2 :] if what == "create"] == ["COMMITTED.new"]
    assert order[-3:] == [("sync", "COMMITTED.new"), ("rename", "COMMITTED.new"), ("sync_directory", "step_00000001")]


def test_a_full_disk_at_every_size(tmp_path: Path) -> None:
    save_step(str(tmp_path), 1)
    total = sum(os.path.getsize(path) for path in (tmp_path / "step_00000001").rglob("*") if path.is_file())
    for capacity in range(0, total + 2000, 1000):
        with faults.full_disk(capacity):
            try:
                save_step(str(tmp_path), 2)
            except checkpoint.CheckpointError as error:
                assert "No space left on device" in str(error)
            else:
                assert capacity >= total
                break
            assert visible(str(tmp_path)) == ["step_00000001"] and hidden(str(tmp_path)) == []
    else:
        raise AssertionError("the save never fitted")
    check_is_step(str(tmp_path / "step_00000002"), 2)


def test_a_real_full_file_system(tmp_path: Path) -> None:
    try:
        disk = faults.small_disk(256 * 1024)
        root = disk.__enter__()
    except PermissionError as error:
        pytest.skip(f"no right to mount a tmpfs: {error}")
    try:
        save_step(str(root), 1)
        (root / "filler").write_bytes(b"x" * (shutil.disk_usage(root).free - 16 * 1024))
        with pytest.raises(checkpoint.CheckpointError, match="No space left on device"):
            save_step(str(root), 2)
        check_is_step(str(root / "step_00000001"), 1)
        assert visible(str(root)) == ["filler", "step_00000001"] and hidden(str(root)) == []
        (root / "filler").unlink()
        save_step(str(root), 2)
        check_is_step(str(root / "step_00000002"), 2)
    finally:
        disk.__exit__(None, None, None)
