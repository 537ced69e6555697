"""A load that is cut short: the others hear of it, the checkpoint stays what it was, and nothing wrong is loaded."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_dist import checkpoint
from lightning_dist.testing import WorkerPool, faults
from tests.checkpoint import forked
from tests.checkpoint.state import check_is_step, save_step, tensors_at


def fingerprint(directory: str) -> str:
    """Of every byte and name under a directory."""
    found = hashlib.sha256()
    for path in sorted(Path(directory).rglob("*")):
        found.update(str(path).encode() + (path.read_bytes() if path.is_file() else b""))
    return found.hexdigest()


def save_one(rank: int, root: str) -> None:
    save_step(root, 1)


def load_one(rank: int, root: str) -> int:
    target = tensors_at(0, rank)
    with faults.recorded_storage_calls() as calls:
        checkpoint.load_into(os.path.join(root, "step_00000001"), target)
    assert target["note"] == {"step": 1}
    return len(calls)


def load_and_die(rank: int, root: str, nth: int, victim: int) -> None:
    if rank != victim:
        load_one(rank, root)
        return
    with faults.storage_fault("any", faults.kill_this_process, nth=nth):
        load_one(rank, root)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_every_operation_of_a_load(victim: int, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    os.mkdir(root)
    forked.run(tmp_path, save_one, root, ranks=2)
    before = fingerprint(root)
    counts = [ended.result for ended in forked.run(tmp_path, load_one, root, ranks=2)]
    assert counts[victim] >= 2
    for nth in range(1, counts[victim] + 1):
        ended = forked.run(tmp_path, load_and_die, root, nth, victim, ranks=2)
        assert ended[victim].code == -9
        assert isinstance(ended[1 - victim].error, checkpoint.CheckpointError), "it does not go on alone"
    assert fingerprint(root) == before
    check_is_step(os.path.join(root, "step_00000001"), 1, ranks=2)


def load_with_errors(root: str, victim: int) -> list[str]:
    save_step(root, 1)
    messages = []
    for nth in range(1, 4):
        fault = faults.storage_fault("read_into", faults.fail(errno.EIO), file="*.distcp", nth=nth)
        with fault if dist.get_rank() == victim else faults.recorded_storage_calls():
            try:
                checkpoint.load_into(os.path.join(root, "step_00000001"), tensors_at(0, dist.get_rank()))
                messages.append("loaded")
            except checkpoint.CheckpointError as error:
                messages.append(str(error))
    return messages


@pytest.mark.parametrize("victim", [0, 1])
def test_a_read_that_fails_on_one_rank_is_raised_on_all(victim: int, tmp_path: Path, pool: WorkerPool) -> None:
    first, second = pool.run(load_with_errors, 2, str(tmp_path), victim)
    assert first == second and first[-1] == "loaded"
    assert f"rank {victim}: " in first[0] and "Input/output error" in first[0] and ".distcp" in first[0]


def load_beside_a_stalled_rank(root: str) -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    save_step(root, 1)
    stall = faults.storage_fault("read_into", faults.wait(3.0), file="*.distcp")
    began = time.monotonic()
    with stall if dist.get_rank() == 1 else faults.recorded_storage_calls():
        try:
            checkpoint.load_into(os.path.join(root, "step_00000001"), tensors_at(0, dist.get_rank()), group=group)
        except checkpoint.CheckpointError as error:
            assert time.monotonic() - began < 10
            return str(error)
    return "loaded"


def test_a_stalled_disk_under_one_rank_ends_in_an_error_not_a_wait(tmp_path: Path, pool: WorkerPool) -> None:
    messages = pool.run(load_beside_a_stalled_rank, 2, str(tmp_path))
    assert all("lost contact with the other ranks" in message for message in messages)
