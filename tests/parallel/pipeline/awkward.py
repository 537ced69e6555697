"""Networks that do what a pipeline could silently get wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parallel.pipeline.networks import Block, Network, Wrapper


class SkipConnection(Network):
    def forward(self, ids: Tensor) -> Tensor:
        x = embedded = self.embed(ids)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 4:
                x = x + embedded
        return self.head(x)


class EncoderToEveryBlock(Network):
    def forward(self, ids: Tensor) -> Tensor:
        x = embedded = self.embed(ids)
        scale = 1.0 + 0.1 * embedded.mean()
        for block in self.blocks:
            x = block(x, scale)
        return self.head(x)


class SkipToResult(Network):
    def forward(self, ids: Tensor) -> Tensor:
        x = embedded = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + embedded.sum()


class SkipThroughAttribute(Network):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.kept = self.embed(ids)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 4:
                x = x + self.kept
        return self.head(x)


class CalledTwice(Network):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.blocks[0](x))


class OtherOrder(Network):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class NotCalled(Network):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks[:5]:
            x = block(x)
        return self.head(x)


class ForeignParameterUsed(Network):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight)


class ValueRead(Network):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if float(x.sum()) > 0:
            x = x * 2
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WritesInto(Network):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        mask = torch.zeros_like(ids, dtype=x.dtype)
        mask += x.sum(-1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class GradientInside(Network):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        (gradient,) = torch.autograd.grad(x.sum(), x, create_graph=True)
        return self.head(x + gradient)


class RandomPrefix(Network):
    """Draws a mask in front of the chain, and one between modules, that every block uses."""

    def forward(self, ids: Tensor) -> Tensor:
        keep = (torch.rand(ids.shape[0], 1, 1) > 0.3).double()
        scale = random.random() + float(np.random.rand())
        x = self.embed(ids) * keep
        x = F.dropout(x, 0.2, self.training)
        kept = (torch.rand(ids.shape[0], 1, 1) > 0.3).double()
        for block in self.blocks:
            x = block(x, scale * kept * keep)
        return self.head(F.dropout(x, 0.2, self.training))


class DropoutBlock(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(F.dropout(x, 0.3, self.training), scale)


class DropoutNetwork(Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DropoutBlock(8) for _ in range(6))


class PairBlock(Block):
    """Hands on a dictionary with the hidden state, a tuple, an integer mask without gradient, and a number."""

    def forward(self, state: Any) -> Any:  # type: ignore[override]
        x = super().forward(state["x"]) * state["mask"].unsqueeze(-1) + state["extra"][0]
        return {"x": x, "mask": state["mask"], "extra": (state["extra"][0] * 0.5, x), "depth": state["depth"] + 1}


class PairNetwork(Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairBlock(8) for _ in range(6))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        state = {"x": x, "mask": (ids > 2).long(), "extra": (x * 0.1, x), "depth": 0}
        for block in self.blocks:
            state = block(state)
        return self.head(state["x"] / state["depth"] + state["extra"][1])


class TiedNetwork(Network):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight


class SharedUse(ForeignParameterUsed):
    """Right with ``shared=['model.embed.weight']``; the head is not in the chain."""

    def __init__(self) -> None:
        super().__init__()
        del self.head


class LooseParameters(Network):
    """Parameters outside the chain: used in front, by every block, behind, and by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))
        self.bias = nn.Parameter(torch.zeros(11))
        self.unused = nn.Parameter(torch.ones(3))
        self.prefix = nn.Linear(1, 8)

    def forward(self, ids: Tensor) -> Tensor:
        gain = self.gain * self.prefix(torch.ones(1, dtype=self.gain.dtype))
        x = self.embed(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, gain)
        return self.head(x) + self.bias


class CheckpointedCalls(Network):
    reentrant = False

    def forward(self, ids: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class ReentrantCalls(CheckpointedCalls):
    reentrant = True


class InPlaceBetween(Network):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            x += 0.1
            x.mul_(1.1)
        return self.head(x.transpose(0, 1).transpose(0, 1))


class TransposedBlock(Block):
    """Returns a view that is not contiguous."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x.transpose(0, 1).contiguous(), scale).transpose(0, 1)


class ViewNetwork(Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransposedBlock(8) for _ in range(6))


class FrozenFirstStage(Network):
    def __init__(self) -> None:
        super().__init__()
        self.position.requires_grad_(False)
        for module in (self.embed, *self.blocks[:3]):
            module.requires_grad_(False)


class FrozenLastStage(Network):
    def __init__(self) -> None:
        super().__init__()
        for module in (self.head, *self.blocks[3:]):
            module.requires_grad_(False)


class NormalisedFirst(nn.Module):
    """A BatchNorm whose input does not depend on microbatches: its pooled statistics are those of the batch."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(6, momentum=momentum), nn.Linear(6, 6), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


KINDS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        Network, SkipConnection, EncoderToEveryBlock, SkipToResult, SkipThroughAttribute, CalledTwice, OtherOrder,
        NotCalled, ForeignParameterUsed, ValueRead, WritesInto, GradientInside, RandomPrefix, DropoutNetwork,
        PairNetwork, TiedNetwork, SharedUse, LooseParameters, CheckpointedCalls, ReentrantCalls, InPlaceBetween,
        ViewNetwork, FrozenFirstStage, FrozenLastStage, NormalisedFirst,
    )
}  # fmt: skip


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Wrapper(KINDS[kind]()).double()


class TwiceUsedBlock(Block):
    """Uses one weight twice, and one that is computed from others twice."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.mix = nn.Linear(width, width)
        self.gate = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        gate = self.gate * self.mix.weight[0]
        x = torch.tanh(self.mix(x)) * gate
        x = super().forward(x, scale)
        return torch.tanh(self.mix(x)) * gate


class TwiceUsed(Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwiceUsedBlock(8) for _ in range(6))


KINDS["TwiceUsed"] = TwiceUsed
