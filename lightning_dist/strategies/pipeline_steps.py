"""Lightning's steps on a pipeline: the schedule runs inside ``training_step``, and every rank gets what it gave."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.parallel.loss_weights import LossWeights
from lightning_dist.parallel.pipeline import (
    AttachedPipeline,
    Microbatches,
    PipelineError,
    PipelineRunner,
    add_gradients,
    new_gradients,
    sum_shared_gradients,
)
from lightning_dist.parallel.pipeline.results import LogRecorder, merge_outputs
from lightning_dist.parallel.pipeline.sharding import average_loose_gradients
from lightning_dist.parallel.pipeline.trace import Tracer
from lightning_dist.strategies.context_steps import ContextSteps
from lightning_dist.strategies.pipeline_metrics import BatchMetrics, apply_changes, find_metric_inside

WeightOf = Callable[[Any], Tensor | float]


class PipelineSteps:
    """Runs a LightningModule's steps through a pipeline.

    Args:
        module: The module, with the pipeline attached.
        pipeline: What was attached.
        runner: Drives this rank's stages.
        tracer: A copy of the whole module, traced with the first batch to refuse what no pipeline can do; None where
            that has been done.
        data_mesh: Mesh of the data axes, or None.
        shared: Full names of parameters that every stage has by the plan.
        context: Cuts sequences over the context ranks, if there are any.
    """

    def __init__(
        self,
        module: LightningModule,
        pipeline: AttachedPipeline,
        runner: PipelineRunner,
        tracer: Tracer | None,
        data_mesh: DeviceMesh | None,
        shared: Sequence[str],
        context: ContextSteps | None,
    ) -> None:
        inside = find_metric_inside(module, pipeline.plan.chain)
        if inside is not None:
            raise ValueError(
                f"{inside} is a metric object inside a module of the pipeline's chain, where one stage alone would"
                " update it; make it an attribute of the LightningModule and update it in the step."
            )
        self._module = module
        self._pipeline = pipeline
        self.runner = runner
        self._tracer = tracer
        self._data_mesh = data_mesh
        self._shared = shared
        self._context = context
        self._metrics = BatchMetrics(module)
        self._gradients: list[Tensor | None] = []
        self._batches: dict[str, int] = {}

    def train(
        self,
        batch: Any,
        rest: tuple[Any, ...],
        weight_of: WeightOf | None,
        loss_weights: LossWeights,
        scale: float,
        exchange: bool,
        device: torch.device,
    ) -> Any:
        """Runs forward and backward of a batch; its gradients wait for :meth:`add_gradients`.

        Args:
            batch: This data rank's batch, the same on every rank of the pipeline.
            rest: The other arguments of ``training_step``.
            weight_of: The module's ``loss_weight``, or None for the number of samples.
            loss_weights: What the batch's weight is added to.
            scale: Factor of every loss: the loss scale, divided by the accumulation window.
            exchange: Whether gradients are exchanged over the data ranks now.
            device: This rank's device.

        Returns:
            What ``training_step`` would have returned for the whole batch, without a graph, on every rank.
        """
        parts = self.runner.split(batch)
        weights = [weight_of(part) for part in parts.parts] if weight_of is not None else list(parts.sizes)
        loss_weights.add(sum(weights), device)
        scales = [loss_weights.factor(weight) * scale for weight in weights]
        recorder = LogRecorder(self._module, parts.sizes, weights, self.runner.has_last_stage)
        self._refuse(parts, "training_step", rest)
        step, parts = self._step("training_step", rest, recorder, parts)
        with new_gradients(list(self._module.parameters())) as self._gradients, self._running(recorder):
            outputs = self.runner.train(
                parts, step, scales=scales, step_index=self._count("train"), reduce_gradients=exchange
            )
        return self._everywhere(outputs, parts, weights, recorder)

    def evaluate(self, kind: str, method: str, batch: Any, rest: tuple[Any, ...], weight_of: WeightOf | None) -> Any:
        """Runs a batch forward and returns what the step would have returned for all of it, on every rank."""
        parts = self.runner.split(batch)
        weights = [weight_of(part) for part in parts.parts] if weight_of is not None else list(parts.sizes)
        recorder = LogRecorder(self._module, parts.sizes, weights, self.runner.has_last_stage)
        self._refuse(parts, method, rest)
        step, parts = self._step(method, rest, recorder, parts)
        with self._running(recorder):
            outputs = self.runner.evaluate(parts, step, kind=kind, step_index=self._count(kind))
        return self._everywhere(outputs, parts, weights, recorder)

    def add_gradients(self) -> None:
        """Adds the gradients of the last batch to the parameters, where Lightning expects backward to do it."""
        add_gradients(list(self._module.parameters()), self._gradients)
        self._gradients = []

    def complete_gradients(self) -> None:
        """At the end of a window: gradients of what several stages have, and FSDP2 does not, become whole.

        Collectives: those of :func:`~lightning_dist.parallel.pipeline.sharding.average_loose_gradients` over the data
        ranks and of :func:`~lightning_dist.parallel.pipeline.ownership.sum_shared_gradients` over the pipeline.
        """
        if self._data_mesh is not None and self._pipeline.loose_parameters:
            average_loose_gradients(self._pipeline, self._data_mesh)
        sum_shared_gradients(
            self._pipeline.ownership,
            dict(self._module.named_parameters()),
            self.runner.group,
            self.runner.control_group,
        )

    def holders(self, world_size: int) -> Callable[[Tensor], int]:
        """How many ranks of the world hold (a part of) a parameter."""
        ownership, ranks = self._pipeline.ownership, self._pipeline.plan.num_ranks
        several = {
            id(parameter): ownership.holders(name)
            for name, parameter in self._module.named_parameters()
            if ownership.holders(name) > 1
        }
        return lambda parameter: several.get(id(parameter), 1) * world_size // ranks

    def _step(
        self, method: str, rest: tuple[Any, ...], recorder: LogRecorder, parts: Microbatches
    ) -> tuple[Callable[[Any, int], Any], Microbatches]:
        """The user's step on a microbatch, and the microbatches it is to be given: under context parallelism this
        rank's part of their sequences, and the loss is that of the whole."""
        call, context = getattr(self._module, method), self._context
        if context is None:
            return partial(_recorded_step, call, rest, recorder), parts
        shares = [context.share(part) for part in parts.parts]

        def step(part: Any, microbatch: int) -> Any:
            return context.microbatch(
                partial(_recorded_step, call, rest, recorder, part, microbatch),
                shares[microbatch],
                training=method == "training_step",
                logs=self.runner.has_last_stage,
            )

        return step, replace(parts, parts=[context.cut(part) for part in parts.parts])

    @contextmanager
    def _running(self, recorder: LogRecorder) -> Generator[None, None, None]:
        before = self._module.__dict__.get("log")
        self._module.log = recorder  # type: ignore[assignment, method-assign]
        try:
            with (
                self._metrics.watch(),
                self._context.attention_of_stages(self.runner.control_group) if self._context else nullcontext(),
            ):
                yield
        finally:
            del self._module.__dict__["log"]
            if before is not None:
                self._module.log = before  # type: ignore[method-assign]

    def _refuse(self, parts: Microbatches, method: str, rest: tuple[Any, ...]) -> None:
        """Traces the first step of all on the copy without values; every rank traces the same and says the same."""
        if self._tracer is None:
            return
        tracer, self._tracer = self._tracer, None

        def step(module: Any, part: Any) -> Any:
            module.log = lambda *_, **__: None
            return getattr(module, method)(part, *rest)

        refusal = tracer.trace(step, parts.parts[0]).find_refusal(self._pipeline.plan, self._shared)
        if refusal is not None:
            raise PipelineError(refusal)

    def _everywhere(
        self,
        outputs: list[Any] | None,
        parts: Microbatches,
        weights: Sequence[Tensor | float],
        recorder: LogRecorder,
    ) -> Any:
        """Merges the microbatches' results on the rank with the last stage, and logs and returns them on all."""
        payload: Any = None
        if outputs is not None:
            logged = {
                name: {
                    "value": entry.value,
                    "metric": entry.metric,
                    "seen": self._metrics.value(self._metric(entry.metric)) if entry.metric else None,
                    "arguments": entry.arguments,
                }
                for name, entry in recorder.values().items()
            }
            payload = {
                "output": merge_outputs(outputs, parts.sizes, weights),
                "logged": logged,
                "metrics": self._metrics.changes(),
            }
        payload = self.runner.share(payload)
        if outputs is None:
            apply_changes(self._module, payload["metrics"])
        for name, entry in payload["logged"].items():
            value = entry["value"]
            if entry["metric"]:
                value = self._metric(entry["metric"])
                value._forward_cache = entry["seen"]
            self._module.log(name, value, **entry["arguments"])
        return payload["output"]

    def _metric(self, name: str) -> Any:
        return self._module.get_submodule(name)

    def _count(self, kind: str) -> int:
        """A running number of batches, from which random streams are made. In training it is the trainer's own."""
        if kind == "train":
            return int(self._module.trainer.fit_loop.epoch_loop.total_batch_idx)
        self._batches[kind] = self._batches.get(kind, -1) + 1
        return self._batches[kind]


def _recorded_step(
    call: Callable[..., Any], rest: tuple[Any, ...], recorder: LogRecorder, part: Any, microbatch: int
) -> Any:
    recorder.microbatch = microbatch
    return call(part, *rest)
