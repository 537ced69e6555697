"""The one flag exchange of a run, shared by all callbacks of this package."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_dist.parallel.flag_exchange import FlagExchange

_exchanges: WeakKeyDictionary[Trainer, FlagExchange] = WeakKeyDictionary()


def flags_of(trainer: Trainer) -> FlagExchange:
    """The trainer's exchange, made when it is first asked for, on all ranks alike (a callback's ``setup``).

    Collectives: makes a CPU group, the first time.
    """
    if trainer not in _exchanges:
        group = dist.new_group(backend="gloo") if trainer.world_size > 1 else None
        _exchanges[trainer] = FlagExchange(group)
    return _exchanges[trainer]
