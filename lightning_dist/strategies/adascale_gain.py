"""The gain of AdaScale in the loggers."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dist.parallel.adascale import AdaScale


class AdaScaleGain(Callback):
    """Logs ``adascale/gain`` and ``adascale/scale_invariant_steps`` every ``Trainer(log_every_n_steps=…)`` steps.

    ``FairScaleShardedStrategy`` adds it by itself where an optimizer is AdaScale; under other strategies pass it to the
    Trainer. Optimizers after the first are numbered: ``adascale/gain-1``. No collectives.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero or trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        for number, optimizer in enumerate(trainer.optimizers):
            if isinstance(optimizer, AdaScale):
                suffix = f"-{number}" if number else ""
                values = {
                    f"adascale/gain{suffix}": optimizer.gain(),
                    f"adascale/scale_invariant_steps{suffix}": optimizer.scale_invariant_steps,
                }
                for logger in trainer.loggers:
                    logger.log_metrics(values, step=trainer.global_step)
