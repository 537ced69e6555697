"""A small job of two ranks with one fault on purpose, and what `SyncStallDetector` made of it.

Run by `run_job`, through torchrun; or by hand::

    torchrun --nproc-per-node 2 -m lightning_dist.testing.stall_job --fault "data wait" --folder /tmp/out
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SLOW = ("data wait", "input imbalance", "slow device", "garbage collection", "disk", "slow link")
HUNG = ("stopped process", "held interpreter lock", "skipped collective")
CRASHED = ("raised", "out of memory", "exited")
FAULTS = (*SLOW, *HUNG, *CRASHED)
"""The causes that a job can be given; "slow link" needs networks to run in, see `network.two_networks`."""
NOTHING = "nothing returned"
"""A fault that Lightning's DDP raises for: one rank's step returns None."""


@dataclass
class Outcome:
    """What a job's processes wrote.

    Args:
        causes: Every cause that was named, in order, with the rank or group.
        fault_at: When the fault happened, in seconds of the system's monotonic clock; None without.
        reported_at: When a report, or a crash's notice, was first written.
        ended_at: When the job had ended.
        output: Everything written to stderr and stdout.
        reports: Texts of the files of reports.
    """

    causes: list[tuple[str, str]]
    fault_at: float | None
    reported_at: float | None
    ended_at: float
    output: str
    reports: list[str] = field(default_factory=list)


def find_causes(output: str) -> list[tuple[str, str]]:
    """Reads the causes, and who is to blame, out of a job's output; each once."""
    found: list[tuple[int, tuple[str, str]]] = []
    for match in re.finditer(r"straggler: (rank \d+|the \w+ group's link) holds the job up by ([a-z ]+):", output):
        found.append((match.start(), (match[2], match[1])))
    for match in re.finditer(r"stall: missing (ranks? [\d, ]+): ([a-zA-Z ]+?)(?: \(|,| in phase)", output):
        found.append((match.start(), (match[2], match[1])))
    for match in re.finditer(r"lightning_dist: rank \d+: (rank \d+) stopped the run: ([a-z ]+):", output):
        found.append((match.start(), (match[2], match[1])))
    return list(dict.fromkeys(cause for _, cause in sorted(found)))


