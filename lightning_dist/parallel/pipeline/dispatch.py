"""A call of a chain module while a stage runs: compute, pass on what arrived, or stop and hand over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_dist.parallel.pipeline.foreign import PipelineError, first_foreign
from lightning_dist.parallel.pipeline.placement import PipelinePlan
from lightning_dist.parallel.pipeline.random_streams import RandomStreams


class StageBoundary(BaseException):
    """Carries the output of a stage's last module out of the user's step. No ``except Exception`` stops it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class StandIns(Protocol):
    """Makes what stands for the output of the chain module at a position of an earlier stage."""

    def __call__(self, position: int) -> Any: ...


@dataclass
class StageRun:
    """One microbatch on its way through one stage.

    Args:
        stage: The stage that runs.
        first: Where in the chain its first module stands.
        last: Where its last module stands.
        is_last_stage: Whether the step runs to its end.
        microbatch: Its index in the batch.
        received: The output of the module in front of ``first``.
        stand_ins: Stands for the outputs of the modules before that.
        observe: Called with the position and output of each of the stage's modules; may return another output.
    """

    stage: int
    first: int
    last: int
    is_last_stage: bool
    microbatch: int
    received: Any
    stand_ins: StandIns
    observe: Callable[[int, Any], Any] | None = None
    position: int = field(default=-1, init=False)


