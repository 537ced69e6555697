"""One step traced on tensors without values, to see before anything runs what a pipeline could not do exactly.

Every rank traces the same step of the same whole module, so every rank finds the same and says the same sentence.
What can't be traced (a step that reads values) is still seen while it runs, by `foreign` and `dispatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_dist import _compat
from lightning_dist.parallel.pipeline.dispatch import install
from lightning_dist.parallel.pipeline.foreign import READS, PipelineError, is_metadata, writes
from lightning_dist.parallel.pipeline.guards import no_gradients_by_hand
from lightning_dist.parallel.pipeline.placement import PipelinePlan


@dataclass
class Trace:
    """What one step did with the modules of the chain.

    Args:
        chain: The chain's module names.
        calls: Positions in the chain, in the order they were called.
        uses: (module whose output was used, by which module; the chain's length stands for the step's result).
        reads: (module whose output's value was read into Python or written into another tensor, how many modules had
            been called before that, by what).
        parameters: Full names of chain modules' parameters that code outside them used.
        flops: Floating-point operations of each module's forward.
        refusal: What the step did that no pipeline can do.
        incomplete: Why the trace ended early, if it did.
    """

    chain: tuple[str, ...]
    calls: list[int] = field(default_factory=list)
    uses: set[tuple[int, int]] = field(default_factory=set)
    reads: set[tuple[int, int, str]] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    flops: dict[int, int] = field(default_factory=dict)
    refusal: str | None = None
    incomplete: str | None = None

    def find_refusal(self, plan: PipelinePlan, shared: Iterable[str] = ()) -> str | None:
        """The first thing that ``plan`` can't do exactly, as a sentence, or None.

        Args:
            plan: Stages and ranks.
            shared: Parameters that every stage has.
        """
        if plan.num_stages == 1:
            return None
        if self.refusal is not None:
            return self.refusal
        chain = self.chain
        for place, position in enumerate(self.calls):
            if position in self.calls[:place]:
                return (
                    f"The pipeline's chain module {chain[position]} is called more than once in one step; each module"
                    " of the chain must be called once. Wrap the calls in one module, or leave it out of the chain."
                )
            if position != place:
                order = ", ".join(chain[call] for call in self.calls[: place + 1])
                return (
                    f"The step calls the pipeline's chain modules in another order than the chain's: {order}; write"
                    " them in calling order in ModelPlan.pipeline, every one of them called in every step."
                )
        if self.incomplete is None and len(self.calls) < len(chain):
            return (
                f"The step does not call {chain[len(self.calls)]} of the pipeline's chain; each module of the chain"
                " must be called once in every step. Leave it out of ModelPlan.pipeline."
            )
        for origin, user in sorted(self.uses, key=lambda use: (use[1], use[0])):
            if not self._has(plan, origin, user):
                what = "the step's result" if user == len(chain) else chain[user]
                return (
                    f"The output of {chain[origin]} (stage {plan.stage_of[origin]}) reaches {what} (stage"
                    f" {self._stage(plan, user)}) by another way than through the chain: a skip connection, or an"
                    " encoder's output, across a cut of the pipeline. Put both on one stage (ModelPlan.pipeline as one"
                    " list for each stage), or hand it on inside the hidden state, as a tuple of tensors."
                )
        for origin, called, name in sorted(self.reads):
            running = range(self._stage(plan, called), plan.num_stages)
            if not all(self._stage_has(plan, origin, stage) for stage in running):
                return (
                    f"The values of a tensor made from the output of {chain[origin]} are read on the host, or written"
                    f" into another tensor ({name}), between modules of the pipeline's chain, which later stages run"
                    " without having them; do this inside a chain module."
                )
        missing = sorted(self.parameters - set(shared))
        if missing:
            return (
                f"{missing[0]} is used directly, outside its module, which only one stage of the pipeline can do; name"
                " it in ModelPlan.shared so that every stage has it."
            )
        return None

    def _stage(self, plan: PipelinePlan, user: int) -> int:
        return plan.stage_of[user] if user < len(plan.chain) else plan.num_stages - 1

    def _has(self, plan: PipelinePlan, origin: int, user: int) -> bool:
        return self._stage_has(plan, origin, self._stage(plan, user))

    def _stage_has(self, plan: PipelinePlan, origin: int, stage: int) -> bool:
        """Whether ``stage`` has the true output of ``origin``: its own module's, or the one that it receives."""
        return plan.stage_of[origin] == stage or origin == plan.positions_of(stage)[0] - 1


