"""Saving while training goes on: what is saved is what was there, failures are heard of, nobody waits for long."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_dist import checkpoint
from lightning_dist.checkpoint import BackgroundWriter, CheckpointError
from lightning_dist.testing import WorkerPool, faults
from tests.checkpoint.state import check_is_step, tensors_at, visible


def save_step(writer: BackgroundWriter, root: str, step: int, **kwargs: Any) -> bool:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return writer.save(
        f"{root}/step_{step}",
        tensors_at(step, rank),
        {"global_step": step},
        rank_state={"rank": rank, "step": step},
        **kwargs,
    )


def test_tensors_changed_right_after_the_call_are_saved_as_they_were(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    tensors = {"state_dict": {"weight": torch.arange(300_000.0), "count": torch.tensor(3)}}
    view = tensors["state_dict"]["weight"][10:20]
    with faults.slow_disk(bytes_per_second=4e6):
        for step in (1, 2):
            assert writer.save(tmp_path / f"step_{step}", tensors, {})
            assert writer.busy
            for value in tensors["state_dict"].values():
                value += 1000  # in place, as optimizers on the CPU do
            view.zero_()
        writer.close()
    first, second = (checkpoint.read_tensors(tmp_path / f"step_{step}")["state_dict"] for step in (1, 2))
    assert torch.equal(first["weight"], torch.arange(300_000.0)) and first["count"] == 3
    expected = torch.arange(300_000.0) + 1000
    expected[10:20] = 0
    assert torch.equal(second["weight"], expected) and second["count"] == 1003


def test_the_call_returns_while_the_disk_is_still_slow(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    with faults.storage_fault("sync", faults.wait(1.0), file="*.distcp"):
        began = time.monotonic()
        assert save_step(writer, str(tmp_path), 1)
        assert writer.busy
        assert not checkpoint.is_checkpoint(tmp_path / "step_1")
        assert writer.protected_step is None
        assert writer.wait()
    assert time.monotonic() - began >= 1.0
    check_is_step(str(tmp_path / "step_1"), 1)
    assert writer.protected_step == 1


def test_a_failure_is_raised_once_by_the_next_call_and_protection_is_not_claimed(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    assert save_step(writer, str(tmp_path), 1)
    assert writer.wait()
    since_first = writer.unprotected_seconds
    with faults.failing_disk():
        assert save_step(writer, str(tmp_path), 2)
        while writer.busy:
            time.sleep(0.01)
    time.sleep(0.2)
    assert writer.unprotected_seconds >= since_first + 0.2 and writer.protected_step == 1
    with pytest.raises(
        CheckpointError, match=r"step_2 failed: .*Input/output error.*newest safe state is \d+ seconds old"
    ):
        save_step(writer, str(tmp_path), 3)
    assert visible(str(tmp_path)) == ["step_1"]
    began = time.monotonic()
    assert save_step(writer, str(tmp_path), 3), "the second call begins it"
    writer.close()
    assert writer.protected_step == 3 and writer.unprotected_seconds <= time.monotonic() - began
    check_is_step(str(tmp_path / "step_3"), 3)


@pytest.mark.parametrize("together", [True, False])
def test_the_last_failure_is_raised_at_the_end(together: bool, tmp_path: Path) -> None:
    writer = BackgroundWriter()
    with faults.full_disk(500):
        assert save_step(writer, str(tmp_path), 1)
        with pytest.raises(CheckpointError, match="No space left on device"):
            writer.close(together=together)


def test_nothing_holds_on_to_the_tensors_that_were_saved(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    for step in (1, 2):
        tensor = torch.ones(5)
        gone = weakref.ref(tensor)
        assert writer.save(tmp_path / f"step_{step}", {"state_dict": {"w": tensor}}, {})
        del tensor
        assert gone() is None
    writer.close()
    assert torch.equal(checkpoint.read_tensors(tmp_path / "step_2")["state_dict"]["w"], torch.ones(5))


def test_an_unpicklable_state_is_a_failure_too(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    assert writer.save(tmp_path / "step_1", {}, {"lock": threading.Lock()})
    with pytest.raises(CheckpointError, match="step_1 failed: TypeError: cannot pickle"):
        writer.wait()


def test_what_is_damaged_on_its_way_to_the_disk_is_noticed(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    file = tmp_path / "step_1" / "data" / "__0_0.distcp"
    with faults.storage_fault("sync_directory", lambda call: faults.flip_bit(file), file="step_1"):
        assert save_step(writer, str(tmp_path), 1)
        with pytest.raises(CheckpointError, match=r"just written is not what was to be written.*\n.*__0_0.distcp"):
            writer.wait()
    assert writer.protected_step is None


def test_a_stalled_disk_does_not_stop_training(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    with faults.storage_fault("write", faults.wait(1.5), file="*.distcp"):
        assert save_step(writer, str(tmp_path), 1)
        began = time.monotonic()
        assert not save_step(writer, str(tmp_path), 2, patience=0.1), "skipped, and says so"
        assert not writer.wait(patience=0.1)
        assert time.monotonic() - began < 1.0
        with pytest.raises(CheckpointError, match="still being written"):
            writer.close(patience=0.1)
        writer.close()
    assert visible(str(tmp_path)) == ["step_1"]


def test_deleting_waits_for_the_write_of_the_same_path(tmp_path: Path) -> None:
    """Lightning#14035: a delete overtook the write, and the file came back."""
    writer = BackgroundWriter()
    assert save_step(writer, str(tmp_path), 1)
    with faults.storage_fault("sync", faults.wait(0.4), file="*.distcp"):
        assert save_step(writer, str(tmp_path), 2)
        writer.delete(tmp_path / "step_2")
        assert writer.wait()
    assert visible(str(tmp_path)) == ["step_1"]


