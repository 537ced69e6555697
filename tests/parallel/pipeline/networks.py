"""Small networks and steps, each one unchanged by the pipeline."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.parallel.pipeline import PipelinePlan, placement, plan_pipeline
from lightning_dist.parallel.pipeline.placement import find_schedule


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


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride != 1 or channels != out
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResidualNetwork(nn.Module):
    """Built like torchvision's ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(ResidualBlock(4, 4), ResidualBlock(4, 4))
        self.layer2 = nn.Sequential(ResidualBlock(4, 8, 2), ResidualBlock(8, 8))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def residual_network() -> nn.Module:
    torch.manual_seed(0)
    return Wrapper(ResidualNetwork()).double()


def classification_step(module: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(module.model(inputs), labels)


class EncoderClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=ids == 0).mean(1))


def encoder_classifier() -> nn.Module:
    torch.manual_seed(0)
    return Wrapper(EncoderClassifier()).double()


def plain_sequential() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(6, 6), nn.Tanh()]
    return Wrapper(nn.Sequential(*layers, nn.Linear(6, 3))).double()


def plan_for(schedule: str, ranks: int) -> PipelinePlan:
    return plan_pipeline(CHAIN, ranks, schedule)


def train_resharding(*args: Any) -> dict[str, Any]:
    """`train_pipeline` with parameters freed after forward under a zero-bubble schedule, past the refusal."""
    from unittest import mock

    from tests.parallel.pipeline import harness

    whole = dataclasses.replace(find_schedule(args[4]), splits_backward=False)
    with mock.patch.dict(placement.SCHEDULES, {whole.name: whole}):
        return harness.train_pipeline(*args, reshard_after_forward=True)


def labelled_batches(network: str, sizes: list[int]) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"plain_sequential": (6,), "residual_network": (3, 8, 8), "normalised": (6,)}
    made = []
    for size in sizes:
        if network == "encoder_classifier":
            inputs = torch.randint(0, 11, (size, 5), generator=generator)
        else:
            inputs = torch.randn(size, *shapes[network], generator=generator, dtype=torch.float64)
        made.append((inputs, torch.randint(0, 3, (size,), generator=generator)))
    return made
