"""Pipeline schedules as numbers: how long ranks idle, and how many microbatches they hold."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dist.parallel.pipeline.placement import SCHEDULES, Schedule, find_schedule


def idle_time(schedule: Schedule, ranks: int, forward: float, inputs: float, weights: float) -> float:
    """Seconds that a rank waits in one step for the pipeline to fill and drain.

    Args:
        schedule: The schedule.
        ranks: Pipeline ranks.
        forward: Seconds of one microbatch's forward through all stages of a rank.
        inputs: Seconds of the backward's part for inputs (and what it computes again).
        weights: Seconds of the backward's part for weights.

    Sources: GPipe and 1F1B (p - 1)(F + B + W); interleaving divides it by the stages of a rank (Narayanan et al.,
    2021); a split backward fills all but (p - 1)(F + B - W) (Qi et al., ZB-H1, 2023), divided likewise. What ZBV and
    DualPipeV leave in the order that torch lays down was measured by running that order on a clock, with F and W equal
    and B up to three times as long (as under full checkpointing), which is where the last terms come from.
    """
    between = ranks - 1
    chunks = schedule.stages_per_rank
    if not schedule.splits_backward:
        return between * (forward + inputs + weights) / chunks
    idle = between * max(forward + inputs - weights, 0.0) / chunks
    if schedule.name == "ZBVZeroBubble":
        return max(idle, between * (inputs - weights))
    if schedule.name == "DualPipeV":
        return max(idle, between * inputs - ranks / 2 * forward)
    return idle


def held_microbatches(schedule: Schedule, ranks: int, rank: int, microbatches: int) -> float:
    """How many microbatches' activations a rank holds at once, its stages together counted as one.

    ``rank`` counts from the one that holds stage 0.
    """
    if schedule.name == "GPipe":
        held = float(microbatches)
    elif schedule.name == "1F1B":
        held = float(ranks - rank)
    elif schedule.name == "Interleaved1F1B":
        chunks = schedule.stages_per_rank
        held = ((ranks - rank - 1) * 2 + (chunks - 1) * ranks + 1) / chunks
    elif schedule.name in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        held = float(ranks)
    else:
        held = ranks + 0.5
    return min(held, float(microbatches))


def refusal(schedule: Schedule, ranks: int, microbatches: int) -> str:
    """Why a schedule can't run with so many microbatches; empty if it can."""
    stages = ranks * schedule.stages_per_rank
    if schedule.name in ("1F1B", "DualPipeV") and microbatches < stages:
        return f"{schedule.name} needs at least {stages} microbatches, one for each stage; there are {microbatches}"
    if schedule.name != "GPipe" and microbatches < ranks:
        return f"{schedule.name} idles more than it works with {microbatches} microbatches on {ranks} ranks"
    if schedule.name.startswith("Interleaved"):
        rounds = max(1, microbatches // ranks)
        if microbatches % rounds:
            return f"{schedule.name} needs a multiple of its {rounds} rounds; {microbatches} microbatches are none"
    return ""


def candidates(names: Sequence[str] | None = None) -> list[Schedule]:
    """The schedules of those names; by default all but GPipe, which idles as long as 1F1B and holds more.

    Where 1F1B can't run for lack of microbatches, GPipe takes its turn, as in training.

    Raises:
        ValueError: If a name is none.
    """
    if names is None:
        names = [name for name in SCHEDULES if name != "GPipe"]
    return [find_schedule(name) for name in names]