def run_job(
    folder: str | os.PathLike[str],
    fault: str | None,
    *,
    strategy: str = "ddp",
    steps: int = 240,
    at: int = 100,
    hang_timeout: float | str = 3.0,
    on_hang: str = "abort",
    timeout: float = 120.0,
    launch: Sequence[str] | None = None,
    more: Sequence[str] = (),
) -> Outcome:
    """Runs the job and waits for its end.

    Args:
        folder: Where it writes.
        fault: One of `FAULTS`, on rank 1; None for a healthy job.
        strategy: ``"ddp"``, or a layout such as ``"shard=2"``.
        steps: How many it makes.
        at: The step of the fault, which slow ones last from.
        hang_timeout, on_hang: Of the detector.
        timeout: Seconds after which the job is killed.
        launch: What starts it instead of torchrun with two processes.
        more: More arguments of the job.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    launch = launch or [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = ["-m", "lightning_dist.testing.stall_job", "--folder", str(folder), "--strategy", strategy]
    job += ["--steps", str(steps), "--at", str(at), "--hang-timeout", str(hang_timeout), "--on-hang", on_hang, *more]
    job += ["--fault", fault] if fault else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    lines: list[str] = []
    reported_at: float | None = None
    process = subprocess.Popen(
        [*launch, *job], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    deadline = time.monotonic() + timeout
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    while True:
        line = process.stdout.readline()
        if line:
            lines.append(line)
            if reported_at is None and find_causes(line):
                reported_at = time.monotonic()
        elif process.poll() is not None:
            break
        elif time.monotonic() > deadline:
            process.kill()
            lines.append(f"(killed after {timeout:.0f} s)\n")
        else:
            time.sleep(0.02)
    output = "".join(lines)
    fault_file = folder / "fault_at"
    return Outcome(
        causes=find_causes(output),
        fault_at=float(fault_file.read_text()) if fault_file.exists() else None,
        reported_at=reported_at,
        ended_at=time.monotonic(),
        output=output,
        reports=[file.read_text() for file in sorted(folder.rglob("stall_*.txt"))],
    )


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--fault", choices=(*FAULTS, NOTHING))
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--at", type=int, default=100)
    parser.add_argument("--hang-timeout", default="auto")
    parser.add_argument("--on-hang", default="warn")
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--straggler-seconds", type=float, default=0.5)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--epoch-steps", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--bumps", action="store_true", help="a slow first step, and full collections, on all ranks")
    _fit(parser.parse_args())


def _fit(options: argparse.Namespace) -> None:
    import logging
    import warnings

    import lightning as L
    import torch
    import torch.distributed as dist
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import TensorBoardLogger
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, Dataset

    from lightning_dist import HybridParallelStrategy
    from lightning_dist.callbacks import SyncStallDetector
    from lightning_dist.testing import faults, network

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rank, fault = int(os.environ.get("RANK", 0)), options.fault
    faulty = rank == 1
    width, length, rows = options.width, 8, 16

    class Samples(Dataset):
        """Rows of the same sequence length; from the fault on, on one rank, longer or slower to come."""

        fetched = 0

        def __len__(self) -> int:
            return 2 * rows * (options.epoch_steps or options.steps)

        def __getitem__(self, index: int) -> Tensor:
            Samples.fetched += 1
            late = faulty and Samples.fetched > rows * options.at
            if late and fault == "data wait":
                time.sleep(0.02 / rows)
            wide = 4 * length if late and fault == "input imbalance" else length
            return torch.full((wide, width), 0.001 * (index % 7))

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
            self.weight_of_rank = torch.zeros(width, width)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            step = self.trainer.global_step
            if options.bumps:
                if step == 0:
                    time.sleep(3.0)
                if step % 700 == 699:
                    _make_garbage(10_000)
            if faulty and step >= options.at and fault == "slow device":
                for _ in range(40):
                    self.weight_of_rank @ self.weight_of_rank
                begin = time.process_time()
                while time.process_time() - begin < 0.015:
                    self.weight_of_rank @ self.weight_of_rank
            if faulty and step >= options.at and fault == "garbage collection":
                _make_garbage(30_000)
            if fault == "skipped collective" and not (faulty and step == options.at):
                dist.all_reduce(torch.zeros(1), group=extra_group[0])
            if faulty and step == options.at:
                self._fail()
                if fault == NOTHING:
                    return None
            loss = self.model(batch).square().mean()
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val_loss", self.model(batch).square().mean(), sync_dist=True)

        def _fail(self) -> None:
            (Path(options.folder) / "fault_at").write_text(str(time.monotonic()))
            if fault == "stopped process":
                faults.stop(os.getpid())
            elif fault == "held interpreter lock":
                faults.hold_interpreter(60.0)
            elif fault == "raised":
                raise faults.InjectedFault("raised on purpose")
            elif fault == "slow link":
                network.slow_down(megabits=50)
            elif fault == "out of memory":
                torch.empty(2**50)
            elif fault == "exited":
                sys.exit(0)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class Around(L.Callback):
        """What has to be set up once there are groups, and taken down at the end."""

        def __init__(self) -> None:
            self.stack = ExitStack()

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if fault == "skipped collective":
                extra_group.append(dist.new_group(backend="gloo"))

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if fault == "disk" and faulty and trainer.global_step == options.at:
                self.stack.enter_context(faults.storage_fault("write", faults.wait(0.25), times=None))

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            self.stack.close()

    extra_group: list[Any] = []
    limit = options.hang_timeout if options.hang_timeout == "auto" else float(options.hang_timeout)
    detector = SyncStallDetector(
        hang_timeout=limit,
        on_hang=options.on_hang,
        every_n_steps=options.every,
        straggler_seconds=options.straggler_seconds,
    )
    callbacks: list[Any] = [detector, Around()]
    if options.save_every:
        callbacks.append(
            ModelCheckpoint(dirpath=f"{options.folder}/checkpoints", every_n_train_steps=options.save_every)
        )
    strategy = options.strategy if options.strategy == "ddp" else HybridParallelStrategy(layout=options.strategy)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        strategy=strategy,
        max_steps=options.steps,
        callbacks=callbacks,
        logger=TensorBoardLogger(options.folder, name="", version=""),
        enable_checkpointing=bool(options.save_every),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        limit_val_batches=2 if options.epoch_steps else 0,
    )
    torch.manual_seed(1)
    loader = DataLoader(Samples(), rows, num_workers=options.workers)
    trainer.fit(Module(), loader, DataLoader(Samples(), rows))
    print("done", flush=True)


def _make_garbage(number: int) -> None:
    """Cycles that only the collector can free, and its run."""
    for _ in range(number):
        cycle: list[Any] = []
        cycle.append(cycle)
    gc.collect()


if __name__ == "__main__":
    main()
