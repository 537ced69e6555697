"""Weights, optimizers and schedulers of an earlier checkpoint, inside the running fit; the data goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_dist import checkpoint as engine
from lightning_dist.callbacks.checkpoint import FaultTolerantCheckpoint


def keeper_of(trainer: Trainer) -> FaultTolerantCheckpoint | None:
    """The callback that keeps this run's checkpoints."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, FaultTolerantCheckpoint):
            return callback
    return None


def find_good(
    keeper: FaultTolerantCheckpoint, before: int, suspect: Sequence[Sequence[int]], group: dist.ProcessGroup | None
) -> tuple[str, int] | None:
    """Path and step of the newest intact checkpoint that was taken before something went wrong, alike on all ranks.

    Collectives: those of waiting for the writer and of ``verify_together``, and a broadcast of a small object.

    Args:
        keeper: Its folder is looked at, after what it still writes.
        before: The first step whose number was bad. The update before it may have been the cause, so the checkpoint
            has to be older than that.
        suspect: Steps ``(after, up to)`` whose checkpoints were taken between a cause and a rollback.
        group: CPU group of all ranks.
    """
    keeper.wait_until_written()
    entries: list[Any] = [engine.list_checkpoints(str(keeper.dirpath))]
    if group is not None:
        dist.broadcast_object_list(entries, 0, group=group)
    for entry in entries[0]:
        step = entry.step
        if entry.problem is not None or step is None or step > before - 2:
            continue
        if any(after < step <= last for after, last in suspect):
            continue
        if engine.verify_together(entry.path, group=group).intact:
            return entry.path, step
    return None


def restore(trainer: Trainer, path: str) -> None:
    """Puts a checkpoint's weights, optimizers, learning-rate schedules and loss scale into the running fit.

    Loops, callbacks and the position in the data stay where they are: the next batch is the next of the data.

    Collectives: those of the strategy's loading.
    """
    strategy = trainer.strategy
    state = strategy.load_checkpoint(path)
    strategy.load_model_state_dict(state, strict=trainer.lightning_module.strict_loading)
    strategy.load_optimizer_state_dict(state)
    for config, saved in zip(trainer.lr_scheduler_configs, state.get("lr_schedulers", ()), strict=False):
        config.scheduler.load_state_dict(saved)
    precision = trainer.precision_plugin
    if (key := type(precision).__qualname__) in state:
        precision.load_state_dict(state[key])
    for optimizer in trainer.optimizers:
        optimizer.zero_grad()
