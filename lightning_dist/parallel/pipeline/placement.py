"""Which stage a chain module belongs to, and which pipeline rank runs which stage under a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """What a schedule of ``torch.distributed.pipelining`` asks of the stages.

    Args:
        name: torch's name, without the prefix ``Schedule``.
        stages_per_rank: How many stages each rank holds unless told otherwise.
        fixed_stages: Whether that number can't be changed.
        placement: ``"loop"``: stage i on rank i modulo ranks; ``"v"``: forth and back again.
        splits_backward: Whether it computes the gradients of inputs and of weights at different times.
    """

    name: str
    stages_per_rank: int
    fixed_stages: bool
    placement: Literal["loop", "v"]
    splits_backward: bool


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("GPipe", 1, True, "loop", False),
        Schedule("1F1B", 1, True, "loop", False),
        Schedule("Interleaved1F1B", 2, False, "loop", False),
        Schedule("InterleavedZeroBubble", 2, False, "loop", True),
        Schedule("ZBVZeroBubble", 2, True, "v", True),
        Schedule("DualPipeV", 2, True, "v", True),
    )
}


def find_schedule(name: str) -> Schedule:
    """The schedule of that name, whatever its case.

    Raises:
        ValueError: If there is none; names all.
    """
    for schedule in SCHEDULES.values():
        if schedule.name.lower() == name.lower():
            return schedule
    raise ValueError(f"pipeline_schedule={name!r} is no schedule; there are {', '.join(SCHEDULES)}.")


def place_stages(placement: Literal["loop", "v"], num_ranks: int, num_stages: int) -> list[int]:
    """The pipeline rank of each stage, with the last stage on pipeline rank 0.

    Code behind the network that asks for rank zero runs where the last stage is, so that is where rank zero should
    be. A V ends where it begins, on rank 0; a loop is laid backwards: stage 0 on the highest rank.
    """
    if num_stages % num_ranks or (placement == "v" and num_stages != 2 * num_ranks):
        wanted = f"{2 * num_ranks}" if placement == "v" else f"a multiple of {num_ranks}"
        raise ValueError(f"{num_stages} stages do not fit {num_ranks} pipeline ranks: give {wanted}.")
    if placement == "v":
        return [min(stage, num_stages - 1 - stage) for stage in range(num_stages)]
    return [num_ranks - 1 - stage % num_ranks for stage in range(num_stages)]


def balance_stages(costs: Sequence[float], num_stages: int) -> list[int]:
    """The number of consecutive modules in each stage such that the costliest stage is as cheap as can be.

    Among such divisions the one with the smallest sum of squares is taken, so that the other stages are even too.

    Args:
        costs: Cost of each module of the chain, in any unit.
        num_stages: Number of stages, each of which gets at least one module.

    Raises:
        ValueError: If the chain is shorter than the number of stages.
    """
    count = len(costs)
    if count < num_stages:
        raise ValueError(
            f"The pipeline's chain has {count} module{'s' if count != 1 else ''}, fewer than its {num_stages} stages;"
            " name more modules in ModelPlan.pipeline, or use fewer pipeline ranks or stages for each rank."
        )
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[modules] = (costliest stage, sum of squares, sizes) of the first `modules` modules in the stages so far
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        left = num_stages - 1 - stage
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage + 1, count - left + 1):
            following[end] = min(
                (
                    max(worst, before[end] - before[start]),
                    squares + (before[end] - before[start]) ** 2,
                    (*sizes, end - start),
                )
                for start, (worst, squares, sizes) in best.items()
                if start < end
            )
        best = following
    return list(best[count][2])


@dataclass(frozen=True)
class PipelinePlan:
    """The chain of modules, the stage of each, and the pipeline rank of each stage.

    Args:
        chain: Full module names in calling order.
        stage_of: The stage of each module of the chain, from 0, never falling.
        rank_of_stage: The pipeline rank that runs each stage.
        schedule: The schedule that was asked for.
    """

    chain: tuple[str, ...]
    stage_of: tuple[int, ...]
    rank_of_stage: tuple[int, ...]
    schedule: Schedule

    @cached_property
    def _positions(self) -> list[list[int]]:
        return [
            [position for position, owner in enumerate(self.stage_of) if owner == stage]
            for stage in range(self.num_stages)
        ]

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of_stage) + 1

    @property
    def last_rank(self) -> int:
        """The pipeline rank of the last stage, where losses and outputs are."""
        return self.rank_of_stage[-1]

    def stages_of(self, rank: int) -> list[int]:
        """The stages that pipeline rank ``rank`` runs, in ascending order."""
        return [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]

    def positions_of(self, stage: int) -> list[int]:
        """Where in the chain the modules of ``stage`` stand."""
        return self._positions[stage]

    def modules_of(self, stage: int) -> list[str]:
        return [self.chain[position] for position in self.positions_of(stage)]

    def describe(self) -> str:
        """One line for each stage: its rank and its modules."""
        return "\n".join(
            f"stage {stage} (pipeline rank {rank}): {', '.join(self.modules_of(stage))}"
            for stage, rank in enumerate(self.rank_of_stage)
        )


def plan_pipeline(
    chain: Sequence[str],
    num_ranks: int,
    schedule: str = "1F1B",
    *,
    costs: Sequence[float] | None = None,
    sizes: Sequence[int] | None = None,
    stages_per_rank: int | None = None,
) -> PipelinePlan:
    """Gives each module of the chain a stage and each stage a rank; arithmetic only.

    Args:
        chain: Full module names in calling order.
        num_ranks: Pipeline ranks.
        schedule: Name of the schedule.
        costs: Cost of each module, to balance by; None counts modules. Not used where ``sizes`` is given.
        sizes: Number of modules in each stage, by hand.
        stages_per_rank: For the interleaved schedules; None is the schedule's own number, or what ``sizes`` says.

    Raises:
        ValueError: If the chain is too short, or the sizes do not fit the chain, the ranks or the schedule.
    """
    wanted = find_schedule(schedule)
    if sizes is not None:
        num_stages = len(sizes)
        if sum(sizes) != len(chain) or min(sizes) < 1:
            raise ValueError(
                f"The pipeline's stages {list(sizes)} do not fit its chain of {len(chain)} modules: each stage needs at"
                " least one module, and they must add up."
            )
        per_rank, rest = divmod(num_stages, num_ranks)
        if rest or per_rank < 1 or (wanted.fixed_stages and per_rank != wanted.stages_per_rank):
            fits = wanted.stages_per_rank * num_ranks
            raise ValueError(
                f"ModelPlan.pipeline has {num_stages} stages, but {wanted.name} on {num_ranks} pipeline ranks needs"
                f" {fits if wanted.fixed_stages else f'a multiple of {num_ranks}'}."
            )
    else:
        per_rank = stages_per_rank or wanted.stages_per_rank
        if wanted.fixed_stages and per_rank != wanted.stages_per_rank:
            raise ValueError(
                f"{wanted.name} runs {wanted.stages_per_rank} stage{'s' * (wanted.stages_per_rank > 1)} on each rank,"
                f" not {per_rank}."
            )
        num_stages = per_rank * num_ranks
        sizes = balance_stages(costs if costs is not None else [1.0] * len(chain), num_stages)
    stage_of = tuple(stage for stage, size in enumerate(sizes) for _ in range(size))
    ranks = tuple(place_stages(wanted.placement, num_ranks, num_stages))
    return PipelinePlan(tuple(chain), stage_of, ranks, wanted)


def fit_microbatches(plan: PipelinePlan, wanted: int, samples: int) -> tuple[str, int]:
    """The schedule and the number of microbatches that a batch can be run with.

    No microbatch is empty. The interleaved schedules need a multiple of their number of rounds, so some microbatches
    become larger. 1F1B and DualPipeV refuse fewer microbatches than stages; then GPipe and ZBVZeroBubble, which hold
    the same stages in the same places, take their turn. None of this changes the result.

    Args:
        plan: The stages.
        wanted: Number of microbatches asked for.
        samples: Number of samples in the batch.
    """
    name = plan.schedule.name
    number = max(1, min(wanted, samples))
    if name.startswith("Interleaved"):
        while number % max(1, number // plan.num_ranks):
            number -= 1
    if number < plan.num_stages:
        name = {"1F1B": "GPipe", "DualPipeV": "ZBVZeroBubble"}.get(name, name)
    return name, number


def choose_microbatches(plan: PipelinePlan, samples: int) -> int:
    """A number of microbatches for a batch: about four for each pipeline rank, equal ones where possible.

    With ``r`` ranks and ``m`` microbatches a simple schedule idles for (r - 1) / (m + r - 1) of the time: 16 % at
    m = 4 r with many ranks; more microbatches make each too small to be computed well.
    """
    most = min(samples, 4 * plan.num_ranks)
    for number in range(most, max(most // 2, 1) - 1, -1):
        if samples % number == 0 and fit_microbatches(plan, number, samples)[1] == number:
            return number
    return most
