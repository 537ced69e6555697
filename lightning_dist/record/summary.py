"""A run's recorded numbers in short, and what became of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

COUNTED = ("step", "epoch", "time", "minutes", "evaluations", "evaluation", "devices")
"""What counts the run's course instead of measuring it."""


@dataclass(frozen=True)
class Series:
    """The values of one name, and the steps that they belong to.

    Args:
        name: The name.
        steps: The optimizer steps, in the order of time; a run that was restarted may go back.
        values: As many; not all need be finite.
    """

    name: str
    steps: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]

    def quantile(self, share: float) -> float | None:
        """Of the finite values; in proportion between the two around the place, None where there are none."""
        return quantile(self.finite, share)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.finite) if self.finite else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which a share of the values lies, in proportion between the two around the place."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def series_of(rows: Iterable[Mapping[str, float]]) -> dict[str, Series]:
    """The measured values of a run by name, in alphabetical order."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in COUNTED:
                points.setdefault(name, []).append((row["step"], value))
    return {
        name: Series(name, tuple(step for step, _ in own), tuple(value for _, value in own))
        for name, own in sorted(points.items())
    }
