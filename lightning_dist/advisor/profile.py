"""What the advisor knows about a model: sizes and work of each module of its chain, for one sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Amount:
    """A quantity, split by what tensor parallelism does with it: left whole on every rank, or cut."""

    whole: float = 0.0
    cut: float = 0.0

    @property
    def total(self) -> float:
        return self.whole + self.cut

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.whole + other.whole, self.cut + other.cut)

    def over(self, size: int) -> float:
        """The share of one of ``size`` tensor ranks."""
        return self.whole + self.cut / size


@dataclass(frozen=True)
class LayerProfile:
    """One module of the chain, or a sum of some. Activations, work and messages are those of one sample.

    Args:
        parameters: Elements, without those of experts.
        trainable: Of these, elements that get a gradient.
        experts: Elements of experts.
        trainable_experts: Of these, elements that get a gradient.
        forward: Floating-point operations of the forward.
        backward: Those of the backward.
        operations: Kernels of the forward.
        saved: Bytes kept for the backward without checkpointing.
        kept: Bytes kept under selective checkpointing.
        received: Bytes of the inputs: what full checkpointing keeps.
        largest: Bytes of the largest tensor that an operation makes.
        sent: Bytes of the output, which a pipeline hands on.
        cast: Elements of weights of which mixed precision keeps a 16-bit copy.
        reduced: Bytes summed over tensor ranks in forward; ``reductions`` is in how many calls.
        reduced_backward: Bytes summed over tensor ranks in backward; ``reductions_backward`` in how many calls.
        gathered: Bytes gathered over tensor ranks in forward.
        query: Bytes of attention's queries; ``key_value`` of its keys and values; ``attentions`` how many there are.
        routed: Bytes of tokens on their way to experts, one direction; ``routers`` how many there are.
        cost: What pipeline stages are balanced by; 0 balances by operations.
        unit: Whether FSDP2 gathers it by itself; what is none stays gathered.
    """

    name: str = ""
    parameters: Amount = field(default_factory=Amount)
    trainable: Amount = field(default_factory=Amount)
    experts: Amount = field(default_factory=Amount)
    trainable_experts: Amount = field(default_factory=Amount)
    forward: Amount = field(default_factory=Amount)
    backward: Amount = field(default_factory=Amount)
    saved: Amount = field(default_factory=Amount)
    kept: Amount = field(default_factory=Amount)
    received: Amount = field(default_factory=Amount)
    largest: Amount = field(default_factory=Amount)
    cast: Amount = field(default_factory=Amount)
    operations: float = 0.0
    sent: float = 0.0
    reduced: float = 0.0
    reductions: float = 0.0
    reduced_backward: float = 0.0
    reductions_backward: float = 0.0
    gathered: float = 0.0
    query: float = 0.0
    key_value: float = 0.0
    attentions: float = 0.0
    routed: float = 0.0
    routers: float = 0.0
    cost: float = 0.0
    unit: bool = True

    def activations(self, mode: Checkpointing) -> Amount:
        """Bytes of one sample that stay until the backward under a checkpointing mode."""
        return {"none": self.saved, "selective": self.kept, "full": self.received}[mode]


_SUMMED = [entry.name for entry in fields(LayerProfile) if entry.name not in ("name", "largest", "sent", "unit")]


def combine(layers: Iterable[LayerProfile]) -> LayerProfile:
    """The sum of some layers in order: one stage. Its output is the last one's, its largest tensor the largest."""
    layers = list(layers)
    if not layers:
        return LayerProfile()
    sums = {}
    for name in _SUMMED:
        values = [getattr(layer, name) for layer in layers]
        sums[name] = sum(values[1:], values[0])
    largest = max((layer.largest for layer in layers), key=lambda amount: amount.total)
    return LayerProfile(largest=largest, sent=layers[-1].sent, **sums)


