"""Attention over a sequence whose tokens lie on several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor.experimental import context_parallel
from torch.overrides import TorchFunctionMode, has_torch_function

from lightning_dist import _compat
from lightning_dist.parallel.context.sequence import ContextParallel, gather_sequence
from lightning_dist.parallel.tensor.attention import NEEDS_NO_WEIGHTS, without_attention_weights
from lightning_dist.parallel.tensor.dropout import RandomRegion

NO_ATTENTION = (
    "Context parallelism: the step called no F.scaled_dot_product_attention, so each rank attended to its own tokens"
    " only. Attention written out by hand does not work over context ranks; call that function instead."
)

_scaled_dot_product_attention = F.scaled_dot_product_attention


@contextlib.contextmanager
def context_attention(context: ContextParallel, length: int | None = None) -> Iterator[None]:
    """Makes ``F.scaled_dot_product_attention`` reach the whole sequence, in plain code and in torch's attention module.

    Put it around forward *and* backward: activation checkpointing calls attention again there. Hugging Face networks
    that went through `prepare_network` need it for nothing but the check at its end.

    Attention that never reaches that function (written out by hand, or with ``need_weights=True``) would see only this
    rank's tokens; if no call was seen at all, leaving the context raises.

    Collectives: those of :func:`ulysses_attention` for each call, or torch's own.

    Args:
        context: The context ranks.
        length: Tokens of the whole sequences, for ``"ring"`` and ``"allgather"``.

    Raises:
        RuntimeError: On leaving, on every rank alike, if attention was not called.
    """
    context.attentions = 0
    context.loss_combined = False
    with contextlib.ExitStack() as stack:
        stack.enter_context(_without_fast_path())
        stack.enter_context(without_attention_weights())
        stack.enter_context(_WholeSequence(context))
        if context.method == "ulysses":
            stack.enter_context(_attention_everywhere(context))
        else:
            stack.enter_context(_torch_context_parallel(context, length))
        yield
    if not context.attentions:
        raise RuntimeError(NO_ATTENTION)


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    context: ContextParallel,
) -> Tensor:
    """Attention over the whole sequence, given and returning this rank's consecutive tokens.

    Tokens are exchanged for heads: each rank attends with its heads over all tokens (DeepSpeed Ulysses,
    arXiv:2309.14509). Key/value heads that do not divide by the ranks are repeated for the query heads that share them.

    Collectives: two all-to-alls over the context group (four if the head sizes of query and value differ), and as many
    in backward; an all-gather for a mask that is cut.

    Args:
        query: ``[batch, heads, own tokens, size]``.
        key: ``[batch, key heads, own tokens, size]``.
        value: As ``key``; its size may differ.
        attn_mask: Over ``[…, queries, keys]``: all tokens by all tokens, own queries by all keys, or one row for all
            queries (padding) with own or all keys. Boolean (True may be seen) or added to the scores.
        dropout_p: Each rank draws its own numbers for its heads.
        is_causal: See torch.
        scale: See torch.
        enable_gqa: See torch.
        context: The context ranks.

    Raises:
        ValueError: If the heads do not divide, or the mask covers own queries by own keys only.
    """
    context.attentions += 1
    heads, key_heads, own = query.shape[1], key.shape[1], query.shape[2]
    if heads % context.size:
        raise ValueError(
            f"context_parallel_size={context.size} does not fit attention with {heads} heads on each rank: they do not"
            f" divide by {context.size}."
        )
    if key_heads % context.size:
        key, value = (x.repeat_interleave(heads // key_heads, dim=1) for x in (key, value))
        key_heads = heads
    # [batch, own heads, tokens, size]
    query, key, value = _tokens_to_heads((query, key, value), context)
    mask = None if attn_mask is None else _whole_mask(attn_mask, own, heads, context)
    if mask is not None and mask.dim() > 2 and mask.shape[1] == heads > 1:
        mask = mask[:, context.rank * heads // context.size :][:, : heads // context.size]
    region = RandomRegion(context.rank).on(query.device) if dropout_p else contextlib.nullcontext()
    context.attending = True
    try:
        with region:
            output = _scaled_dot_product_attention(
                query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa or key_heads != heads
            )
    finally:
        context.attending = False
    return _HeadsToTokens.apply(output, context.group)


def _tokens_to_heads(tensors: tuple[Tensor, Tensor, Tensor], context: ContextParallel) -> list[Tensor]:
    if len({x.shape[-1] for x in tensors}) > 1:
        return [_TokensToHeads.apply(context.group, x)[0] for x in tensors]
    return list(_TokensToHeads.apply(context.group, *tensors))


def _whole_mask(mask: Tensor, own: int, heads: int, context: ContextParallel) -> Tensor:
    """The mask over all queries and keys."""
    whole = own * context.size
    queries, keys = mask.shape[-2:]
    if mask.requires_grad:
        raise ValueError("A mask that is learnt does not work over context ranks.")
    if queries in (1, whole) and keys in (1, whole):
        return mask
    if queries == own and keys == whole:
        return gather_sequence(mask, mask.dim() - 2, context)
    if queries == 1 and keys == own:
        return gather_sequence(mask, mask.dim() - 1, context)
    raise ValueError(
        f"An attention mask over {queries} queries and {keys} keys does not fit context ranks that hold {own} of"
        f" {whole} tokens: give one over all {whole} keys, or is_causal=True."
    )


class _WholeSequence(TorchFunctionMode):
    """Meets calls of torch's attention functions in plain code, by whatever name they were imported."""

    def __init__(self, context: ContextParallel) -> None:
        super().__init__()
        self._context = context

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is _scaled_dot_product_attention and not self._context.attending:
            if self._context.method == "ulysses":
                return ulysses_attention(*args, **kwargs, context=self._context)
            self._context.attentions += 1
        if func is F.multi_head_attention_forward:
            if kwargs.get("need_weights", True):
                raise RuntimeError(NEEDS_NO_WEIGHTS)
            self._context.attentions += self._context.method != "ulysses"
        return func(*args, **kwargs)


