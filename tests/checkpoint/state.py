"""Small states with known values, and the question every fault test asks: what would a restart find now?"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist import checkpoint


def tensors_at(step: int, rank: int = 0) -> dict[str, Any]:
    """Every value tells its step: loading a mixture of two steps cannot go unnoticed."""
    return {
        "state_dict": {
            "weight": torch.full((64, 32), float(step)),
            "bias": torch.arange(8) + step,
            f"own.{rank}": torch.full((16,), float(step)),
        },
        "note": {"step": step},
    }


def save_step(root: str, step: int, name: str | None = None, group: Any = None) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    checkpoint.save(
        os.path.join(root, name or f"step_{step:08d}"),
        tensors_at(step, rank),
        {"global_step": step, "epoch": step // 10},
        rank_state={"rank": rank, "step": step},
        group=group,
    )


def check_is_step(directory: str, step: int, ranks: int = 1) -> None:
    """Every tensor, value and file of a checkpoint is of one step, and as saved."""
    assert checkpoint.verify(directory).problems == ()
    found = checkpoint.read_tensors(directory)
    for rank in range(ranks):
        for name, value in tensors_at(step, rank)["state_dict"].items():
            assert torch.equal(found["state_dict"][name], value), name
        assert checkpoint.read_rank_state(directory, rank) == {"rank": rank, "step": step}
    assert found["note"] == {"step": step}
    assert checkpoint.read_trainer_state(directory)["global_step"] == step


def memory(kind: str) -> int:
    """Bytes of memory of this process: resident now ("VmRSS"), or at most since `reset_peak_memory` ("VmHWM").

    getrusage would tell the peak of the process's whole life, that of the process which started it included.
    """
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def reset_peak_memory() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def visible(root: str) -> list[str]:
    return sorted(name for name in os.listdir(root) if not name.startswith("."))


def hidden(root: str) -> list[str]:
    return sorted(name for name in os.listdir(root) if name.startswith("."))
