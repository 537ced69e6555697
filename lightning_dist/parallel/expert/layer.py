"""``MixtureOfExperts``: a feed-forward layer in which each token passes through a few of many experts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist import _compat
from lightning_dist.parallel.expert.capacity import drop_beyond_capacity
from lightning_dist.parallel.expert.experts import ACTIVATIONS, Experts
from lightning_dist.parallel.expert.losses import PendingLosses, load_balancing_loss, z_loss
from lightning_dist.parallel.expert.router import Routing, TopKRouter
from lightning_dist.parallel.expert.token_ranks import TokenRanks


class MixtureOfExperts(nn.Module):
    """Routes each token to ``top_k`` of ``num_experts`` gated feed-forward networks and sums what they make of it.

    Works on one device as it is. No token is dropped unless ``capacity_factor`` is given. Where it has auxiliary
    losses, a training step adds :func:`~lightning_dist.parallel.expert.auxiliary_loss` of the network to its loss.

    Args:
        hidden_size: Width of a token.
        expert_size: Width inside one expert.
        num_experts: Experts to choose from.
        top_k: How many each token goes to.
        shared_size: Width inside one more network that every token passes through; 0 for none.
        activation: ``"silu"``, ``"gelu"`` or ``"relu"``.
        score: ``"softmax"`` or ``"sigmoid"``, see :class:`~lightning_dist.parallel.expert.TopKRouter`.
        normalise: Whether the weights of a token's experts are divided by their sum.
        scale: Factor of the weights.
        balance_coefficient: Factor of the load-balancing loss.
        z_coefficient: Factor of the z-loss.
        bias_update_rate: Above 0, balances by biases instead of a loss; then call
            :func:`~lightning_dist.parallel.expert.update_expert_biases` after each optimizer step.
        capacity_factor: An expert takes at most ``ceil(capacity_factor * tokens * top_k / num_experts)`` tokens of a
            batch, those of all ranks together; others are dropped. None drops nothing.

    Raises:
        ValueError: If an argument does not fit.
    """

    def __init__(
        self,
        hidden_size: int,
        expert_size: int,
        num_experts: int,
        top_k: int = 2,
        *,
        shared_size: int = 0,
        activation: str = "silu",
        score: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        balance_coefficient: float = 0.0,
        z_coefficient: float = 0.0,
        bias_update_rate: float = 0.0,
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__()
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"capacity_factor={capacity_factor} does not fit: give a positive number, or None.")
        self.router = TopKRouter(
            hidden_size,
            num_experts,
            top_k,
            score=score,
            normalise=normalise,
            scale=scale,
            bias_update_rate=bias_update_rate,
        )
        self.experts = Experts(num_experts, hidden_size, expert_size, activation=activation)
        self.shared = SharedExpert(hidden_size, shared_size, activation) if shared_size else None
        self.balance_coefficient, self.z_coefficient = balance_coefficient, z_coefficient
        self.capacity_factor = capacity_factor
        self.pending_losses = PendingLosses()
        self.token_ranks: TokenRanks | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Applies the layer to tokens ``[..., hidden_size]``.

        Collectives: those of the losses and of the capacity, over the ranks with other tokens; none for one device.
        """
        tokens = hidden.reshape(-1, hidden.shape[-1])
        routing: Routing = self.router(tokens)
        group = self.token_ranks.group if self.token_ranks is not None else None
        if self.training and torch.is_grad_enabled() and (self.balance_coefficient or self.z_coefficient):
            loss = self._auxiliary_loss(routing, group)
            if not _compat.in_backward():
                self.pending_losses.add(loss)
        chosen = routing.chosen
        if self.capacity_factor is not None:
            chosen = drop_beyond_capacity(chosen, self.router.num_experts, self.capacity_factor, group)
        output = self.experts(tokens, chosen, routing.weights)
        if self.shared is not None:
            output = output + self.shared(tokens)
        return output.view_as(hidden)

    def _auxiliary_loss(self, routing: Routing, group: dist.ProcessGroup | None) -> Tensor:
        loss = routing.logits.new_zeros(())
        if self.balance_coefficient:
            loss = loss + self.balance_coefficient * load_balancing_loss(routing.scores, routing.chosen, group)
        if self.z_coefficient:
            loss = loss + self.z_coefficient * z_loss(routing.logits)
        return loss


class SharedExpert(nn.Module):
    """The gated feed-forward network that every token passes through."""

    def __init__(self, hidden_size: int, size: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, size, bias=False)
        self.up_proj = nn.Linear(hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, hidden_size, bias=False)
        self.activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(hidden)) * self.up_proj(hidden))