def test_the_last_good_one_is_deleted_only_when_there_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = BackgroundWriter()
    assert save_step(writer, str(tmp_path), 1)
    writer.delete(tmp_path / "step_1")
    assert writer.wait() and visible(str(tmp_path)) == ["step_1"]
    assert "is the only good checkpoint and stays" in caplog.text
    with faults.failing_disk():
        assert save_step(writer, str(tmp_path), 2)
        with pytest.raises(CheckpointError):
            writer.wait()
    assert visible(str(tmp_path)) == ["step_1"]
    assert save_step(writer, str(tmp_path), 3)
    writer.close()
    assert visible(str(tmp_path)) == ["step_3"]


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    for step in range(1, 5):
        assert save_step(writer, str(tmp_path), step)
        writer.retain(tmp_path, 2)
    writer.close()
    assert visible(str(tmp_path)) == ["step_3", "step_4"]


def test_prepared_memory_is_used_by_the_first_save(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    writer.prepare(tensors_at(0))
    assert writer.wait()
    places = {index.fqn: buffer.data_ptr() for index, buffer in writer._buffers.items()}
    assert save_step(writer, str(tmp_path), 1) and writer.wait() and save_step(writer, str(tmp_path), 2)
    assert writer.wait()
    assert {index.fqn: buffer.data_ptr() for index, buffer in writer._buffers.items()} == places and len(places) == 3
    writer.close()
    check_is_step(str(tmp_path / "step_2"), 2)


ENDS_AT_ONCE = """
import sys, torch
from lightning_dist import checkpoint
writer = checkpoint.BackgroundWriter()
writer.save(sys.argv[1], {"state_dict": {"w": torch.ones(3_000_000)}}, {})
"""


@pytest.mark.slow
def test_a_script_that_just_ends_finishes_its_last_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path / "one")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert checkpoint.verify(tmp_path / "one").intact


def run_ranks(root: str) -> list[Any]:
    """Several saves with the same and with another plan, a failure on one rank, and a slow rank."""
    rank = dist.get_rank()
    writer = BackgroundWriter(timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (2,))

    def tensors(step: int, rows: int) -> dict[str, Any]:
        whole = torch.arange(rows * 4, dtype=torch.float32).view(rows, 4) + step
        return {
            "state_dict": {
                "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
                "replicated": distribute_tensor(whole, mesh, [Replicate()]),
                "buffer": torch.full((3,), float(step + 100 * rank)),
            }
        }

    seen: list[Any] = []
    copied = []
    for step, rows in ((1, 5), (2, 5), (3, 5), (4, 7)):
        assert writer.save(f"{root}/step_{step}", tensors(step, rows), {"global_step": step})
        assert writer.wait()
        copied.append(sum(buffer.nbytes for buffer in writer._buffers.values()))
    seen.append(copied)
    with faults.failing_disk() if rank == 1 else faults.recorded_storage_calls():
        assert writer.save(f"{root}/step_5", tensors(5, 7), {"global_step": 5})
        try:
            writer.wait()
        except CheckpointError as error:
            seen.append(str(error).split(". The newest")[0])
    with faults.storage_fault("write", faults.wait(1.0)) if rank == 1 else faults.recorded_storage_calls():
        assert writer.save(f"{root}/step_6", tensors(6, 7), {"global_step": 6})
        seen.append(writer.save(f"{root}/step_7", tensors(7, 7), {"global_step": 7}, patience=0.0))
        seen.append(writer.wait())
    writer.close()
    return seen


