"""Numbers as people read them."""

from __future__ import annotations


def gigabytes(number: float) -> str:
    """Bytes with a decimal unit and three figures."""
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g} {unit}" if abs(number / size) < 1000 else f"{number / size:.0f} {unit}"
    return f"{number:.0f} B"


def seconds(number: float) -> str:
    """Seconds with a unit and three figures."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(number) >= size:
            return f"{number / size:.3g} {unit}" if abs(number / size) < 1000 else f"{number / size:.0f} {unit}"
    return f"{number * 1e6:.3g} µs"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
