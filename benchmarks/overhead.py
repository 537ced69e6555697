"""Step time of HybridParallelStrategy on one process ÷ Lightning's own single-device strategy, alternated in one run.

python benchmarks/overhead.py
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import HybridParallelStrategy

ROUNDS, STEPS, WARM = 15, 60, 10


class Timed(L.LightningModule):
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


def seconds_per_step(strategy: object, width: int) -> float:
    torch.manual_seed(0)
    module = Timed(width)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=STEPS, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(STEPS * 32, width)), 32))
    gaps = [after - before for before, after in zip(module.times[WARM:], module.times[WARM + 1 :], strict=False)]
    return statistics.median(gaps)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print("| step of the single-device strategy | hybrid ÷ single device, median of rounds [quartiles] |\n|---|---|")
    for width in (256, 512, 1280):
        pairs = []
        for turn in range(ROUNDS):
            kinds = ["auto", "hybrid"] if turn % 2 else ["hybrid", "auto"]
            took = {
                kind: seconds_per_step(HybridParallelStrategy() if kind == "hybrid" else "auto", width)
                for kind in kinds
            }
            pairs.append((took["auto"], took["hybrid"] / took["auto"]))
        ratios = statistics.quantiles([ratio for _, ratio in pairs], n=4)
        single = statistics.median(single for single, _ in pairs)
        print(f"| {single * 1e3:.2f} ms | {ratios[1]:.3f} [{ratios[0]:.3f}, {ratios[2]:.3f}] |")


if __name__ == "__main__":
    main()
