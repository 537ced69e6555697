"""Small networks and steps, each one unchanged by the pipeline."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    """Embedding, blocks, head; code in front of, between and behind them."""

    def __init__(self, blocks: int = 6, width: int = 8, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.1 * torch.randn(32, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        scale = 1.0 / ids.shape[1]
        x = self.embed(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, scale) * 1.1
        return self.head(x) * 0.5


class Wrapper(nn.Module):
    """Stands for the LightningModule: holds the network under ``model``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


CHAIN = ["model.embed", *(f"model.blocks.{index}" for index in range(6)), "model.head"]


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return Wrapper(Network()).double()


def language_step(module: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    ids, labels = batch
    logits = module.model(ids)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def token_batches(sizes: list[int], lengths: list[int] | None = None, vocabulary: int = 11) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    lengths = lengths or [5] * len(sizes)
    return [
        tuple(torch.randint(0, vocabulary, (size, length), generator=generator) for _ in range(2))
        for size, length in zip(sizes, lengths, strict=True)
    ]
