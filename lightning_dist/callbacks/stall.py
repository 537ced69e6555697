"""Sees a stall in seconds, with its cause, and writes where the time of a run goes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist import _compat
from lightning_dist.callbacks.run_record import record_event
from lightning_dist.parallel.pipeline.stage import BoundaryStage
from lightning_dist.strategies.hybrid import HybridParallelStrategy
from lightning_dist.telemetry.clock import PRODUCTIVE, Phase
from lightning_dist.telemetry.device import EnergyMeter, counted_flops, peak_flops
from lightning_dist.telemetry.ledger import Ledger
from lightning_dist.telemetry.links import read_bandwidths
from lightning_dist.telemetry.monitor import RankMonitor, WindowReport
from lightning_dist.telemetry.pages import TelemetryPages, scalars_of
from lightning_dist.telemetry.published import publish
from lightning_dist.telemetry.verdict import StragglerJudge, Verdict
from lightning_dist.telemetry.watchdog.heartbeat import ENABLED
from lightning_dist.telemetry.watchdog.limits import limits_from
from lightning_dist.telemetry.watchdog.start import RankWatchdog, launcher_restarts
from lightning_dist.telemetry.window import percentiles

log = logging.getLogger("lightning_dist.telemetry")

HangTimeout = float | dict[str, float | str] | Literal["auto"]
FLOPS_BATCH = 2
"""The batch, counted from 0, whose floating-point operations are counted: by then everything has been set up."""


class SyncStallDetector(Callback):
    """Follows every rank's time, names the rank, link or cause that holds the others up, and reports a hang.

    Writes to TensorBoard (see docs/telemetry.md), to the log folder (``stall_*.txt``, ``crash_rank*.txt``,
    ``goodput.jsonl``) and, on rank 0, to stderr. Works with every strategy of this package and with Lightning's DDP.
    Ranks must train on the same number of batches, as they do under these strategies.

    Each rank has a side process that sees it hang even where it holds the interpreter's lock or is stopped. When a rank
    raises, the others print its traceback and, if they do not end by themselves, are ended within five seconds,
    whatever ``on_hang`` is.

    Collectives: two CPU groups' set-up; then every ``every_n_steps`` batches one asynchronous all-gather of about 500
    bytes on a CPU group of its own, read later. No device synchronisation.

    Args:
        hang_timeout: Seconds that a rank may stay in one phase of a step; or a dictionary of seconds by kind (``step``,
            ``first_step``, ``loader_start``, ``evaluation``, ``checkpoint``, ``other``); or ``"auto"``: learnt from the
            run. With one number, first step, loader start and checkpoint have at least ten minutes.
        on_hang: ``"warn"`` reports; ``"abort"`` reports and ends all ranks; ``"auto"`` aborts where a launcher starts
            the job again.
        straggler_threshold: Own work of a rank ÷ that of its peers from which it is a straggler.
        straggler_seconds: How long it must hold the others up before it is named.
        every_n_steps: Batches from one exchange to the next.
        write_seconds: The least time from one set of scalars in TensorBoard, and line in the ledger, to the next.
        links: ``links.json`` of ``lightning-dist doctor``, run with the same layout; without it a link is compared with
            its own best.
        peak_flops: Floating-point operations a second of a device, for MFU; None is the maker's figure where known.
        ledger: The file in which goodput is kept over restarts; None is ``goodput.jsonl`` in the checkpoint callback's
            folder, or else in the log folder.

    Raises:
        ValueError: If an argument does not fit.

    Example::

        trainer = Trainer(strategy="hybrid", devices=8, callbacks=[SyncStallDetector()])
    """

    def __init__(
        self,
        hang_timeout: HangTimeout = "auto",
        on_hang: Literal["auto", "warn", "abort"] = "auto",
        straggler_threshold: float = 1.2,
        straggler_seconds: float = 10.0,
        every_n_steps: int = 50,
        write_seconds: float = 2.0,
        links: str | os.PathLike[str] | None = None,
        peak_flops: float | None = None,
        ledger: str | os.PathLike[str] | None = None,
    ) -> None:
        limits_from(hang_timeout)
        if on_hang not in ("auto", "warn", "abort"):
            raise ValueError(f"on_hang={on_hang!r} does not fit: it can be 'auto', 'warn' or 'abort'.")
        if straggler_seconds < 0 or write_seconds < 0:
            given = f"straggler_seconds={straggler_seconds!r} or write_seconds={write_seconds!r}"
            raise ValueError(f"{given} does not fit: give 0 or more.")
        if straggler_threshold <= 1:
            raise ValueError(f"straggler_threshold={straggler_threshold!r} does not fit: give a number above 1.")
        if isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps!r} does not fit: give a whole number of at least 1.")
        self._hang_timeout, self._on_hang = hang_timeout, on_hang
        self._threshold, self._every_n_steps = straggler_threshold, every_n_steps
        self._straggler_seconds, self._write_seconds = straggler_seconds, write_seconds
        self._written_at = float("-inf")
        self._bandwidths = read_bandwidths(links) if links is not None else {}
        self._peak_flops, self._ledger_path = peak_flops, ledger
        self._monitor: RankMonitor | None = None
        self._watchdog: RankWatchdog | None = None
        self._pages: TelemetryPages | None = None
        self._ledger: Ledger | None = None
        self._energy: EnergyMeter | None = None
        self._stack = ExitStack()
        self._optimizer_hooks: list[Any] = []
        self._folder = Path()
        self._world = self._data_size = 1
        self._batches, self._productive = 0, 0.0
        self._flops, self._counting = 0.0, ExitStack()
        self._reports = self._steps_since_written = 0
        self._last: WindowReport | None = None

    # --- begin -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        strategy = trainer.strategy
        self._world, device = trainer.world_size, strategy.root_device
        coordinates = _coordinates(trainer)
        # Like Lightning's own callbacks: rank 0's folder counts.
        self._folder = Path(strategy.broadcast(trainer.log_dir or trainer.default_root_dir))
        group = dist.new_group(backend="gloo") if self._world > 1 else None
        roles = [place.get("pipeline", 0) for place in coordinates]
        judge = StragglerJudge(self._threshold, roles, self._straggler_seconds, self._bandwidths)
        monitor = self._monitor = RankMonitor(
            trainer.global_rank,
            self._world,
            device,
            every_n_steps=self._every_n_steps,
            group=group,
            judge=judge,
            world_name=_name_of_world(coordinates),
        )
        self._energy = EnergyMeter(device)
        self._batches, self._productive, self._reports, self._steps_since_written = 0, 0.0, 0, 0
        self._start_watchdog(trainer, coordinates[trainer.global_rank])
        monitor.start()
        monitor.switch(Phase.OTHER, "first_step")
        self._stack.callback(monitor.stop)
        self._stack.callback(_compat.watch_fetching(self._begin_fetch, self._end_fetch))
        BoundaryStage.observers.append(self._stage_action)
        self._stack.callback(BoundaryStage.observers.remove, self._stage_action)
        self._time_saves(trainer)
        if trainer.is_global_zero:
            self._open_pages(trainer, coordinates)

    def _start_watchdog(self, trainer: Trainer, place: dict[str, int]) -> None:
        assert self._monitor is not None
        words = ", ".join(f"{axis}={value}" for axis, value in place.items())
        watchdog = RankWatchdog(
            trainer.global_rank, self._world, trainer.local_rank, self._folder, words, self._monitor.counts
        )
        environment = getattr(trainer.strategy, "cluster_environment", None)
        host = environment.main_address if environment is not None and self._world > 1 else "127.0.0.1"
        watchdog.start(trainer.strategy.broadcast, host)
        self._monitor.watchdog = self._watchdog = watchdog
        self._stack.callback(watchdog.close)
        self.configure()

    def configure(
        self,
        hang_timeout: HangTimeout | None = None,
        on_hang: Literal["auto", "warn", "abort"] | None = None,
        enabled: bool = True,
    ) -> None:
        """Changes limits and action of this rank, or switches the watchdog off, at any time; call it on all ranks.

        From outside the job, write the same names as JSON into ``stall_settings.json`` in the log folder.

        Args:
            hang_timeout: As in the constructor; None leaves it.
            on_hang: The same.
            enabled: Whether to watch.
        """
        self._hang_timeout = self._hang_timeout if hang_timeout is None else hang_timeout
        self._on_hang = self._on_hang if on_hang is None else on_hang
        abort = self._on_hang == "abort" or (self._on_hang == "auto" and launcher_restarts())
        if self._watchdog is not None:
            self._watchdog.configure(self._hang_timeout, abort, enabled)

    def _open_pages(self, trainer: Trainer, coordinates: list[dict[str, int]]) -> None:
        folders = [callback.dirpath for callback in trainer.callbacks if getattr(callback, "dirpath", None)]  # type: ignore[attr-defined]
        local = [folder for folder in folders if "://" not in str(folder)]
        self._ledger = Ledger(self._ledger_path or Path(local[0] if local else self._folder) / "goodput.jsonl")
        writer = next((it.experiment for it in trainer.loggers if isinstance(it, TensorBoardLogger)), None)
        self._pages = TelemetryPages(writer, coordinates) if writer is not None else None

    def _time_saves(self, trainer: Trainer) -> None:
        original, monitor = trainer.save_checkpoint, self._monitor
        assert monitor is not None

        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            with monitor.saving():
                return original(*args, **kwargs)

        trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]
        self._stack.callback(trainer.__dict__.pop, "save_checkpoint", None)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy  # its layout="auto" has been decided by now
        self._data_size = strategy.layout.data_size if isinstance(strategy, HybridParallelStrategy) else self._world
        for optimizer in trainer.optimizers:
            self._optimizer_hooks.append(optimizer.register_step_post_hook(self._after_optimizer))
        if self._watchdog is not None:
            self._watchdog.register_stack_signal()
        if self._monitor is not None and isinstance(trainer.strategy, DDPStrategy):
            trained = (it for it in pl_module.parameters() if it.requires_grad)
            self._monitor.watch.reducer_carries(float(sum(it.numel() * it.element_size() for it in trained)))
        if self._ledger is not None:
            self._ledger.begin(trainer.global_step)
        self._switch(Phase.OTHER, "first_step")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._switch(Phase.DATA_WAIT, "loader_start")

    def _begin_fetch(self) -> bool:
        assert self._monitor is not None
        if self._monitor.clock.phase is not Phase.OTHER:
            return False
        self._monitor.switch(Phase.DATA_WAIT)
        return True

    def _end_fetch(self, began: bool) -> None:
        assert self._monitor is not None
        if began:
            self._monitor.switch(Phase.OTHER)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._monitor is not None
        self._monitor.step = trainer.global_step
        self._monitor.add_batch(batch)
        if self._batches == FLOPS_BATCH:
            self._count_flops(trainer, pl_module)
        self._switch(Phase.FORWARD, "first_step" if self._batches <= FLOPS_BATCH else "step")

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._switch(Phase.OPTIMIZER)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        assert self._monitor is not None
        self._monitor.begin_backward(loss, isinstance(trainer.strategy, DDPStrategy))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._monitor is not None
        self._monitor.end_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._switch(Phase.OPTIMIZER)

    def _after_optimizer(self, *_: Any) -> None:
        self._switch(Phase.OTHER)

    @contextmanager
    def _backward_action(self) -> Any:
        assert self._monitor is not None
        before = self._monitor.clock.enter(Phase.BACKWARD)
        try:
            yield
        finally:
            self._monitor.clock.leave(before)

    def _stage_action(self, kind: str) -> AbstractContextManager[None]:
        """A pipeline's stages run backward inside the step."""
        return nullcontext() if kind == "forward" else self._backward_action()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._monitor is not None
        self._switch(Phase.OTHER, "step")
        self._counting.close()
        self._batches += 1
        report = self._monitor.end_step(trainer.global_step)
        if report is not None:
            self._take(trainer, report)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._switch(Phase.OTHER, "other")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._switch(Phase.EVALUATION, "evaluation")

    def on_validation_batch_start(self, *_: Any) -> None:
        if self._monitor is not None:
            self._monitor.beat()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._switch(Phase.OTHER, "other")

    def _switch(self, phase: Phase, kind: str | None = None) -> None:
        if self._monitor is not None:
            self._monitor.switch(phase, kind)

    # --- what comes of it --------------------------------------------------------------------------------------------

    def _count_flops(self, trainer: Trainer, module: LightningModule) -> None:
        """Where a figure for the device is there to compare with; compiled modules are not seen by torch's counter."""
        device = trainer.strategy.root_device
        self._peak_flops = self._peak_flops or peak_flops(device)
        if self._peak_flops is None or any(hasattr(inner, "_orig_mod") for inner in module.modules()):
            return
        count = self._counting.enter_context(counted_flops())

        def keep() -> None:
            self._flops = float(count.flops)

        self._counting.callback(keep)

    def _take(self, trainer: Trainer, report: WindowReport) -> None:
        assert self._monitor is not None and self._energy is not None
        self._last = report
        windows = report.windows
        own = windows[trainer.global_rank]
        if not own.steps:
            return
        self._productive += sum(own.seconds[phase] for phase in PRODUCTIVE)
        self._steps_since_written += own.steps
        for verdict in report.verdicts:
            self._say_verdict(trainer, verdict, report.step)
        assert self._watchdog is not None
        stalls, stalled = self._watchdog.page.reports()
        if time.monotonic() - self._written_at < self._write_seconds and stalls == self._reports:
            return
        self._written_at = time.monotonic()
        new_stalls, self._reports = stalls - self._reports, stalls
        values = scalars_of(windows)
        seconds = max(window.total for window in windows)
        share = self._data_size / self._world  # ranks of one replica have the same batch
        values["tokens_per_second"] = share * sum(window.tokens for window in windows) / seconds
        values["samples_per_second"] = share * sum(window.samples for window in windows) / seconds
        if self._flops and self._peak_flops:
            values["mfu"] = self._flops * own.steps / own.total / self._peak_flops
        if (joules := self._energy.take()) is not None:
            values["joules_per_step"] = joules / self._steps_since_written
        self._steps_since_written = 0
        times = percentiles(step.wall for step in self._monitor.recent)
        values |= {f"step_time_{name}": value for name, value in times.items()}
        values |= {"stalls": stalls, "stalled_seconds": stalled}
        if self._ledger is not None:
            self._ledger.note(report.step, self._productive)
            life = self._ledger.life()
            values |= {"goodput": life.goodput, "restarts": life.restarts}
        for name, value in values.items():
            publish(name, value)
        for phase in Phase:
            publish(phase.word, sum(window.per_step(phase) for window in windows) / len(windows))
        if trainer.is_global_zero:
            self._write(trainer, report, values, new_stalls)

    def _write(self, trainer: Trainer, report: WindowReport, values: dict[str, float], new_stalls: int) -> None:
        if self._pages is not None:
            self._pages.add(report.step, report.windows, values)
        for file in sorted(self._folder.glob("stall_*.txt"))[-new_stalls:] if new_stalls else []:
            text = file.read_text()
            self._say("stall", text, int(file.stem.split("_")[1]))
            record_event(trainer, "stall", report=str(file), summary=text.splitlines()[1])

    def _say_verdict(self, trainer: Trainer, verdict: Verdict, step: int) -> None:
        sentence = verdict.sentence(self._world)
        if trainer.is_global_zero:
            log.warning("step %d: %s", step, sentence)
            self._say("straggler", sentence, step)
            numbers = {"rank": verdict.rank, "group": verdict.group, "gain": verdict.gain}
            record_event(trainer, "straggler", cause=verdict.cause, words=sentence, **numbers)

    def _say(self, tag: str, text: str, step: int) -> None:
        if self._pages is not None:
            self._pages.say(tag, text, step)

    # --- end ---------------------------------------------------------------------------------------------------------

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        ends_in_order = isinstance(exception, KeyboardInterrupt | SIGTERMException)
        if self._watchdog is not None and not ends_in_order:
            self._watchdog.crash(exception)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._switch(Phase.OTHER, "other")
        if self._pages is not None and self._last is not None:
            self._pages.end(self._last.windows)
        if self._ledger is not None:
            self._ledger.note(trainer.global_step, self._productive)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for hook in self._optimizer_hooks:
            hook.remove()
        self._optimizer_hooks.clear()
        self._counting.close()
        self._stack.close()
        self._monitor = self._watchdog = self._pages = self._ledger = None


