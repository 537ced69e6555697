"""``HybridParallelStrategy``: any mix of data, tensor, pipeline, context and expert parallelism for one module."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_dist import _compat
from lightning_dist.advisor import Advice
from lightning_dist.layout import ParallelLayout
from lightning_dist.parallel import agreement, data, gradients, loaders
from lightning_dist.parallel import batch as batches
from lightning_dist.parallel.activation import ActivationCheckpointing
from lightning_dist.parallel.apply import ParallelModule, ParallelSettings
from lightning_dist.parallel.expert import update_expert_biases
from lightning_dist.parallel.loss_weights import LossWeights, UndefinedGradients
from lightning_dist.parallel.path_check import PathCheck
from lightning_dist.parallel.pipeline import AttachedPipeline, PipelineRunner, RandomStreams
from lightning_dist.parallel.pipeline.placement import find_schedule
from lightning_dist.parallel.pipeline.timings import Action
from lightning_dist.parallel.pipeline.trace import Tracer
from lightning_dist.parallel.tensor import sharded_loss, sum_replicated_gradients
from lightning_dist.plan import ModelPlan
from lightning_dist.strategies import auto_layout, module_checkpoint
from lightning_dist.strategies.context_steps import ContextSteps
from lightning_dist.strategies.evaluation import Evaluation, uncounted
from lightning_dist.strategies.hybrid_arguments import AUTO, as_timedelta, check_arguments, choose_layout
from lightning_dist.strategies.logged_values import EpochAgreement, LogCheck
from lightning_dist.strategies.parallel_setup import make_parallel
from lightning_dist.strategies.pipeline_steps import PipelineSteps
from lightning_dist.strategies.precision import HybridMixedPrecision
from lightning_dist.strategies.process_groups import ProcessGroups, make_process_groups

EVALUATIONS = {"validation_step": "val", "test_step": "test", "predict_step": "predict"}
"""Steps without backward, and what Lightning's precision plugins call them."""

BatchCheck = Literal["first", "always", "broadcast", "off"]

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
DATA_AXES = ("replicate", "shard")
FIRST_BATCHES = 3
"""How many batches ``batch_check="first"`` compares."""

STATE_NAME = "_lightning_dist"
"""The one attribute that a module carries from a strategy: its :class:`ParallelModule`."""


