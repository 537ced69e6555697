"""Draws the pipeline's schedule as it really ran."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_dist.strategies.hybrid import HybridParallelStrategy
from lightning_dist.telemetry.pipeline_drawing import draw_schedule, idle_share


class PipelineDrawing(Callback):
    """Writes to TensorBoard, now and then, a picture of ranks x time: forward, backward, idle; and the idle share.

    The measured batch begins with a barrier and ends with an exchange of its times; the others cost nothing.

    Collectives: in a measured batch a barrier and an all-gather over the pipeline's CPU group.

    Args:
        every_n_batches: How often a batch is measured. The first one never is: memory is first filled there.

    Raises:
        ValueError: If ``every_n_batches`` is not positive.
        TypeError: When the Trainer starts with another strategy.

    Example::

        trainer = Trainer(strategy="hybrid", callbacks=[PipelineDrawing(every_n_batches=500)])
    """

    def __init__(self, every_n_batches: int = 1000) -> None:
        if every_n_batches < 1:
            raise ValueError(f"every_n_batches={every_n_batches!r} does not fit: give a whole number of at least 1.")
        self._every_n_batches = every_n_batches
        self._batches = 0
        self._measuring = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, HybridParallelStrategy):
            raise TypeError(
                f"PipelineDrawing works with HybridParallelStrategy, not with {type(trainer.strategy).__name__}."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._measuring = self._batches > 0 and self._batches % self._every_n_batches == 0
        self._batches += 1
        if self._measuring:
            trainer.strategy.measure_schedule()  # type: ignore[attr-defined]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._measuring:
            return
        self._measuring = False
        ranks = trainer.strategy.measured_schedule()  # type: ignore[attr-defined]
        if not ranks or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                step = trainer.global_step
                logger.experiment.add_image("pipeline/schedule", draw_schedule(ranks), step)
                logger.experiment.add_scalar("pipeline/idle", idle_share(ranks), step)
