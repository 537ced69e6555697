"""``FaultTolerantCheckpoint``: checkpoints that survive what ends a run, and a run that goes on where it was."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_dist import _compat
from lightning_dist import checkpoint as engine
from lightning_dist.callbacks.directory_checkpoints import SUPPORTED, DirectoryCheckpoints
from lightning_dist.callbacks.flags import flags_of
from lightning_dist.callbacks.run_record import record_event
from lightning_dist.checkpoint.position import (
    Position,
    ResumableSampler,
    StatefulLoader,
    batch_size_of,
    has_state,
    make_resumable,
)
from lightning_dist.parallel.flag_exchange import REQUEUE, AgreedExit, Flag, FlagExchange
from lightning_dist.strategies.hybrid import HybridParallelStrategy
from lightning_dist.strategies.module_checkpoint import SaveOptions
from lightning_dist.telemetry.published import publish

POSITION = "position"


class FaultTolerantCheckpoint(ModelCheckpoint):
    """A ``ModelCheckpoint`` that writes checkpoint directories, verified and in the background, and resumes exactly.

    What it adds to ``ModelCheckpoint``, all of whose arguments it takes:

    * A checkpoint is a directory that is committed at once, checksummed and read back (docs/checkpoints.md). One is
      taken whenever the triggers say so, whether or not ``monitor`` is among the best; the newest ``keep_last`` good
      ones and the ``save_top_k`` best stay. Nothing is deleted before a newer one is committed and verified.
    * ``fit(ckpt_path="last")`` goes on from the newest intact checkpoint of ``dirpath``, chosen once for all ranks, and
      starts afresh where there is none. Older layouts and numbers of ranks are converted.
    * With another number of data ranks a step keeps its samples, by more or fewer accumulated batches.
    * Every rank's random numbers and the position in the data come back too: the run goes on as if it had not stopped.
      In the middle of an accumulation window the checkpoint waits for the window's end.
    * SIGTERM or SIGUSR1 to any rank ends the run at one step of all ranks, with a checkpoint of that step and exit code
      75: start it again (docs/checkpoints.md).
    * A failing disk costs checkpoints, not training; the warnings say how long the run has been unprotected.

    Works with :class:`~lightning_dist.HybridParallelStrategy`,
    :class:`~lightning_dist.strategies.FairScaleShardedStrategy`, Lightning's DDP and a single device.

    Args:
        dirpath: Folder of this run's checkpoints; it belongs to one run at a time. Local, or any fsspec path.
        filename: See ``ModelCheckpoint``.
        monitor: See ``ModelCheckpoint``.
        verbose: See ``ModelCheckpoint``.
        save_last: Not needed: the newest checkpoint is the last. ``last_model_path`` names it.
        save_top_k: How many of the best by ``monitor`` stay as well.
        save_on_exception: Not supported: after an exception ranks can't write together any more.
        save_weights_only: Not supported: a run can't go on from weights alone.
        mode: See ``ModelCheckpoint``.
        auto_insert_metric_name: See ``ModelCheckpoint``.
        every_n_train_steps: See ``ModelCheckpoint``.
        train_time_interval: See ``ModelCheckpoint``.
        every_n_epochs: See ``ModelCheckpoint``.
        save_on_train_epoch_end: See ``ModelCheckpoint``.
        enable_version_counter: See ``ModelCheckpoint``.
        keep_last: How many of the newest good checkpoints stay.
        async_save: Whether training goes on while a checkpoint is written; it waits for a copy in host memory only.
        verify: How a checkpoint is looked at before a run goes on from it: ``"full"`` compares every byte with its
            checksum, ``"sizes"`` looks for missing files and wrong sizes.
        on_signal: ``"requeue"`` as above, while it trains; ``"ignore"`` leaves signals to Lightning.

    Raises:
        ValueError: If an argument does not fit.
    """

    FILE_EXTENSION = ""

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        *,
        keep_last: int = 2,
        async_save: bool = True,
        verify: Literal["full", "sizes"] = "full",
        on_signal: Literal["requeue", "ignore"] = "requeue",
    ) -> None:
        if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
            raise ValueError(f"keep_last={keep_last!r} does not fit: give a whole number of at least 1.")
        if verify not in ("full", "sizes"):
            raise ValueError(f"verify={verify!r} does not fit: give 'full' or 'sizes'.")
        if on_signal not in ("requeue", "ignore"):
            raise ValueError(f"on_signal={on_signal!r} does not fit: give 'requeue' or 'ignore'.")
        if save_weights_only:
            raise ValueError(
                "save_weights_only=True does not fit: a run can't go on from weights; use ModelCheckpoint."
            )
        if save_on_exception:
            raise ValueError(
                "save_on_exception=True does not fit: after an exception ranks can't write together; take checkpoints"
                " often instead (every_n_train_steps, train_time_interval)."
            )
        super().__init__(
            str(dirpath),
            filename,
            monitor,
            verbose,
            None,
            save_top_k,
            False,
            False,
            mode,
            auto_insert_metric_name,
            every_n_train_steps,
            train_time_interval,
            every_n_epochs,
            save_on_train_epoch_end,
            enable_version_counter,
        )
        self.keep_last = keep_last
        self.async_save = async_save
        self.verify = verify
        self.on_signal = on_signal
        self._flags: FlagExchange | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._writer: engine.BackgroundWriter | None = None
        self._group: dist.ProcessGroup | None = None
        self._directories: DirectoryCheckpoints | None = None
        self._samplers: list[ResumableSampler] = []
        self._loaded: Position | None = None
        self._choice: str | None = None
        self._random: dict[str, Any] | None = None
        self._resumed_from: str | None = None
        self._batch_size = 0
        self._wanted = False
        self._leaving = False
        self._more_follows = False
        self._trainer: Trainer | None = None

    @property
    def unprotected_seconds(self) -> float:
        """Seconds of training that would be lost if the run ended now."""
        return self._writer.unprotected_seconds if self._writer is not None else 0.0

    def wait_until_written(self) -> None:
        """Waits for what is being written; a failure is a warning, as when saving.

        Collectives: those of the writer.
        """
        if self._writer is not None:
            try:
                self._writer.wait()
            except engine.CheckpointError as error:
                rank_zero_warn(f"A checkpoint could not be written: {error}")

    # --- set-up ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lets the strategy write directories, and settles which checkpoint to go on from.

        Collectives: makes a CPU group; those of :func:`~lightning_dist.checkpoint.agree_on_newest`.
        """
        strategy: Any = trainer.strategy
        if not isinstance(strategy, HybridParallelStrategy) and type(strategy) not in SUPPORTED:
            raise ValueError(
                f"FaultTolerantCheckpoint does not work with {type(strategy).__name__}: use HybridParallelStrategy,"
                " FairScaleShardedStrategy, 'ddp' or one device, or Lightning's ModelCheckpoint with this strategy."
            )
        super().setup(trainer, pl_module, stage)
        self._trainer = trainer
        if self._group is None and trainer.world_size > 1:
            self._group = dist.new_group(backend="gloo")
        if type(strategy) in SUPPORTED:
            if self._directories is not None:
                self._directories.detach()
            self._directories = DirectoryCheckpoints(trainer, self._group)
        _compat.resolve_resume_path(trainer, self._resolve)
        if stage == "fit":
            self._flags = flags_of(trainer)
            if trainer.is_global_zero:
                os.makedirs(self._root, exist_ok=True) if self._is_local else None
                engine.sweep(self._root)
            if self._writer is None:
                self._writer = engine.BackgroundWriter(self._group)
            self._samplers = []
            process = strategy.process_dataloader
            strategy.process_dataloader = lambda loader: self._prepare_loader(process(loader))

    @property
    def _root(self) -> str:
        return str(self.dirpath)

    @property
    def _is_local(self) -> bool:
        return "://" not in self._root

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """Lightning asks each rank by itself, before they have met: the folder stands for whatever is found then."""
        if self._is_local:
            Path(self._root).mkdir(parents=True, exist_ok=True)
        return {self._root}

    def _resolve(self, path: Any) -> Any:
        """The checkpoint that the folder stands for, the same on every rank; None where there is none."""
        if os.path.normpath(str(path)) != os.path.normpath(self._root):
            return path
        choice = engine.agree_on_newest(self._root, full=self.verify == "full", group=self._group)
        if choice is None:
            rank_zero_info(f"No checkpoint was found in {self._root}: the run starts afresh.")
            return None
        (rank_zero_warn if choice.rejected else rank_zero_info)(f"Going on from a checkpoint: {choice}")
        self._choice = str(choice)
        return choice.path

    # --- position in the data ----------------------------------------------------------------------------------------

    def _prepare_loader(self, loader: Any) -> Any:
        trainer = self._trainer
        assert trainer is not None
        if not trainer.training:
            return loader
        if has_state(loader):
            if sized_len(loader) is not None:
                return loader
            return StatefulLoader(loader, lambda: _compat.batches_fetched_ahead(trainer))
        sampler = make_resumable(loader)
        if sampler is None:
            rank_zero_warn(
                f"FaultTolerantCheckpoint can't set the position in a {type(loader).__name__} over"
                f" {type(getattr(loader, 'dataset', loader)).__name__}: a run that goes on in the middle of an"
                " epoch sees its first samples again. Use torchdata's StatefulDataLoader, or a map-style dataset."
            )
            return loader
        if sampler not in self._samplers:
            self._samplers.append(sampler)
        self._batch_size = batch_size_of(loader)
        if self._loaded is not None:
            self._go_on(sampler, self._loaded, len(self._samplers) - 1)
        return loader

    def _go_on(self, sampler: ResumableSampler, position: Position, index: int) -> None:
        """Sets a sampler to where the checkpoint's was, and the random numbers with it."""
        trainer = self._trainer
        assert trainer is not None and self._resumed_from is not None
        own = engine.read_rank_state(self._resumed_from, trainer.global_rank) or {}
        same = trainer.world_size == self._world_size_then
        now = own.get("random") if same else None
        if position.at_end:
            sampler.begin(position.epoch + 1, now)
            return
        # Lightning knows of loaders with a state only.
        warnings.filterwarnings("ignore", ".*ended before the epoch ended and your dataloader is not resumable.*")
        starts = own.get("epoch_starts", []) if same else []
        skip = position.samples_for(self._data_size)
        sampler.go_on(position.epoch, skip, starts[index] if index < len(starts) else None, now)

    @property
    def _data_size(self) -> int:
        assert self._trainer is not None
        strategy = self._trainer.strategy
        return strategy.layout.data_size if isinstance(strategy, HybridParallelStrategy) else self._trainer.world_size

    def _position(self, trainer: Trainer) -> Position:
        batches = _compat.batches_processed(trainer)
        of = trainer.num_training_batches
        accumulate = trainer.accumulate_grad_batches
        return Position(trainer.current_epoch, batches, of, self._batch_size, self._data_size, accumulate)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            checkpoint[POSITION] = {**vars(self._position(trainer)), "world_size": trainer.world_size}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = dict(checkpoint.get(POSITION) or {})
        self._loaded = None
        self._resumed_from = str(trainer.ckpt_path)
        if saved and engine.is_checkpoint(self._resumed_from) and trainer.state.fn == "fit":
            self._world_size_then = saved.pop("world_size")
            self._loaded = position = Position(**saved)
            own = engine.read_rank_state(self._resumed_from, trainer.global_rank) or {}
            if trainer.world_size == self._world_size_then:
                if own.get("loaders"):
                    _compat.set_loader_states(checkpoint, own["loaders"])
                self._random = own.get("random")
            elif self._loaders_were_saved and not position.at_end:
                raise ValueError(
                    f"The checkpoint has the positions of the loaders of {self._world_size_then} ranks, which can't be"
                    f" given to {trainer.world_size}: go on with {self._world_size_then} ranks, or from a checkpoint at"
                    " the end of an epoch, or use a DataLoader over a map-style dataset."
                )
            if position.data_size != self._data_size:
                if not position.at_end:
                    position.samples_for(self._data_size)  # refused here, before any data is read
                    _compat.set_batches_done(checkpoint, position.batches * position.data_size // self._data_size)
                self._keep_batch(trainer, position)

    @property
    def _loaders_were_saved(self) -> bool:
        """By rank 0, whose state every rank can read, also one that there was not then."""
        assert self._resumed_from is not None
        return bool((engine.read_rank_state(self._resumed_from, 0) or {}).get("loaders"))

    def _keep_batch(self, trainer: Trainer, position: Position) -> None:
        """With another number of data ranks a step keeps its samples, by more or fewer batches in a window."""
        wanted, changed = position.accumulate_for(self._data_size), f"{position.data_size} to {self._data_size}"
        if wanted is None:
            rank_zero_warn(
                f"The number of data ranks changes from {changed}: a step will have"
                f" {trainer.accumulate_grad_batches * self._data_size} batches instead of"
                f" {position.accumulate * position.data_size}; look at the learning rate."
            )
        elif wanted != trainer.accumulate_grad_batches:
            rank_zero_warn(
                f"The number of data ranks changes from {changed}: accumulate_grad_batches={wanted} instead of"
                f" {trainer.accumulate_grad_batches} keeps the samples of a step."
            )
            trainer.accumulate_grad_batches = wanted

    # --- saving ------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Where no sampler puts the random numbers back when it begins, they are put back before the first batch."""
        if self._random is not None and not self._samplers:
            engine.restore_random_state(self._random)
        self._random = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._more_follows = self._in_window(trainer) or _compat.validation_or_epoch_end_follows(trainer)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._in_window(trainer):
            return
        assert self._flags is not None
        publish("unprotected_minutes", self.unprotected_seconds / 60)
        told = self._flags.at_boundary(trainer.global_step)
        self._wanted |= bool(told & (Flag.SAVE | Flag.SIGNAL))
        self._leaving = bool(told & Flag.SIGNAL)
        if self._leaving and self._more_follows:  # in case there is no time for what follows
            self._save_newest(trainer)
        self._at_a_good_moment(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._more_follows = _compat.validation_or_epoch_end_follows(trainer, validation=False)
        super().on_validation_end(trainer, pl_module)
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._at_a_good_moment(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loaded, self._more_follows = None, False
        super().on_train_epoch_end(trainer, pl_module)
        self._at_a_good_moment(trainer)

    def _at_a_good_moment(self, trainer: Trainer) -> None:
        """Takes a checkpoint that was put off, where nothing follows that a run going on from it would leave out."""
        if self._more_follows:
            return
        if self._wanted:
            self._wanted = False
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer), again=self._leaving)
        if self._leaving:
            self._leave(trainer)

    def _in_window(self, trainer: Trainer) -> bool:
        """Whether gradients of some batches wait for those of others."""
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        return _compat.batches_processed(trainer) % trainer.accumulate_grad_batches != 0 and not is_last

    def _save_topk_checkpoint(
        self, trainer: Trainer, monitor_candidates: dict[str, Tensor], *, again: bool = False
    ) -> None:
        """Saves among the best where it belongs there, and else as the newest.

        In the middle of an accumulation window it waits for the window's end. Where validation or the end of the epoch
        follows on this batch it waits for that, which Lightning would leave out when it goes on.
        """
        if self._more_follows:
            self._wanted = True
            return
        if self.monitor is None or self.monitor in monitor_candidates:
            super()._save_topk_checkpoint(trainer, monitor_candidates)
        if self._last_global_step_saved != trainer.global_step or again:
            self._save_newest(trainer)

    def _save_newest(self, trainer: Trainer) -> None:
        candidates = self._monitor_candidates(trainer)
        self._save_checkpoint(trainer, self.format_checkpoint_name(candidates))

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        assert self._writer is not None
        state = {
            "random": engine.capture_random_state(),
            "epoch_starts": [sampler.start for sampler in self._samplers],
            "loaders": _compat.loader_states(trainer),
        }
        options = SaveOptions(rank_state=state, writer=self._writer)
        self.last_model_path = filepath
        for attempt in range(2):
            try:
                trainer.save_checkpoint(filepath, False, storage_options=options)
                if not self.async_save:
                    self._writer.wait()
                break
            except engine.CheckpointError as error:
                minutes = self.unprotected_seconds / 60
                rank_zero_warn(
                    f"Training goes on without a new checkpoint, unprotected for {minutes:.1f} minutes: {error}"
                )
                record_event(
                    trainer, "failure", what="no new checkpoint", error=str(error), unprotected_minutes=minutes
                )
                if attempt or not self.async_save:
                    return
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        keep = {self.best_model_path, *self.best_k_models} - {""}
        self._writer.retain(self._root, self.keep_last, keep=tuple(keep))

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """The newest is the last."""

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """What is no longer among the best goes when a newer checkpoint is safe, see ``retain``."""

    # --- signals -----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._choice is not None:
            record_event(trainer, "restore", checkpoint=self._choice, step=trainer.global_step)
            self._choice = None
        if self.on_signal == "requeue" and threading.current_thread() is threading.main_thread():
            _compat.take_over_signals(trainer)
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        """Only notes it: nothing may be waited for in a handler."""
        assert self._flags is not None
        self._flags.raise_flag(Flag.SIGNAL)

    def _leave(self, trainer: Trainer) -> NoReturn:
        step = trainer.global_step
        self._finish(together=True)
        rank_zero_info(f"A signal ended the run at step {step}; it goes on from {self.last_model_path}.")
        record_event(trainer, "signal", step=step, checkpoint=self.last_model_path)
        raise AgreedExit(REQUEUE)

    def _give_back_signals(self, trainer: Trainer) -> None:
        while self._handlers:
            number, handler = self._handlers.popitem()
            signal.signal(number, handler)
        _compat.give_back_signals(trainer)

    # --- end ---------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._give_back_signals(trainer)
        if self._flags is not None:
            self._flags.close()
        self._finish(together=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """What is being written is finished as far as this rank goes; the others may be gone."""
        self._give_back_signals(trainer)
        self._finish(together=False, patience=60.0)

    def _finish(self, *, together: bool, patience: float | None = None) -> None:
        if self._writer is None:
            return
        try:
            self._writer.close(together=together, patience=patience)
        except engine.CheckpointError as error:
            rank_zero_warn(f"The run ends unprotected for {self.unprotected_seconds / 60:.1f} minutes: {error}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.strategy.__dict__.pop("process_dataloader", None)
        if self._directories is not None and stage != "fit":
            self._directories.detach()
            self._directories = None
