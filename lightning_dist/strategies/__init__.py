"""Lightning Strategy classes: thin translations of Lightning's hooks to what ``parallel`` and ``checkpoint`` do."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dist.strategies.hybrid import HybridParallelStrategy
from lightning_dist.strategies.precision import HybridMixedPrecision

if "hybrid" not in StrategyRegistry:
    StrategyRegistry.register("hybrid", HybridParallelStrategy, HybridParallelStrategy.__doc__.splitlines()[0])

__all__ = ["HybridMixedPrecision", "HybridParallelStrategy"]
