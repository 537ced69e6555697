"""Settings of the whole test session and the one pool of worker processes that its tests share."""

import os
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

from lightning_dist.testing import WorkerPool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """``pool.run(function, world_size, *args)``: the function's result on every rank, see `WorkerPool`."""
    with WorkerPool() as workers:
        yield workers
