"""Checks that users run on their own modules: equal numbers under every layout, on a pool of warm worker processes."""

from lightning_dist.testing.parity import assert_parity, compare_with_one_process
from lightning_dist.testing.parity_report import Difference, ParityReport
from lightning_dist.testing.parity_run import FactoryError
from lightning_dist.testing.pool import WorkerError, WorkerPool
from lightning_dist.testing.worker import WorkerFailure

__all__ = [
    "Difference",
    "FactoryError",
    "ParityReport",
    "WorkerError",
    "WorkerFailure",
    "WorkerPool",
    "assert_parity",
    "compare_with_one_process",
]
