"""Lightning's steps on context ranks: each sees its part of every sequence, and the loss is that of the whole."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.parallel.context import (
    NO_ATTENTION,
    ContextParallel,
    combine_loss,
    combine_value,
    context_attention,
    cut_batch,
    loss_share,
    prepare_network,
    sum_context_gradients,
)
from lightning_dist.plan import ModelPlan


def prepare_context(network: nn.Module, plan: ModelPlan | None, mesh: DeviceMesh) -> ContextParallel:
    """Lets the network attend over the ranks of the context axis; once for each network, before it is sharded.

    Raises:
        ValueError: If the plan does not say in ``sequence_dims`` what is cut.
    """
    if plan is None or not plan.sequence_dims:
        raise ValueError(
            f"context_parallel_size={mesh['context'].size()} needs ModelPlan.sequence_dims: the entries of a batch"
            " that are cut along the sequence, for example ModelPlan(sequence_dims={'input_ids': 1, 'labels': 1});"
            " give it as plan=, or return it from the module's parallel_plan()."
        )
    context = ContextParallel(mesh)
    tensor_size = mesh["tensor"].size() if "tensor" in (mesh.mesh_dim_names or ()) else 1
    prepare_network(network, context, tensor_parallel_size=tensor_size)
    return context


class ContextSteps:
    """Runs a module's steps on this rank's part of the sequences.

    Numbers that a step logs become those of the whole sequences: means weighted by the ranks' targets, or what
    ``reduce_fx`` says. Metric objects gather the ranks' tokens when they are computed.

    Args:
        module: The module, whose ``log`` is met.
        context: The ranks that share each sequence.
        sequence_dims: The entries of a batch that are cut, and along which dimension.
    """

    def __init__(self, module: LightningModule, context: ContextParallel, sequence_dims: Mapping[str, int]) -> None:
        self._module = module
        self._context = context
        self._sequence_dims = sequence_dims
        self._stages_checked = False

    def train(self, step: Callable[..., Any], batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """Runs a training step on this rank's tokens; the loss it returns is that of the whole sequences.

        Collectives: those of attention, and one all-reduce of a scalar over the context group, one more for each
        number that is logged.
        """
        share = self.share(batch)
        return self._combine(self._run(step, batch, share, *rest, **kwargs), share)

    def evaluate(self, step: Callable[..., Any], batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """Runs a step on this rank's tokens; what it returns is this rank's, what it logs is of the whole sequences."""
        return self._run(step, batch, self.share(batch), *rest, **kwargs)

    def _run(self, step: Callable[..., Any], batch: Any, share: Tensor, *rest: Any, **kwargs: Any) -> Any:
        self._context.loss_combined = False
        with context_attention(self._context), self._whole_numbers_logged(share):
            return step(self.cut(batch), *rest, **kwargs)

    def microbatch(self, step: Callable[[], Any], share: Tensor, *, training: bool, logs: bool) -> Any:
        """Runs a stage's step on a microbatch that has been cut; a training step's loss is that of whole sequences.

        Args:
            step: Runs the step.
            share: Of the whole microbatch.
            training: Whether the step returns a loss.
            logs: Whether what is logged on this rank counts.
        """
        self._context.loss_combined = False
        with self._whole_numbers_logged(share) if logs else nullcontext():
            output = step()
        return self._combine(output, share) if training else output

    def cut(self, batch: Any) -> Any:
        """This rank's part of the sequences of a batch."""
        return cut_batch(batch, self._sequence_dims, self._context)

    def share(self, batch: Any) -> Tensor:
        """Which part of the loss of a whole batch this rank's loss is."""
        return loss_share(batch, self._sequence_dims, self._context)

    def _combine(self, output: Any, share: Tensor) -> Any:
        if isinstance(output, dict):
            return {**output, "loss": combine_loss(output["loss"], share, self._context)}
        return combine_loss(output, share, self._context) if isinstance(output, Tensor) else output

    @contextmanager
    def _whole_numbers_logged(self, share: Tensor) -> Generator[None, None, None]:
        before = self._module.__dict__.get("log")
        self._module.log = partial(self._log, self._module.log, share)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._module.__dict__["log"]
            if before is not None:
                self._module.log = before  # type: ignore[method-assign]

    def _log(self, log: Callable[..., None], share: Tensor, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        reduce_fx = kwargs.get("reduce_fx", "mean")
        how = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
        if isinstance(value, int | float) or (type(value) is Tensor and value.numel() == 1):
            own = torch.as_tensor(value, device=share.device)
            value = combine_value(own, share, self._context, how if how in ("sum", "max", "min") else "mean")
        log(name, value, *args, **kwargs)

    @contextmanager
    def attention_of_stages(self, control_group: dist.ProcessGroup) -> Generator[None, None, None]:
        """Around all microbatches of a pipeline, forward and backward; a stage may have no attention of its own.

        Collectives: for the first batch, an all-reduce of a number over the pipeline's CPU group.
        """
        with context_attention(self._context):
            yield
            seen = torch.tensor(self._context.attentions)
            self._context.attentions += 1
        if not self._stages_checked:
            self._stages_checked = True
            dist.all_reduce(seen, group=control_group)
            if not seen:
                raise RuntimeError(NO_ATTENTION)

    @contextmanager
    def backward_attention(self) -> Generator[None, None, None]:
        """Around backward: a checkpointed forward is computed again there, and calls attention."""
        with context_attention(self._context):
            yield
            self._context.attentions += 1  # Without checkpointing nobody calls it here, and that is right.

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """At the end of a window: gradients become those of the whole sequences; see ``sum_context_gradients``."""
        sum_context_gradients(parameters, self._context)
