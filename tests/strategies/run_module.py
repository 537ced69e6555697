"""A user's script: trains two steps under the strategy named on the command line and says which rank it was."""

import sys

import lightning as L
from torch.utils.data import DataLoader

import lightning_dist  # noqa: F401  (registers strategy="hybrid")
from tests.strategies.training import Classifier, data


class Raising(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            raise ZeroDivisionError("the sample at fault is number 7")
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    strategy = sys.argv[1]
    if strategy != "hybrid":
        from lightning_dist import HybridParallelStrategy

        strategy = HybridParallelStrategy(layout=strategy)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=2,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Raising() if "raise" in sys.argv else Classifier(), DataLoader(data(16), 2))
    print(
        f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps as {trainer.strategy.layout}",
        flush=True,
    )