@dataclass(frozen=True)
class Precision:
    """Bytes of one element, by what it is for.

    Args:
        name: What it is called.
        parameter: Of a parameter as the optimizer sees it.
        gradient: Of a gradient.
        gather: As FSDP2 gathers parameters.
        reduce: As gradients are reduced.
        cast: Of the copy of a weight that autocast makes; 0 without autocast.
    """

    name: str
    parameter: float
    gradient: float
    gather: float
    reduce: float
    cast: float = 0.0


PRECISIONS = {
    "64-true": Precision("64-true", 8, 8, 8, 8),
    "32-true": Precision("32-true", 4, 4, 4, 4),
    "bf16-true": Precision("bf16-true", 2, 2, 2, 2),
    "16-true": Precision("16-true", 2, 2, 2, 2),
    "bf16-mixed": Precision("bf16-mixed", 4, 4, 4, 4, 2),
    "16-mixed": Precision("16-mixed", 4, 4, 4, 4, 2),
    # FSDP2's own mixed precision, as torchtitan and Llama 3 use it: float32 shards, bf16 gathered, float32 reduced.
    "bf16-gathered": Precision("bf16-gathered", 4, 4, 2, 4),
}


@dataclass(frozen=True)
class ModelProfile:
    """A model as the advisor sees it.

    Args:
        name: Class of the module.
        layers: The modules of the chain in order, then what runs behind the last one (the loss).
        outside: What belongs to none of them; every pipeline stage has it.
        samples: Samples of the batch that was traced; None if there was none.
        optimizer_bytes: Bytes of optimizer state for each trainable element.
        precision: Bytes of elements.
        refused: Axes (``tensor``, ``context``, ``pipeline``, ``expert``) that the module can't have, and why.
        refused_tensor_sizes: Tensor sizes that do not fit, and why; others were not asked.
        query_heads: Attention heads, which limit exchanging heads for sequence; 0 if unknown.
        key_value_heads: Heads of keys and values.
        num_experts: Experts of each layer that has some; 0 if there are none.
        unknown: Why activations and work are not known; empty if they are.
        sequence_parallel: Whether hidden states between blocks are cut over tensor ranks, see
            :func:`with_sequence_parallel`.
        notes: What was assumed on the way.
    """

    name: str
    layers: tuple[LayerProfile, ...]
    outside: LayerProfile = field(default_factory=LayerProfile)
    samples: int | None = None
    optimizer_bytes: float = 8.0
    precision: Precision = PRECISIONS["32-true"]
    refused: Mapping[str, str] = field(default_factory=dict)
    refused_tensor_sizes: Mapping[int, str] = field(default_factory=dict)
    query_heads: int = 0
    key_value_heads: int = 0
    num_experts: int = 0
    unknown: str = ""
    sequence_parallel: bool = False
    notes: tuple[str, ...] = ()

    @property
    def chain_length(self) -> int:
        """Modules that a pipeline can cut between; what runs behind the last one goes with it."""
        return sum(1 for layer in self.layers if layer.name)

    @property
    def whole(self) -> LayerProfile:
        return combine([*self.layers, self.outside])

    @property
    def num_parameters(self) -> float:
        return self.whole.parameters.total + self.whole.experts.total

    @property
    def num_trainable(self) -> float:
        return self.whole.trainable.total + self.whole.trainable_experts.total


def with_sequence_parallel(profile: ModelProfile) -> ModelProfile:
    """The same model with the activations of its units cut along the sequence over tensor ranks, between matrices too.

    The messages are the same: a sum becomes a scatter and a gather of as many bytes.
    """

    def cut(layer: LayerProfile) -> LayerProfile:
        return replace(
            layer,
            saved=Amount(cut=layer.saved.total),
            kept=Amount(cut=layer.kept.total),
            received=Amount(cut=layer.received.total),
            largest=Amount(cut=layer.largest.total),
        )

    layers = tuple(cut(layer) if layer.name and layer.unit else layer for layer in profile.layers)
    return replace(profile, layers=layers, sequence_parallel=True)
