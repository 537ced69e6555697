"""Context parallelism: each rank holds a part of every sequence, and attention reaches the whole."""

from lightning_dist.parallel.context.attention import NO_ATTENTION, context_attention, ulysses_attention
from lightning_dist.parallel.context.huggingface import prepare_network
from lightning_dist.parallel.context.sequence import (
    ContextParallel,
    combine_loss,
    combine_value,
    cut_batch,
    gather_sequence,
    loss_share,
    shift_labels,
    sum_context_gradients,
    token_positions,
)

__all__ = [
    "NO_ATTENTION",
    "ContextParallel",
    "combine_loss",
    "combine_value",
    "context_attention",
    "cut_batch",
    "gather_sequence",
    "loss_share",
    "prepare_network",
    "shift_labels",
    "sum_context_gradients",
    "token_positions",
    "ulysses_attention",
]
