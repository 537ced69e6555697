"""Modules for the parity checks: some that train alike under every layout, some made to differ."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader


class Regression(pl.LightningModule):
    """A small network with a mean loss."""

    def __init__(self, optimizer: str = "SGD", width: int = 8, dropout: float = 0.0):
        super().__init__()
        layers = [nn.Linear(4, width), *(nn.Sequential(nn.Tanh(), nn.Linear(width, width)) for _ in range(2))]
        self.model = nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(width, 1))
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs).squeeze(1), targets)

    def configure_optimizers(self):
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.05)

    def train_dataloader(self):
        return DataLoader(list(zip(torch.randn(24, 4), torch.randn(24), strict=True)), batch_size=8, shuffle=True)


class SumLoss(Regression):
    """Made to differ: a sum grows with the number of samples that a rank sees."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * len(batch[0])


class UsesTheRank(Regression):
    """Made to differ: each rank trains something else, though every rank reports the same kind of loss."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.global_rank)


class HiddenFactor(Regression):
    """Made to differ only in the gradients, by a constant factor, which AdamW all but hides."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        factor = self.trainer.world_size
        return loss * factor - (loss * (factor - 1)).detach()


class MaskedMean(Regression):
    """Samples of different weight: targets that are NaN do not count."""

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        valid = ~targets.isnan()
        errors = (self.model(inputs).squeeze(1) - targets.nan_to_num()) ** 2
        return (errors * valid).sum() / valid.sum()

    def loss_weight(self, batch):
        return (~batch[1].isnan()).sum()


class MaskedMeanWithoutWeight(MaskedMean):
    """Made to differ: averages of averages."""

    loss_weight = None


class BuiltLate(Regression):
    """Makes its network in `configure_model`, as models do that fit on no single device."""

    def __init__(self):
        pl.LightningModule.__init__(self)
        self.model = None
        self.optimizer = "SGD"

    def configure_model(self):
        if self.model is None:
            self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


class TwoOptimizers(Regression):
    """Manual optimization; the loss is not returned."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.step()

    def configure_optimizers(self):
        parameters = list(self.parameters())
        return torch.optim.SGD(parameters[:3], lr=0.05), torch.optim.SGD(parameters[3:], lr=0.01)


class FailsUnderLayout(Regression):
    def training_step(self, batch, batch_idx):
        if self.trainer.world_size > 1 and self.global_rank == 1:
            raise RuntimeError("no luck on rank one")
        return super().training_step(batch, batch_idx)


class FailsEverywhere(Regression):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("no luck anywhere")


class NoData(pl.LightningModule):
    """Has no loader of its own."""


def regression_adamw():
    return Regression("AdamW")


def hidden_factor_adamw():
    return HiddenFactor("AdamW")


def with_dropout():
    return Regression(dropout=0.5)


def with_batches():
    return Regression(), batches()


def not_a_module():
    return nn.Linear(1, 1)


def batches():
    return [(torch.randn(8, 4), torch.randn(8)) for _ in range(10)]


def uneven_batches():
    return [(torch.randn(7, 4), torch.randn(7)) for _ in range(10)]


def nine_batches():
    return [(torch.randn(samples, 4), torch.randn(samples)) for samples in (8, 5, 8, 6, 8, 8, 8, 7, 9)]


def single_samples():
    return [(torch.randn(1, 4), torch.randn(1))]


def masked_batches():
    made = batches()
    for index, (_, targets) in enumerate(made):
        targets[: 1 + index % 5] = float("nan")
    return made


def batches_with_an_empty_part():
    """In the first batch no sample of the second half counts, so the second of two ranks has weight 0."""
    made = masked_batches()
    made[0][1][4:] = float("nan")
    return made


def with_single_samples():
    return Regression(), single_samples()


def needs_arguments(width, depth):
    raise AssertionError("not called")


LAYERS = 3
