"""The random number generators of one rank, as a checkpoint keeps them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture_random_state() -> dict[str, Any]:
    """The states of torch's generators (CPU and this process's CUDA devices), NumPy's and Python's; plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, numbers, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else [],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss],
        "python": [version, list(numbers), gauss_next],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Puts back what :func:`capture_random_state` gave; CUDA's where as many devices are seen as then."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, numbers, gauss_next = state["python"]
    random.setstate((version, tuple(numbers), gauss_next))
