"""The newest telemetry values of this process, by the names that stop rules and pages use."""

from __future__ import annotations

_values: dict[str, float] = {}


def publish(name: str, value: float) -> None:
    """Makes a value the newest of its name.

    Args:
        name: Such as ``"goodput"``; shares and ratios are in [0, 1], times in seconds, memory in bytes.
        value: A number on the host: this never reads from a device.
    """
    _values[name] = float(value)


def published() -> dict[str, float]:
    """A copy of all newest values, by name."""
    return dict(_values)


def forget_published() -> None:
    """Removes all values: a new run begins in this process."""
    _values.clear()
