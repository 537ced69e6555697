"""Activation checkpointing: less memory in forward, paid for by computing parts of it again in backward."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ActivationCheckpointing = Literal["none", "full", "selective"]

SAVED_OPERATIONS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
"""What "selective" keeps because it is dear to compute again; the rest is cheap."""


def checkpoint_activations(units: Iterable[nn.Module], mode: ActivationCheckpointing) -> None:
    """Makes each unit's forward forget its activations and compute them again in backward.

    ``"full"`` keeps only the unit's inputs, ``"selective"`` also the results of matrix products and attention.
    Follows ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``, which restores the random state, so dropout
    draws the same numbers. Names of modules and parameters do not change. No collectives of its own; under FSDP2 the
    second forward gathers the unit's parameters again.
    """
    if mode == "none":
        return
    for unit in units:
        unit.forward = _checkpointed(unit.forward, mode)  # type: ignore[method-assign]


def _checkpointed(forward: Any, mode: ActivationCheckpointing) -> Any:
    context_fn: dict[str, Any] = {}
    if mode == "selective":
        context_fn["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    @functools.wraps(forward)
    def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **context_fn, **kwargs)

    return checkpointed_forward


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE
