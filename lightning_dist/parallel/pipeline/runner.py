"""Runs the user's step on every microbatch of a batch, stage by stage, under one of torch's schedules."""

from __future__ import annotations

import logging
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.utils import _pytree as pytree

from lightning_dist import _compat
from lightning_dist.parallel.pipeline.attach import AttachedPipeline
from lightning_dist.parallel.pipeline.batch_statistics import BatchStatistics
from lightning_dist.parallel.pipeline.boundary import BoundaryBook, BoundarySpec, OutputSpec
from lightning_dist.parallel.pipeline.carried_losses import LossCarrier
from lightning_dist.parallel.pipeline.dispatch import StageBoundary, StageRun, unflatten_boundary
from lightning_dist.parallel.pipeline.foreign import PipelineError, first_foreign
from lightning_dist.parallel.pipeline.guards import no_gradients_by_hand
from lightning_dist.parallel.pipeline.microbatches import count_samples, even_sizes, signature, split_batch
from lightning_dist.parallel.pipeline.placement import choose_microbatches, fit_microbatches
from lightning_dist.parallel.pipeline.random_streams import RandomStreams
from lightning_dist.parallel.pipeline.results import ResultSharer
from lightning_dist.parallel.pipeline.stage import BoundaryStage
from lightning_dist.parallel.pipeline.timings import Action, ActionClock

MOST_SCHEDULES = 16
"""How many prepared schedules (one for each number of microbatches, training or not) are kept; they hold no tensors."""

Step = Callable[[Any, int], Any]


@dataclass(frozen=True)
class Microbatches:
    """A batch cut into microbatches.

    Args:
        parts: The microbatches, views of the batch.
        sizes: Number of samples in each.
        schedule: Name of the schedule that can run so many.
    """

    parts: list[Any]
    sizes: list[int]
    schedule: str

    @property
    def shares(self) -> list[float]:
        """Each microbatch's part of the batch's samples; they add up to 1."""
        return [size / sum(self.sizes) for size in self.sizes]


@dataclass
class _Batch:
    """The batch that is running."""

    step: Step
    parts: list[Any]
    training: bool
    scales: Sequence[Tensor | float]
    outputs: dict[int, Any] = field(default_factory=dict)


class PipelineRunner:
    """Drives this rank's stages.

    Collectives: those of torch's schedule on ``group`` (one message each way for each microbatch and cut), and for
    each new kind of microbatch two small ones on ``control_group``.

    Args:
        pipeline: The attached module.
        group: The pipeline's ranks; pipeline rank i is its rank i.
        control_group: A CPU (Gloo) group of the same ranks; ``group`` itself where that is one.
        device: Where the stages compute.
        streams: Random streams; None leaves the generators alone.
        microbatches: How many a batch is cut into, or ``"auto"``.
    """

    def __init__(
        self,
        pipeline: AttachedPipeline,
        group: dist.ProcessGroup,
        control_group: dist.ProcessGroup,
        device: torch.device,
        *,
        streams: RandomStreams | None = None,
        microbatches: int | str = "auto",
    ) -> None:
        if microbatches != "auto" and (
            isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1
        ):
            raise ValueError(
                f"microbatches={microbatches!r} does not fit: give a whole number of at least 1, or 'auto'."
            )
        self.plan = pipeline.plan
        self.stages = pipeline.stages
        self.group = group
        self.control_group = control_group
        self._dispatcher = pipeline.dispatcher
        self._dispatcher.streams = streams
        self._streams = streams
        self._device = device
        self._wanted = microbatches
        self._book = BoundaryBook(control_group)
        self._schedules: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._batch: _Batch | None = None
        self._reduce_gradients = True
        self._clock: ActionClock | None = None
        self._measure_next = False
        self._statistics = BatchStatistics(pipeline.stages)
        self._losses = LossCarrier(pipeline.module)
        self._sharer = ResultSharer(pipeline.plan.last_rank, group, control_group, device)
        self._units = [unit for stage in self.stages for unit in stage.modules() if isinstance(unit, FSDPModule)]
        self._rank = pipeline.dispatcher.rank
        # torch's schedules know a loop only forwards and a V; a loop laid backwards is the same with ranks renamed.
        ranks = range(self.plan.num_ranks)
        backwards = self.plan.schedule.placement == "loop"
        self._group_rank_of = [self.plan.num_ranks - 1 - rank if backwards else rank for rank in ranks]
        for stage in self.stages:
            stage.run_microbatch = self._run_microbatch

    @property
    def has_last_stage(self) -> bool:
        """Whether losses and outputs are on this rank."""
        return self._rank == self.plan.last_rank

    def split(self, batch: Any) -> Microbatches:
        """Cuts a batch into microbatches that differ by one sample at most, as many as asked for and possible.

        Raises:
            ValueError: If the batch has no common dimension 0, or no samples.
        """
        samples = count_samples(batch)
        if samples < 1:
            raise ValueError("The batch holds no samples, so there is nothing to run through the pipeline.")
        wanted = choose_microbatches(self.plan, samples) if self._wanted == "auto" else int(self._wanted)
        schedule, number = fit_microbatches(self.plan, wanted, samples)
        sizes = even_sizes(samples, number)
        return Microbatches(split_batch(batch, sizes), sizes, schedule)

    def train(
        self,
        microbatches: Microbatches,
        step: Step,
        *,
        scales: Sequence[Tensor | float] | None = None,
        step_index: int = 0,
        reduce_gradients: bool = True,
    ) -> list[Any] | None:
        """Runs forward and backward of a batch; gradients are added to the parameters' ``.grad``.

        Args:
            microbatches: From `split`.
            step: Called once for each microbatch and stage of this rank, with the microbatch and its index. Returns
                the loss, a scalar, or a dictionary with it under ``"loss"``.
            scales: Factor for each microbatch's loss before backward; None is its share of the samples. A microbatch
                with factor 0 adds nothing to the gradients, whatever its loss is.
            step_index: Names the batch to the random streams.
            reduce_gradients: Whether FSDP2 exchanges gradients over the data ranks at the end; else it keeps them
                for a later batch.

        Returns:
            What ``step`` returned for each microbatch, detached, on the rank with the last stage; None elsewhere.

        Raises:
            PipelineError: If the step does what a pipeline can't do.
        """
        self._reduce_gradients = reduce_gradients
        scales = microbatches.shares if scales is None else scales
        with self._statistics.collect(microbatches.sizes):
            return self._run(microbatches, step, "train", True, scales, step_index)

    def evaluate(
        self, microbatches: Microbatches, step: Step, *, kind: str = "evaluate", step_index: int = 0
    ) -> list[Any] | None:
        """Runs forward only; arguments and result as `train`. ``step`` may return anything."""
        return self._run(microbatches, step, kind, False, [1.0] * len(microbatches.parts), step_index)

    def share(self, value: Any) -> Any:
        """Gives every rank of the pipeline what the rank with the last stage has; see `ResultSharer.share`."""
        return self._sharer.share(value)

    def measure_next(self) -> None:
        """Has the times of the next batch's actions noted, for `measured`; all ranks must ask for it together."""
        self._measure_next = True

    def measured(self) -> list[list[Action]]:
        """What each pipeline rank did in the batch that was measured, their clocks set together at its beginning.

        Collectives: an all-gather of the times on ``control_group``.
        """
        everyone: list[Any] = [None] * self.plan.num_ranks
        dist.all_gather_object(everyone, self._clock.actions() if self._clock else [], group=self.control_group)
        self._clock = None
        return everyone

    def _run(
        self, microbatches: Microbatches, step: Step, kind: str, training: bool, scales: Sequence[Any], step_index: int
    ) -> list[Any] | None:
        parts = microbatches.parts
        number = len(parts)
        mode = (training, torch.is_grad_enabled())
        self._book.begin([(mode, signature(part)) for part in parts])
        self._batch = _Batch(step, parts, training, scales)
        schedule = self._schedule(microbatches.schedule if training else "forward", number)
        index = torch.arange(number)
        arguments: dict[str, Any] = {"microbatch": index, "return_outputs": False}
        if training and self.has_last_stage:
            arguments.update(target=index, losses=[])
        outputs = self._batch.outputs
        if self._measure_next:
            dist.barrier(group=self.control_group)
            self._clock, self._measure_next = ActionClock(self._device), False
        try:
            with ExitStack() as stack:
                stack.enter_context(_without_drawings())
                if self._streams is not None:
                    stack.enter_context(self._streams.batch(kind, step_index))
                schedule.step(**arguments)
            self._book.end()
        except BaseException as error:
            self._book.forget()
            self._schedules.clear()
            raise _users_error(error) from None
        finally:
            self._batch = None
            self._dispatcher.run = None
        self._free_gathered()
        return [outputs[microbatch] for microbatch in range(number)] if self.has_last_stage else None

    def _free_gathered(self) -> None:
        """Frees what FSDP2 gathered: it must be gathered anew after the optimizer, or a loaded state, changed it."""
        for unit in self._units:
            unit.reshard()

    def _schedule(self, name: str, number: int) -> Any:
        key = (name, number)
        if key not in self._schedules:
            self._schedules[key] = self._prepare(name, number)
        self._schedules.move_to_end(key)
        while len(self._schedules) > MOST_SCHEDULES:
            self._schedules.popitem(last=False)
        return self._schedules[key]

    def _prepare(self, name: str, number: int) -> Any:
        schedule_rank = self._group_rank_of[self._rank]  # either way round, renaming is its own inverse
        stages = [
            BoundaryStage(
                stage,
                self.plan.num_stages,
                self._device,
                self.group,
                schedule_rank,
                self._group_rank_of,
                self._book,
                lambda: self._reduce_gradients,
                lambda: self._clock,
            )
            for stage in self.stages
        ]
        if name == "forward":
            owners = [self._group_rank_of[rank] for rank in self.plan.rank_of_stage]
            return _compat.forward_only_schedule(stages, number, forward_order(owners, number))
        kind = get_schedule_class(name)
        one_stage = issubclass(kind, PipelineScheduleSingle)
        return kind(stages[0] if one_stage else stages, number, loss_fn=_first, scale_grads=False)

    def _run_microbatch(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        batch = self._batch
        assert batch is not None
        positions = self.plan.positions_of(stage)
        is_last = stage == self.plan.num_stages - 1
        boundary = self._book.outgoing(stage - 1, microbatch) if stage else None
        described: list[OutputSpec | None] = list(boundary.earlier) if boundary else []
        known = is_last or self._book.knows(stage, microbatch)

        def observe(position: int, output: Any) -> Any:
            if not known:
                described.append(self._describe(output, position))
            if is_last and position == positions[-1] and batch.training:
                _silence(output, batch.scales[microbatch])
            return output

        def stand_in(position: int) -> Any:
            assert boundary is not None
            spec = boundary.earlier[position]
            if spec is None:
                raise PipelineError(
                    f"The output of {self.plan.chain[position]} can't be described to later stages: it holds other"
                    " things than tensors and plain values in tuples, lists and dictionaries."
                )
            return spec.stand_in(self.plan.chain[position], self._device)

        run = StageRun(
            stage,
            positions[0],
            positions[-1],
            is_last,
            microbatch,
            self._losses.arrive(_unflatten(boundary, received)),
            stand_in,
            observe,
        )
        try:
            value = self._call_step(run, batch, microbatch)
        finally:
            self._dispatcher.run = None
        if is_last:
            return self._finish(batch, microbatch, value)
        name = self.plan.chain[positions[-1]]
        output, tensors = OutputSpec.of(self._losses.leave(value), name)
        tensors = [_sendable(tensor, tensors[:place]) for place, tensor in enumerate(tensors)]
        if known:
            self._book.check(stage, microbatch, output, name)
        else:
            self._book.record(stage, microbatch, BoundarySpec(output, tuple(described)))
        return tuple(tensors)

    def _call_step(self, run: StageRun, batch: _Batch, microbatch: int) -> Any:
        if self._streams is not None:
            self._streams.start_microbatch(microbatch)
        self._dispatcher.run = run
        try:
            with no_gradients_by_hand(lambda: self._dispatcher.computing):
                value = batch.step(batch.parts[microbatch], microbatch)
        except StageBoundary as boundary:
            value = boundary.value
            # Frames in the traceback hold activations and half-left contexts (a checkpoint's); let go of them now.
            traceback.clear_frames(boundary.__traceback__)
            boundary.__traceback__ = None
            boundary.value = None
            return value
        missing = self.plan.chain[run.position + 1 : run.last + 1]
        if missing:
            raise PipelineError(
                f"The step ended without calling {', '.join(missing)} of the pipeline's chain; every module of the"
                " chain must be called once in each step (a step that returns early, or swallows BaseException, can't)."
            )
        if not run.is_last_stage:
            raise PipelineError(
                "The step caught the pipeline's StageBoundary (a bare except?) and went on; let it pass."
            )
        return value

    def _finish(self, batch: _Batch, microbatch: int, value: Any) -> tuple[Tensor, ...]:
        found = first_foreign(value)
        if found is not None:
            raise PipelineError(
                f"The step's result is computed from the output of {found.origin} by another way than through the"
                " pipeline's chain, on a stage that does not have its values; hand it on inside the hidden state (a"
                " tuple of tensors), or put that module on the last stage."
            )
        batch.outputs[microbatch] = pytree.tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value
        )
        if not batch.training:
            return ()
        loss = value.get("loss") if isinstance(value, dict) else value
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(value).__name__
            raise PipelineError(
                f"The training step returned {what}"
                " instead of a scalar loss (or a dictionary with one under 'loss'); under a pipeline every microbatch"
                " needs one, for the other stages wait for its gradient."
            )
        scale = batch.scales[microbatch]
        return (loss.reshape(()) * scale,)

    def _describe(self, output: Any, position: int) -> OutputSpec | None:
        try:
            return OutputSpec.of(output, self.plan.chain[position])[0]
        except PipelineError:
            return None


