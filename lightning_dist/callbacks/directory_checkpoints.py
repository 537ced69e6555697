"""Checkpoint directories under strategies where every rank holds the whole model: DDP, one device, FairScale's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_dist import checkpoint as engine
from lightning_dist.strategies import FairScaleShardedStrategy, module_checkpoint

SUPPORTED = (DDPStrategy, SingleDeviceStrategy, FairScaleShardedStrategy)

GATHERED = "gathered_optimizer_states"
"""Optimizer state that rank 0 has gathered from the others, among the trainer's state."""


class DirectoryCheckpoints:
    """Stands before the checkpoint methods of a strategy that writes one file, and writes directories.

    Files are still read as before.

    Args:
        trainer: Its strategy is one of `SUPPORTED`.
        group: CPU group of all ranks; None in a world of one.
    """

    def __init__(self, trainer: Trainer, group: dist.ProcessGroup | None) -> None:
        self._trainer = trainer
        self._group = group
        strategy: Any = trainer.strategy
        self._load_file = strategy.load_checkpoint
        self._load_optimizers = strategy.load_optimizer_state_dict
        self._remove_file = strategy.remove_checkpoint
        strategy.save_checkpoint = self.save
        strategy.load_checkpoint = self.load
        strategy.load_optimizer_state_dict = self.load_optimizers
        strategy.remove_checkpoint = self.remove

    def detach(self) -> None:
        """Gives the strategy its own methods back."""
        for name in ("save_checkpoint", "load_checkpoint", "load_optimizer_state_dict", "remove_checkpoint"):
            self._trainer.strategy.__dict__.pop(name, None)

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        module: Any = self._trainer.lightning_module
        names = {parameter: name for name, parameter in module.named_parameters()}
        if isinstance(self._trainer.strategy, FairScaleShardedStrategy):
            checkpoint[GATHERED] = checkpoint.pop("optimizer_states", [])
        elif "optimizer_states" in checkpoint:
            inner = [getattr(optimizer, "optimizer", optimizer) for optimizer in self._trainer.optimizers]
            checkpoint["optimizer_states"] = [engine.optimizer_state_by_name(optimizer, names) for optimizer in inner]
        path = self._trainer.strategy.broadcast(str(filepath))
        module_checkpoint.save(checkpoint, path, self._group, list(module.state_dict()), storage_options)

    def load(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = str(checkpoint_path)
        if not engine.is_checkpoint(path):
            return self._load_file(checkpoint_path, weights_only=weights_only)
        module: Any = self._trainer.lightning_module
        checkpoint = module_checkpoint.load(path, module, self._group, weights_only, {}, list(module.state_dict()))
        if GATHERED in checkpoint:
            states = checkpoint.pop(GATHERED)
            del checkpoint[module_checkpoint.PATH_KEY]
            # Rank 0 sends each rank its part.
            checkpoint["optimizer_states"] = states if self._trainer.is_global_zero else [None] * len(states)
        return checkpoint

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        if module_checkpoint.PATH_KEY not in checkpoint:
            self._load_optimizers(checkpoint)
            return
        module: Any = self._trainer.lightning_module
        module_checkpoint.load_optimizers(module, self._trainer.optimizers, checkpoint, self._group)

    def remove(self, filepath: Any) -> None:
        if not engine.is_checkpoint(str(filepath)):
            self._remove_file(filepath)
        elif self._trainer.is_global_zero:
            module_checkpoint.remove(filepath)