def test_ranks_save_together_and_learn_of_each_others_failures(tmp_path: Path, pool: WorkerPool) -> None:
    first, second = pool.run(run_ranks, 2, str(tmp_path))
    assert first[1:] == second[1:]
    assert "step_5 failed: rank 1: " in first[1] and "Input/output error" in first[1] and "rank 0" not in first[1]
    assert first[2:] == [False, True]
    for step, rows in ((1, 5), (2, 5), (3, 5), (4, 7), (6, 7)):
        found = checkpoint.read_tensors(tmp_path / f"step_{step}")["state_dict"]
        whole = torch.arange(rows * 4, dtype=torch.float32).view(rows, 4) + step
        assert torch.equal(found["sharded"], whole) and torch.equal(found["replicated"], whole)
        assert torch.equal(found["buffer"], torch.full((3,), float(step))), "a buffer is as the lowest rank has it"
    assert visible(str(tmp_path)) == [f"step_{step}" for step in (1, 2, 3, 4, 6)]
    # What both hold is copied by both at first, and by the one that writes it from the second save on.
    both = first[0][0] + second[0][0]
    assert first[0][1] + second[0][1] == both - 5 * 4 * 4 - 3 * 4 == first[0][2] + second[0][2]


def lose_contact(root: str) -> list[Any]:
    """Rank 1's disk stalls for longer than rank 0 waits; later it is well again."""
    rank = dist.get_rank()
    writer = BackgroundWriter(timeout=timedelta(seconds=1))
    seen: list[Any] = []
    with faults.storage_fault("write", faults.wait(3.0)) if rank == 1 else faults.recorded_storage_calls():
        assert save_step(writer, root, 1)
        for step in range(2, 40):
            try:
                took = save_step(writer, root, step, patience=0.3)
                seen.append(took)
                if took:
                    break
            except CheckpointError as error:
                seen.append("lost contact" if "lost contact with the other ranks" in str(error) else str(error))
    assert writer.wait()
    writer.close()
    return [*seen, step]


def test_ranks_that_lost_each_other_over_a_stalled_disk_save_again(tmp_path: Path, pool: WorkerPool) -> None:
    first, second = pool.run(lose_contact, 2, str(tmp_path))
    assert first == second
    assert "lost contact" in first and first[-2] is True
    check_is_step(str(tmp_path / f"step_{first[-1]}"), first[-1], ranks=2)
    assert visible(str(tmp_path)) == [f"step_{first[-1]}"]


def kill_while_writing(rank: int, root: str) -> str:
    writer = BackgroundWriter(timeout=timedelta(seconds=10))
    assert save_step(writer, root, 1)
    assert writer.wait()
    if rank == 1:
        with faults.storage_fault("sync", faults.kill_this_process):
            save_step(writer, root, 2)
            time.sleep(10)
    assert save_step(writer, root, 2)
    writer.close(together=False)
    return "no error"


def test_a_rank_killed_in_the_background_is_noticed_and_the_older_checkpoint_stays(tmp_path: Path) -> None:
    from tests.checkpoint import forked

    survivor, victim = forked.run(tmp_path, kill_while_writing, str(tmp_path), ranks=2)
    assert victim.code == -9
    assert isinstance(survivor.error, CheckpointError) and "lost contact" in str(survivor.error)
    choice = checkpoint.newest_good(tmp_path)
    assert choice is not None and choice.step == 1


def test_errors_of_the_system_name_the_file(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    with faults.storage_fault("create", faults.fail(errno.EACCES), file="trainer.pt"):
        save_step(writer, str(tmp_path), 1)
        with pytest.raises(CheckpointError, match=r"Permission denied: '.*trainer\.pt'"):
            writer.close()
    assert os.listdir(tmp_path) == []
