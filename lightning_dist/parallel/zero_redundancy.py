"""torch's ``ZeroRedundancyOptimizer``, for where FairScale can't be imported.

Imported only there: torch compiles functional optimizers when its module is imported, which takes a second.
"""

from __future__ import annotations

from functools import partial

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from lightning_dist.parallel.optimizer_shards import ClosureFirst, local_part


class ZeroRedundancy(ClosureFirst, ZeroRedundancyOptimizer):
    """torch's optimizer-state sharding around an optimizer that exists already; gradients are DDP's to reduce.

    Collectives: in ``step``, a broadcast of each parameter.

    Args:
        optimizer: The optimizer to shard. It keeps its groups and, of its state, this rank's part.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer_class=partial(local_part, optimizer))  # type: ignore[arg-type, call-arg]
        self.defaults = optimizer.defaults
