"""Looks at what a job runs in, on every rank, and says what is likely to hurt."""

from __future__ import annotations

import os
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SHARED_MEMORY = 1e9
"""Bytes of /dev/shm below which loaders with workers and Gloo are likely to fail."""

CLOCK = 1.0
"""Seconds by which clocks of nodes may differ before logs and timeouts mislead."""

HARMFUL = {
    "NCCL_P2P_DISABLE": "devices of a node then talk through host memory",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE are not used",
    "NCCL_SHM_DISABLE": "ranks of a node then talk over the network",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL checks every collective",
}


def look_around(folder: Path | None = None, megabytes: int = 64) -> dict[str, Any]:
    """What this rank sees: versions, variables, shared memory, clock, and the checkpoint folder's disk.

    Args:
        folder: Where checkpoints will go; a file of ``megabytes`` is written there, flushed and deleted.
        megabytes: Its size.
    """
    import lightning

    seen: dict[str, Any] = {
        "host": platform.node(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "cuda": torch.version.cuda,
        },
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_")) or name in HARMFUL
        },
        "clock": time.time(),
    }
    shared = Path("/dev/shm")
    seen["shared_memory"] = shutil.disk_usage(shared).free if shared.exists() else None
    if folder is not None:
        seen["disk"] = _try_disk(folder, megabytes)
    return seen


def _try_disk(folder: Path, megabytes: int) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = folder / f".lightning-dist-doctor-{os.getpid()}-{rank}"
    block = os.urandom(2**20)
    try:
        begin = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(megabytes):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - begin
        return {"speed": megabytes * 2**20 / seconds, "free": shutil.disk_usage(folder).free}
    except OSError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        path.unlink(missing_ok=True)


def find_problems(seen: list[dict[str, Any]], needed: float | None = None) -> list[str]:
    """What looks wrong, in sentences that name ranks.

    Args:
        seen: What each rank saw, by rank, taken at one moment.
        needed: Bytes that a checkpoint takes; None does not ask.
    """
    problems = []
    for name in seen[0]["versions"]:
        by_version: dict[str, list[int]] = {}
        for rank, entry in enumerate(seen):
            by_version.setdefault(str(entry["versions"][name]), []).append(rank)
        if len(by_version) > 1:
            listed = "; ".join(f"{version} on ranks {_ranks(ranks)}" for version, ranks in by_version.items())
            problems.append(f"Ranks run different versions of {name}: {listed}.")
    for name, why in HARMFUL.items():
        ranks = [rank for rank, entry in enumerate(seen) if _is_on(name, entry["variables"].get(name))]
        if ranks:
            problems.append(f"{name} is set on ranks {_ranks(ranks)}: {why}.")
    small = [
        rank
        for rank, entry in enumerate(seen)
        if entry["shared_memory"] is not None and entry["shared_memory"] < SHARED_MEMORY
    ]
    if small:
        problems.append(
            f"/dev/shm has less than 1 GB free on ranks {_ranks(small)}: loaders with workers are likely to fail; start"
            " the container with more (--shm-size)."
        )
    clocks = [entry["clock"] for entry in seen]
    if max(clocks) - min(clocks) > CLOCK:
        early, late = clocks.index(min(clocks)), clocks.index(max(clocks))
        problems.append(
            f"The clocks of ranks {early} ({seen[early]['host']}) and {late} ({seen[late]['host']}) differ by"
            f" {max(clocks) - min(clocks):.1f} s: logs of nodes can't be compared."
        )
    problems += _disk_problems(seen, needed)
    return problems


def _disk_problems(seen: list[dict[str, Any]], needed: float | None) -> list[str]:
    problems = []
    for rank, entry in enumerate(seen):
        disk = entry.get("disk")
        if disk is None:
            continue
        if "error" in disk:
            problems.append(f"Rank {rank} ({entry['host']}) can't write to the checkpoint folder: {disk['error']}.")
        elif needed is not None and disk["free"] < 2 * needed:
            problems.append(
                f"Rank {rank} ({entry['host']}) sees {disk['free'] / 1e9:.3g} GB free for checkpoints of"
                f" {needed / 1e9:.3g} GB; a new one is written before the old one is deleted, so it needs two."
            )
    return problems


def _is_on(name: str, value: str | None) -> bool:
    if value is None:
        return False
    return value.upper() == "DETAIL" if name == "TORCH_DISTRIBUTED_DEBUG" else value not in ("", "0")


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def gather(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's entry, by rank, clocks taken again at one moment. Collectives: a barrier and an all-gather."""
    if not dist.is_initialized():
        return [entry]
    dist.barrier()
    entry = entry | {"clock": time.time()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, entry)
    return everyone
