"""Which workers take part in a round."""

from __future__ import annotations

from collections.abc import Callable

import torch

Participation = float | Callable[[int, int], bool]
"""The share of workers drawn for each round, or ``function(round, worker)``, asked for a worker by itself only."""


def takes_part(participation: Participation, round_number: int, worker: int, workers: int, seed: int) -> bool:
    """Whether a worker trains in a round and sends its update.

    Args:
        participation: As the strategy got it. A share draws ``max(1, round(share * workers))`` workers.
        round_number: From 0 on.
        worker: Its rank.
        workers: How many there are.
        seed: The same on all workers.
    """
    if callable(participation):
        return bool(participation(round_number, worker))
    if participation == 1.0:
        return True
    generator = torch.Generator().manual_seed((seed + 1_000_003 * round_number) % 2**63)
    drawn = torch.randperm(workers, generator=generator)[: max(1, round(participation * workers))]
    return worker in drawn.tolist()
