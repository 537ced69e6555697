"""Evaluation in which every sample counts once, on data ranks that have unequal numbers of batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from lightning_dist.parallel.loaders import TogetherLoader


class Evaluation:
    """Knows which batches of a running evaluation are padding: repeated only so that all ranks join the collectives."""

    def __init__(self) -> None:
        self._batches: Counter[int] = Counter()
        self._padded: Counter[int] = Counter()

    def begin(self) -> None:
        self._batches.clear()
        self._padded.clear()

    def is_padding(self, trainer: Trainer, dataloader_index: int) -> bool:
        """Whether the batch that comes now is padding; to be asked once for each batch, in order."""
        if trainer.training:
            return False
        loader = _evaluation_loaders(trainer)[dataloader_index]
        place = self._batches[dataloader_index]
        self._batches[dataloader_index] += 1
        padding = isinstance(loader, TogetherLoader) and loader.is_padding(place)
        self._padded[dataloader_index] += padding
        return padding

    def drop_padded_predictions(self, trainer: Trainer) -> None:
        """Takes the Nones that padding left out of what ``trainer.predict`` returns."""
        predictions = trainer.predict_loop.predictions
        if not predictions:
            return
        several = len(self._batches) > 1
        for index, padded in self._padded.items():
            kept = predictions[index] if several else predictions
            del kept[len(kept) - padded :]


def _evaluation_loaders(trainer: Trainer) -> list[Any]:
    if trainer.testing:
        loaders = trainer.test_dataloaders
    elif trainer.predicting:
        loaders = trainer.predict_dataloaders
    else:
        loaders = trainer.val_dataloaders
    return pytree.tree_leaves(loaders)


@contextmanager
def uncounted(module: LightningModule) -> Generator[None, None, None]:
    """Within it a step takes part in collectives, but what it logs weighs nothing and metrics forget what they saw."""
    before = {metric: _snapshot(metric) for metric in module.modules() if isinstance(metric, Metric)}
    log = module.log

    def log_nothing(name: str, value: Any, *args: Any, reduce_fx: Any = "mean", **kwargs: Any) -> None:
        if isinstance(value, Metric):
            return
        if reduce_fx in ("sum", torch.sum, sum):
            value = torch.zeros_like(torch.as_tensor(value, dtype=torch.get_default_dtype()))
        log(name, value, *args, **{**kwargs, "reduce_fx": reduce_fx, "batch_size": 0})

    module.log = log_nothing  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        module.log = log  # type: ignore[method-assign]
        for metric, state in before.items():
            metric.__dict__.update(state)


def _snapshot(metric: Metric) -> dict[str, Any]:
    states = {
        name: list(value) if isinstance(value, list) else value.clone() for name, value in metric.metric_state.items()
    }
    return {**states, "_update_count": metric.update_count, "_computed": None}
