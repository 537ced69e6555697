"""What ``HybridParallelStrategy`` accepts: every argument is checked here, before any process or group exists."""

from __future__ import annotations

import datetime
from typing import Any

from lightning_dist import _compat
from lightning_dist.layout import ParallelLayout
from lightning_dist.parallel.pipeline.placement import find_schedule

AUTO = "auto"


def choose_layout(sizes: ParallelLayout, layout: str | ParallelLayout | None) -> ParallelLayout:
    """The layout from its sizes or from its short form, of which one may be given; ``"auto"`` is decided later."""
    if layout is None or (layout == AUTO and sizes == ParallelLayout()):
        return sizes
    if sizes != ParallelLayout():
        raise ValueError(f"layout={layout!r} was given beside sizes ({sizes}); give one or the other.")
    return ParallelLayout.parse(layout) if isinstance(layout, str) else layout


def check_arguments(
    sizes: ParallelLayout,
    *,
    pipeline_schedule: str,
    microbatches: Any,
    reshard_after_forward: Any,
    activation_checkpointing: str,
    batch_check: str,
    gradient_norm_type: float,
) -> None:
    """Raises ValueError, naming argument, value and what fits; the arguments are those of the strategy."""
    schedule = find_schedule(pipeline_schedule)
    if microbatches != "auto" and (not _whole(microbatches) or microbatches < 1):
        raise ValueError(f"microbatches={microbatches!r} does not fit: give a whole number of at least 1, or 'auto'.")
    if sizes.pipeline > 1 and activation_checkpointing == "selective" and schedule.splits_backward:
        raise ValueError(
            f"activation_checkpointing='selective' does not fit pipeline_schedule={pipeline_schedule!r}: torch"
            " computes a selectively checkpointed region again once only, and this schedule goes backward in two"
            " parts; use 'full' or 'none', or one of GPipe, 1F1B, Interleaved1F1B."
        )
    if sizes.pipeline > 1 and reshard_after_forward is not False and reshard_after_forward != "auto":
        if schedule.splits_backward:
            raise ValueError(
                f"reshard_after_forward={reshard_after_forward!r} does not fit pipeline_schedule="
                f"{pipeline_schedule!r}: torch computes wrong gradients when parameters are freed before a backward"
                " that is split in two; use 'auto' or False, or one of GPipe, 1F1B, Interleaved1F1B."
            )
        if reshard_after_forward is not True:
            raise ValueError(
                f"reshard_after_forward={reshard_after_forward!r} does not fit a pipeline; give 'auto', False or True."
            )
    _one_of("activation_checkpointing", activation_checkpointing, ("none", "full", "selective"))
    _one_of("batch_check", batch_check, ("first", "always", "broadcast", "off"))
    if not (isinstance(reshard_after_forward, bool | int) or reshard_after_forward == "auto"):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward!r} does not fit: True, False, a number, 'auto'."
        )
    if not gradient_norm_type > 0:
        raise ValueError(f"gradient_norm_type={gradient_norm_type!r} does not fit: give a positive number or inf.")


def as_timedelta(timeout: datetime.timedelta | float | None) -> datetime.timedelta:
    """A limit given as a timedelta or in seconds; None is torch's own."""
    if timeout is None:
        return _compat.default_timeout()
    if not isinstance(timeout, datetime.timedelta):
        timeout = datetime.timedelta(seconds=timeout)
    if timeout <= datetime.timedelta(0):
        raise ValueError(f"timeout={timeout} does not fit: give a positive timedelta or number of seconds.")
    return timeout


def _whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _one_of(argument: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{argument}={value!r} does not fit: give one of {', '.join(map(repr, choices))}.")