class Tracer:
    """Keeps a copy of a module without values, to be traced when the first batch comes.

    Args:
        module: The whole module, before the pipeline is attached to it. It is not changed.
        chain: The chain's module names.
        keep: Objects that the copy shares with the module (its Trainer).
    """

    def __init__(self, module: nn.Module, chain: Sequence[str], keep: Iterable[object] = ()) -> None:
        self._chain = tuple(chain)
        self._mode = _compat.fake_mode()
        self._incomplete: str | None = None
        self._copy: nn.Module | None = None
        try:
            self._copy = _compat.fake_copy(module, self._mode, keep)
        except Exception as error:  # whatever a user's attributes raise when they are copied
            self._incomplete = f"the module can't be copied: {type(error).__name__}: {error}"

    def trace(self, step: Callable[[Any, Any], Any], microbatch: Any) -> Trace:
        """Runs ``step(copy of the module, microbatch)`` without values."""
        trace = Trace(self._chain, incomplete=self._incomplete)
        if self._copy is None:
            return trace
        recorder = _Recorder(self._copy, trace)
        for position, name in enumerate(self._chain):
            install(self._copy.get_submodule(name), position, recorder)
        try:
            with (
                torch.enable_grad(),
                torch.random.fork_rng(devices=[]),
                self._mode,
                FlopCounterMode(display=False) as flops,
            ):
                recorder.flops = flops
                fake = pytree.tree_map(
                    lambda leaf: self._mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, microbatch
                )
                with recorder, no_gradients_by_hand(lambda: recorder.inside):
                    result = step(self._copy, fake)
                recorder.use(result, len(self._chain))
        except PipelineError as error:
            trace.refusal = str(error)
        except Exception as error:  # a step that reads values, or an operation without a fake
            trace.incomplete = f"{type(error).__name__}: {error}"
        return trace


class _Recorder(TorchFunctionMode):
    """Follows the outputs of chain modules through the code between them."""

    flops: FlopCounterMode

    def __init__(self, module: nn.Module, trace: Trace) -> None:
        super().__init__()
        self.inside = False
        self._trace = trace
        self._origins: Any = WeakIdKeyDictionary()
        self._parameters: Any = WeakIdKeyDictionary()
        for name in trace.chain:
            for inner, parameter in module.get_submodule(name).named_parameters():
                self._parameters[parameter] = f"{name}.{inner}"
        links = tuple(f"{name}." for name in trace.chain)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if not name.startswith(links):
                self._parameters.pop(parameter, None)  # every stage has it anyway

    def is_local(self, position: int) -> bool:
        return True

    def refuse_forward(self, position: int) -> NoReturn:
        raise AssertionError("every module is local to a trace")

    def call(self, position: int, compute: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """What a call of the chain module at ``position`` does while the step is traced."""
        if self.inside:
            return compute(*args, **kwargs)
        self.use((args, kwargs), position)
        self._trace.calls.append(position)
        before = self.flops.get_total_flops()
        self.inside = True
        try:
            output = compute(*args, **kwargs)
        finally:
            self.inside = False
        self._trace.flops[position] = self.flops.get_total_flops() - before
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._origins[leaf] = frozenset({position})
        return output

    def use(self, values: Any, user: int) -> None:
        for origin in self._origins_of(values):
            self._trace.uses.add((origin, user))

    def _origins_of(self, values: Any) -> frozenset[int]:
        found = [self._origins.get(leaf) for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
        return frozenset().union(*(origins for origins in found if origins))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.inside or is_metadata(func):
            return func(*args, **kwargs)
        origins = self._origins_of((args, kwargs))
        name = getattr(func, "__name__", "")
        changed = [kwargs.get("out", args[0])] if writes(name, kwargs) and args else []
        into_other = any(isinstance(leaf, Tensor) and not self._origins.get(leaf) for leaf in changed)
        if name in READS or into_other:
            self._trace.reads.update((origin, len(self._trace.calls), name) for origin in origins)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter) and leaf in self._parameters:
                self._trace.parameters.add(self._parameters[leaf])
        result = func(*args, **kwargs)
        if origins:
            for leaf in (*pytree.tree_leaves(result), *changed):
                if isinstance(leaf, Tensor):
                    self._origins[leaf] = self._origins.get(leaf, frozenset()) | origins
        return result
