"""Modules for FairScaleShardedStrategy, and the functions that train them on a rank."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

import lightning_dist.parallel
from lightning_dist.strategies import AdaScale, FairScaleShardedStrategy, ScaleInvariantSchedule
from tests.strategies.training import Classifier, make

Removal = Callable[[pytest.MonkeyPatch], None]
"""Takes a fix away for the time of one run."""


class Scheduled(Classifier):
    """AdamW over two groups, with a schedule inside a sequence of schedules."""

    def configure_optimizers(self):
        blocks = list(self.model.blocks.parameters())
        rest = [p for n, p in self.named_parameters() if ".blocks." not in n]
        optimizer = torch.optim.AdamW([{"params": blocks, "lr": 0.01, "weight_decay": 0.1}, {"params": rest}], lr=0.005)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=2)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[2])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class WarmUpInHook(Classifier):
    """Sets the learning rate of a step in the hook right before it, as Lightning's documentation shows."""

    def on_before_optimizer_step(self, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (self.trainer.global_step + 1)


class Freezing(Classifier):
    """The first and last layers do not train from step 2 to 4."""

    def on_train_batch_start(self, batch, batch_idx):
        for layer in (self.model.embed, self.model.head):
            layer.requires_grad_(not 2 <= batch_idx < 4)


class Thawing(Classifier):
    """The first layer is frozen until step 3."""

    def __init__(self) -> None:
        super().__init__()
        self.model.embed.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        self.model.embed.requires_grad_(batch_idx >= 3)


class WithBatchNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))

    def validation_step(self, batch, batch_idx):
        assert not self.model.training
        self.log("val_loss", self.loss(batch))


class Validating(Classifier):
    def validation_step(self, batch, batch_idx):
        assert not self.model.training
        self.log("val_loss", self.loss(batch))


class TiedClassifier(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[2].up.weight = self.model.blocks[0].up.weight


class Overflowing(Classifier):
    """The gradient of one tensor, which one rank owns, is infinite in the second step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.model.head.bias.sum() * torch.inf if batch_idx == 1 else loss


class TwoOptimizers(Classifier):
    """Two losses and two optimizers; the second loss reaches the first one's parameters too, which are zeroed after."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        second.zero_grad()
        self.manual_backward(self.loss(batch) * 2)
        self.clip_gradients(second, gradient_clip_val=0.05)
        second.step()

    def configure_optimizers(self):
        head = list(self.model.head.parameters())
        rest = [p for n, p in self.named_parameters() if ".head." not in n]
        return [torch.optim.SGD(rest, 0.1, momentum=0.9), torch.optim.AdamW(head, 0.01)]


class AdaScaled(Classifier):
    """SGD whose learning rate was chosen for one batch of one rank."""

    def __init__(self, accumulate: int = 1, schedule: bool = False, smoothing: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen: list[float] = []

    def configure_optimizers(self):
        optimizer = AdaScale(
            torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9),
            smoothing=self.hparams.smoothing,
            num_gradients_to_accumulate=self.hparams.accumulate,
        )
        if not self.hparams.schedule:
            return optimizer
        decay = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
        return [optimizer], [{"scheduler": ScaleInvariantSchedule(decay, optimizer), "interval": "step"}]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(self.trainer.optimizers[0].gain())


class Divergent(Classifier):
    """From step 2 on the second rank does not use one block."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1:
            self.model.blocks[1] = nn.Identity()
        return super().training_step(batch, batch_idx)


class UsedEarlyOnly(Classifier):
    """A block that only the first batch of a window uses."""

    def training_step(self, batch, batch_idx):
        block = self.model.blocks[1]
        if batch_idx % 2:
            self.model.blocks[1] = nn.Identity()
        try:
            return super().training_step(batch, batch_idx)
        finally:
            self.model.blocks[1] = block


class Holdings(Classifier):
    """Counts what gradients a rank holds when it steps, and what state afterwards."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.seen: dict[str, int] = {}

    def on_before_optimizer_step(self, optimizer):
        self.seen["gradients"] = sum(p.grad.numel() for p in self.parameters() if p.grad is not None)

    def on_train_end(self):
        local = self.trainer.optimizers[0].optim
        self.seen["state"] = sum(v["exp_avg"].numel() for v in local.state.values())
        self.seen["parameters"] = sum(p.numel() for p in self.parameters())


class WithoutFairscale:
    """Fairscale can't be imported on these ranks."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def __call__(self, patch: pytest.MonkeyPatch) -> None:
        if rank() in self.ranks:
            patch.setitem(sys.modules, "lightning_dist.parallel.fairscale_adapter", None)
            patch.delattr(lightning_dist.parallel, "fairscale_adapter", raising=False)


def rank() -> int:
    return int(os.environ["RANK"])


def share(dataset: Dataset, world: int) -> Subset:
    """Every world-th sample, from this rank's on."""
    return Subset(dataset, range(rank(), len(dataset), world))


def quiet(**kwargs: Any) -> L.Trainer:
    """A Trainer that prints and writes nothing it is not asked to."""
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
    remove: Removal | None = None,
    factory_kwargs: dict[str, Any] | None = None,
    ckpt_path: Any = None,
    save_as: Any = None,
    strategy: Any = None,
    seed: int = 0,
    **kwargs: Any,
) -> dict[str, Any]:
    """Fits on this rank, unshuffled; batch i of rank r is made of every world-th sample.

    Args:
        validate: Whether to validate, in a sanity check and in the middle of each epoch too.
        remove: Takes a fix away, for this run only.
        save_as: File of a checkpoint to write at the end.
        strategy: Instead of ours, for comparison.
    """
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if remove is not None:
            remove(patch)
        module = make(factory, seed, **(factory_kwargs or {}))
        strategy = strategy or FairScaleShardedStrategy(timeout=kwargs.pop("patience", 30.0))
        extra = {"val_check_interval": 2, "num_sanity_val_steps": 1} if validate else {}
        run = quiet(devices=world, strategy=strategy, **{**extra, **kwargs})
        loader = DataLoader(share(dataset, world), batch_size)
        validation = DataLoader(dataset, batch_size=batch_size) if validate else None
        run.fit(module, loader, validation, ckpt_path=ckpt_path)
        if save_as is not None:
            run.save_checkpoint(save_as)
    return {
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "steps": run.global_step,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in run.optimizers[0].param_groups],
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "seen": module.__dict__.get("seen"),
        "precision": run.precision_plugin.state_dict(),
        "warnings": [str(warning.message) for warning in caught],
    }


def flat_gradient(module: nn.Module, loss: Tensor) -> Tensor:
    used = [p for p in module.parameters() if p.requires_grad]
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, used)])