@contextmanager
def unwatched(trainer: Trainer) -> Iterator[None]:
    """Inside, a run may stand still on purpose (it waits for a person's word): no watchdog calls it a hang.

    Args:
        trainer: Whose detector, if it has one, looks away; on the rank that waits, which the others then wait for.
    """
    pages = [
        callback._watchdog.page
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, SyncStallDetector) and callback._watchdog is not None
    ]
    pages = [page for page in pages if page.read().flags & ENABLED]
    for page in pages:
        page.set_flags(ENABLED, False)
    try:
        yield
    finally:
        for page in pages:
            page.set_flags(ENABLED)


def _name_of_world(coordinates: list[dict[str, int]]) -> str:
    """A mesh of one axis uses the default group for it."""
    axes = list(coordinates[0])
    return axes[0] if len(axes) == 1 else "world"


def _coordinates(trainer: Trainer) -> list[dict[str, int]]:
    """Each rank's place on each axis of the mesh; of replicas, which one it is."""
    strategy, world = trainer.strategy, trainer.world_size
    if isinstance(strategy, HybridParallelStrategy) and world > 1:
        mesh = strategy.device_mesh
        names = mesh.mesh_dim_names or ()
        places = [(mesh.mesh == rank).nonzero()[0].tolist() for rank in range(world)]
        return [dict(zip(names, place, strict=True)) for place in places]
    return [{"data": rank} if world > 1 else {} for rank in range(world)]
