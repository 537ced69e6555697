"""Hybrid-parallel training strategies and callbacks for PyTorch Lightning."""

from lightning_dist.layout import ParallelLayout
from lightning_dist.plan import ModelPlan

__version__ = "0.1.0"

__all__ = ["ModelPlan", "ParallelLayout", "__version__"]
