"""Averaged weights of a sharded model, without ever building the whole of it."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_dist.parallel.data import free_gathered, fsdp_modules, local_tensor

CURRENT_KEY = "current_model_state"
"""Where a checkpoint keeps the weights that training goes on with; its ``state_dict`` holds the average."""


class ShardedWeightAveraging(Callback):
    """Keeps an average of the weights, each rank of its own shards; validates with it and ends with it.

    Checkpoints hold the average as ``state_dict`` (so that what was validated is what is loaded) and the training
    weights beside it; a resumed fit goes on with both. Buffers are not averaged. No collectives.

    Args:
        decay: Of an exponential average, ``average += (1 - decay) * (weight - average)``; None for the plain mean of
            all weights taken.
        every_n_steps: Optimizer steps from one weight taken to the next.
        start_step: The number of optimizer steps after which the first weight is taken. Until then nothing is
            averaged, swapped or overwritten.

    Raises:
        ValueError: If ``decay`` is not in [0, 1), or a number of steps is not positive (``start_step`` may be 0).

    Example::

        trainer = Trainer(strategy="hybrid", devices=2, callbacks=[ShardedWeightAveraging(decay=0.999)])
    """

    def __init__(self, decay: float | None = 0.999, every_n_steps: int = 1, start_step: int = 0) -> None:
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"decay={decay!r} does not fit: give a number in [0, 1), or None for the plain mean.")
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps!r} does not fit: give a whole number of at least 1.")
        if start_step < 0:
            raise ValueError(f"start_step={start_step!r} does not fit: give a whole number of at least 0.")
        self._decay = decay
        self._every_n_steps = every_n_steps
        self._start_step = start_step
        self._average: dict[str, Tensor] = {}
        self._taken = 0
        self._last_step = 0
        self._swapped = False

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        due = step > self._last_step and step > self._start_step and step % self._every_n_steps == 0
        self._last_step = step
        if not due:
            return
        self._taken += 1
        if not self._average:
            self._average = _copy(pl_module)
            return
        weight = 1.0 / self._taken if self._decay is None else 1.0 - self._decay
        current = dict(pl_module.named_parameters())
        averages = [local_tensor(average) for average in self._average.values()]
        torch._foreach_lerp_(averages, [local_tensor(current[name]) for name in self._average], weight)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._swapped:
            self._swap(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _fill(pl_module, self._average)

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken, "last_step": self._last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._taken, self._last_step = state_dict["taken"], state_dict["last_step"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._average:
            return
        weights = {name: checkpoint["state_dict"][name] for name in self._average}
        average, current = (weights, self._average) if self._swapped else (self._average, weights)
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **average}
        checkpoint[CURRENT_KEY] = current

    def checkpoint_tensors(self, pl_module: LightningModule) -> dict[str, dict[str, Tensor]]:
        """Room for what a sharded checkpoint holds for this callback, by top-level name."""
        return {CURRENT_KEY: _copy(pl_module)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if CURRENT_KEY in checkpoint and trainer.state.fn == TrainerFn.FITTING:
            self._average = _copy(pl_module)
            _fill(pl_module, checkpoint[CURRENT_KEY])

    def _swap(self, pl_module: LightningModule) -> None:
        if self._average:
            weights = _copy(pl_module)
            _fill(pl_module, self._average)
            self._average = weights
            self._swapped = not self._swapped


def _copy(module: LightningModule) -> dict[str, Tensor]:
    free_gathered(fsdp_modules(module))  # An evaluation leaves parameters gathered: what counts is the shards.
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@torch.no_grad()
def _fill(module: LightningModule, weights: dict[str, Tensor]) -> None:
    free_gathered(fsdp_modules(module))
    parameters = dict(module.named_parameters())
    for name, weight in weights.items():
        local_tensor(parameters[name]).copy_(local_tensor(weight))