@contextmanager
def new_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Collects the gradients that arise inside, and leaves the parameters' ``.grad`` as they were before.

    Lightning zeroes gradients between the training step, in which the schedule has already run backward, and
    ``backward``; what is collected here is added there by `add_gradients`.
    """
    held = [parameter.grad for parameter in parameters]
    collected: list[Tensor | None] = []
    for parameter in parameters:
        parameter.grad = None
    try:
        yield collected
    finally:
        for parameter, before in zip(parameters, held, strict=True):
            collected.append(parameter.grad)
            parameter.grad = before


def add_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Adds gradients collected by `new_gradients`."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def forward_order(owners: Sequence[int], number: int) -> dict[int, list[tuple[int, int]]]:
    """For each rank the (stage, microbatch) it runs, in order, when only forward is run.

    Each rank takes, at each tick, the furthest stage that has its input, so microbatches leave as early as they can.

    Args:
        owners: The rank of each stage.
        number: Number of microbatches.
    """
    order: dict[int, list[tuple[int, int]]] = {rank: [] for rank in sorted(set(owners))}
    done = [0] * len(owners)  # microbatches that have left each stage
    while done[-1] < number:
        ready = [
            max(
                (
                    stage
                    for stage, owner in enumerate(owners)
                    if owner == rank and done[stage] < (done[stage - 1] if stage else number)
                ),
                default=None,
            )
            for rank in order
        ]
        for rank, stage in zip(order, ready, strict=True):
            if stage is not None:
                order[rank].append((stage, done[stage]))
        for stage in ready:
            if stage is not None:
                done[stage] += 1
    return order


@contextmanager
def _without_drawings() -> Iterator[None]:
    """Keeps torch from logging a drawing of the whole schedule, on every rank, above the error that matters."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def _first(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return output[0]


