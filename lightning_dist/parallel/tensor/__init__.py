"""Tensor and sequence parallelism: each rank holds and computes a part of every layer."""

from lightning_dist.parallel.tensor.apply import TensorParallelReport, apply_tensor_parallel
from lightning_dist.parallel.tensor.loss import sharded_loss
from lightning_dist.parallel.tensor.replicas import check_replicas, sum_replicated_gradients
from lightning_dist.parallel.tensor.resolve import STYLES

__all__ = [
    "STYLES",
    "TensorParallelReport",
    "apply_tensor_parallel",
    "check_replicas",
    "sharded_loss",
    "sum_replicated_gradients",
]
