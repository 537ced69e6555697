"""What crosses from one stage to the next: shapes are told once for each kind of microbatch, tensors every time."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.parallel.pipeline.dispatch import flatten_boundary, unflatten_boundary
from lightning_dist.parallel.pipeline.foreign import ForeignActivation, PipelineError

MOST_SIGNATURES = 256
"""How many kinds of microbatch (structure, shapes, types) are remembered; each costs some kB, and no tensors."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape, type and differentiability of a tensor; tensors are sent contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


@dataclass(frozen=True)
class OutputSpec:
    """A module's output without its values.

    Args:
        tensors: Its tensors.
        template: Its leaves, with marks in the places of tensors.
        structure: How the leaves are nested.
    """

    tensors: tuple[TensorSpec, ...]
    template: tuple[Any, ...]
    structure: Any

    @staticmethod
    def of(value: Any, name: str) -> tuple[OutputSpec, list[Tensor]]:
        tensors, template, structure = flatten_boundary(value, name)
        return OutputSpec(tuple(map(TensorSpec.of, tensors)), tuple(template), structure), tensors

    def stand_in(self, origin: str, device: torch.device) -> Any:
        """What stands for such an output on a stage that does not have it."""
        tensors = [ForeignActivation.stand_for(origin, spec.shape, spec.dtype, device) for spec in self.tensors]
        return unflatten_boundary(tensors, self.template, self.structure)


@dataclass(frozen=True)
class BoundarySpec:
    """What a stage hands over, and the outputs of all modules up to there, which later stages need stand-ins for.

    Args:
        output: The output of the stage's last module.
        earlier: For each position of the chain up to that module, its output; None if it can't be described.
    """

    output: OutputSpec
    earlier: tuple[OutputSpec | None, ...]


class BoundaryBook:
    """What this rank knows about the boundaries of its stages, for each kind of microbatch.

    The first microbatch of a new kind is preceded, from stage to stage, by a header that describes it; so shapes
    never have to be inferred by running the user's code once more, and every microbatch may have its own. All ranks
    see the same batches, so they forget the same kinds.

    Collectives: for each new kind of microbatch, two point-to-point messages on ``group`` at each cut between ranks.

    Args:
        group: A CPU group of the pipeline's ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._known: OrderedDict[Any, dict[int, BoundarySpec]] = OrderedDict()
        self._kinds: list[Any] = []
        self._unannounced: set[tuple[int, int]] = set()
        self._sending: list[tuple[dist.Work | None, Tensor]] = []

    def begin(self, kinds: Sequence[Any]) -> None:
        """Starts a batch whose microbatches are of these kinds."""
        self._kinds = list(kinds)
        for kind in dict.fromkeys(kinds):
            self._known.setdefault(kind, {})
            self._known.move_to_end(kind)
        while len(self._known) > max(MOST_SIGNATURES, len(set(kinds))):
            self._known.popitem(last=False)

    def end(self) -> None:
        """Ends the batch: every header has been taken."""
        for work, _ in self._sending:
            if work is not None:
                work.wait()
        self._sending.clear()

    def forget(self) -> None:
        """Forgets everything, after an error."""
        self._known.clear()
        self._unannounced.clear()
        self._sending.clear()

    def kind(self, microbatch: int) -> Any:
        """What kind of microbatch it is."""
        return self._kinds[microbatch]

    def knows(self, stage: int, microbatch: int) -> bool:
        return stage in self._known[self._kinds[microbatch]]

    def outgoing(self, stage: int, microbatch: int) -> BoundarySpec:
        """What this rank's ``stage`` hands over."""
        return self._known[self._kinds[microbatch]][stage]

    def record(self, stage: int, microbatch: int, spec: BoundarySpec) -> None:
        """Notes what ``stage`` hands over for the first microbatch of its kind; it is announced with the tensors."""
        self._known[self._kinds[microbatch]][stage] = spec
        self._unannounced.add((stage, microbatch))

    def check(self, stage: int, microbatch: int, output: OutputSpec, name: str) -> None:
        """Raises if a later microbatch of a kind is handed over in another shape than the first.

        Raises:
            PipelineError: Naming both.
        """
        known = self.outgoing(stage, microbatch).output
        if known != output:
            raise PipelineError(
                f"The output of {name} was {_describe(known)} for one microbatch and is {_describe(output)} for another"
                " of the same shapes; under a pipeline it may depend on the shapes of the batch, not on its values."
            )

    def announce(self, stage: int, microbatch: int, group_rank: int) -> None:
        """Sends the header of what ``stage`` hands over, if it is the first of its kind."""
        if (stage, microbatch) not in self._unannounced:
            return
        self._unannounced.discard((stage, microbatch))
        payload = torch.frombuffer(bytearray(pickle.dumps(self.outgoing(stage, microbatch))), dtype=torch.uint8)
        for message in (torch.tensor([payload.numel()]), payload):
            work = dist.isend(message, group=self._group, group_dst=group_rank, tag=stage + 1)
            self._sending.append((work, message))

    def incoming(self, stage: int, microbatch: int, group_rank: int) -> BoundarySpec:
        """What ``stage`` of another rank hands over, received from there if it is the first of its kind."""
        known = self._known[self._kinds[microbatch]]
        if stage not in known:
            size = torch.empty(1, dtype=torch.int64)
            dist.recv(size, group=self._group, group_src=group_rank, tag=stage + 1)
            payload = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(payload, group=self._group, group_src=group_rank, tag=stage + 1)
            known[stage] = pickle.loads(payload.numpy().tobytes())
        return known[stage]


def _describe(output: OutputSpec) -> str:
    tensors = ", ".join(f"{list(spec.shape)} {spec.dtype}" for spec in output.tensors)
    return f"({tensors}{' with a gradient' if any(spec.requires_grad for spec in output.tensors) else ''})"
