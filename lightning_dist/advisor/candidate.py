"""One way to run a model: a layout and how its memory and its step are treated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_dist.advisor.profile import Checkpointing
from lightning_dist.layout import ParallelLayout


@dataclass(frozen=True)
class Candidate:
    """A layout with everything that the prediction depends on.

    Args:
        layout: Resolved sizes.
        zero: 3 frees parameters after forward, 2 keeps them until backward, 0 does not shard.
        checkpointing: Activation checkpointing.
        schedule: Pipeline schedule; None without a pipeline.
        microbatches: Microbatches of a step on each data rank: of the pipeline, or accumulated one after the other.
        samples: Samples of a microbatch.
    """

    layout: ParallelLayout
    zero: int = 0
    checkpointing: Checkpointing = "none"
    schedule: str | None = None
    microbatches: int = 1
    samples: int = 1

    @property
    def kind(self) -> str:
        """The axes in use, in words: what rejections are grouped by."""
        layout = self.layout
        sizes = layout.sizes()
        if layout.world_size == 1:
            return "one device"
        words = []
        if sizes["tensor"] > 1:
            words.append("tensor")
        if sizes["context"] > 1:
            words.append("context")
        if sizes["pipeline"] > 1:
            words.append("pipeline")
        if layout.expert > 1:
            words.append("expert")
        if self.zero and words:
            words.append("shards")
        elif self.zero:
            words.append(f"ZeRO-{self.zero}" if sizes["replicate"] == 1 else f"HSDP (ZeRO-{self.zero})")
        elif sizes["replicate"] > 1:
            words.append("copies" if words else "plain DDP")
        return " x ".join(words)

    @property
    def num_axes(self) -> int:
        """How many axes are in use, experts included."""
        return sum(size > 1 for size in (*self.layout.sizes().values(), self.layout.expert))

    def strategy_arguments(self) -> dict[str, Any]:
        """What to pass to ``HybridParallelStrategy``."""
        arguments: dict[str, Any] = {
            "layout": str(self.layout),
            "activation_checkpointing": self.checkpointing,
        }
        if self.zero:
            arguments["reshard_after_forward"] = self.zero == 3
        if self.schedule is not None:
            arguments |= {"pipeline_schedule": self.schedule, "microbatches": self.microbatches}
        return arguments

    @property
    def accumulated_batches(self) -> int:
        """``Trainer(accumulate_grad_batches=…)``: without a pipeline microbatches are batches."""
        return 1 if self.schedule is not None else self.microbatches

    def describe(self) -> str:
        """The layout and its settings in one line."""
        settings = []
        if self.zero:
            settings.append(f"ZeRO-{self.zero}")
        if self.schedule is not None:
            settings.append(f"{self.schedule}, {self.microbatches} microbatches of {self.samples}")
        elif self.microbatches > 1:
            settings.append(f"{self.microbatches} accumulated batches of {self.samples}")
        else:
            settings.append(f"batch {self.samples}")
        if self.checkpointing != "none":
            settings.append(f"{self.checkpointing} checkpointing")
        return f"{self.layout} ({', '.join(settings)})"


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that holds the most, by what they are for.

    Args:
        parameters: This rank's shards, and what is not sharded.
        gradients: Sharded ones, and whole ones that accumulation keeps.
        optimizer: Optimizer state.
        activations: Kept until the backward by all microbatches in flight.
        working: What one layer needs while it runs, beside what it keeps.
        communication: Gathered parameters, and gradients on their way.
        casts: 16-bit copies of weights under autocast.
        pipeline_rank: The rank it is, counted from the first stage.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    working: float = 0.0
    communication: float = 0.0
    casts: float = 0.0
    pipeline_rank: int = 0

    @property
    def states(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.activations + self.working + self.communication + self.casts


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by what they go to; what is hidden behind computing is not in them.

    Args:
        compute: Computing, recomputation included.
        tensor: Sums over tensor ranks.
        context: Exchange of the sequence.
        expert: Tokens to experts and back.
        pipeline: Hidden states between stages.
        data: Parameters and gradients over data ranks, as far as computing does not hide them.
        bubble: Waiting for the pipeline to fill and drain.
        intra: Bytes that one device sends inside its node.
        inter: Bytes that one device sends to other nodes.
    """

    compute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    bubble: float = 0.0
    intra: float = 0.0
    inter: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        names = ("compute", "tensor", "context", "expert", "pipeline", "data", "bubble")
        return {name: getattr(self, name) for name in names}

    @property
    def bubble_share(self) -> float:
        return self.bubble / self.total if self.total else 0.0


@dataclass(frozen=True)
class Assumptions:
    """Factors on what is not known exactly; 1 is what was given or measured.

    Args:
        rate: On the floating-point rate.
        bandwidth: On both links.
        latency: On both links.
        overlap: The part of computing behind which exchange of parameters and gradients can hide.
    """

    rate: float = 1.0
    bandwidth: float = 1.0
    latency: float = 1.0
    overlap: float = 0.9


@dataclass(frozen=True)
class Estimate:
    """A candidate with what is predicted for it.

    Args:
        candidate: The layout and its settings.
        memory: Bytes of the fullest rank.
        time: Seconds of a step.
        low, high: Range of the step's seconds over the assumptions.
        dominating: The assumption that moves the step the most, in words.
    """

    candidate: Candidate
    memory: Memory
    time: StepTime
    low: float = 0.0
    high: float = 0.0
    dominating: str = ""
