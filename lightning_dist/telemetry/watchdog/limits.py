"""How long a rank may stay where it is: what was set, or what the run itself has shown to be usual."""

from __future__ import annotations

from lightning_dist.telemetry.watchdog.heartbeat import Beat

FACTOR = 10.0
"""A learnt limit is this many times the longest time seen."""
LEARNT = {
    # kind: seconds until enough was seen, the least limit after that, and how often is enough
    "step": (600.0, 10.0, 300),
    "first_step": (1800.0, 1800.0, 1),
    "loader_start": (1200.0, 120.0, 2),
    "evaluation": (600.0, 20.0, 50),
    "checkpoint": (1800.0, 120.0, 4),
    "other": (600.0, 60.0, 50),
}
PATIENT = ("first_step", "loader_start", "checkpoint")
"""Kinds to which one number of seconds for all applies only where it is larger than ten minutes."""
PATIENCE = 600.0


def limit_of(beat: Beat) -> float:
    """Seconds that a rank may stay in what it is in."""
    if beat.limits.get(beat.kind, 0.0) > 0:
        return beat.limits[beat.kind]
    initial, least, enough = LEARNT[beat.kind]
    longest, seen = beat.longest.get(beat.kind, (0.0, 0))
    return initial if seen < enough else max(least, FACTOR * longest)


def limits_from(hang_timeout: object) -> dict[str, float]:
    """The limits by kind that a ``hang_timeout`` stands for; 0 where it is learnt.

    Raises:
        ValueError: If it is no positive number, ``"auto"``, or a dictionary of such by kind.
    """
    if hang_timeout == "auto":
        return dict.fromkeys(LEARNT, 0.0)
    if isinstance(hang_timeout, int | float) and not isinstance(hang_timeout, bool) and hang_timeout > 0:
        return {kind: max(hang_timeout, PATIENCE) if kind in PATIENT else float(hang_timeout) for kind in LEARNT}
    if isinstance(hang_timeout, dict) and hang_timeout.keys() <= LEARNT.keys():
        given = {kind: limits_from(value)["step"] for kind, value in hang_timeout.items()}
        return {kind: given.get(kind, 0.0) for kind in LEARNT}
    raise ValueError(
        f"hang_timeout={hang_timeout!r} does not fit: give seconds, 'auto', or a dictionary of them by kind:"
        f" {', '.join(LEARNT)}."
    )
