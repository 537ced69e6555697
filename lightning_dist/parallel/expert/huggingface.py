"""Hugging Face's mixtures of experts: the balancing loss that their models compute, and their own file format."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist.parallel.expert.losses import sum_over
from lightning_dist.parallel.expert.token_ranks import TokenRanks
from lightning_dist.parallel.tensor.shards import Forward, override_forward

BALANCING_LOSS = "load_balancing_loss_func"
"""The function that their models look up in their own file (transformers 5)."""


def share_balancing_loss(network: nn.Module, group: dist.ProcessGroup) -> None:
    """Lets the load-balancing losses of Hugging Face's models in ``network`` count the tokens of all ranks.

    Their models compute it in a function of their file; it is replaced while such a model's forward runs.

    Collectives: one all-reduce of ``num_experts + 1`` numbers over ``group`` for each forward that computes the loss.
    """
    ranks = TokenRanks(group)
    for module in network.modules():
        names = _globals_of(module)
        if BALANCING_LOSS not in names or not callable(getattr(module, "generate", None)):
            continue
        if "_token_ranks" not in vars(module):
            override_forward(module, _with_shared_loss)
        vars(module)["_token_ranks"] = ranks


def _with_shared_loss(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
    names, group = _globals_of(self), vars(self)["_token_ranks"].group
    before = names[BALANCING_LOSS]
    names[BALANCING_LOSS] = _shared_loss(group)
    try:
        return original(*args, **kwargs)
    finally:
        names[BALANCING_LOSS] = before


def _globals_of(module: nn.Module) -> dict[str, Any]:
    """The global names of the file that defines the module's class."""
    for base in type(module).__mro__:
        forward: Any = vars(base).get("forward")
        while hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        if forward is not None:
            return getattr(forward, "__globals__", {})
    return {}


def _shared_loss(group: dist.ProcessGroup) -> Callable[..., Tensor | int]:
    def load_balancing_loss(
        gate_logits: tuple[Tensor, ...] | None,
        num_experts: int,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        """``num_experts * sum(f * P)`` over all layers, padding left out; ``f`` counts the tokens of all ranks, so the
        mean of the ranks' losses is the loss of the joined batch."""
        if not isinstance(gate_logits, tuple):
            return 0
        device = gate_logits[0].device
        dtype = torch.float64 if gate_logits[0].dtype == torch.float64 else torch.float32
        mask = None if attention_mask is None else attention_mask.reshape(-1).to(device, dtype)
        counts = torch.zeros(num_experts + 1, dtype=dtype, device=device)  # choices of each expert, then rows
        scores = torch.zeros(num_experts, dtype=dtype, device=device)
        for logits in gate_logits:
            weights = logits.to(device).softmax(-1)
            chosen = weights.topk(top_k, dim=-1).indices.reshape(-1)
            rows = weights.new_ones(len(weights), dtype=dtype) if mask is None else mask
            counts = counts.scatter_add(0, chosen, rows.repeat_interleave(top_k))
            counts[-1] += rows.sum()
            scores = scores + (weights.to(dtype) * rows.unsqueeze(-1)).sum(0)
        own_rows = counts[-1].clone()
        counts = sum_over(counts.detach(), group)
        return num_experts * (counts[:-1] / counts[-1] * scores / own_rows.clamp(min=1)).sum()

    return load_balancing_loss


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Writes a spread Hugging Face model in its own format, which ``from_pretrained`` reads on one device.

    To be called by every rank that holds a part of the model; rank 0 writes, and holds one full copy in host memory.

    Collectives: an all-gather of each sharded parameter over its mesh, then a barrier of the world.

    Args:
        model: A model with a method ``save_pretrained``; not divided in pipeline stages.
        folder: Where rank 0 writes.
    """
    first = dist.get_rank() == 0
    whole = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if first:
            whole[name] = tensor.detach().cpu()
    if first:
        # A model with the same configuration and no memory: FSDP2 has changed the classes of this one.
        with torch.device("meta"):
            blank = _original_class(model)(model.config)
        blank.load_state_dict(whole, assign=True)
        blank.tie_weights()
        blank.save_pretrained(folder)
    dist.barrier()


def _original_class(model: nn.Module) -> Any:
    """The class of ``model`` that its file defines, below those that FSDP2 and others put on top."""
    return next(
        base
        for base in type(model).__mro__
        if issubclass(base, nn.Module) and getattr(sys.modules.get(base.__module__), base.__name__, None) is base
    )
