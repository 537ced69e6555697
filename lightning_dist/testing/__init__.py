"""Checks that users run on their own modules: equal numbers under every layout, on a pool of warm worker processes."""

from lightning_dist.testing.pool import WorkerError, WorkerPool

__all__ = ["WorkerError", "WorkerPool"]
