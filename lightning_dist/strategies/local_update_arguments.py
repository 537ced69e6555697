"""What ``LocalUpdateStrategy`` accepts: every argument is checked here, before any process or group exists."""

from __future__ import annotations

import math
from typing import Any


def check_arguments(
    inner_steps: Any,
    weight_by: Any,
    compression: Any,
    clip_update: Any,
    noise_multiplier: Any,
    participation: Any,
) -> None:
    """Raises ValueError, naming argument, value and what fits; the arguments are those of the strategy."""
    if not isinstance(inner_steps, int) or isinstance(inner_steps, bool) or inner_steps < 1:
        raise ValueError(f"inner_steps={inner_steps!r} does not fit: give a whole number of at least 1.")
    for name, value, choices in (
        ("weight_by", weight_by, ("samples", "equal")),
        ("compression", compression, ("none", "bf16", "int8")),
    ):
        if value not in choices:
            raise ValueError(f"{name}={value!r} does not fit: give one of {', '.join(map(repr, choices))}.")
    for name, value in (("clip_update", clip_update), ("noise_multiplier", noise_multiplier)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value!r} does not fit: give a positive number or None.")
    if noise_multiplier is not None and clip_update is None:
        raise ValueError(
            f"noise_multiplier={noise_multiplier} does not fit clip_update=None: noise is in multiples of the largest"
            " norm that an update may have; give clip_update."
        )
    if noise_multiplier is not None and weight_by != "equal":
        raise ValueError(
            f"noise_multiplier={noise_multiplier} does not fit weight_by={weight_by!r}: what a worker counts would tell"
            " how much data it has, and the noise would not be in proportion; give weight_by='equal'."
        )
    if not callable(participation) and not (isinstance(participation, int | float) and 0 < participation <= 1):
        raise ValueError(
            f"participation={participation!r} does not fit: give a share of the workers above 0 and at most 1, or"
            " function(round, worker) -> bool."
        )
