"""Logged values: one number on all ranks at the end of an epoch, and the same names on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dist import _compat

if TYPE_CHECKING:
    from lightning_dist.strategies.hybrid import HybridParallelStrategy


class EpochAgreement(Callback):
    """Runs before every other callback at the end of an epoch; the strategy adds it by itself.

    Without it each rank sees its own value of what was logged without ``sync_dist``, so ranks may disagree on the best
    checkpoint or on when to stop (Lightning-AI/pytorch-lightning#19045, #20141), and values logged under different
    names on different ranks are averaged with each other (#19106).

    Collectives: at the end of an epoch, an all-gather of the logged names over a CPU group, and one reduction per value
    over the data ranks.
    """

    def __init__(self, strategy: HybridParallelStrategy) -> None:
        self._strategy = strategy

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._agree(trainer, "training")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._agree(trainer, "validation")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._agree(trainer, "test")

    def _agree(self, trainer: Trainer, what: str) -> None:
        metrics = _compat.epoch_metrics(trainer)
        names: dict[str, Any] = {name: metric.meta.sync.should for name, metric in metrics.items()}
        everyone = self._strategy.gather_objects(names)
        for name in sorted({name for names in everyone for name in names}):
            having = [rank for rank, names in enumerate(everyone) if name in names]
            lacking = [rank for rank in range(len(everyone)) if rank not in having]
            if lacking and any(names.get(name) for names in everyone):
                raise RuntimeError(
                    f"{name!r} was logged with sync_dist=True in {what} by rank{'s' * (len(having) > 1)}"
                    f" {', '.join(map(str, having))} but not by {', '.join(map(str, lacking))}; log the same names on"
                    " all ranks, or this one with sync_dist=False."
                )
            if not lacking:
                _compat.synchronise_metric(metrics[name])


class LogCheck:
    """Stands before ``LightningModule.log`` and lets the ranks agree on each new name that is reduced at once.

    A value logged with ``sync_dist=True`` on a step is reduced there and then: ranks that log different names, or
    different numbers of them, would average unrelated values or wait for each other. Names seen before cost nothing.

    Args:
        module: The module whose ``log`` it stands before.
        agree: Called with a running number and the name; raises if the other ranks have another name.
    """

    def __init__(self, module: LightningModule, agree: Callable[[int, str], None]) -> None:
        self._log = type(module).log.__get__(module)
        self._module = module
        self._agree = agree
        self._seen: set[tuple[str | None, str]] = set()

    def __call__(self, name: str, value: Any, *args: Any, sync_dist: bool = False, **kwargs: Any) -> None:
        key = (self._module._current_fx_name, name)
        if sync_dist and not kwargs.get("rank_zero_only") and key not in self._seen:
            self._seen.add(key)
            self._agree(len(self._seen), name)
        self._log(name, value, *args, sync_dist=sync_dist, **kwargs)
