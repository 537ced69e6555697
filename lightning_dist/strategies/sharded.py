"""``FairScaleShardedStrategy``: whole models on every rank, optimizer state and gradients in parts (ZeRO-2)."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from lightning_dist import _compat
from lightning_dist.parallel import agreement, data, gradients, loaders, optimizer_shards
from lightning_dist.parallel import batch as batches
from lightning_dist.parallel.adascale import STATE, AdaScale
from lightning_dist.parallel.loss_weights import LossWeights, UndefinedGradients
from lightning_dist.parallel.optimizer_shards import ShardedState
from lightning_dist.strategies.adascale_gain import AdaScaleGain
from lightning_dist.strategies.precision import HybridMixedPrecision

MANY_RANKS = 4
"""Above this number of ranks each one compares the order of its reductions with its neighbours' only."""


class FairScaleShardedStrategy(DDPStrategy):
    """Lightning 1.x's ``ddp_sharded``: FairScale's OSS and ShardedDataParallel, with the numbers of one device.

    For models of plain modules that fit in one device's memory while their optimizer state does not. The loss that a
    step returns is taken as a mean over its batch; losses and gradients are combined as
    ``sum(weight * loss) / sum(weight)`` over accumulated batches and ranks, where the weight of a batch is its number
    of samples, or what the module's ``loss_weight(batch)`` returns. docs/fairscale.md says when to use it.

    Ranks: all are data ranks. Each holds all parameters, after backward the gradients of its part, and the optimizer
    state of its part; a tensor belongs to one rank whole. Collectives for an optimizer step, whatever the accumulation
    window: a reduction of each gradient to its rank, a broadcast of each rank's parameters (one buffer for each rank),
    the module's buffers in each forward that synchronises, one scalar for clipping, and one for the weights where
    ranks may differ in them.

    Gradients are reduced by torch's DDP instead, and every rank holds them all, with manual optimization (FairScale
    reduces a parameter once a step) and where fairscale can't be imported; then torch's ``ZeroRedundancyOptimizer``
    shards the state, with a warning. One process shards nothing. Checkpoints are single files, those of
    ``strategy="ddp"``: either loads the other's, at any number of ranks.

    Args:
        reduce_buffer_size: 0, the only size with which FairScale reduces all gradients under Lightning; the argument
            is for settings that come from Lightning 1.x.
        process_group_backend: ``"nccl"``, ``"gloo"``, …; None fits the device.
        timeout: How long a collective may wait, in seconds or as a timedelta.

    Raises:
        ValueError: When the strategy is made: an argument does not fit. When training begins, on all ranks: what
            :func:`~lightning_dist.parallel.optimizer_shards.refuse_unsuited` lists.
    """

    def __init__(
        self,
        reduce_buffer_size: int = 0,
        process_group_backend: str | None = None,
        timeout: datetime.timedelta | float | None = None,
    ) -> None:
        if reduce_buffer_size != 0:
            raise ValueError(
                f"reduce_buffer_size={reduce_buffer_size} does not fit: FairScale's buffer is detached when gradients"
                " are zeroed to None, and they would go unreduced without a word; give 0."
            )
        if timeout is None:
            timeout = _compat.default_timeout()
        elif not isinstance(timeout, datetime.timedelta):
            timeout = datetime.timedelta(seconds=timeout)
        if timeout <= datetime.timedelta(0):
            raise ValueError(f"timeout={timeout} does not fit: give a positive timedelta or number of seconds.")
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._wait = timeout
        self._control_group: dist.ProcessGroup | None = None
        self._crash_watch: agreement.CrashWatch | None = None
        self._fairscale: ModuleType | None = None
        self._undefined: UndefinedGradients | None = None
        self._reduced_by_ddp: set[int] = set()
        self._equal_batches = True
        self._loss_weights: LossWeights | None = None
        self._loss_factor: Tensor | float = 1.0

    # --- environment -------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.world_size > 1

    def setup_distributed(self) -> None:
        super().setup_distributed()
        if self.world_size > 1 and self._control_group is None:
            self._control_group = dist.new_group(backend="gloo", timeout=self._wait)
        if self.world_size > 1 and self._crash_watch is None:
            self._crash_watch = agreement.CrashWatch(_compat.default_store(), self.global_rank, self.world_size)

    @property
    def precision_plugin(self) -> Precision:
        if self._precision_plugin is None:
            self._precision_plugin = Precision()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # An overflow is seen by the rank that holds the gradient only, and torch's scaler would skip the step there,
        # while the others wait for its parameters. The plugin's scaler has torch's settings and state, and agrees.
        if type(plugin) is MixedPrecision:
            plugin = HybridMixedPrecision.from_lightning(plugin)
        self._precision_plugin = plugin

    # --- model and optimizers ----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Moves the module, makes ranks equal, and, to fit, shards its optimizers and wraps it."""
        assert self.accelerator is not None and self.lightning_module is not None and self.model is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        data.equalise_weights(self.model)
        self._connect(self.lightning_module)
        if fitting:
            self.setup_optimizers(trainer)
            optimizer_shards.move_state(self.optimizers, self.root_device)
            if self.world_size > 1:
                self._shard(self.lightning_module)
            if any(isinstance(optimizer, AdaScale) for optimizer in self.optimizers) and not any(
                isinstance(callback, AdaScaleGain)
                for callback in trainer.callbacks  # type: ignore[attr-defined]
            ):
                trainer.callbacks.append(AdaScaleGain())  # type: ignore[attr-defined]
        self.setup_precision_plugin()

    def _connect(self, module: LightningModule) -> None:
        plugin = self.precision_plugin
        plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        plugin.clip_grad_by_value = self._clip_grad_by_value  # type: ignore[method-assign]
        if callable(getattr(module, "loss_weight", None)) and self._undefined is None:
            self._undefined = UndefinedGradients(module)

    def _shard(self, module: LightningModule) -> None:
        """Shards what ``configure_optimizers`` gave, and wraps the module with what reduces gradients to match."""
        self._fairscale = self._import_fairscale()
        given = list(self.optimizers)
        plain = [optimizer.optimizer if isinstance(optimizer, AdaScale) else optimizer for optimizer in given]
        optimizer_shards.refuse_unsuited(module, plain)
        if self._fairscale is not None:
            shard: type[Any] = self._fairscale.ShardedOptimizer
        else:
            from lightning_dist.parallel.zero_redundancy import ZeroRedundancy as shard
        sharded: list[Any] = [shard(optimizer) for optimizer in plain]
        sharded_gradients = self._fairscale is not None and module.automatic_optimization
        for optimizer, inner in zip(given, sharded, strict=True):
            if isinstance(optimizer, AdaScale):
                optimizer.optimizer = inner
                optimizer.gradients_sharded = sharded_gradients
        self.optimizers = [
            optimizer if isinstance(optimizer, AdaScale) else inner
            for optimizer, inner in zip(given, sharded, strict=True)
        ]
        replaced = {id(optimizer): inner for optimizer, inner in zip(plain, sharded, strict=True)}
        self._point_schedulers([config.scheduler for config in self.lr_scheduler_configs], replaced)
        if sharded_gradients:
            assert self._fairscale is not None
            self.model = self._fairscale.ShardedModule(module, sharded, self._agree_on_reduction)
        else:
            # As under FairScale, a parameter may go without a gradient (it is frozen, or the other optimizer's).
            self._ddp_kwargs = {"find_unused_parameters": True}
            self.configure_ddp()
            self._reduced_by_ddp = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}

    def _import_fairscale(self) -> ModuleType | None:
        """FairScale's adapter, or None on all ranks if it can't be imported on one of them."""
        reason = ""
        try:
            from lightning_dist.parallel import fairscale_adapter
        except Exception as error:  # An old package on a new torch can fail in any way.
            reason = f"{type(error).__name__}: {error}"
        if self.reduce_boolean_decision(not reason):
            return fairscale_adapter
        rank_zero_warn(
            f"fairscale can't be imported ({reason or 'on another rank'}), so FairScaleShardedStrategy uses torch's"
            " ZeroRedundancyOptimizer with DDP: the optimizer state is sharded, gradients are not."
        )
        return None

    def _point_schedulers(self, schedulers: Iterable[Any], replaced: Mapping[int, Optimizer]) -> None:
        """Lets schedulers, and those inside them, act on the optimizers that step now."""
        for scheduler in schedulers:
            if id(scheduler.optimizer) in replaced:
                scheduler.optimizer = replaced[id(scheduler.optimizer)]
            inside = pytree.tree_leaves([value for name, value in vars(scheduler).items() if name != "optimizer"])
            self._point_schedulers([leaf for leaf in inside if isinstance(leaf, LRScheduler)], replaced)

    def _agree_on_reduction(self, number: int, name: str) -> None:
        rank, size = self.global_rank, self.world_size
        peers = list(range(size)) if size <= MANY_RANKS else sorted({(rank - 1) % size, rank, (rank + 1) % size})
        topic = f"lightning_dist/next gradient to reduce#{number}"
        agreement.agree(_compat.default_store(), topic, name, rank, peers, 0.8 * self._wait.total_seconds())

    # --- data --------------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """In training, ranks with unequal numbers of batches end together, with the shortest."""
        assert self.lightning_module is not None
        if self._control_group is None or not self.lightning_module.trainer.training:
            return dataloader
        sampler = loaders.distributed_sampler(dataloader)
        equal = sampler is not None and sampler.num_replicas == self.world_size
        self._equal_batches &= equal
        if equal:
            return dataloader
        lengths = loaders.exchange_lengths(loaders.sized(dataloader), self._control_group)  # type: ignore[arg-type]
        if lengths is not None and len(set(lengths)) == 1:
            return dataloader
        return loaders.TogetherLoader(dataloader, self._control_group, True, lengths)

    # --- step --------------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        weighted = callable(getattr(self.lightning_module, "loss_weight", None))
        group = dist.group.WORLD if self.world_size > 1 else None
        self._loss_weights = LossWeights(group, self._equal_batches and not weighted)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step through the wrapper; its loss will count with the weight of its batch."""
        assert self.lightning_module is not None and self._loss_weights is not None
        batch = args[0] if args else next(iter(kwargs.values()))
        self._loss_factor = self._loss_weights.add(self._weight_of(batch), self.root_device)
        if not self.lightning_module.automatic_optimization:
            self._loss_factor = self._loss_factor * self._loss_weights.gradient_factor(1)
            self._loss_weights.begin()
        self._wake_wrapper()
        self._refuse_unreduced()
        output = super().training_step(*args, **kwargs)
        if output is None and self.lightning_module.automatic_optimization:
            self._loss_weights.truncate(self._loss_weights.batches - 1)
        return output

    def _wake_wrapper(self) -> None:
        """Sets the wrapper's own flag, no module's: Lightning leaves it in evaluation mode after any validation, the
        sanity check too, and FairScale's then takes its hooks off and reduces nothing."""
        if self._shards_gradients:
            assert self.model is not None
            self.model.training = True

    def _refuse_unreduced(self) -> None:
        """DDP reduces the parameters that were trainable when it was made, and says nothing of others."""
        if not isinstance(self.model, nn.parallel.DistributedDataParallel):
            return
        assert self.lightning_module is not None
        late = [
            name
            for name, parameter in self.lightning_module.named_parameters()
            if parameter.requires_grad and id(parameter) not in self._reduced_by_ddp
        ]
        if late:
            raise RuntimeError(
                f"{', '.join(late)} began to train after DDP was set up, which would not reduce their gradients; let"
                " them require gradients when fit begins and freeze them from on_train_start on."
            )

    def _weight_of(self, batch: Any) -> Tensor | float:
        loss_weight = getattr(self.lightning_module, "loss_weight", None)
        if not callable(loss_weight):
            return batches.sample_count(batch)
        assert self._undefined is not None
        weight = torch.as_tensor(loss_weight(batch), device=self.root_device)
        self._undefined.counts = weight > 0
        return weight

    @property
    def _shards_gradients(self) -> bool:
        return self._fairscale is not None and isinstance(self.model, self._fairscale.ShardedModule)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        factor = self._loss_factor
        if isinstance(factor, Tensor):
            closure_loss = closure_loss * factor.to(closure_loss.dtype)
        elif factor != 1.0:
            closure_loss = closure_loss * factor
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._shards_gradients:
            model: Any = self.model
            if not model.accumulating:
                model.check_reduced()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keeps gradients on this rank while batches are accumulated; the last batch's backward reduces the sum."""
        if self._shards_gradients:
            with self.model.no_sync():  # type: ignore[union-attr, operator]
                yield
        else:
            with super().block_backward_sync():
                yield

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Steps, after the gradients of the window have been given their exact weights."""
        assert self.lightning_module is not None and self._loss_weights is not None
        if not self.lightning_module.automatic_optimization:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        weighted = partial(self._weighted_closure, closure, optimizer, self._loss_weights.batches)
        result = super().optimizer_step(optimizer, weighted, model, **kwargs)
        self._loss_weights.begin()
        return result

    def _weighted_closure(self, closure: Callable[[], Any], optimizer: Optimizer, batches_before: int) -> Any:
        assert self.lightning_module is not None and self._loss_weights is not None
        self._loss_weights.truncate(batches_before)
        result = closure()
        factor = self._loss_weights.gradient_factor(self.lightning_module.trainer.accumulate_grad_batches)
        if isinstance(factor, Tensor) or factor != 1.0:
            gradients.scale_gradients_(_parameters(optimizer), factor)
        return result

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        # Not OSS.clip_grad_norm: its norm is in float32, of the parameters that it saw first, and ranks of which one
        # has no gradient reduce different types.
        holders = 1 if self._shards_gradients else self.world_size
        gradients.clip_grad_norm_(_parameters(optimizer), clip_val, holders=holders)

    def _clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        gradients.clip_grad_value_(_parameters(optimizer), clip_val)

    # --- evaluation, on the module without its wrapper ---------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Gives every rank the first one's buffers (batch statistics), as each training step begins with."""
        assert self.lightning_module is not None
        if self.world_size > 1:
            _equalise_buffers(self.lightning_module)

    on_test_start = on_predict_start = on_validation_start

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision_plugin.test_step_context():
            return self.lightning_module.test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision_plugin.predict_step_context():
            return self.lightning_module.predict_step(*args, **kwargs)

    # --- collectives -------------------------------------------------------------------------------------------------

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._control_group is None:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src, group=self._control_group)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over all ranks; Lightning's own would issue a barrier beside."""
        if not isinstance(tensor, Tensor) or self.world_size == 1:
            return tensor
        mean = reduce_op is None or reduce_op == dist.ReduceOp.AVG or str(reduce_op).lower() in ("mean", "avg")
        if isinstance(reduce_op, str) and not mean:
            reduce_op = getattr(dist.ReduceOp, reduce_op.upper())
        tensor = tensor.detach().to(self.root_device, copy=True)
        if mean and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM if mean else reduce_op, group=group)
        return tensor / dist.get_world_size(group) if mean else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if all ranks (or any) say so; over the CPU group."""
        if self._control_group is None:
            return decision
        votes = torch.tensor([int(decision)])
        dist.all_reduce(votes, group=self._control_group)
        return bool(votes == self.world_size) if all else bool(votes)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Yes: before it the module has not yet its type, and float64 weights would be rounded on the way in."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state; on the first rank, which writes it, each tensor in memory of its own, not in a buffer."""
        state = super().lightning_module_state_dict()
        return _out_of_buffers(state) if self.is_global_zero and self._fairscale is not None else state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The plain optimizer's whole state on the first rank, to which the others send theirs in turn; {} on those."""
        inner: Any = getattr(optimizer, "_optimizer", optimizer)  # Out of Lightning's wrapper.
        estimates = {}
        if isinstance(inner, AdaScale):
            inner, estimates = inner.optimizer, {STATE: inner.estimates()}
        if self._control_group is None or not isinstance(inner, ShardedState):
            return {**inner.state_dict(), **estimates}
        state = optimizer_shards.gather_state(inner, self._control_group)
        return {**state, **estimates} if self.is_global_zero else {}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads the file on the first rank, which keeps the optimizers' state until each rank is sent its part of it.

        All ranks must call it, and all raise if the file can't be read.
        """
        if self._control_group is None:
            return super().load_checkpoint(checkpoint_path, weights_only)
        checkpoint, shared, error = {}, {}, None
        if self.is_global_zero:
            try:
                checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
            except Exception as failure:
                error = failure
            shared = dict(checkpoint)
            if "optimizer_states" in shared:
                shared["optimizer_states"] = [None] * len(shared["optimizer_states"])
        shared, reason = self.broadcast((shared, error and f"{type(error).__name__}: {error}"))
        if reason is not None:
            raise RuntimeError(f"Rank 0 could not read {checkpoint_path}: {reason}") from error
        return checkpoint if self.is_global_zero else shared

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the state of plain or of sharded optimizers, of any number of ranks."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            inner = optimizer
            if isinstance(optimizer, AdaScale):
                inner = optimizer.optimizer
                optimizer.load_estimates(self.broadcast(state.get(STATE) if state is not None else None))
            plain = {key: value for key, value in state.items() if key != STATE} if state is not None else None
            if self._control_group is not None and isinstance(inner, ShardedState):
                optimizer_shards.scatter_state(inner, plain, self._control_group)
            else:
                assert plain is not None
                inner.load_state_dict(plain)
        optimizer_shards.move_state(self.optimizers, self.root_device)

    # --- end ---------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks why this one stops, or says which rank's failure it was that reached this one."""
        super().on_exception(exception)
        if self._crash_watch is not None:
            self._crash_watch.on_failure(exception)

    def teardown(self) -> None:
        if self._shards_gradients:
            self.model.detach()  # type: ignore[union-attr, operator]
            self.model = self.lightning_module
        optimizer_shards.move_state(self.optimizers, torch.device("cpu"))
        if self._crash_watch is not None:
            self._crash_watch.stop()
            self._crash_watch = None
        super().teardown()


def _equalise_buffers(module: nn.Module) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in module.buffers():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        _compat.broadcast_flattened(buffers, None, 0)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _out_of_buffers(state: dict[str, Any]) -> dict[str, Any]:
    """Copies tensors that are views of larger memory, which would be saved whole; tied ones stay one."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    apart = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            place = (value.data_ptr(), value.shape, value.stride())
            value = copies.setdefault(place, value) if place in copies else copies.setdefault(place, value.clone())
        apart[name] = value
    return apart
