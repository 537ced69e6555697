"""Which experts a token goes to, and how much each counts."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist import _compat
from lightning_dist.parallel.expert.token_ranks import one_token_group

SCORES = ("softmax", "sigmoid")


class Routing(NamedTuple):
    """What a router decides for ``tokens`` tokens."""

    chosen: Tensor
    """Chosen experts ``[tokens, k]``, best first, int64."""
    weights: Tensor
    """Their weights ``[tokens, k]``."""
    scores: Tensor
    """The scores of all experts ``[tokens, experts]``."""
    logits: Tensor
    """What the scores come from ``[tokens, experts]``."""


class TopKRouter(nn.Module):
    """Scores experts by a linear map and chooses the best ``top_k`` for each token.

    Computed in float32 (float64 stays), whatever autocast says: the choice is sensitive.

    Args:
        hidden_size: Width of a token.
        num_experts: Experts to choose from.
        top_k: How many each token goes to.
        score: ``"softmax"`` over experts or ``"sigmoid"`` of each.
        normalise: Whether the weights of the chosen experts are divided by their sum.
        scale: Factor of the weights.
        bias_update_rate: Above 0, balances without a loss (arXiv:2408.15664): a bias for each expert is added to its
            score for the choice only, and :func:`update_expert_biases` moves it by this much after each step.

    Raises:
        ValueError: If ``top_k`` or ``score`` does not fit.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        bias_update_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k} does not fit: give a number from 1 to num_experts={num_experts}.")
        if score not in SCORES:
            raise ValueError(f"score={score!r} does not fit: give one of {', '.join(SCORES)}.")
        if bias_update_rate < 0:
            raise ValueError(f"bias_update_rate={bias_update_rate} does not fit: give 0 (off) or a positive number.")
        self.num_experts, self.top_k = num_experts, top_k
        self.score, self.normalise, self.scale = score, normalise, scale
        self.bias_update_rate = bias_update_rate
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.expert_bias: Tensor | None
        self.load: Tensor | None
        balanced = bias_update_rate > 0
        self.register_buffer("expert_bias", torch.zeros(num_experts) if balanced else None)
        # Integers, which a change of precision leaves alone. Read and reset at every step, so not part of the state.
        load = torch.zeros(num_experts, dtype=torch.int64) if balanced else None
        self.register_buffer("load", load, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight as ``nn.Linear`` does; biases and load are 0."""
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)
        for buffer in self.buffers():
            buffer.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> TopKRouter:
        super()._apply(fn, recurse)
        if self.expert_bias is not None and self.expert_bias.dtype in (torch.bfloat16, torch.float16):
            self.expert_bias = self.expert_bias.float()  # small steps would be lost
        return self

    def extra_repr(self) -> str:
        return f"{self.weight.shape[-1]} -> {self.top_k} of {self.num_experts}, {self.score}"

    def forward(self, hidden: Tensor) -> Routing:
        """Chooses for tokens ``[tokens, hidden]``; counts the load where biases are balanced, recomputation aside."""
        with torch.autocast(hidden.device.type, enabled=False):
            dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            logits = F.linear(hidden.to(dtype), self.weight.to(dtype))
            scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
            choice = scores if self.expert_bias is None else scores.detach() + self.expert_bias
            chosen = choice.topk(self.top_k, dim=-1).indices
            weights = scores.gather(-1, chosen)
            if self.normalise:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            if self.scale != 1.0:
                weights = weights * self.scale
        if self.load is not None and self.training and not _compat.in_backward():
            flat = chosen.reshape(-1)
            self.load.scatter_add_(0, flat, torch.ones_like(flat))
        return Routing(chosen, weights, scores, logits)


@torch.no_grad()
def update_expert_biases(network: nn.Module) -> None:
    """Moves the biases of all balanced routers towards even load; to be called once after each optimizer step.

    The load is that of all microbatches and accumulated batches since the last call, and of all ranks that
    :func:`~lightning_dist.parallel.expert.share_tokens` named. No host read.

    Collectives: one all-reduce of ``layers * experts`` numbers over the ranks with other tokens.
    """
    # A router of another pipeline stage has lost its buffers; stand-ins that raise are in their place.
    routers = [
        module
        for module in network.modules()
        if isinstance(module, TopKRouter) and module._buffers.get("load") is not None
    ]
    if not routers:
        return
    load = torch.cat([router.load for router in routers])  # type: ignore[misc]
    group = one_token_group(router.__dict__.get("token_ranks") for router in routers)
    if group is not None:
        dist.all_reduce(load, group=group)
    for router, counts in zip(routers, load.split([router.num_experts for router in routers]), strict=True):
        assert router.expert_bias is not None and router.load is not None
        mean = counts.sum() / router.num_experts
        router.expert_bias.add_(torch.sign(mean - counts), alpha=router.bias_update_rate)
        router.load.zero_()
