"""What a parity check found: both runs merged over ranks, side by side, with the largest relative differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_dist.layout import ParallelLayout
from lightning_dist.testing.parity_run import Held, Recording, Reference, RunSettings

_SMALL = 1e-2
"""A tensor's difference is relative to its largest value, or to this part of the largest of its kind if that is more:
values that are zero but for rounding (the gradient of an attention's key bias) are not held to their own noise."""


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of one quantity.

    Attributes:
        largest: max|layout - one process| / scale; infinite where one is missing or not finite.
        where: The step or the name of the tensor where it is.
    """

    largest: float
    where: str


@dataclass(frozen=True)
class ParityReport:
    """One process and a layout side by side.

    Attributes:
        layout: The layout in its short form.
        world_size: Its number of ranks.
        steps: Optimizer steps that were compared.
        precision: The Trainer's precision of both runs.
        tolerance: Largest relative difference that counts as the same.
        optimizers: Class names of the optimizers.
        losses: Per step, the loss of the whole global batch on one process and under the layout.
        gradient_norms: Per step, the 2-norm of all gradients before clipping, likewise.
        weights: Per full name, the final tensor, likewise.
        differences: Per quantity (loss, gradient norm, gradients of the first and last step, weights) the largest.
        worst_weights: Names of weights with their relative difference, largest first.
        problems: What made the runs incomparable, one sentence each; any of them makes the verdict "different".
        notes: What a reader must know, such as layers that a parity claim leaves out.
    """

    layout: str
    world_size: int
    steps: int
    precision: str
    tolerance: float
    optimizers: list[str]
    losses: list[tuple[float, float]]
    gradient_norms: list[tuple[float, float]]
    weights: dict[str, tuple[Tensor, Tensor]] = field(repr=False)
    differences: dict[str, Difference]
    worst_weights: list[tuple[str, float]]
    problems: list[str]
    notes: list[str]

    @property
    def same(self) -> bool:
        """Whether every quantity is within the tolerance."""
        return not self.problems and all(d.largest <= self.tolerance for d in self.differences.values())

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        who = f"layout {self.layout} ({self.world_size} rank{'s' if self.world_size != 1 else ''})"
        if self.problems:
            return f"DIFFERENT: {who} and one process cannot be equal. {self.problems[0]}"
        quantity, worst = max(self.differences.items(), key=lambda item: item[1].largest)
        at = f"largest relative difference {worst.largest:.1e} ({quantity}, {worst.where})"
        if self.same:
            return f"SAME: {who} trains like one process over {self.steps} steps; {at}, tolerance {self.tolerance:g}."
        return f"DIFFERENT: {who} does not train like one process; {at}, tolerance {self.tolerance:g}."


def compare(
    reference: Reference, recordings: list[Recording], layout: ParallelLayout, settings: RunSettings, tolerance: float
) -> ParityReport:
    """Merges what the layout's ranks recorded and puts it beside the one-process run."""
    one = reference.recording
    problems = _unequal_lengths(one, recordings)
    differences: dict[str, Difference] = {}

    losses = list(
        zip(
            _losses_by_step([one.losses], settings.accumulate_grad_batches),
            _losses_by_step(_losses_by_data_coordinate(recordings, layout), settings.accumulate_grad_batches),
            strict=False,
        )
    )
    norms_under_layout = _merged_norms(recordings, tolerance, problems)
    norms = [
        (_total_norm(ours, reference.parameter_names), _total_norm(theirs, reference.parameter_names))
        for ours, theirs in zip(one.gradient_norms, norms_under_layout, strict=False)
    ]
    for quantity, pairs in (("loss", losses), ("gradient norm", norms)):
        if pairs:
            by_step = step_differences(pairs)
            largest = max(by_step)
            differences[quantity] = Difference(largest, f"step {by_step.index(largest) + 1}")
    for step in one.gradients:
        ours = _merged([one.gradients[step]], f"the gradient at the {step}", problems)
        theirs = _merged([r.gradients.get(step, {}) for r in recordings], f"the gradient at the {step}", problems)
        differences[f"gradients of the {step}"] = _largest(relative_differences(ours, theirs, absent_is_zero=True))

    ours = _merged([one.weights], "the final value", problems)
    theirs = _merged([recording.weights for recording in recordings], "the final value", problems)
    weight_differences = relative_differences(ours, theirs, absent_is_zero=False)
    differences["weights"] = _largest(weight_differences)
    return ParityReport(
        layout=str(layout),
        world_size=layout.world_size,
        steps=len(one.gradient_norms),
        precision=settings.precision,
        tolerance=tolerance,
        optimizers=one.optimizers,
        losses=losses,
        gradient_norms=norms,
        weights={name: (ours[name], theirs[name]) for name in ours if name in theirs},
        differences=differences,
        worst_weights=weight_differences,
        problems=problems,
        notes=one.notes,
    )


def relative_differences(
    one_process: Mapping[str, Tensor], layout: Mapping[str, Tensor], absent_is_zero: bool
) -> list[tuple[str, float]]:
    """Per name max|difference| / max|one process|, largest first; see the note at `_SMALL` for small tensors.

    Args:
        one_process: Tensors of any dtype by name.
        layout: Likewise, of the same shapes.
        absent_is_zero: Whether a name that one side lacks counts as zeros, or as infinitely different.
    """
    floor = _SMALL * max((_largest_value(tensor) for tensor in one_process.values()), default=0.0)
    differences = []
    for name in {**one_process, **layout}:
        ours, theirs = one_process.get(name), layout.get(name)
        if ours is None or theirs is None:
            present = theirs if ours is None else ours
            assert present is not None
            ours, theirs = (torch.zeros_like(present) if t is None else t for t in (ours, theirs))
            if not absent_is_zero:
                differences.append((name, math.inf))
                continue
        differences.append((name, _relative_difference(ours, theirs, floor)))
    return sorted(differences, key=lambda item: -item[1])


def _relative_difference(ours: Tensor, theirs: Tensor, floor: float) -> float:
    if ours.shape != theirs.shape:
        return math.inf
    ours, theirs = ours.double(), theirs.double()
    finite = ours.isfinite() & theirs.isfinite()
    # An infinity on both sides is equal (a mask kept as a buffer); a NaN never is.
    if not torch.equal(ours[~finite], theirs[~finite]):
        return math.inf
    distance = _largest_value(ours[finite] - theirs[finite])
    return distance / max(_largest_value(ours), floor) if distance else 0.0


def _largest_value(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()].double()
    return float(finite.abs().max()) if finite.numel() else 0.0


def _largest(differences: list[tuple[str, float]]) -> Difference:
    name, largest = differences[0] if differences else ("nothing to compare", 0.0)
    return Difference(largest, name)


def step_differences(pairs: list[tuple[float, float]]) -> list[float]:
    """Per step the relative difference of a number on one process and under the layout."""
    ours, theirs = (
        {str(step): torch.tensor(pair[side], dtype=torch.float64) for step, pair in enumerate(pairs)} for side in (0, 1)
    )
    by_step = dict(relative_differences(ours, theirs, absent_is_zero=False))
    return [by_step[str(step)] for step in range(len(pairs))]


def _merged(held_by_rank: Iterable[Mapping[str, Held]], what: str, problems: list[str]) -> dict[str, Tensor]:
    """One tensor per name; notes ranks whose copies differ from the first rank's."""
    merged: dict[str, Tensor] = {}
    digests: dict[str, str] = {}
    for rank, held in enumerate(held_by_rank):
        others = [name for name, item in held.items() if digests.setdefault(name, item.digest) != item.digest]
        problems += _disagreement(rank, others, what)
        merged |= {name: item.tensor for name, item in held.items() if item.tensor is not None}
    return merged


def _merged_norms(recordings: list[Recording], tolerance: float, problems: list[str]) -> list[dict[str, float]]:
    merged = []
    for step, by_rank in enumerate(zip(*(recording.gradient_norms for recording in recordings), strict=False), 1):
        norms: dict[str, float] = {}
        for rank, own in enumerate(by_rank):
            noise = tolerance * max(own.values(), default=0.0)
            others = [name for name, norm in own.items() if abs(norms.setdefault(name, norm) - norm) > noise]
            problems += _disagreement(rank, others, f"the gradient at step {step}")
        merged.append(norms)
    return merged


def _disagreement(rank: int, names: list[str], what: str) -> list[str]:
    if not names:
        return []
    more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
    return [f"Rank {rank} holds another copy of {what} of {names[0]}{more} than a rank before it."]


def _total_norm(norms: Mapping[str, float], names: list[str]) -> float:
    return math.sqrt(sum(norms.get(name, 0.0) ** 2 for name in names))


def _losses_by_data_coordinate(
    recordings: list[Recording], layout: ParallelLayout
) -> list[list[tuple[float | None, float]]]:
    """For each part of the data, the losses of its first rank that has them."""
    chosen: dict[int, list[tuple[float | None, float]]] = {}
    for rank, recording in enumerate(recordings):
        coordinate = layout.data_coordinate(rank)
        if coordinate not in chosen or all(loss is None for loss, _ in chosen[coordinate]):
            chosen[coordinate] = recording.losses
    return list(chosen.values())


def _losses_by_step(parts: list[list[tuple[float | None, float]]], window: int) -> list[float]:
    """Sum(weight x loss) / sum(weight) over the parts of the data and the batches of each optimizer step."""
    losses = []
    batches = min(map(len, parts))
    for start in range(0, batches, window):
        entries = [entry for part in parts for entry in part[start : min(start + window, batches)]]
        if any(loss is None for loss, _ in entries):
            return []
        # A part of weight 0 has no say, whatever its loss is (a mean over nothing is NaN).
        weighted = [(loss, weight) for loss, weight in entries if loss is not None and weight]
        total = sum(weight for _, weight in weighted)
        losses.append(sum(loss * weight for loss, weight in weighted) / total if total else math.nan)
    return losses


def _unequal_lengths(one: Recording, recordings: list[Recording]) -> list[str]:
    problems = []
    for rank, recording in enumerate(recordings):
        counts = (len(recording.losses), len(recording.gradient_norms))
        expected = (len(one.losses), len(one.gradient_norms))
        if counts != expected:
            problems.append(
                f"Rank {rank} trained {counts[0]} batches in {counts[1]} optimizer steps,"
                f" one process {expected[0]} in {expected[1]}."
            )
    return problems
