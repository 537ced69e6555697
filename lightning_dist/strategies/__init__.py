"""Lightning Strategy classes: thin translations of Lightning's hooks to what ``parallel`` and ``checkpoint`` do."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dist.strategies.hybrid import HybridParallelStrategy
from lightning_dist.strategies.precision import HybridMixedPrecision

if "hybrid" not in StrategyRegistry:
    StrategyRegistry.register(
        "hybrid", HybridParallelStrategy, "Any mix of data, tensor, pipeline, context and expert parallelism"
    )

__all__ = ["HybridMixedPrecision", "HybridParallelStrategy"]
