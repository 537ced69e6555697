"""What each worker logged, beside what all of them did together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_dist import _compat
from lightning_dist.strategies.logged_values import EpochAgreement


class WorkerMetrics(EpochAgreement):
    """At the end of an epoch gives loggers each worker's own value (``loss/worker_2``), then lets all combine theirs.

    The combined value counts samples alike: Lightning weighs what is logged by its batch sizes.

    Collectives: at the end of an epoch, an all-gather of the logged numbers over a CPU group, then those of
    :class:`~lightning_dist.strategies.logged_values.EpochAgreement`.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self.values: dict[str, list[float | None]] = {}
        """The newest value of each worker by name, in the order of ranks; None where a worker logged none."""

    def _agree(self, trainer: Trainer, what: str) -> None:
        mine = {name: _own_value(metric) for name, metric in _compat.epoch_metrics(trainer).items()}
        everyone = self._strategy.gather_objects(mine)
        names = sorted({name for values in everyone for name in values})
        # Lightning names what it keeps "training_step.loss".
        found = {name.partition(".")[2] or name: [values.get(name) for values in everyone] for name in names}
        self.values |= found
        if not trainer.sanity_checking:
            rows = {
                f"{name}/worker_{worker}": value
                for name, values in found.items()
                for worker, value in enumerate(values)
                if value is not None
            }
            for logger in trainer.loggers:
                logger.log_metrics(rows, step=trainer.global_step)
        super()._agree(trainer, what)


def _own_value(metric: Any) -> float | None:
    """A logged value of this worker alone; also of one that is to be combined."""
    sync = metric.meta.sync
    should, sync.should = sync.should, False
    try:
        return float(metric.compute())
    finally:
        sync.should, metric._computed = should, None


class LocalLog:
    """Stands before ``LightningModule.log``: values of training steps are combined at the end of the epoch, not at each
    step, where ranks would wait for each other and workers without a batch would be missing.

    Args:
        module: The module whose ``log`` it stands before.
        warn: Called with a sentence when a ``sync_dist=True`` is put off for the first time.
    """

    def __init__(self, module: LightningModule, warn: Callable[[str], Any]) -> None:
        self._log = type(module).log.__get__(module)
        self._module = module
        self._warn = warn
        self._warned = False

    def __call__(self, name: str, value: Any, *args: Any, sync_dist: bool = False, **kwargs: Any) -> None:
        if sync_dist and self._module._current_fx_name in ("training_step", "on_train_batch_end"):
            sync_dist = False
            if not self._warned:
                self._warned = True
                self._warn(
                    f"{name!r} is logged with sync_dist=True in a training step, which would exchange numbers at every"
                    " step: each worker logs its own, and the epoch's value (on_epoch=True) is combined over all."
                )
        self._log(name, value, *args, sync_dist=sync_dist, **kwargs)