class HybridParallelStrategy(ParallelStrategy):
    """Trains an unchanged LightningModule over a mesh of ranks, with the numbers of one device.

    The loss that a step returns is taken as a mean over its batch. Losses and gradients are combined as
    ``sum(weight * loss) / sum(weight)`` over accumulated batches and data ranks; the weight of a batch is its number of
    samples, or what the module's ``loss_weight(batch)`` returns (the number of valid labels, say).

    Mesh: see :class:`~lightning_dist.layout.ParallelLayout`. Each rank holds 1/shard of the parameters, gradients and
    optimizer state. Collectives for an optimizer step, whatever the accumulation window: those of
    :func:`~lightning_dist.parallel.data.shard_module`, one scalar for clipping, and one for the weights where data
    ranks may differ in them.

    Args:
        data_parallel_replicate_size: Whole copies (HSDP when the shard size is above 1).
        data_parallel_shard_size: Ranks over which FSDP2 shards; ``"auto"`` is what the other sizes leave of the world.
        tensor_parallel_size: Ranks that share each layer.
        context_parallel_size: Ranks that share each sequence.
        pipeline_parallel_size: Ranks that hold consecutive stages.
        expert_parallel_size: Ranks that share the experts, out of shard x context.
        plan: Which module goes where; None finds it (``LightningModule.parallel_plan()``, the network's structure).
        layout: The short form, such as ``"replicate=2,shard=2"``, instead of the sizes; ``"auto"`` measures the links,
            reads the module and its first batch, and takes what the advisor recommends for all devices (``advice``).
        pipeline_schedule: ``"GPipe"``, ``"1F1B"``, ``"Interleaved1F1B"``, ``"InterleavedZeroBubble"``,
            ``"ZBVZeroBubble"`` or ``"DualPipeV"``, as torch runs them.
        microbatches: How many parts a batch is cut into for the pipeline; ``"auto"`` is about four for each rank.
        reshard_after_forward: True frees gathered parameters after forward (ZeRO-3), False keeps them until backward
            (ZeRO-2), a number reshards to that many ranks; ``"auto"`` is True, and False under a pipeline, where every
            microbatch would gather again.
        activation_checkpointing: ``"none"``, ``"full"`` or ``"selective"``, for each unit of the plan.
        compile: Whether to compile each unit of the plan.
        batch_check: How ranks of one replica are kept to the same batch: ``"first"`` compares the first batches,
            ``"always"`` every one, ``"broadcast"`` sends the first rank's, ``"off"`` trusts.
        gradient_norm_type: The p of ``Trainer(gradient_clip_val=…)``'s norm: 1, 2, another positive number, or inf.
        process_group_backend: ``"nccl"``, ``"gloo"``, …; None fits the device.
        timeout: How long a collective may wait.

    Raises:
        ValueError: When the Trainer is made, before any process or group: a size, or another argument, does not fit.
    """

    def __init__(
        self,
        data_parallel_replicate_size: int = 1,
        data_parallel_shard_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        plan: ModelPlan | None = None,
        layout: str | ParallelLayout | None = None,
        pipeline_schedule: str = "1F1B",
        microbatches: int | Literal["auto"] = "auto",
        reshard_after_forward: data.ReshardAfterForward = "auto",
        activation_checkpointing: ActivationCheckpointing = "none",
        compile: bool = False,
        batch_check: BatchCheck = "first",
        gradient_norm_type: float = 2.0,
        process_group_backend: str | None = None,
        timeout: datetime.timedelta | float | None = None,
    ) -> None:
        super().__init__()
        sizes = ParallelLayout(
            replicate=data_parallel_replicate_size,
            shard=data_parallel_shard_size,
            tensor=tensor_parallel_size,
            context=context_parallel_size,
            pipeline=pipeline_parallel_size,
            expert=expert_parallel_size,
        )
        sizes = choose_layout(sizes, layout)
        check_arguments(
            sizes,
            pipeline_schedule=pipeline_schedule,
            microbatches=microbatches,
            reshard_after_forward=reshard_after_forward,
            activation_checkpointing=activation_checkpointing,
            batch_check=batch_check,
            gradient_norm_type=gradient_norm_type,
        )
        self.layout = sizes
        self.advice: Advice | None = None
        self._is_open = layout == AUTO
        self.num_nodes = 1
        self._plan = plan
        self._schedule = pipeline_schedule
        self._microbatches = microbatches
        self._settings = ParallelSettings(reshard_after_forward, activation_checkpointing, compile)
        self._batch_check = batch_check
        self._gradient_norm_type = gradient_norm_type
        self._process_group_backend = process_group_backend
        self._timeout = as_timedelta(timeout)
        self._groups = ProcessGroups()
        self._crash_watch: agreement.CrashWatch | None = None
        self._parallel_module = ParallelModule(sizes, self._settings, {})
        self._path_check: PathCheck | None = None
        self._pipeline: PipelineSteps | None = None
        self._context: ContextSteps | None = None
        self._exchange = True
        self._undefined: UndefinedGradients | None = None
        self._evaluation = Evaluation()
        self._padding = False
        self._equal_batches = True
        self._checked_batches = 0
        self._loss_weights: LossWeights | None = None
        self._loss_factor: Tensor | float = 1.0

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.layout}: a strategy for the Trainer of the package `lightning`"
            " (`from lightning.pytorch import Trainer`), not for that of `pytorch_lightning`>"
        )

    # --- environment -------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning injects distributed samplers and synchronises; not with one process."""
        return self.world_size > 1

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str:
        return self._process_group_backend or ("nccl" if self.root_device.type == "cuda" else "gloo")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        layout = self.layout.resolve(self.world_size)
        return {"num_replicas": layout.data_size, "rank": layout.data_coordinate(self.global_rank)}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the axes larger than 1, once the processes have met."""
        if self._groups.mesh is None:
            raise RuntimeError("There is no device mesh: the processes have not met yet, or there is only one.")
        return self._groups.mesh

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self.layout.resolve(self.world_size)
        if not self.cluster_environment.creates_processes_externally and self.num_processes > 1:
            self._launcher = _compat.subprocess_launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        self.layout = self.layout.resolve(self.world_size)
        if self.world_size == 1:
            return
        assert self.cluster_environment is not None
        _compat.init_process_group(
            self.cluster_environment, self.process_group_backend, self._timeout, self.root_device
        )
        self._crash_watch = agreement.CrashWatch(_compat.default_store(), self.global_rank, self.world_size)
        if self._is_open:  # until setup, when there are data and a module
            self._groups = ProcessGroups(control=dist.new_group(backend="gloo", timeout=self._timeout))
        elif self._groups.mesh is None:
            self._groups = make_process_groups(self.layout, self.root_device.type, self._timeout)

    @property
    def _patience(self) -> float:
        """Seconds to wait in the store: less than a collective's limit, so that a reason comes before its timeout."""
        return 0.8 * self._timeout.total_seconds()

    @property
    def precision_plugin(self) -> Precision:
        if self._precision_plugin is None:
            self._precision_plugin = Precision()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if type(plugin) is MixedPrecision:
            plugin = HybridMixedPrecision.from_lightning(plugin)
        self._precision_plugin = plugin

    # --- model -------------------------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Builds modules on the meta device if ``empty_init``; they get memory unit by unit in :meth:`setup`."""
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        """Turns the module into this rank's part of it, then makes its optimizers."""
        assert self.accelerator is not None and self.lightning_module is not None
        module = self.lightning_module
        self._refuse_unsuited(trainer)
        self.accelerator.setup(trainer)
        if self._is_open and self.world_size > 1:
            self._decide(trainer, module)
        self._parallelise(module)
        self.model = module
        self._connect_hooks(trainer, module)
        if trainer.state.fn == TrainerFn.FITTING:
            # An earlier fit may have left optimizers of parameters that no longer exist.
            self._reset_optimizers_and_schedulers()
            with _compat.optimizers_of_nothing():
                self.setup_optimizers(trainer)
            self._seed_by_data_rank()
        self.setup_precision_plugin()

    def _decide(self, trainer: Trainer, module: LightningModule) -> None:
        """Takes the advisor's layout, and its settings where the user has left the defaults."""
        if trainer.state.fn != TrainerFn.FITTING:
            raise ValueError(
                "layout='auto' is decided with the first training batch: call fit first, or give a layout."
            )
        fixed = None if self._schedule == "1F1B" else [self._schedule]
        chosen, self.advice = auto_layout.decide(trainer, module, self.root_device, self.broadcast, schedules=fixed)
        self.layout = ParallelLayout.parse(chosen["layout"]).resolve(self.world_size)
        self._schedule = chosen.get("pipeline_schedule", self._schedule)
        if self._microbatches == "auto":
            self._microbatches = chosen.get("microbatches", "auto")
        settings = self._settings
        if settings.activation_checkpointing == "none":
            settings = replace(settings, activation_checkpointing=chosen["activation_checkpointing"])
        if settings.reshard_after_forward == "auto":
            settings = replace(settings, reshard_after_forward=chosen.get("reshard_after_forward", "auto"))
        self._settings = settings
        self._groups = make_process_groups(self.layout, self.root_device.type, self._timeout, self._groups.control)
        self._is_open = False
        if self.advice is not None:
            text = auto_layout.describe(self.advice)
            rank_zero_info(text)
            for logger in trainer.loggers:
                experiment: Any = getattr(logger, "experiment", None)
                if callable(getattr(experiment, "add_text", None)):
                    experiment.add_text("plan", text.replace("\n", "\n\n"), 0)

    def _seed_by_data_rank(self) -> None:
        """From here on ranks of one replica draw the same random numbers (dropout), and data ranks others."""
        if self.world_size > 1:
            seed = self.broadcast(torch.initial_seed())
            torch.manual_seed((seed + self.layout.data_coordinate(self.global_rank)) % 2**63)

    def _refuse_unsuited(self, trainer: Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging | StochasticWeightAveraging) and self.world_size > 1:
                raise ValueError(
                    f"{type(callback).__name__} copies the whole model before it is sharded; use"
                    " lightning_dist.callbacks.ShardedWeightAveraging, which averages shard by shard."
                )

    def _parallelise(self, module: LightningModule) -> None:
        earlier: ParallelModule | None = module.__dict__.get(STATE_NAME)
        if earlier is not None:
            if (earlier.layout, earlier.settings) != (self.layout, self._settings):
                raise ValueError(
                    f"The module was made parallel before as {earlier.layout} with {earlier.settings}; it can't become"
                    f" {self.layout} with {self._settings}. Make a new module and load a checkpoint."
                )
            self._parallel_module = earlier
            self._set_context(module, earlier)
            if earlier.pipeline is not None and self._pipeline is None:
                self._drive_stages(module, earlier.pipeline)
            return
        setup = make_parallel(
            module,
            self._plan,
            self.layout,
            self._groups,
            self._settings,
            self.root_device,
            pipeline_schedule=self._schedule,
            convert=self.precision_plugin.convert_module,
        )
        self._parallel_module = setup.made
        self._set_context(module, setup.made)
        if setup.made.pipeline is not None:
            self._drive_stages(module, setup.made.pipeline, setup.tracer, setup.shared)
        module.__dict__[STATE_NAME] = setup.made

    def _set_context(self, module: LightningModule, made: ParallelModule) -> None:
        if made.context is not None and made.sequence_dims is not None:
            self._context = ContextSteps(module, made.context, made.sequence_dims)

    def _drive_stages(
        self,
        module: LightningModule,
        pipeline: AttachedPipeline,
        tracer: Tracer | None = None,
        shared: Sequence[str] = (),
    ) -> None:
        """Makes the runner of this rank's stages; without a tracer where an earlier Trainer has traced the module."""
        schedule = find_schedule(self._schedule)
        if pipeline.plan.schedule != schedule:
            raise ValueError(
                f"The module was cut for pipeline_schedule={pipeline.plan.schedule.name!r} before; it can't run under"
                f" {schedule.name!r}. Make a new module and load a checkpoint."
            )
        assert self._groups.pipeline_control is not None
        coordinate = self.layout.data_coordinate(self.global_rank)
        seed = self.broadcast(torch.initial_seed())
        runner = PipelineRunner(
            pipeline,
            self.device_mesh["pipeline"].get_group(),
            self._groups.pipeline_control,
            self.root_device,
            streams=RandomStreams(seed, coordinate, self.root_device),
            microbatches=self._microbatches,
        )
        self._pipeline = PipelineSteps(module, pipeline, runner, tracer, self._groups.data_mesh, shared, self._context)

    def _connect_hooks(self, trainer: Trainer, module: LightningModule) -> None:
        plugin = self._precision_plugin
        assert plugin is not None
        plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        plugin.clip_grad_by_value = self._clip_grad_by_value  # type: ignore[method-assign]
        if self._own_weight is not None and self._undefined is None and self._pipeline is None:
            self._undefined = UndefinedGradients(module)
        if self.world_size == 1:
            return
        for metric in module.modules():
            if isinstance(metric, Metric):
                # Ranks that have seen the same tokens must not count twice.
                metric.process_group = self._groups.tokens
                if self._groups.tokens is None:
                    metric.distributed_available_fn = _never
        if not any(isinstance(callback, EpochAgreement) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            trainer.callbacks.insert(0, EpochAgreement(self))  # type: ignore[attr-defined]
        if self._groups.data is not None and self._path_check is None and self._pipeline is None:
            self._path_check = PathCheck(
                self._parallel_module.units,
                _compat.default_store(),
                self.global_rank,
                dist.get_process_group_ranks(self._groups.data),
                self._patience,
            )
        module.log = LogCheck(module, self._agree_on_name)  # type: ignore[assignment, method-assign]

    def _agree_on_name(self, number: int, name: str) -> None:
        topic = f"lightning_dist/next name logged with sync_dist=True#{number}"
        ranks = list(range(self.world_size))
        agreement.agree(_compat.default_store(), topic, repr(name), self.global_rank, ranks, self._patience)

    # --- data --------------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Seeds workers by the data coordinate; data ranks with unequal numbers of batches end together."""
        assert self.lightning_module is not None
        training = bool(self.lightning_module.trainer.training)
        if getattr(dataloader, "worker_init_fn", 0) is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
            coordinate = self.layout.data_coordinate(self.global_rank)
            dataloader.worker_init_fn = _compat.worker_init_function(coordinate)  # type: ignore[attr-defined]
        if self._groups.data_control is None:
            return dataloader
        sampler = loaders.distributed_sampler(dataloader)
        equal = sampler is not None and sampler.num_replicas == self.layout.data_size
        if training:
            self._equal_batches &= equal
        if equal and training:
            return dataloader
        if equal and sampler is not None:
            loaders.without_repeats(sampler)
        length = loaders.sized(dataloader)  # type: ignore[arg-type]
        lengths = loaders.exchange_lengths(length, self._groups.data_control)
        if lengths is not None and len(set(lengths)) == 1:
            return dataloader
        return loaders.TogetherLoader(dataloader, self._groups.data_control, training, lengths)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch, makes sure that all ranks of a replica have the same, and marks what is padding."""
        assert self.lightning_module is not None
        if self._groups.replica_control is not None:
            batch = self._same_batch(batch)
        if self._groups.data_control is not None:
            self._padding = self._evaluation.is_padding(self.lightning_module.trainer, dataloader_idx)
        return super().batch_to_device(batch, device, dataloader_idx)

    def _same_batch(self, batch: Any) -> Any:
        assert self._groups.replica_control is not None
        if self._batch_check == "broadcast":
            return batches.broadcast_batch(batch, self._groups.replica_control)
        self._checked_batches += 1
        if self._batch_check == "always" or (self._batch_check == "first" and self._checked_batches <= FIRST_BATCHES):
            what = f"batch {self._checked_batches}"
            batches.check_same_batch(batch, self._groups.replica_control, what)
        return batch

    # --- step --------------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        self._loss_weights = LossWeights(self._groups.data, self._equal_batches and self._own_weight is None)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step; its loss will count with the weight of its batch."""
        assert self.lightning_module is not None and self._loss_weights is not None
        batch = args[0] if args else next(iter(kwargs.values()))
        if self._pipeline is not None:
            return self._pipeline_step(self._pipeline, batch, args[1:])
        self._loss_factor = self._loss_weights.add(self._weight_of(batch), self.root_device)
        if not self.lightning_module.automatic_optimization:
            self._loss_factor = self._loss_factor * self._loss_weights.gradient_factor(1)
            self._loss_weights.begin()
        with self._on_common_path():
            if self._context is None:
                output = super().training_step(*args, **kwargs)
            else:
                output = self._context.train(super().training_step, batch, *args[1:], **kwargs)
        if output is None and self.lightning_module.automatic_optimization:
            self._loss_weights.truncate(self._loss_weights.batches - 1)
        return output

    def _pipeline_step(self, pipeline: PipelineSteps, batch: Any, rest: tuple[Any, ...]) -> Any:
        """Forward and backward of all microbatches; what is returned only carries the loss on."""
        assert self.lightning_module is not None and self._loss_weights is not None
        scale = 1.0 / self.lightning_module.trainer.accumulate_grad_batches
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            scale *= scaler.get_scale()
        with self.precision_plugin.train_step_context(), self._on_common_path():
            output = pipeline.train(
                batch, rest, self._own_weight, self._loss_weights, scale, self._exchange, self.root_device
            )
        loss = output["loss"] if isinstance(output, dict) else output
        loss = loss.detach().requires_grad_()
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    @property
    def _own_weight(self) -> Callable[[Any], Any] | None:
        loss_weight = getattr(self.lightning_module, "loss_weight", None)
        return loss_weight if callable(loss_weight) else None

    def _weight_of(self, batch: Any) -> Tensor | float:
        if self._own_weight is None:
            return batches.sample_count(batch)
        assert self._undefined is not None
        weight = torch.as_tensor(self._own_weight(batch), device=self.root_device)
        self._undefined.counts = weight > 0
        return weight

    @contextmanager
    def _on_common_path(self) -> Generator[None, None, None]:
        tensor = self._parallel_module.tensor
        with sharded_loss() if tensor is not None and tensor.sharded_logits else nullcontext():
            if self._path_check is not None:
                self._path_check.begin()
            yield
        if self._path_check is not None:
            self._path_check.end()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self._pipeline is not None:
            return self._pipeline_backward(self._pipeline, closure_loss)
        factor = self._loss_factor
        if isinstance(factor, Tensor):
            closure_loss = closure_loss * factor.to(closure_loss.dtype)
        elif factor != 1.0:
            closure_loss = closure_loss * factor
        with self._context.backward_attention() if self._context is not None else nullcontext():
            result = super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            # What this backward did not reach is still gathered, as it was before the step and its toggling.
            data.free_gathered(self._parallel_module.fsdp_modules)
        return result

    def _pipeline_backward(self, pipeline: PipelineSteps, loss: Tensor) -> Tensor:
        """The schedule has run backward in the step; here its gradients arrive, and all hooks run in their order."""
        assert self.lightning_module is not None
        self.pre_backward(loss)
        loss = self.precision_plugin.pre_backward(loss, self.lightning_module)
        pipeline.add_gradients()
        loss = self.precision_plugin.post_backward(loss, self.lightning_module)
        self.post_backward(loss)
        return loss

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keeps gradients on this rank while batches are accumulated; the last batch's backward exchanges the sum."""
        self._exchange = False
        units = self._parallel_module.fsdp_modules if self._pipeline is None else []
        data.set_gradient_sync(units, False)
        try:
            yield
        finally:
            self._exchange = True
            data.set_gradient_sync(units, True)

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
            sum_replicated_gradients(_parameters(optimizer))
            if self._context is not None:
                self._context.sum_gradients(_parameters(optimizer))
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        weighted = partial(self._weighted_closure, closure, optimizer, self._loss_weights.batches)
        result = super().optimizer_step(optimizer, weighted, model, **kwargs)
        update_expert_biases(self.lightning_module)
        self._loss_weights.begin()
        return result

    def _weighted_closure(self, closure: Callable[[], Any], optimizer: Optimizer, batches_before: int) -> Any:
        assert self.lightning_module is not None and self._loss_weights is not None
        self._loss_weights.truncate(batches_before)
        result = closure()
        if self._pipeline is not None:
            self._pipeline.complete_gradients()
        sum_replicated_gradients(_parameters(optimizer))
        if self._context is not None:
            self._context.sum_gradients(_parameters(optimizer))
        factor = self._loss_weights.gradient_factor(self.lightning_module.trainer.accumulate_grad_batches)
        if isinstance(factor, Tensor) or factor != 1.0:
            gradients.scale_gradients_(_parameters(optimizer), factor)
        return result

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        holders = self._pipeline.holders(self.world_size) if self._pipeline is not None else None
        gradients.clip_grad_norm_(_parameters(optimizer), clip_val, self._gradient_norm_type, holders=holders)

    def _clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        gradients.clip_grad_value_(_parameters(optimizer), clip_val)

    # --- evaluation --------------------------------------------------------------------------------------------------

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", super().predict_step, *args, **kwargs)

    def _evaluate(self, method: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        if self._pipeline is not None:
            step = partial(self._evaluate_stages, self._pipeline, method)
        elif self._context is not None:
            step = partial(self._context.evaluate, step)
        with self._on_common_path():
            if not self._padding:
                return step(*args, **kwargs)
            with uncounted(self.lightning_module):
                step(*args, **kwargs)
            return None

    def _evaluate_stages(self, pipeline: PipelineSteps, method: str, batch: Any, *rest: Any) -> Any:
        with getattr(self.precision_plugin, f"{EVALUATIONS[method]}_step_context")():
            return pipeline.evaluate(EVALUATIONS[method], method, batch, rest, self._own_weight)

    def measure_schedule(self) -> None:
        """Has the times of the pipeline's next batch noted; to be called on all ranks."""
        if self._pipeline is not None:
            self._pipeline.runner.measure_next()

    def measured_schedule(self) -> list[list[Action]]:
        """What each rank of this rank's pipeline did in the measured batch; nothing without a pipeline.

        Collectives: an all-gather over the pipeline's CPU group.
        """
        return self._pipeline.runner.measured() if self._pipeline is not None else []

    def on_validation_start(self) -> None:
        self._evaluation.begin()

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self) -> None:
        data.free_gathered(self._parallel_module.fsdp_modules)

    on_test_end = on_validation_end

    def on_predict_end(self) -> None:
        assert self.lightning_module is not None
        self._evaluation.drop_padded_predictions(self.lightning_module.trainer)
        data.free_gathered(self._parallel_module.fsdp_modules)

    # --- collectives -------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        if self._groups.control is not None and dist.is_initialized():
            dist.barrier(group=self._groups.control)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._groups.control is None:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src, group=self._groups.control)
        return box[0]

    def gather_objects(self, obj: Any) -> list[Any]:
        """One object of each rank, in the order of ranks, on every rank; over the CPU group."""
        if self._groups.control is None:
            return [obj]
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, obj, group=self._groups.control)
        return everyone

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over the data ranks: ranks of one replica hold the same, which must not count twice."""
        group = group or self._groups.data
        if not isinstance(tensor, Tensor) or group is None or dist.get_world_size(group) == 1:
            return tensor
        mean, op = _reduction(reduce_op)
        tensor = tensor.detach().to(self.root_device, copy=True)
        if mean and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        dist.all_reduce(tensor, op=op, group=group)
        return tensor / dist.get_world_size(group) if mean else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if all ranks of the world (or any) say so."""
        if self._groups.control is None:
            return decision
        votes = torch.tensor([int(decision)])
        dist.all_reduce(votes, group=self._groups.control)
        return bool(votes == self.world_size) if all else bool(votes)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state under its full names, each tensor this rank's part (DTensor)."""
        assert self.lightning_module is not None
        data.free_gathered(self._parallel_module.fsdp_modules)
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        return module_checkpoint.optimizer_state(self.lightning_module, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a directory, each rank its own parts. All ranks must call it.

        Args:
            checkpoint: Lightning's dictionary.
            filepath: The directory.
            storage_options: None, or :class:`~lightning_dist.strategies.module_checkpoint.SaveOptions`.
        """
        if storage_options is not None and not isinstance(storage_options, module_checkpoint.SaveOptions):
            raise TypeError("storage_options is not supported: a checkpoint is a directory, not one file.")
        path, names = self.broadcast(str(filepath)), self._parallel_module.names
        layout = str(self.layout)
        module_checkpoint.save(checkpoint, path, self._groups.control, names, storage_options, layout=layout)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a directory of any layout, or a single file of one device, into this rank's parts."""
        assert self.lightning_module is not None
        data.free_gathered(self._parallel_module.fsdp_modules)
        module = self.lightning_module
        extra: dict[str, Any] = {}
        for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
            if callable(getattr(callback, "checkpoint_tensors", None)):
                extra |= callback.checkpoint_tensors(module)
        path = self.broadcast(str(checkpoint_path))
        names = self._parallel_module.names
        return module_checkpoint.load(path, module, self._groups.control, weights_only, extra, names)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        module_checkpoint.load_model(self.lightning_module, checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        stage_of = self._parallel_module.names if self._pipeline is not None else None
        module_checkpoint.load_optimizers(
            self.lightning_module, self.optimizers, checkpoint, self._groups.control, stage_of
        )

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            module_checkpoint.remove(filepath)

    # --- end ---------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks why this one stops, or says which rank's failure it was that reached this one."""
        if self._crash_watch is not None:
            self._crash_watch.on_failure(exception)

    def teardown(self) -> None:
        assert self.cluster_environment is not None and self.accelerator is not None
        if self._crash_watch is not None:
            self._crash_watch.stop()
            self._crash_watch = None
        if self.lightning_module is not None:
            self.lightning_module.__dict__.pop("log", None)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _reduction(reduce_op: Any) -> tuple[bool, Any]:
    if reduce_op is None or reduce_op == dist.ReduceOp.AVG or str(reduce_op).lower() in ("mean", "avg"):
        return True, dist.ReduceOp.SUM
    return False, getattr(dist.ReduceOp, reduce_op.upper()) if isinstance(reduce_op, str) else reduce_op


def _never() -> bool:
    return False
