"""What telemetry costs, step time with it on ÷ off, alternated in one run; and how soon a hang is reported.

torchrun --standalone --nproc-per-node 2 benchmarks/telemetry.py
python benchmarks/telemetry.py --hangs 5
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist.callbacks import SyncStallDetector
from lightning_dist.testing.stall_job import CRASHED, HUNG, run_job


class Timed(L.LightningModule):
    """Notes when its batches end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.times: list[float] = []

    def training_step(self, batch, batch_idx):
        return self.model(batch[0]).square().mean()

    def on_train_batch_end(self, *_):
        self.times.append(time.perf_counter())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Switched(SyncStallDetector):
    """Takes telemetry off and puts it on again every ``block`` steps of one run, so that both see the same machine.

    Off, the Trainer calls empty hooks and torch's functions are as they were; the side process goes on, and what it
    uses is measured by itself.
    """

    def __init__(self, block: int) -> None:
        super().__init__(every_n_steps=50)
        self.block, self.on, self.watchdog_pid = block, True, 0
        self.processor_share = 0.0

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        assert self._watchdog is not None and self._watchdog._process is not None
        self.watchdog_pid = self._watchdog._process.pid
        self.began = time.time(), self.processor_seconds()

    def processor_seconds(self) -> float:
        fields = Path(f"/proc/{self.watchdog_pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def on_train_end(self, trainer, pl_module):
        wall, processor = self.began
        self.processor_share = (self.processor_seconds() - processor) / (time.time() - wall)
        super().on_train_end(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.on:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if (batch_idx + 1) % self.block:
            return
        self.on = not self.on
        assert self._monitor is not None
        if self.on:
            for name in HOOKS:
                self.__dict__.pop(name, None)
            self._monitor.start()
        else:
            self._monitor.stop()
            for name in HOOKS:
                self.__dict__[name] = _nothing


HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "_switch",
)


def _nothing(*_: object, **__: object) -> None:
    return None


@dataclass
class Cost:
    """What one width cost.

    Args:
        off, on: Seconds of a step, without telemetry and with it.
        ratios: On ÷ off of each pair of neighbouring blocks.
        extra: How many seconds longer a step is in the quickest block of all, which other programs disturb the least.
        side: The side process's share of a core.
    """

    off: float
    on: float
    ratios: list[float]
    extra: float
    side: float


def overhead(width: int, blocks: int, block: int) -> Cost:
    """Measures one width."""
    torch.manual_seed(0)
    module, steps = Timed(width), 2 * blocks * block
    world = int(os.environ.get("WORLD_SIZE", 1))
    switched, folder = Switched(block), tempfile.mkdtemp()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_steps=steps,
        callbacks=[switched],
        logger=TensorBoardLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randn(32, width).expand(world * steps, 32, width)
    trainer.fit(module, DataLoader(TensorDataset(rows), 1))
    on, off = by_block(module.times, block)
    return Cost(
        off=statistics.median(off),
        on=statistics.median(on),
        ratios=[a / b for a, b in zip(on, off, strict=False)],
        extra=min(on) - min(off),
        side=switched.processor_share,
    )


def by_block(moments: list[float], block: int) -> tuple[list[float], list[float]]:
    """Mean seconds of a step in each block with telemetry and without, the first pair left out."""
    ends = [moments[i] for i in range(block - 1, len(moments), block)]
    means = [(after - before) / block for before, after in pairwise(ends)]
    return means[1::2], means[2::2]


def hangs(runs: int) -> None:
    """The time from a fault to its report, beyond the limit of 3 s for hangs."""
    print("| fault | runs | to the report, p50 | max | to the end of the job, p50 | max |\n|---|---|---|---|---|---|")
    for fault in (*HUNG, *CRASHED):
        outcomes = [run_job(tempfile.mkdtemp(), fault) for _ in range(runs)]
        assert all(it.fault_at is not None and it.reported_at is not None for it in outcomes), outcomes[0].output
        reported = [it.reported_at - it.fault_at for it in outcomes if it.reported_at and it.fault_at]
        ended = [it.ended_at - it.fault_at for it in outcomes if it.fault_at]
        numbers = (statistics.median(reported), max(reported), statistics.median(ended), max(ended))
        print(f"| {fault} | {runs} | " + " | ".join(f"{number:.1f} s" for number in numbers) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hangs", type=int, default=0, help="how often each hang is injected; else overhead")
    parser.add_argument("--blocks", type=int, default=12)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if options.hangs:
        hangs(options.hangs)
        return
    first = os.environ.get("RANK", "0") == "0"
    if first:
        print(
            "| step without | with | on ÷ off, median of pairs [quartiles] | thread, more for a step | side process |"
        )
        print("|---|---|---|---|---|")
    for width in (256, 512, 1024):
        cost = overhead(width, options.blocks, 50)
        low, middle, high = statistics.quantiles(cost.ratios, n=4)
        if first:
            times = f"| {1000 * cost.off:.2f} ms | {1000 * cost.on:.2f} ms | {middle:.4f} [{low:.4f}, {high:.4f}] |"
            print(f"{times} {1e6 * cost.extra:+.0f} µs | {100 * cost.side:.2f} % of a core |", flush=True)


if __name__ == "__main__":
    main()