class ChainDispatcher:
    """Stands in every chain module's call on one rank and knows which stage is running.

    Args:
        plan: Stages and ranks.
        rank: This pipeline rank.
        global_ranks: The global rank of each pipeline rank, for errors.
    """

    def __init__(self, plan: PipelinePlan, rank: int, global_ranks: Sequence[int]) -> None:
        self.plan = plan
        self.rank = rank
        self.streams: RandomStreams | None = None
        self.run: StageRun | None = None
        self.computing = False
        self._owners = [f"stage {stage} on rank {global_ranks[plan.rank_of_stage[stage]]}" for stage in plan.stage_of]
        self._local = [plan.rank_of_stage[stage] == rank for stage in plan.stage_of]

    def owner(self, position: int) -> str:
        """Who has the chain module at ``position``, in words."""
        return self._owners[position]

    def is_local(self, position: int) -> bool:
        """Whether this rank has the chain module at ``position``."""
        return self._local[position]

    def refuse_forward(self, position: int) -> NoReturn:
        """Answers a direct call of another rank's module's ``forward``, which `call` never sees."""
        raise PipelineError(
            f"{self.plan.chain[position]}.forward is called directly, which the pipeline can't see; call the module"
            f" itself. It belongs to {self._owners[position]}."
        )

    def call(self, position: int, compute: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """What a call of the chain module at ``position`` does now. ``compute`` is the module's own call."""
        run = self.run
        name = self.plan.chain[position]
        if run is None:
            if self._local[position]:
                return compute(*args, **kwargs)
            raise PipelineError(
                f"{name} was called outside a step, but it belongs to {self._owners[position]}; under a pipeline the"
                " network as a whole runs only inside training_step, validation_step, test_step and predict_step."
            )
        self._check_order(run, position)
        run.position = position
        if self.plan.stage_of[position] < run.stage:
            output = run.received if position == run.first - 1 else run.stand_ins(position)
        else:
            self._refuse_foreign(args, kwargs, name)
            if self.streams is not None:
                self.streams.enter_module(run.microbatch, position)
            self.computing = True
            try:
                output = compute(*args, **kwargs)
            finally:
                self.computing = False
            self._refuse_foreign(output, None, name)
            if run.observe is not None:
                output = run.observe(position, output)
            if position == run.last and not run.is_last_stage:
                _refuse_checkpoint_without_graph(name)
                raise StageBoundary(output)
        if self.streams is not None:
            self.streams.leave_module(run.microbatch, position)
        return output

    def _check_order(self, run: StageRun, position: int) -> None:
        if position == run.position + 1:
            return
        chain = self.plan.chain
        if position <= run.position:
            raise PipelineError(
                f"The pipeline's chain module {chain[position]} is called more than once, or after"
                f" {chain[run.position]}, in one step; each module of the chain must be called once, in the order of"
                " ModelPlan.pipeline. Leave such a module's parts out of the chain or wrap them in one module."
            )
        raise PipelineError(
            f"The pipeline's chain module {chain[run.position + 1]} is not called before {chain[position]}; each module"
            " of the chain must be called once in every step, in the order of ModelPlan.pipeline."
        )

    def _refuse_foreign(self, args: Any, kwargs: Any, name: str) -> None:
        found = first_foreign((args, kwargs))
        if found is not None:
            position = self.plan.chain.index(found.origin)
            raise PipelineError(
                f"The output of {found.origin} ({self._owners[position]}) reaches {name}"
                f" ({self._owners[self.plan.chain.index(name)]}) by another way than through the chain (a skip"
                " connection or an encoder's output across a cut); put both on one stage by writing the stages by"
                " hand in ModelPlan.pipeline, or hand it on inside the hidden state (a tuple of tensors)."
            )


class Dispatcher(Protocol):
    """What can stand in a chain module's call."""

    def is_local(self, position: int) -> bool: ...

    def refuse_forward(self, position: int) -> NoReturn: ...

    def call(self, position: int, compute: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any: ...


def install(module: nn.Module, position: int, dispatcher: Dispatcher) -> None:
    """Puts ``dispatcher`` into every call of ``module``.

    The module stays the same object; its class is replaced by a subclass of the same name, as FSDP2 does, because
    Python looks ``__call__`` up on the class and hooks of another stage's module must not run.
    """
    base: Any = type(module)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return dispatcher.call(position, super(staged, self).__call__, args, kwargs)  # type: ignore[arg-type]

    members: dict[str, Any] = {
        "__call__": __call__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    if not dispatcher.is_local(position):
        members["forward"] = lambda self, *args, **kwargs: dispatcher.refuse_forward(position)
    staged: Any = type(base.__name__, (base,), members)
    module.__class__ = staged


def _refuse_checkpoint_without_graph(name: str) -> None:
    """Re-entrant checkpointing attaches a graph only to what it returns, when the stage has already left."""
    if torch.is_grad_enabled():
        return
    frame = sys._getframe(2)
    while frame is not None:
        if (
            frame.f_code.co_filename.endswith("torch/utils/checkpoint.py")
            and "CheckpointFunction" in frame.f_code.co_qualname
        ):
            raise PipelineError(
                f"{name}, the last module of a stage, is called inside torch.utils.checkpoint with use_reentrant=True,"
                " which gives its output a graph only after the stage has left; use use_reentrant=False."
            )
        frame = frame.f_back  # type: ignore[assignment]


def flatten_boundary(value: Any, name: str) -> tuple[list[Tensor], list[Any], Any]:
    """Splits a module's output into its tensors, a template with None in their places, and its structure.

    Raises:
        PipelineError: If a part of it can't be sent to another rank.
    """
    leaves, structure = pytree.tree_flatten(value)
    tensors: list[Tensor] = []
    template: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.is_nested or leaf.layout != torch.strided or type(leaf) not in (Tensor, nn.Parameter):
                kind = (
                    "nested" if leaf.is_nested else type(leaf).__name__ if leaf.layout == torch.strided else leaf.layout
                )
                raise PipelineError(
                    f"The output of {name} crosses a cut of the pipeline and holds a tensor of kind {kind}, which can't"
                    " be sent; let the module return plain tensors (nn.TransformerEncoder: enable_nested_tensor=False;"
                    " tensor parallel: use_local_output=True)."
                )
            tensors.append(leaf)
            template.append(_TENSOR)
        elif leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | torch.Size):
            template.append(leaf)
        else:
            raise PipelineError(
                f"The output of {name} crosses a cut of the pipeline and holds a {type(leaf).__name__}, which can't be"
                " sent; let the module return tensors in tuples, lists or dictionaries, or register the class with"
                " torch.utils._pytree."
            )
    return tensors, template, structure


def unflatten_boundary(tensors: Sequence[Tensor], template: Sequence[Any], structure: Any) -> Any:
    """The inverse of `flatten_boundary`."""
    rest = iter(tensors)
    leaves = [next(rest) if isinstance(entry, _Tensor) else entry for entry in template]
    return pytree.tree_unflatten(leaves, structure)


@dataclass(frozen=True)
class _Tensor:
    """Marks a tensor's place in a template; equal to every other such mark, after pickling too."""


_TENSOR = _Tensor()
