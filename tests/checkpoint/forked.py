"""Processes that may be killed: forked in milliseconds from a server that has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed", "lightning_dist.testing.faults", "tests.checkpoint.test_faults_while_writing"]
)


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (negative for a signal), what it returned, or the error it raised."""

    code: int | None
    result: Any = None
    error: BaseException | None = None


def run(
    folder: Path,
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 1,
    timeout: float = 30.0,
    group_timeout: float = 20.0,
) -> list[Ended]:
    """Runs `function(rank, *args)` in `ranks` new processes; with more than one they form a Gloo group.

    Raises:
        AssertionError: A process has not ended within `timeout` seconds: a hang.
    """
    room = folder / f"run_{time.monotonic_ns()}"
    room.mkdir()
    processes = [
        CONTEXT.Process(target=_child, args=(str(room), function, rank, ranks, args, group_timeout))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    limit = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, limit - time.monotonic()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    assert not hung, f"ranks {hung} hung"
    return [_ended(room, rank, process.exitcode) for rank, process in enumerate(processes)]


def _ended(room: Path, rank: int, code: int | None) -> Ended:
    found = room / f"{rank}.pickle"
    if not found.exists():
        return Ended(code)
    result, error = pickle.loads(found.read_bytes())
    return Ended(code, result, error)


def _child(
    room: str, function: Callable[..., Any], rank: int, ranks: int, args: tuple[Any, ...], timeout: float
) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        store = dist.FileStore(f"{room}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    try:
        outcome = (function(rank, *args), None)
    except Exception as error:
        outcome = (None, error)
    Path(room, f"{rank}.part").write_bytes(pickle.dumps(outcome))
    Path(room, f"{rank}.part").rename(Path(room, f"{rank}.pickle"))
    os._exit(0)