@contextlib.contextmanager
def _attention_everywhere(context: ContextParallel) -> Iterator[None]:
    """Puts our attention in the place of torch's function, where backward finds it: a mode is switched off there.

    Recomputation runs inside of ``backward``, on CUDA in another thread, and so does what torch's attention module
    calls by name.
    """

    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if has_torch_function((query,)):  # modes come first: that of `context_attention`, and those above it
            return _scaled_dot_product_attention(query, *args, **kwargs)
        return ulysses_attention(query, *args, **kwargs, context=context)

    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _scaled_dot_product_attention  # type: ignore[assignment]


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """Torch's inference kernels for transformer layers do attention past any function that could be met."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _torch_context_parallel(context: ContextParallel, length: int | None) -> Iterator[None]:
    """Torch's context parallelism without its cutting of buffers, which `cut_batch` has done in the same order."""
    if length is None:
        raise ValueError(f"method={context.method!r} needs the length of the whole sequences.")
    _compat.set_context_rotation("allgather" if context.method == "allgather" else "alltoall")
    places = torch.arange(length, device="cuda")
    with context_parallel(context.mesh, buffers=[places], buffer_seq_dims=[0], no_restore_buffers={places}):
        yield


class _TokensToHeads(torch.autograd.Function):
    """``[batch, heads, own tokens, size]`` to ``[batch, own heads, tokens, size]``, for several tensors at once."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.counts = [x.shape[1] // dist.get_world_size(group) for x in tensors]
        return _exchange_for_heads(tensors, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *_exchange_for_tokens(gradients, ctx.group)


class _HeadsToTokens(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange_for_tokens((x,), group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _exchange_for_heads((gradient,), ctx.group)[0], None


def _exchange_for_heads(tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    ranks = dist.get_world_size(group)
    counts = [x.shape[1] // ranks for x in tensors]
    # [receiving rank, batch, its heads of all tensors, own tokens, size]
    sent = torch.cat([x.unflatten(1, (ranks, -1)).movedim(1, 0) for x in tensors], dim=2).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    # [batch, heads, sending rank, its tokens, size]
    joined = received.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return tuple(part.contiguous() for part in joined.split(counts, dim=1))


def _exchange_for_tokens(tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    ranks = dist.get_world_size(group)
    counts = [x.shape[1] for x in tensors]
    whole = torch.cat(tensors, dim=1)  # [batch, own heads, tokens, size]
    sent = whole.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    # [sending rank, batch, its heads of all tensors, own tokens, size]
    return tuple(part.movedim(0, 1).flatten(1, 2).contiguous() for part in received.split(counts, dim=2))
