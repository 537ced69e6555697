"""``LocalUpdateStrategy``: workers train alone on their own data and exchange only what their weights changed by."""

from __future__ import annotations

import datetime
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_dist import _compat
from lightning_dist.parallel import agreement, data, gradients, loaders
from lightning_dist.parallel import batch as batches
from lightning_dist.parallel import local_updates as library
from lightning_dist.parallel.loss_weights import LossWeights, UndefinedGradients
from lightning_dist.strategies.hybrid_arguments import as_timedelta
from lightning_dist.strategies.local_update_arguments import check_arguments
from lightning_dist.strategies.worker_metrics import LocalLog, WorkerMetrics

STATE = "local_updates"
WORKER = "local_updates_worker"


class LocalUpdateStrategy(DDPStrategy):
    """Workers train alone for ``inner_steps`` optimizer steps and exchange only model updates.

    Local SGD, FedAvg, FedOpt, DiLoCo and SlowMo are settings of ``outer``. One process is one worker, with the whole
    model. A round ends after ``inner_steps`` steps and, however short, with the epoch and with the run; validation
    and checkpoints in between see the weights of the last round that ended. A worker whose loader is shorter waits, its
    samples counting for what they are; a worker's optimizer keeps its state from round to round.

    Batches, activations, gradients and optimizer states never leave their worker. Collectives of a round, over all
    workers: an all-gather of two numbers over a CPU group, and those of
    :class:`~lightning_dist.parallel.local_updates.UpdateExchange`; in each epoch one all-gather of the loaders'
    lengths, and of logged numbers. docs/local_updates.md says when to use it, and what it does not protect from.

    Args:
        inner_steps: Optimizer steps of a round.
        outer: ``"average"``, ``"nesterov"`` (DiLoCo), or a function that makes a torch optimizer of the weights.
        weight_by: How much a worker counts: ``"samples"`` it trained on in the round (or what its module's
            ``loss_weight(batch)`` adds up to), or ``"equal"``.
        compression: ``"none"``, ``"bf16"`` or ``"int8"``; what is lost is sent with the next update.
        clip_update: The largest norm that an update may have; longer ones are scaled down.
        noise_multiplier: Gaussian noise on the sum of the updates, in multiples of ``clip_update``; each worker
            adds its share before it sends.
        participation: The share of workers drawn for each round, or ``function(round, worker) -> bool``. A worker that
            does not take part passes over its batches and goes on from the common weights.
        process_group_backend: ``"nccl"``, ``"gloo"``, …; None fits the device.
        timeout: How long a worker may wait for the others, in seconds or as a timedelta.

    Raises:
        ValueError: When the strategy is made: an argument does not fit. When training begins, on all workers: manual
            optimization, ``sync_batchnorm``, a worker without a batch, noise with batch statistics.
    """

    def __init__(
        self,
        inner_steps: int = 1,
        outer: Literal["average", "nesterov"] | library.OuterFactory = "average",
        weight_by: Literal["samples", "equal"] = "samples",
        compression: library.Compression = "none",
        clip_update: float | None = None,
        noise_multiplier: float | None = None,
        participation: library.Participation = 1.0,
        process_group_backend: str | None = None,
        timeout: datetime.timedelta | float | None = None,
    ) -> None:
        check_arguments(inner_steps, weight_by, compression, clip_update, noise_multiplier, participation)
        self._outer = library.make_outer(outer)
        self._wait = as_timedelta(timeout)
        super().__init__(process_group_backend=process_group_backend, timeout=self._wait)
        self.inner_steps = inner_steps
        self._weight_by = weight_by
        self._compression = compression
        self._clip_update = clip_update
        self._noise_multiplier = noise_multiplier
        self._participation = participation
        self._noise = torch.Generator().manual_seed(secrets.randbits(63))
        self._control_group: dist.ProcessGroup | None = None
        self._crash_watch: agreement.CrashWatch | None = None
        self._common: library.CommonWeights | None = None
        self._exchange = library.UpdateExchange(None)
        self._undefined: UndefinedGradients | None = None
        self._loss_weights = LossWeights(None, True)
        self._loss_factor: Tensor | float = 1.0
        self._loader: library.PaddedLoader | None = None
        self._epoch = 0
        self._place = 0
        self._seed = 0
        self._takes_part = True
        self._samples: Tensor | float = 0.0
        self.rounds = 0
        """Rounds that have ended."""
        self.steps_in_round = 0
        """Optimizer steps since then."""

    # --- environment -------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one worker."""
        return self.world_size > 1

    def setup_distributed(self) -> None:
        super().setup_distributed()
        if self.world_size > 1 and self._control_group is None:
            self._control_group = dist.new_group(backend="gloo", timeout=self._wait)
        if self.world_size > 1 and self._crash_watch is None:
            self._crash_watch = agreement.CrashWatch(_compat.default_store(), self.global_rank, self.world_size)

    # --- model -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Moves the module, makes workers equal, and, to fit, makes their optimizers and the outer one."""
        assert self.accelerator is not None and self.lightning_module is not None and self.model is not None
        module = self.lightning_module
        self._refuse_unsuited(module)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        data.equalise_weights(self.model)
        if callable(getattr(module, "loss_weight", None)) and self._undefined is None:
            self._undefined = UndefinedGradients(module)
        if self.world_size > 1:
            self._connect(trainer, module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._begin(module)
        self.setup_precision_plugin()

    def _refuse_unsuited(self, module: LightningModule) -> None:
        if self._layer_sync is not None:
            raise ValueError("sync_batchnorm=True exchanges activations at every step; use it with another strategy.")
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} uses manual optimization, where the steps of a round can't be counted on"
                " workers that have no batch left; LocalUpdateStrategy needs automatic optimization."
            )
        if self._noise_multiplier and any(_has_statistics(part) for part in module.modules()):
            raise ValueError(
                f"noise_multiplier={self._noise_multiplier} does not fit a module with batch statistics, which would"
                " leave the worker as they are; use GroupNorm or LayerNorm."
            )

    def _connect(self, trainer: Trainer, module: LightningModule) -> None:
        module.log = LocalLog(module, rank_zero_warn)  # type: ignore[assignment, method-assign]
        for metric in module.modules():
            if isinstance(metric, Metric) and any(isinstance(value, list) for value in metric.metric_state.values()):
                # Its state is a list of what it saw of each sample.
                metric.distributed_available_fn = _never
                rank_zero_warn(f"{type(metric).__name__} keeps samples, so each worker computes it of its own alone.")
        if self.worker_metrics_callback(trainer) is None:
            trainer.callbacks.insert(0, WorkerMetrics(self))  # type: ignore[attr-defined]

    @staticmethod
    def worker_metrics_callback(trainer: Trainer) -> WorkerMetrics | None:
        """The callback that knows what each worker logged (``.values``); None with one worker."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        return next((callback for callback in callbacks if isinstance(callback, WorkerMetrics)), None)

    def _begin(self, module: LightningModule) -> None:
        group = dist.group.WORLD if self.world_size > 1 else None
        buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        if self._noise_multiplier:
            buffers = []  # What they hold would leave without noise.
        self._common = library.CommonWeights(list(module.parameters()), buffers, self._outer)
        self._exchange = library.UpdateExchange(group, self._compression)
        self._loss_weights = LossWeights(None, module_weighs(module) is None)
        self.rounds = self.steps_in_round = 0
        self._samples = 0.0
        if self.world_size > 1:  # From here on workers draw different random numbers (dropout).
            self._seed = self.broadcast(torch.initial_seed())
            torch.manual_seed((self._seed + self.global_rank) % 2**63)

    # --- data --------------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """In training, workers with fewer batches wait for the others at the end of the epoch."""
        assert self.lightning_module is not None
        if self._control_group is None:
            return dataloader
        sampler = loaders.distributed_sampler(dataloader)
        if not self.lightning_module.trainer.training:
            if sampler is not None and sampler.num_replicas == self.world_size:
                loaders.without_repeats(sampler)
            return dataloader
        if sampler is not None:
            sizes = self.gather_objects(len(sampler.dataset))  # type: ignore[arg-type]
            if len(set(sizes)) > 1:
                raise ValueError(
                    f"Workers have data sets of {', '.join(map(str, sizes))} samples, and Lightning's sampler would let"
                    f" each train on 1/{self.world_size} of its own; give Trainer(use_distributed_sampler=False)."
                )
        lengths = loaders.exchange_lengths(loaders.sized(dataloader), self._control_group)  # type: ignore[arg-type]
        if lengths is not None and min(lengths) == 0:
            without = [worker for worker, length in enumerate(lengths) if length == 0]
            raise ValueError(f"Workers {without} have no batch; give each at least one, or leave them out of the run.")
        if lengths is not None and len(set(lengths)) == 1:
            return dataloader
        self._loader = library.PaddedLoader(dataloader, self._control_group, lengths)
        return self._loader

    def _next_is_padding(self) -> bool:
        if self._loader is None:
            return False
        if self._loader.iterations != self._epoch:
            self._epoch, self._place = self._loader.iterations, 0
        return self._loader.is_padding(self._place)

    # --- step --------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step, but not on a repeated batch or in a round that this worker takes no part in."""
        assert self.lightning_module is not None
        if self.steps_in_round == 0 and not self._loss_weights.batches:
            self._takes_part = library.takes_part(
                self._participation, self.rounds, self.global_rank, self.world_size, self._seed
            )
        padding = self._next_is_padding()
        self._place += 1
        if padding or not self._takes_part:
            # Lightning refuses None with more than one rank. No parameter is reached, so no gradient is made.
            return torch.zeros((), device=self.root_device, requires_grad=True)
        batch = args[0] if args else next(iter(kwargs.values()))
        weight = self._weight_of(batch)
        self._loss_factor = self._loss_weights.add(weight, self.root_device)
        output = super().training_step(*args, **kwargs)
        if output is None:
            self._loss_weights.truncate(self._loss_weights.batches - 1)
        else:
            self._samples = self._samples + weight
        return output

    def _weight_of(self, batch: Any) -> Tensor | float:
        loss_weight = module_weighs(self.lightning_module)
        if loss_weight is None:
            return batches.sample_count(batch)
        assert self._undefined is not None
        weight = torch.as_tensor(loss_weight(batch), device=self.root_device)
        self._undefined.counts = weight > 0
        return weight

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        factor = self._loss_factor
        if isinstance(factor, Tensor):
            closure_loss = closure_loss * factor.to(closure_loss.dtype)
        elif factor != 1.0:
            closure_loss = closure_loss * factor
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Steps alone; the last step of a round exchanges updates and begins the next round."""
        assert self.lightning_module is not None
        before = self._loss_weights.batches
        samples = self._samples
        if not before and (self._next_is_padding() or not self._will_take_part()):
            result = closure()  # Without a batch there is nothing to step by: momentum and decay must not act.
        else:
            weighted = partial(self._weighted_closure, closure, optimizer, before, samples)
            result = super().optimizer_step(optimizer, weighted, model, **kwargs)
        self._loss_weights.begin()
        self.steps_in_round += 1
        if self.steps_in_round >= self.inner_steps or self._is_last_step(self.lightning_module.trainer):
            self._end_round()
        return result

    def _will_take_part(self) -> bool:
        if self.steps_in_round:
            return self._takes_part
        return library.takes_part(self._participation, self.rounds, self.global_rank, self.world_size, self._seed)

    def _weighted_closure(
        self, closure: Callable[[], Any], optimizer: Optimizer, before: int, samples: Tensor | float
    ) -> Any:
        assert self.lightning_module is not None
        self._loss_weights.truncate(before)
        self._samples = samples
        result = closure()
        factor = self._loss_weights.gradient_factor(self.lightning_module.trainer.accumulate_grad_batches)
        if isinstance(factor, Tensor) or factor != 1.0:
            gradients.scale_gradients_([p for group in optimizer.param_groups for p in group["params"]], factor)
        return result

    @staticmethod
    def _is_last_step(trainer: Trainer) -> bool:
        """Whether the epoch or the run ends with this step."""
        last_batch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        return last_batch or (trainer.max_steps != -1 and trainer.global_step + 1 >= trainer.max_steps)

    def on_train_end(self) -> None:
        """Ends a round that a callback cut short."""
        if self.steps_in_round:
            self._end_round()

    def _end_round(self) -> None:
        assert self._common is not None
        samples = float(self._samples)
        mine = samples if self._weight_by == "samples" else float(samples > 0)
        weights = self._gather_number(mine)
        if any(weights):
            update = self._common.update()
            if self._clip_update is not None:
                update = library.clip_update(update, self._clip_update)
            if self._noise_multiplier and mine:
                assert self._clip_update is not None
                share = self._noise_multiplier * self._clip_update / sum(map(bool, weights)) ** 0.5
                update = library.add_noise(update, share, self._noise)
            self._common.step(self._exchange.mean(update, weights))
        else:
            self._common.restart()
        self.rounds += 1
        self.steps_in_round = 0
        self._samples = 0.0

    def _gather_number(self, mine: float) -> list[float]:
        if self._control_group is None:
            return [mine]
        everyone = [torch.empty(1, dtype=torch.float64) for _ in range(self.world_size)]
        dist.all_gather(everyone, torch.tensor([mine], dtype=torch.float64), group=self._control_group)
        return [float(number) for number in everyone]

    # --- evaluation on the common weights ----------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        if self._common is not None and self.steps_in_round:
            self._common.swap()

    def on_validation_end(self) -> None:
        if self._common is not None and self._common.swapped:
            self._common.swap()

    # --- collectives -------------------------------------------------------------------------------------------------

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._control_group is None:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src, group=self._control_group)
        return box[0]

    def gather_objects(self, obj: Any) -> list[Any]:
        """One object of each worker, in the order of ranks, on every worker; over the CPU group."""
        if self._control_group is None:
            return [obj]
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, obj, group=self._control_group)
        return everyone

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over all workers; Lightning's own rounds the mean of whole numbers, as samples are."""
        mean = reduce_op is None or reduce_op == dist.ReduceOp.AVG or str(reduce_op).lower() in ("mean", "avg")
        if isinstance(tensor, Tensor) and mean and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        return super().reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if all workers (or any) say so; over the CPU group."""
        votes = self.gather_objects(bool(decision))
        return sum(votes) == len(votes) if all else any(votes)

    # --- checkpoints: one file with the common weights, and one of each worker ---------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state with the weights of the last round that ended."""
        assert self.lightning_module is not None
        if self._common is None or not self.steps_in_round or self._common.swapped:
            return self.lightning_module.state_dict()
        self._common.swap()
        try:
            state = self.lightning_module.state_dict()
            return {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in state.items()}
        finally:
            self._common.swap()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes Lightning's file with the common weights, and beside it ``FILE.worker-N`` by each worker.

        All workers must call it. Nothing of a worker's own is sent.
        """
        if self._common is None or "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        assert self.lightning_module is not None
        stamp = self.broadcast(secrets.token_hex(8))
        swapped = self._common.swapped
        if swapped:
            self._common.swap()
        worker = {
            "stamp": stamp,
            "weights": self.lightning_module.state_dict(),
            "optimizer_states": checkpoint["optimizer_states"],
            "exchange": self._exchange.state_dict(),
            "samples": float(self._samples),
            "takes_part": self._takes_part,
        }
        self.checkpoint_io.save_checkpoint(worker, _worker_file(filepath, self.global_rank))
        state = {"stamp": stamp, "rounds": self.rounds, "steps": self.steps_in_round, "seed": self._seed}
        whole = {**checkpoint, STATE: {**state, "common": self._common.state_dict()}}
        super().save_checkpoint(whole, filepath, storage_options)
        if swapped:
            self._common.swap()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The first worker reads the file and sends it to all but its optimizers' state; each reads its own beside it.

        All workers must call it, and all raise if the file, or a worker's, can't be read.
        """
        checkpoint: dict[str, Any] = {}
        reason = None
        if self.is_global_zero:
            try:
                checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
                if STATE in checkpoint and self.world_size > 1:
                    checkpoint["optimizer_states"] = []
            except Exception as failure:
                reason = f"Rank 0 could not read {checkpoint_path}: {type(failure).__name__}: {failure}"
        checkpoint, reason = self.broadcast((checkpoint, reason))
        if reason is None and STATE in checkpoint:
            worker, reason = self._load_worker(checkpoint_path, checkpoint[STATE]["stamp"])
            checkpoint[WORKER] = worker
            reason = next(filter(None, self.gather_objects(reason)), None)
        if reason is not None:
            raise RuntimeError(reason)
        return checkpoint

    def _load_worker(self, path: Any, stamp: str) -> tuple[dict[str, Any] | None, str | None]:
        file = _worker_file(path, self.global_rank)
        if not get_filesystem(file).exists(file):
            return None, None
        try:
            worker = self.checkpoint_io.load_checkpoint(file, weights_only=True)
        except Exception as failure:
            return None, f"Rank {self.global_rank} could not read {file}: {type(failure).__name__}: {failure}"
        if worker["stamp"] != stamp:
            return None, f"{file} was not saved with {path}: they are of different checkpoints."
        return worker, None

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the common weights; to go on with a run also where the round stood."""
        super().load_model_state_dict(checkpoint, strict)
        if self._common is None:
            return
        state, worker = checkpoint.get(STATE), checkpoint.get(WORKER)
        if state is None:
            self._common.agree()
            return
        self._common.load_state_dict(state["common"])
        self.rounds, self.steps_in_round, self._seed = state["rounds"], state["steps"], state["seed"]
        if worker is None:
            self._takes_part = False if self.steps_in_round else self._takes_part
            return
        self._exchange.load_state_dict(worker["exchange"])
        self._samples, self._takes_part = worker["samples"], worker["takes_part"]
        super().load_model_state_dict({"state_dict": worker["weights"]}, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this worker's optimizer; one that was not there when the checkpoint was saved begins afresh."""
        states = checkpoint.get("optimizer_states")
        if STATE in checkpoint:
            worker = checkpoint[WORKER]
            states = worker["optimizer_states"] if worker is not None else []
            if worker is None:
                message = f"Worker {self.global_rank} has no file beside the checkpoint: its optimizer begins afresh."
                _warn(message)
        if states:
            super().load_optimizer_state_dict({"optimizer_states": states})

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        file = _worker_file(filepath, self.global_rank)
        if get_filesystem(file).exists(file):
            self.checkpoint_io.remove_checkpoint(file)

    # --- end ---------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other workers why this one stops, or says which one's failure it was that reached this one."""
        super().on_exception(exception)
        if self._crash_watch is not None:
            self._crash_watch.on_failure(exception)

    def teardown(self) -> None:
        self.on_validation_end()
        self._common = self._loader = None
        self.steps_in_round = self._epoch = 0
        if self._crash_watch is not None:
            self._crash_watch.stop()
            self._crash_watch = None
        super().teardown()


def module_weighs(module: LightningModule | None) -> Callable[[Any], Any] | None:
    """The module's ``loss_weight`` if it is a method."""
    loss_weight = getattr(module, "loss_weight", None)
    return loss_weight if callable(loss_weight) else None


def _worker_file(path: Any, rank: int) -> str:
    return f"{os.fspath(path)}.worker-{rank}"


def _has_statistics(part: nn.Module) -> bool:
    return getattr(part, "running_mean", None) is not None


def _never() -> bool:
    return False


def _warn(message: str) -> None:
    import warnings

    warnings.warn(message, stacklevel=3)
