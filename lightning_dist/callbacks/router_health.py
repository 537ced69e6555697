"""Shows how a mixture of experts is routed: load, entropy, drops and exchange of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_dist.parallel.expert import RouterStatistics, find_experts, join_statistics, watch_routing
from lightning_dist.strategies.hybrid import HybridParallelStrategy
from lightning_dist.telemetry.published import publish
from lightning_dist.telemetry.router_drawing import draw_load

PAGE = {
    "Are the routers well?": {
        "entropy of the load (1 even, 0 all on one expert)": ["Multiline", ["router/entropy/.*"]],
        "fullest expert / mean": ["Multiline", ["router/max_over_mean/.*"]],
        "dropped share of the choices": ["Multiline", ["router/drop_rate/.*"]],
        "all-to-all: bytes of a step, all ranks": ["Multiline", ["router/exchanged_bytes/.*"]],
        "all-to-all: seconds of a step, mean of the ranks": ["Multiline", ["router/exchange_seconds/.*"]],
    }
}
"""What ``add_custom_scalars`` is given."""
FOLDER = "router_health"
"""Below the run's: a page of its own, which TensorBoard shows beside those of the run."""
_PER_STEP = ("exchanged_bytes", "exchange_seconds")


class RouterHealth(Callback):
    """Logs, for each layer of experts, how the tokens of the last steps were spread over them.

    ``router/entropy/LAYER`` of the load (1 is even, 0 all on one expert), ``router/max_over_mean/LAYER``,
    ``router/drop_rate/LAYER``, and ``router/exchanged_bytes/LAYER`` and ``router/exchange_seconds/LAYER`` of a step's
    forward. TensorBoard gets a page of these (Custom Scalars) and a heat map of layers x experts (Images). Each token
    counts once: over microbatches, accumulated batches, all data and context ranks; recomputation and evaluation don't
    count. Works with this package's strategy, and with Lightning's for one device and DDP; with our
    ``MixtureOfExperts`` and with Hugging Face's models.

    Stop rules find the worst layer under ``router_entropy``, ``router_max_over_mean`` and ``router_drop_rate``.

    Collectives: one all-reduce of ``layers * (experts + 5)`` numbers over a CPU group every ``every_n_steps``.

    Args:
        every_n_steps: Optimizer steps from one report to the next.

    Raises:
        ValueError: If ``every_n_steps`` is not positive; when training starts, if there are no experts.

    Example::

        trainer = Trainer(strategy=HybridParallelStrategy(layout="shard=2,ep=2"), callbacks=[RouterHealth()])
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps!r} does not fit: give a whole number of at least 1.")
        self._every_n_steps = every_n_steps
        self._watched: dict[str, RouterStatistics] = {}
        self._counts: dict[str, bool] = {}
        self._group: dist.ProcessGroup | None = None
        self._reported = 0
        self._writers: list[Any] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to watch what the strategy has made of the module."""
        names = find_experts(pl_module)
        if not names:
            raise ValueError(
                f"RouterHealth finds no experts in {type(pl_module).__name__}: it takes a MixtureOfExperts of"
                " lightning_dist.parallel.expert or a Hugging Face model with an expert plan; leave the callback out."
            )
        sees_own_tokens = _tensor_rank(trainer) == 0
        self._watched = watch_routing(pl_module, names, sync_on_compute=False)
        self._counts = {
            name: sees_own_tokens and any(True for _ in pl_module.get_submodule(name).parameters()) for name in names
        }
        self._group = dist.new_group(backend="gloo") if trainer.world_size > 1 else None
        self._reported = trainer.global_step
        self._open_page(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step - self._reported >= self._every_n_steps:
            self._report(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > self._reported:
            self._report(trainer)
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def _report(self, trainer: Trainer) -> None:
        joined = join_statistics(self._watched, self._counts, self._group)
        for statistics in self._watched.values():
            statistics.reset()
        steps, self._reported = trainer.global_step - self._reported, trainer.global_step
        found = {name: statistics.compute() for name, statistics in joined.items()}
        load = {name: values.pop("load").tolist() for name, values in found.items()}
        numbers = {name: {key: float(value) for key, value in values.items()} for name, values in found.items()}
        publish("router_entropy", min(values["entropy"] for values in numbers.values()))
        for key in ("max_over_mean", "drop_rate"):
            publish(f"router_{key}", max(values[key] for values in numbers.values()))
        if trainer.is_global_zero:
            self._write(trainer, numbers, load, steps)

    def _write(
        self, trainer: Trainer, numbers: Mapping[str, Mapping[str, float]], load: Mapping[str, list[float]], steps: int
    ) -> None:
        scalars = {
            f"router/{key}/{name}": value / steps if key in _PER_STEP else value
            for name, values in numbers.items()
            for key, value in values.items()
            if key != "tokens"
        }
        step = trainer.global_step
        for writer in self._writers:
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, step)
            writer.add_image("router/load", draw_load(load), step)
            writer.flush()
        for logger in trainer.loggers:
            if not isinstance(logger, TensorBoardLogger):
                logger.log_metrics(scalars, step)

    def _open_page(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                from torch.utils.tensorboard import SummaryWriter

                writer = SummaryWriter(str(Path(logger.log_dir) / FOLDER))
                writer.add_custom_scalars(PAGE)
                self._writers.append(writer)

    def _end(self) -> None:
        for statistics in self._watched.values():
            if statistics.hook is not None:
                statistics.hook.remove()
        for writer in self._writers:
            writer.close()
        self._watched, self._writers = {}, []


def _tensor_rank(trainer: Trainer) -> int:
    """This rank's place among those that see the same tokens."""
    strategy = trainer.strategy
    return (
        strategy.layout.coordinate(trainer.global_rank)["tensor"] if isinstance(strategy, HybridParallelStrategy) else 0
    )
