"""Modules for FairScaleShardedStrategy, and the functions that train them on a rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_dist.strategies import FairScaleShardedStrategy
from tests.strategies.training import Classifier, InOrder, make


class Scheduled(Classifier):
    """AdamW over two groups with a warm-up inside a sequence of schedules."""

    def configure_optimizers(self):
        blocks = list(self.model.blocks.parameters())
        rest = [p for n, p in self.named_parameters() if ".blocks." not in n]
        optimizer = torch.optim.AdamW([{"params": blocks, "lr": 0.01, "weight_decay": 0.1}, {"params": rest}], lr=0.005)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=2)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[2])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class WithValidation(Classifier):
    def validation_step(self, batch, batch_idx):
        assert not self.model.training
        self.log("val_loss", self.loss(batch), sync_dist=True)


def quiet(**kwargs: Any) -> L.Trainer:
    """A Trainer that prints and writes nothing it is not asked to."""
    warnings.filterwarnings(
        "ignore", message=".*does not have many workers.*|.*val_dataloader.*|.*LightningDataModule.*"
    )
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return L.Trainer(**{**settings, **kwargs})


def train(
    factory: Callable[..., L.LightningModule],
    dataset: Dataset,
    batch_size: int,
    world: int,
    *,
    validate: bool = False,
    prepare: Callable[[], Any] | None = None,
    factory_kwargs: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    strategy: Any = None,
    seed: int = 0,
    **kwargs: Any,
) -> dict[str, Any]:
    """Fits on this rank; batch i of rank r is every world-th sample.

    Args:
        validate: Whether to validate, in a sanity check and in the middle of each epoch too.
        prepare: Called first, on each rank: takes a fix away.
    """
    if prepare is not None:
        prepare()
    module = make(factory, seed, **(factory_kwargs or {}))
    strategy = strategy or FairScaleShardedStrategy(timeout=30.0)
    extra = {"val_check_interval": 2, "num_sanity_val_steps": 1} if validate else {}
    run = quiet(devices=world, strategy=strategy, **extra, **kwargs)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=InOrder(dataset, run.strategy))
    validation = DataLoader(dataset, batch_size=batch_size) if validate else None
    run.fit(module, loader, validation, ckpt_path=ckpt_path)
    return {
        "weights": weights(module),
        "steps": run.global_step,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in run.optimizers[0].param_groups],
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "module": module.__dict__.get("seen"),
    }


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
