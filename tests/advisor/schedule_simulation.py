"""Runs the order of actions that torch's own schedules lay down, event by event, on a clock."""

from __future__ import annotations

from unittest.mock import MagicMock

from torch.distributed.pipelining import schedules

from lightning_dist.parallel.pipeline.placement import SCHEDULES, place_stages

FORWARD, INPUT, WEIGHT, FULL = "FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "FULL_BACKWARD"


def order_of(name: str, ranks: int, microbatches: int) -> dict[int, list]:
    """For each rank the actions of torch's schedule, stages numbered in calling order."""
    wanted = SCHEDULES[name]
    num_stages = ranks * wanted.stages_per_rank
    if name == "1F1B":
        return {rank: _one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks)}
    if name == "GPipe":
        every = range(microbatches)
        return {r: [*((r, FORWARD, i) for i in every), *((r, FULL, i) for i in every)] for r in range(ranks)}
    owners = place_stages(wanted.placement, ranks, num_stages)
    if wanted.placement == "loop":
        owners = [ranks - 1 - owner for owner in owners]  # torch's own numbering: stage 0 on rank 0
    stages = []
    for index in [stage for stage, owner in enumerate(owners) if owner == 0]:
        stage = MagicMock()
        stage.group_rank, stage.group_size, stage.num_stages, stage.stage_index = 0, ranks, num_stages, index
        stage.has_backward = True
        stages.append(stage)
    schedule = getattr(schedules, f"Schedule{name}")(stages, microbatches)
    plain = {}
    for rank, actions in schedule.pipeline_order.items():
        plain[rank] = []
        for action in actions:
            for part in (getattr(action, "sub_actions", None) or [action]) if action is not None else []:
                plain[rank].append((part.stage_index, part.computation_type.name, part.microbatch_index))
    return plain


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list:
    warmup = min(ranks - rank, microbatches)
    todo = [(rank, FORWARD, index) for index in range(warmup)]
    for index in range(microbatches):
        todo.append((rank, FULL, index))
        if warmup + index < microbatches:
            todo.append((rank, FORWARD, warmup + index))
    return todo


def simulate(name: str, ranks: int, microbatches: int, forward: float, inputs: float, weights: float):
    """Total seconds of a step, and the most microbatches that each rank holds (all its stages counted as one).

    The times are those of all stages of a rank together.
    """
    chunks = SCHEDULES[name].stages_per_rank
    seconds = {FORWARD: forward, INPUT: inputs, WEIGHT: weights, FULL: inputs + weights}
    order = order_of(name, ranks, microbatches)
    num_stages = ranks * chunks
    done: dict[tuple, float] = {}
    clock = dict.fromkeys(order, 0.0)
    position = dict.fromkeys(order, 0)
    held, most = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
    remaining = sum(map(len, order.values()))
    while remaining:
        progressed = False
        for rank, todo in order.items():
            while position[rank] < len(todo):
                stage, kind, index = todo[position[rank]]
                needs = []
                if kind == FORWARD and stage:
                    needs.append((stage - 1, FORWARD, index))
                if kind in (INPUT, FULL):
                    needs.append((stage, FORWARD, index))
                    if stage < num_stages - 1:
                        needs.append((stage + 1, INPUT, index))
                if kind == WEIGHT:
                    needs.append((stage, INPUT, index))
                if any(need not in done for need in needs):
                    break
                start = max([clock[rank], *(done[need] for need in needs)])
                clock[rank] = start + seconds[kind] / chunks
                done[stage, kind, index] = clock[rank]
                if kind == FULL:
                    done[stage, INPUT, index] = clock[rank]
                if kind == FORWARD:
                    held[rank] += 1
                    most[rank] = max(most[rank], held[rank])
                elif kind in (FULL, WEIGHT):
                    held[rank] -= 1
                position[rank] += 1
                remaining -= 1
                progressed = True
        if not progressed:
            raise RuntimeError(f"{name} waits for ever at {position}")
    return max(clock.values()), {rank: number / chunks for rank, number in most.items()}