def _unflatten(boundary: BoundarySpec | None, received: tuple[Tensor, ...]) -> Any:
    if boundary is None:
        return None
    # Copies, for the user's code may work in place (a ReLU), which the leaves that gradients are read from can't bear.
    tensors = [tensor.clone() if tensor.requires_grad else tensor for tensor in received]
    return unflatten_boundary(tensors, boundary.output.template, boundary.output.structure)


def _sendable(tensor: Tensor, before: Sequence[Tensor]) -> Tensor:
    """A tensor that can be sent and, by schedules that split the backward, detached in place.

    Views and leaves (a received tensor that is passed on, a parameter) can't be detached, nor the same tensor twice.
    """
    if not tensor.is_contiguous():
        return tensor.contiguous()
    is_received = tensor.is_leaf and tensor.requires_grad
    if tensor._is_view() or is_received or any(tensor is other for other in before):
        return tensor.clone()
    return tensor


def _silence(output: Any, scale: Tensor | float) -> None:
    """Keeps a microbatch of weight 0 from spoiling gradients: 0 times the gradient of a mean over nothing is NaN."""
    if not isinstance(scale, Tensor) and scale != 0:
        return

    def hook(gradient: Tensor) -> Tensor:
        if isinstance(scale, Tensor):
            return torch.where(scale == 0, torch.zeros_like(gradient), gradient)
        return torch.zeros_like(gradient)

    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(hook)


def _users_error(error: BaseException) -> BaseException:
    """What the user's code raised, without torch's words around it (which hold the activations)."""
    while (
        isinstance(error, RuntimeError)
        and isinstance(error.__cause__, Exception)
        and "failed to run" in str(error).lower()
    ):
        error = error.__cause__
    return error
