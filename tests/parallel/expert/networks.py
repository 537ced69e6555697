"""A small network of dense and expert layers, its batches, and ways to force its routing."""

import torch
import torch.nn.functional as F
from torch import nn

from lightning_dist.parallel.expert import MixtureOfExperts, TopKRouter, auxiliary_loss

WIDTH = 8


class Block(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.moe = MixtureOfExperts(WIDTH, **{"expert_size": 12, "num_experts": 8, "top_k": 2} | settings)

    def forward(self, x):
        x = x + self.dense(self.norm(x))
        return x + self.moe(x)


class Network(nn.Module):
    """Blocks and a head; the loss is a mean over samples plus the auxiliary losses."""

    def __init__(self, depth=2, **settings):
        super().__init__()
        self.blocks = nn.ModuleList(Block(**settings) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, target):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), target) + auxiliary_loss(self)


def build(**settings):
    """The network in float64, the same weights in every process; routing can be forced by its biases."""
    torch.manual_seed(0)
    return Network(**{"bias_update_rate": 0.01} | settings).double()


def batch_for(step, rows=8, length=5):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(rows, length, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, length, 3, generator=generator, dtype=torch.float64)


def force_routing(network, routing, step):
    """Sends tokens where the test wants them, in another direction at every step.

    "balanced" leaves the router alone, "skewed" favours one half of the experts, "all_to_one" sends all tokens to the
    first (or, at odd steps, the last) ``top_k`` experts.
    """
    for module in network.modules():
        if isinstance(module, TopKRouter):
            bias = torch.zeros_like(module.expert_bias)
            if routing == "skewed":
                bias[: len(bias) // 2] = 0.15
            if routing == "all_to_one":
                bias[: module.top_k] = 100.0
            module.expert_bias.copy_(bias.flip(0) if step % 2 else bias)
