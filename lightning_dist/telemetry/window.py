"""What one rank did in the last N steps, as a handful of numbers that fit one small exchange."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_dist.telemetry.clock import COMPUTE, WAITING, Phase, StepTimes
from lightning_dist.telemetry.collectives import GroupTraffic

GROUPS = ("data", "replicate", "shard", "tensor", "context", "pipeline", "expert", "tokens", "world", "control")
"""Mesh dimensions and other groups that are reported by name; the rest is ``"other"``."""
_SLOTS = (*GROUPS, "other")
_SCALARS = (
    "steps",
    "compute",
    "collecting",
    "run_delay",
    "elements",
    "tokens",
    "samples",
    "saves",
    "wait_low",
    "memory",
)


@dataclass(frozen=True)
class RankWindow:
    """One rank's last N steps.

    Args:
        steps: How many.
        seconds: Sum of each phase, in the order of :class:`Phase`.
        compute: Forward, backward and optimizer of a step, in seconds: the mean without its tenth of slowest steps,
            garbage collection taken out.
        collecting: Seconds of garbage collection.
        run_delay: Seconds that the process was ready to run while its core was given to others.
        elements, tokens, samples: Of all batches.
        saves: Number of checkpoints.
        wait_low: Exposed communication of a step that waited little (the lowest fifth), in seconds.
        memory: The most bytes in use.
        traffic: Seconds and bytes of each mesh dimension.
    """

    steps: int
    seconds: tuple[float, ...]
    compute: float = 0.0
    collecting: float = 0.0
    run_delay: float = 0.0
    elements: float = 0.0
    tokens: float = 0.0
    samples: float = 0.0
    saves: float = 0.0
    wait_low: float = 0.0
    memory: float = 0.0
    traffic: dict[str, GroupTraffic] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds)

    def per_step(self, *phases: Phase) -> float:
        """Seconds of some phases for each step."""
        return sum(self.seconds[phase] for phase in phases) / max(self.steps, 1)

    @property
    def waiting(self) -> float:
        """Seconds of a step in which this rank waited for others."""
        return self.per_step(*WAITING)

    def to_vector(self) -> Tensor:
        """float64 of shape [:func:`vector_size`]."""
        numbers = [float(getattr(self, name)) for name in _SCALARS]
        traffic = {name: GroupTraffic() for name in _SLOTS}
        for name, of_group in self.traffic.items():
            slot = traffic[name if name in GROUPS else "other"]
            slot.seconds += of_group.seconds
            slot.payload += of_group.payload
            slot.calls += of_group.calls
        for name in _SLOTS:
            numbers += [traffic[name].seconds, traffic[name].payload, float(traffic[name].calls)]
        return torch.tensor([*self.seconds, *numbers], dtype=torch.float64)

    @classmethod
    def from_vector(cls, vector: Sequence[float]) -> RankWindow:
        """The opposite of :meth:`to_vector`."""
        seconds, rest = tuple(vector[: len(Phase)]), vector[len(Phase) :]
        scalars: dict[str, Any] = dict(zip(_SCALARS, rest, strict=False))
        scalars["steps"] = round(scalars["steps"])
        rest = rest[len(_SCALARS) :]
        traffic = {}
        for place, name in enumerate(_SLOTS):
            waited, payload, calls = rest[3 * place : 3 * place + 3]
            if calls or waited:
                traffic[name] = GroupTraffic(waited, payload, round(calls))
        return cls(seconds=seconds, traffic=traffic, **scalars)


def vector_size() -> int:
    """Numbers of a window."""
    return len(Phase) + len(_SCALARS) + 3 * len(_SLOTS)


def summarise(
    steps: Sequence[StepTimes],
    collecting: dict[int, float],
    traffic: dict[str, GroupTraffic],
    **scalars: float,
) -> RankWindow:
    """Sums up a rank's steps.

    Args:
        steps: The steps.
        collecting: Seconds of garbage collection by step.
        traffic: Of each group.
        scalars: The other fields of :class:`RankWindow`.
    """
    if not steps:  # a GPU has not come so far yet
        return RankWindow(0, (0.0,) * len(Phase), traffic=traffic, **scalars)
    computing = sorted(sum(step.seconds[phase] for phase in COMPUTE) - collecting.get(step.step, 0.0) for step in steps)
    kept = computing[: max(1, len(computing) - len(computing) // 10)]
    waits = sorted(step.seconds[Phase.EXPOSED_COMM] for step in steps)
    return RankWindow(
        steps=len(steps),
        seconds=tuple(sum(column) for column in zip(*(step.seconds for step in steps), strict=True)),
        compute=fmean(kept),
        collecting=sum(collecting.values()),
        wait_low=waits[len(waits) // 5],
        traffic=traffic,
        **scalars,
    )


def quantile(sorted_values: Sequence[float], share: float) -> float:
    """The value that a share of a sorted list lies at or below, between two neighbours by line."""
    place = share * (len(sorted_values) - 1)
    low = int(place)
    high = min(low + 1, len(sorted_values) - 1)
    return sorted_values[low] + (place - low) * (sorted_values[high] - sorted_values[low])


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """p50, p90 and p99."""
    ordered = sorted(values)
    return {name: quantile(ordered, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}


class CollectionTimer:
    """Notes how long Python's garbage collection stops this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def install(self) -> None:
        """Begins; until :meth:`remove`."""
        if self._note not in gc.callbacks:
            gc.callbacks.append(self._note)

    def remove(self) -> None:
        """Ends."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def take(self) -> float:
        """Seconds since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    def _note(self, event: str, _: dict[str, int]) -> None:
        if event == "start":
            self._began = time.perf_counter()
        elif self._began:
            self.seconds += time.perf_counter() - self._began
            self._began = 0.0


def run_delay() -> float:
    """Seconds that this process's main thread was ready to run and did not get a core, since it began (Linux)."""
    try:
        with open("/proc/self/schedstat") as schedule:
            return int(schedule.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass(frozen=True)
class BatchSize:
    """How much a batch holds: samples (dimension 0), tokens (elements of its first integer matrix, else samples), and
    elements of all its tensors."""

    samples: int = 0
    tokens: int = 0
    elements: int = 0


def size_of(batch: Any) -> BatchSize:
    """Measures a batch by the shapes of its tensors."""
    tensors = [batch] if isinstance(batch, Tensor) else [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    with_samples = [tensor for tensor in tensors if tensor.dim() > 0]
    if not with_samples:
        return BatchSize()
    samples = with_samples[0].shape[0]
    tokens = next((x.numel() for x in with_samples if x.dim() > 1 and not x.is_floating_point()), samples)
    return BatchSize(samples, tokens, sum(tensor.numel() for tensor in with_samples))
