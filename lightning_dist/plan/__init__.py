"""Stage 1, partition: which module of the network goes where."""

from lightning_dist.plan.model_plan import ModelPlan, expand_names

__all__ = ["ModelPlan", "expand_names"]
