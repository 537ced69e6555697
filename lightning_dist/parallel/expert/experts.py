"""Many feed-forward networks of one shape, their weights stacked, each applied to its own tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.parallel.expert.rows import combine_rows, sort_by_expert, take_rows

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


class Experts(nn.Module):
    """``num_experts`` networks ``down(activation(gate(x)) * up(x))``, without biases.

    Called as ``experts(hidden, top_k_index, top_k_weights)``, like the experts of Hugging Face's models.

    Args:
        num_experts: How many there are.
        hidden_size: Width of what goes in and comes out.
        expert_size: Width inside one expert.
        activation: ``"silu"``, ``"gelu"`` or ``"relu"``.

    Raises:
        ValueError: If the activation is none of these.
    """

    def __init__(self, num_experts: int, hidden_size: int, expert_size: int, *, activation: str = "silu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r} does not fit: give one of {', '.join(ACTIVATIONS)}.")
        self.num_experts = num_experts
        self.activation = activation
        self.gate_proj = nn.Parameter(torch.empty(num_experts, expert_size, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(num_experts, expert_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, expert_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every matrix as ``nn.Linear`` does."""
        for weights in (self.gate_proj, self.up_proj, self.down_proj):
            bound = 1 / math.sqrt(weights.shape[-1])
            nn.init.uniform_(weights, -bound, bound)

    def extra_repr(self) -> str:
        _, expert_size, hidden_size = self.gate_proj.shape
        return f"{self.num_experts} x ({hidden_size} -> {expert_size} -> {hidden_size}), {self.activation}"

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' outputs.

        Args:
            hidden: ``[tokens, hidden]``.
            top_k_index: Chosen experts ``[tokens, k]``, int64; ``num_experts`` for a choice that counts zero.
            top_k_weights: Their weights ``[tokens, k]``.
        """
        # What was dropped has weight 0; it is computed all the same, which needs no host read.
        order, counts = sort_by_expert(top_k_index.clamp(max=self.num_experts - 1), self.num_experts)
        rows = take_rows(hidden, order, top_k_index.shape[-1])
        weights = top_k_weights.masked_fill(top_k_index >= self.num_experts, 0)
        return combine_rows(self.apply_each(rows, counts), order, weights)

    def apply_each(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Applies expert 0 to the first ``counts[0]`` rows, expert 1 to the next, and so on.

        Grouped matrix products where there is a device for them; elsewhere one expert after the other, for which the
        host reads the counts. An expert without rows gets zeros as its gradient, not none.

        Args:
            rows: ``[rows, hidden]``, sorted by expert.
            counts: Rows of each expert ``[num_experts]``, int64.
        """
        act = ACTIVATIONS[self.activation]
        if has_grouped_product(rows):
            ends = counts.cumsum(0).to(torch.int32)
            gate = F.grouped_mm(rows, self.gate_proj.transpose(-2, -1), offs=ends)
            up = F.grouped_mm(rows, self.up_proj.transpose(-2, -1), offs=ends)
            return F.grouped_mm(act(gate) * up, self.down_proj.transpose(-2, -1), offs=ends)
        # unbind rather than indexing: the backward of an index makes a tensor of the size of all experts each time.
        weights = zip(self.gate_proj.unbind(), self.up_proj.unbind(), self.down_proj.unbind(), strict=True)
        outputs = [
            F.linear(act(F.linear(part, gate)) * F.linear(part, up), down)
            for index, (part, (gate, up, down)) in enumerate(zip(rows.split(counts.tolist()), weights, strict=True))
            if len(part) or (index == 0 and not len(rows))  # one expert on no row keeps the weights in the graph
        ]
        return torch.cat(outputs)


def has_grouped_product(rows: Tensor) -> bool:
    """Whether torch multiplies groups of rows with their matrices at once, for this device, dtype and width."""
    return rows.is_cuda and rows.dtype == torch.bfloat16 and rows.shape[-1] % 8 == 0
