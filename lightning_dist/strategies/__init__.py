"""Lightning Strategy classes: thin translations of Lightning's hooks to what ``parallel`` and ``checkpoint`` do."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dist.parallel.adascale import AdaScale, ScaleInvariantSchedule
from lightning_dist.strategies.adascale_gain import AdaScaleGain
from lightning_dist.strategies.hybrid import HybridParallelStrategy
from lightning_dist.strategies.local_updates import LocalUpdateStrategy
from lightning_dist.strategies.precision import HybridMixedPrecision
from lightning_dist.strategies.sharded import FairScaleShardedStrategy

if "hybrid" not in StrategyRegistry:
    StrategyRegistry.register(
        "hybrid", HybridParallelStrategy, "Any mix of data, tensor, pipeline, context and expert parallelism"
    )
if "fairscale_sharded" not in StrategyRegistry:
    StrategyRegistry.register(
        "fairscale_sharded", FairScaleShardedStrategy, "FairScale's sharded optimizer and gradients (ZeRO-2)"
    )
if "local_update" not in StrategyRegistry:
    StrategyRegistry.register(
        "local_update",
        LocalUpdateStrategy,
        "Workers train alone and exchange model updates (local SGD, DiLoCo, FedAvg)",
    )

__all__ = [
    "AdaScale",
    "AdaScaleGain",
    "FairScaleShardedStrategy",
    "HybridMixedPrecision",
    "HybridParallelStrategy",
    "LocalUpdateStrategy",
    "ScaleInvariantSchedule",
]
