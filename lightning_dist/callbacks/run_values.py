"""The numbers of a run by name, one row for each optimizer step and evaluation: what rules judge and records keep."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer

from lightning_dist import _compat
from lightning_dist.record.host_values import HostValues
from lightning_dist.telemetry.published import published


@dataclass(frozen=True)
class Row:
    """The new numbers of one moment.

    Args:
        values: By name; always ``step``, ``epoch``, ``time`` (seconds of training, earlier attempts included),
            ``minutes``, ``evaluations`` and ``devices``.
        evaluation: Whether an evaluation gave them, not an optimizer step.
    """

    values: dict[str, float]
    evaluation: bool = False


@dataclass
class RunValues:
    """One for each trainer, shared by its callbacks; nothing here talks to other ranks."""

    evaluations: int = 0
    earlier_seconds: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _host: HostValues = field(default_factory=HostValues)
    _of_evaluation: set[str] = field(default_factory=set)
    _step: int | None = None
    _row: Row | None = None

    @property
    def seconds(self) -> float:
        """Seconds of training so far, of earlier attempts too."""
        return self.earlier_seconds + time.monotonic() - self._began

    def at_step(self, trainer: Trainer) -> Row | None:
        """The row of the optimizer step that ended last; the same for every caller, None before there is one.

        No collectives, and no waiting for a device: numbers that lie on one are those of a step before.
        """
        if trainer.global_step == self._step:
            return self._row
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if _compat.batches_processed(trainer) % trainer.accumulate_grad_batches != 0 and not is_last:
            return None
        self._step = trainer.global_step
        metrics = {name: value for name, value in trainer.callback_metrics.items() if name not in self._of_evaluation}
        self._row = Row({**published(), **self._host.read({**metrics, **self._counts(trainer)})})
        return self._row

    def at_evaluation(self, trainer: Trainer) -> Row:
        """The row of the evaluation that has just ended; the same for every caller at this place."""
        mark = -1 - trainer.global_step
        if self._step == mark and self._row is not None:
            return self._row
        self.evaluations += 1
        logged = _compat.names_logged(trainer)
        names = {name for name in trainer.callback_metrics if name.split("/dataloader_idx_")[0] in logged}
        self._of_evaluation |= names
        own: dict[str, Any] = {name: value for name, value in trainer.callback_metrics.items() if name in names}
        self._step = mark
        self._row = Row({name: float(value) for name, value in {**own, **self._counts(trainer)}.items()}, True)
        return self._row

    def _counts(self, trainer: Trainer) -> dict[str, float]:
        seconds = self.seconds
        return {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "time": seconds,
            "minutes": seconds / 60,
            "evaluations": self.evaluations,
            "devices": trainer.world_size,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": self.evaluations, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.evaluations, self.earlier_seconds = state["evaluations"], state["seconds"]
        self._began = time.monotonic()


_of_trainers: WeakKeyDictionary[Trainer, RunValues] = WeakKeyDictionary()


def values_of(trainer: Trainer) -> RunValues:
    """The trainer's one series of numbers."""
    if trainer not in _of_trainers:
        _of_trainers[trainer] = RunValues()
    return _of_trainers[trainer]
