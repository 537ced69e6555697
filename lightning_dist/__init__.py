"""Hybrid-parallel training strategies and callbacks for PyTorch Lightning.

Importing the package registers ``Trainer(strategy="hybrid")``.
"""

from lightning_dist.layout import ParallelLayout
from lightning_dist.plan import ModelPlan
from lightning_dist.strategies import HybridParallelStrategy

__version__ = "0.1.0"

__all__ = ["HybridParallelStrategy", "ModelPlan", "ParallelLayout", "__version__"]
