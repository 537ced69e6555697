"""How near a pipeline comes to its schedule's ideal, and what it costs beside the same pipeline written by hand.

    python benchmarks/pipeline.py [--rounds 7] [--steps 6] [--rows 192]

Two CPU processes with one thread each. In every round, one after the other and in turning order: the two ranks' own
computation at the same time without any exchange (what is ideal but for the bubble), the Trainer with
HybridParallelStrategy, and a loop written with torch.distributed.pipelining. Ratios are taken within a round; the
table shows their medians and quartiles over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from lightning_dist import HybridParallelStrategy
from lightning_dist.parallel.pipeline.placement import find_schedule, place_stages
from lightning_dist.testing import WorkerPool

WIDTH, BLOCKS, RANKS = 512, 8, 2

CASES = [
    ("GPipe", 4), ("GPipe", 8), ("1F1B", 4), ("1F1B", 8), ("1F1B", 16), ("Interleaved1F1B", 8),
    ("ZBVZeroBubble", 8),
]  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.times: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Repeat:
    """A loader that gives one batch again and again."""

    def __init__(self, batch: Tensor, steps: int) -> None:
        self.batch, self.steps = batch, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self):
        return iter([self.batch] * self.steps)


def median_gap(times: list[float]) -> float:
    return statistics.median(after - before for before, after in itertools.pairwise(times[1:]))


def with_trainer(schedule: str, microbatches: int, steps: int, rows: int) -> float:
    """Seconds of a step."""
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    torch.manual_seed(0)
    module = Module()
    strategy = HybridParallelStrategy(layout="pp=2", pipeline_schedule=schedule, microbatches=microbatches)
    trainer = L.Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(module, Repeat(torch.randn(rows * microbatches, WIDTH), steps + 2))
    return median_gap(module.times)


def stages_of(schedule: str, rank: int) -> dict[int, nn.Module]:
    """This rank's stages, cut and placed as torch's schedules want them."""
    kind = find_schedule(schedule)
    number = RANKS * kind.stages_per_rank
    owners = place_stages("v", RANKS, number) if kind.placement == "v" else [stage % RANKS for stage in range(number)]
    size = BLOCKS // number
    torch.manual_seed(0)
    blocks = [Block() for _ in range(BLOCKS)]
    return {
        stage: nn.Sequential(*blocks[stage * size : (stage + 1) * size])
        for stage in range(number)
        if owners[stage] == rank
    }


def by_hand(schedule: str, microbatches: int, steps: int, rows: int) -> float:
    """Seconds of a step."""
    rank = dist.get_rank()
    parts = stages_of(schedule, rank)
    number = RANKS * len(parts)
    first, later = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH, requires_grad=True)
    stages = [
        PipelineStage(
            part, stage, number, torch.device("cpu"), input_args=(later if stage else first,), output_args=(later,)
        )
        for stage, part in parts.items()
    ]
    kind = get_schedule_class(schedule)
    runner = kind(
        stages if len(stages) > 1 else stages[0], microbatches, loss_fn=lambda output, _: output.square().mean()
    )
    optimizer = torch.optim.SGD([parameter for part in parts.values() for parameter in part.parameters()], lr=1e-4)
    batch = torch.randn(rows * microbatches, WIDTH)
    times = []
    for _ in range(steps + 2):
        optimizer.zero_grad()
        arguments = (batch,) if 0 in parts else ()
        losses: list[Tensor] = []
        if number - 1 in parts:
            runner.step(*arguments, target=batch, losses=losses)
        else:
            runner.step(*arguments)
        optimizer.step()
        dist.barrier()
        times.append(time.perf_counter())
    return median_gap(times)


def alone(schedule: str, microbatches: int, steps: int, rows: int) -> tuple[float, float]:
    """Seconds that this rank's stages compute in a step, all microbatches one after the other; and the forwards'."""
    parts = stages_of(schedule, dist.get_rank())
    optimizer = torch.optim.SGD([parameter for part in parts.values() for parameter in part.parameters()], lr=1e-4)
    x = torch.randn(rows, WIDTH, requires_grad=True)
    times, forwards = [], []
    for _ in range(steps + 2):
        optimizer.zero_grad()
        forward = 0.0
        for _ in range(microbatches):
            for part in parts.values():
                start = time.perf_counter()
                output = part(x)
                forward += time.perf_counter() - start
                output.backward(output)
        optimizer.step()
        dist.barrier()
        times.append(time.perf_counter())
        forwards.append(forward)
    return median_gap(times), statistics.median(forwards[2:])


def bubble(schedule: str, microbatches: int, busy: float, forward: float) -> float:
    """The schedule's own idle share of a step, its backward split into equal halves where it splits."""
    from lightning_dist.advisor.schedules import idle_time

    half = (busy - forward) / 2 / microbatches
    idle = idle_time(find_schedule(schedule), RANKS, forward / microbatches, half, half)
    return idle / (busy + idle)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--steps", type=int, default=6)
    arguments.add_argument("--rows", type=int, default=192, help="samples of one microbatch")
    options = arguments.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(
        "| schedule | microbatches | step | ideal 1 - bubble | efficiency ÷ ideal | ÷ written by hand |\n"
        "|---|---|---|---|---|---|"
    )
    with WorkerPool() as pool:
        for schedule, microbatches in CASES:
            print(row(pool, schedule, microbatches, options), flush=True)


def row(pool: WorkerPool, schedule: str, microbatches: int, options: argparse.Namespace) -> str:
    def measure(function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        return pool.run(function, RANKS, schedule, microbatches, options.steps, options.rows, timeout=300, **kwargs)

    took, ideals, efficiencies, overheads = [], [], [], []
    for turn in range(options.rounds):
        results: dict[str, list[Any]] = {}
        kinds = ["alone", "trainer", "hand"]
        for kind in kinds if turn % 2 else reversed(kinds):
            function = {"alone": alone, "trainer": with_trainer, "hand": by_hand}[kind]
            results[kind] = measure(function, **({"init_process_group": False} if kind == "trainer" else {}))
        busy, forward = (max(values) for values in zip(*results["alone"], strict=True))
        idle = bubble(schedule, microbatches, busy, forward)
        step = max(results["trainer"])
        took.append(step)
        ideals.append(1 - idle)
        efficiencies.append(busy / step / (1 - idle))
        overheads.append(step / max(results["hand"]))
    return (
        f"| {schedule} | {microbatches} | {1000 * statistics.median(took):.0f} ms | {statistics.median(ideals):.3f} |"
        f" {spread(efficiencies)} | {spread(overheads)} |"
    )


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
