"""Limits to what an update tells of its worker's data: a bounded norm, and noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def clip_update(update: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Scales an update down to a norm of at most ``limit``, over all its tensors together, computed in float64."""
    norm = torch.stack([tensor.double().square().sum() for tensor in update]).sum().sqrt()
    factor = (limit / norm).clamp(max=1.0)
    return [tensor * factor.to(tensor.dtype) for tensor in update]


def add_noise(update: Sequence[Tensor], deviation: float, generator: torch.Generator) -> list[Tensor]:
    """Adds Gaussian noise to each number of an update.

    Args:
        update: Tensors on any device; noise is drawn on the generator's.
        deviation: The standard deviation.
        generator: Seeded with what nobody else knows.
    """
    return [
        tensor
        + deviation
        * torch.randn(tensor.shape, dtype=tensor.dtype, device=generator.device, generator=generator).to(tensor.device)
        for tensor in update
    ]
