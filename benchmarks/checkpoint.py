"""What a checkpoint costs: how long the loop is blocked, how long until it is safe, bytes, memory; alternated.

    python benchmarks/checkpoint.py [--megabytes 256] [--rounds 9] [--directory DIR]

Right after each call every tensor is changed in place, as optimizers on the CPU do; the saved values must be the old
ones. Medians over the rounds, quartiles in brackets. "total" ends when the method says that it is done: only those
with "yes" in the column "synced" have by then told the disk to keep it. Linux only (memory is read from /proc).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import re
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_dist import checkpoint
from lightning_dist.checkpoint import format as layout

LAYERS = 12
Finish = Callable[[], None]


@dataclass
class Method:
    """`start` returns what to call to wait for the end; `read` gives back the tensors; `synced`: does it call fsync?"""

    start: Callable[[dict[str, Any], Path], Finish]
    read: Callable[[Path], dict[str, Any]]
    synced: bool
    blocked: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    blocked_cpu: list[float] = field(default_factory=list)
    megabytes: float = 0.0
    memory: float = 0.0
    kept_old: bool = True


def make_state(megabytes: int) -> dict[str, Any]:
    """Weights and two moments of a stack of layers, float32, nested as they are in a checkpoint."""
    width = max(8, int((megabytes * 2**20 / 4 / 3 / LAYERS / 12) ** 0.5))
    shapes = {"attention.weight": (3 * width, width), "out.weight": (width, width), "up.weight": (4 * width, width)}
    shapes |= {"down.weight": (width, 4 * width), "norm.weight": (width,), "norm.bias": (width,)}
    names = {f"blocks.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in shapes.items()}
    return {
        "state_dict": {name: torch.randn(shape) for name, shape in names.items()},
        "optimizer_0": {
            "state": {
                name: {"exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape), "step": torch.tensor(1.0)}
                for name, shape in names.items()
            }
        },
    }


def leaves(state: Any) -> list[torch.Tensor]:
    return [state] if isinstance(state, torch.Tensor) else [leaf for value in state.values() for leaf in leaves(value)]


def nothing() -> None:
    """The end of a method that has ended when it returns."""


def torch_save(state: dict[str, Any], path: Path) -> Finish:
    torch.save(state, path)
    return nothing


def torch_save_synced(state: dict[str, Any], path: Path) -> Finish:
    with open(path, "wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    return nothing


def torch_load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def dcp_save(state: dict[str, Any], path: Path) -> Finish:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return nothing


def dcp_async_save(state: dict[str, Any], path: Path) -> Finish:
    future = dcp.async_save(state, checkpoint_id=path, no_dist=True)
    return lambda: future.result()  # type: ignore[union-attr, return-value]


def dcp_load(path: Path) -> dict[str, Any]:
    state = make_empty(path)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def make_empty(path: Path) -> dict[str, Any]:
    index = dcp.FileSystemReader(path).read_metadata()
    state: dict[str, Any] = {}
    for name, entry in index.state_dict_metadata.items():
        here = state
        *parents, last = index.planner_data[name]
        for key in parents:
            here = here.setdefault(key, {})
        here[last] = torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
    return state


class Lightning:
    """`trainer.save_checkpoint`, which is what ModelCheckpoint calls, with the state of this benchmark."""

    def __init__(self, plugin: Any) -> None:
        self.plugin = plugin
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        self.trainer = L.Trainer(accelerator="cpu", devices=1, plugins=[plugin], **quiet)
        self.module = L.LightningModule()
        self.trainer.strategy.connect(self.module)

    def start(self, state: dict[str, Any], path: Path) -> Finish:
        self.module.state_dict = lambda *_, **__: state["state_dict"]  # type: ignore[method-assign]
        self.module.on_save_checkpoint = lambda found: found.update(optimizer_0=state["optimizer_0"])  # type: ignore[method-assign]
        self.trainer.save_checkpoint(path)
        return self.plugin.teardown if isinstance(self.plugin, AsyncCheckpointIO) else nothing


def ours(state: dict[str, Any], path: Path) -> Finish:
    checkpoint.save(path, state, {"global_step": 1})
    return nothing


def ours_without_checksums(state: dict[str, Any], path: Path) -> Finish:
    original, layout.digest = layout.digest, lambda data: "0" * 32
    try:
        return ours(state, path)
    finally:
        layout.digest = original


def ours_in_background() -> Callable[[dict[str, Any], Path], Finish]:
    writers: list[checkpoint.BackgroundWriter] = []

    def start(state: dict[str, Any], path: Path) -> Finish:
        if not writers:  # in the first round, whose memory is measured
            writers.append(checkpoint.BackgroundWriter(verify=False))
        writers[0].save(path, state, {"global_step": 1})
        return lambda: writers[0].wait() and None  # type: ignore[return-value]

    return start


def memory(kind: str) -> float:
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def run_once(method: Method, state: dict[str, Any], folder: Path) -> tuple[float, float, float]:
    path = folder / "checkpoint"
    expected = [leaf.clone() for leaf in leaves(state)]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the allocator still holds would hide what a method takes
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    began, began_cpu = time.perf_counter(), time.thread_time()
    finish = method.start(state, path)
    blocked, blocked_cpu = time.perf_counter() - began, time.thread_time() - began_cpu
    for leaf in leaves(state):
        leaf.add_(1.0)
    changed = time.perf_counter() - began - blocked
    finish()
    total = time.perf_counter() - began - changed
    method.memory = max(method.memory, memory("VmHWM") - before)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    method.megabytes = sum(file.stat().st_size for file in files) / 2**20
    if len(method.blocked) < 2:
        found = method.read(path)
        saved = leaves({key: found[key] for key in state})
        method.kept_old &= all(torch.equal(one, other) for one, other in zip(saved, expected, strict=True))
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return blocked, total, blocked_cpu


def methods() -> dict[str, Method]:
    read = checkpoint.read_tensors
    return {
        "torch.save": Method(torch_save, torch_load, False),
        "torch.save + fsync": Method(torch_save_synced, torch_load, True),
        "Lightning ModelCheckpoint": Method(Lightning(TorchCheckpointIO()).start, torch_load, False),
        "Lightning AsyncCheckpointIO": Method(
            Lightning(AsyncCheckpointIO(TorchCheckpointIO())).start, torch_load, False
        ),
        "dcp.save": Method(dcp_save, dcp_load, True),
        "dcp.async_save": Method(dcp_async_save, dcp_load, True),
        "lightning_dist save": Method(ours, read, True),
        "lightning_dist save, no checksums": Method(ours_without_checksums, lambda path: {}, True),
        "lightning_dist BackgroundWriter": Method(ours_in_background(), read, True),
    }


def show(values: list[float], scale: float = 1000.0) -> str:
    low, middle, high = (scale * value for value in statistics.quantiles(values, n=4))
    return f"{middle:.3g} [{low:.3g}, {high:.3g}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--directory", default=None, help="a folder on the disk to measure; default: the temporary folder"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    state = make_state(arguments.megabytes)
    tested = methods()
    tested["lightning_dist save, no checksums"].read = lambda path: state  # it refuses to be read, as it should
    names = list(tested)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        for turn in range(arguments.rounds + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                blocked, total, blocked_cpu = run_once(tested[name], state, Path(folder))
                if turn:  # the first round touches new memory and is only looked at for that
                    tested[name].blocked.append(blocked)
                    tested[name].total.append(total)
                    tested[name].blocked_cpu.append(blocked_cpu)
    tensors = leaves(state)
    print(f"{sum(leaf.nbytes for leaf in tensors) / 2**20:.0f} MB in {len(tensors)} tensors, one process\n")
    print("| method | blocked ms | total ms | synced | MB written | peak extra MB | saved the old values |")
    print("|---|---|---|---|---|---|---|")
    for name, method in tested.items():
        kept = "-" if "no checksums" in name else "yes" if method.kept_old else "NO"
        print(
            f"| {name} | {show(method.blocked)} | {show(method.total)} | {'yes' if method.synced else 'no'} "
            f"| {method.megabytes:.0f} | {method.memory:.0f} | {kept} |"
        )
    synchronous = tested["lightning_dist save"]
    background = tested["lightning_dist BackgroundWriter"]
    plain = tested["lightning_dist save, no checksums"]
    pairs = {
        "blocked time in the background / synchronous save (bound 0.1)": (background, synchronous),
        "checksums on / off, save time (bound 1.02)": (synchronous, plain),
    }
    print()
    for text, (one, other) in pairs.items():
        wall = [a / b for a, b in zip(one.blocked, other.total, strict=True)]
        # Of the processor's time alone, without waiting for the disk: tells the same on a busy machine.
        processor = [a / b for a, b in zip(one.blocked_cpu, other.blocked_cpu, strict=True)]
        fastest = min(one.blocked) / min(other.total)
        print(f"* {text}: {show(wall, 1.0)}; fastest / fastest {fastest:.3f}; processor time {show(processor, 1.0)}")


if __name__ == "__main__":
    main()
