"""Hugging Face networks over context ranks: attention through their registry, positions, shifted labels, the loss."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.parallel.context.attention import ulysses_attention
from lightning_dist.parallel.context.sequence import (
    IGNORED,
    ContextParallel,
    combine_loss,
    gather_sequence,
    shift_labels,
    sum_losses,
    take_part,
)
from lightning_dist.parallel.tensor.shards import Forward, override_forward

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
_numbers = itertools.count()


def prepare_network(network: nn.Module, context: ContextParallel, *, tensor_parallel_size: int = 1) -> bool:
    """Lets the Hugging Face models in ``network`` work on this rank's tokens; once, at set-up.

    Attention goes through the library's registry, so it reaches the whole sequence in recomputation too, masks of
    every kind (causal, sliding window, padding) are made for the whole sequence. Positions, where none are given, are
    those in the whole sequence. Labels are shifted over the borders of the parts (C12), and the loss that comes back
    is that of the whole sequence, by its number of targets (C09), on every rank; its gradient is this rank's part.

    Collectives per forward: an all-gather of the padding mask for each kind of mask, one of the labels, an all-reduce
    of the loss; see :func:`ulysses_attention` for each layer.

    Args:
        network: A model of transformers, or a module that contains some.
        context: The context ranks.
        tensor_parallel_size: Over how many ranks the heads have been spread already.

    Returns:
        Whether there was one; other networks need nothing, only `context_attention` around each step.

    Raises:
        ValueError: If a model's heads do not divide by the number of ranks (``"ulysses"``), its attention is not in
            the registry, or it has its own loss on whole sequences (classification).
    """
    models = [
        (name, module)
        for name, module in network.named_modules()
        if hasattr(module, "config") and hasattr(module, "base_model_prefix") and hasattr(module.config, "model_type")
    ]
    outermost = [
        (name, module)
        for name, module in models
        if not any(name != other and (not other or name.startswith(other + ".")) for other, _ in models)
    ]
    for name, model in outermost:
        _check_heads(name or type(model).__name__, model, context, tensor_parallel_size)
    for _, model in outermost:
        implementation = _register(context)
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = implementation  # type: ignore[union-attr]
        override_forward(model, _whole_sequence_forward(context))
    return bool(outermost)


def _check_heads(name: str, model: nn.Module, context: ContextParallel, tensor_parallel_size: int) -> None:
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    ranks = context.size * tensor_parallel_size
    if context.method == "ulysses" and isinstance(heads, int) and heads % ranks:
        fits = ", ".join(str(size) for size in range(1, heads + 1) if heads % (size * tensor_parallel_size) == 0)
        spread = f" x tensor_parallel_size={tensor_parallel_size}" if tensor_parallel_size > 1 else ""
        raise ValueError(
            f"context_parallel_size={context.size}{spread} does not fit {name}: its {heads} heads do not divide by"
            f" {ranks}; context sizes that fit: {fits or 'none'}."
        )
    if not getattr(model, "_supports_sdpa", True) and not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{name} ({type(model).__name__}) computes attention by itself, past the library's registry, so it does not"
            " work over context ranks."
        )


def _register(context: ContextParallel) -> str:
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"lightning_dist_context_{next(_numbers)}"
    AttentionInterface.register(name, _attention_for(context))
    AttentionMaskInterface.register(name, _mask_for(context))
    return name


def _attention_for(context: ContextParallel) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
        if unsupported:
            raise NotImplementedError(
                f"{type(module).__name__} wants {', '.join(unsupported)}, which scaled_dot_product_attention lacks."
            )
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        causal = causal and attention_mask is None
        if context.method == "ulysses":
            output = ulysses_attention(query, key, value, attention_mask, dropout, causal, scaling, context=context)
        else:
            context.attentions += 1
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
            output = F.scaled_dot_product_attention(query, key, value, attention_mask, dropout, causal, scale=scaling)
        return output.transpose(1, 2).contiguous(), None

    return attention


def _mask_for(context: ContextParallel) -> Callable[..., Tensor | None]:
    def mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """The library's own mask, over the whole sequence."""
        from transformers.masking_utils import sdpa_mask

        whole = q_length * context.size
        if attention_mask is not None and attention_mask.shape[-1] == q_length:
            attention_mask = gather_sequence(attention_mask, attention_mask.dim() - 1, context)
        try:
            made = sdpa_mask(
                batch_size=batch_size, q_length=whole, kv_length=whole, attention_mask=attention_mask, **kwargs
            )
        except (IndexError, RuntimeError) as error:
            raise NotImplementedError(
                "This attention mask depends on more than places and padding (packed sequences, blocks of images),"
                " which does not work over context ranks."
            ) from error
        if made is not None and context.method != "ulysses":
            raise NotImplementedError(
                f"method={context.method!r} takes no attention mask: leave padding out of the batch, or use 'ulysses'."
            )
        return made

    return mask


def _whole_sequence_forward(context: ContextParallel) -> Callable[[nn.Module, Forward, tuple, dict], Any]:
    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        signature = inspect.signature(original)
        bound = signature.bind_partial(*args, **kwargs)
        given = dict(bound.arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                given.update(given.pop(parameter.name, {}))
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            raise ValueError(
                f"{type(self).__name__} was called without input_ids or inputs_embeds: context parallelism cuts"
                " sequences of tokens."
            )
        if given.get("position_ids") is None and "position_ids" in signature.parameters:
            given["position_ids"] = context.positions(tokens.shape[1] * context.size, tokens.device).unsqueeze(0)
        if "use_cache" in signature.parameters or hasattr(self.config, "use_cache"):
            given["use_cache"] = False
        labels = given.get("labels")
        if labels is None:
            return original(**given)
        whole = gather_sequence(labels, 1, context) if labels.dim() == 2 else None
        if whole is None or labels.shape[1] != tokens.shape[1]:
            raise ValueError(
                f"{type(self).__name__} was given labels of shape {tuple(labels.shape)} for tokens of shape"
                f" {tuple(tokens.shape)}: over context ranks each token needs its label."
            )
        context.loss_combined = True
        if _shifts_labels(self):
            shifted = shift_labels(whole)
            given["shift_labels"] = take_part(shifted, 1, context)
            # The sum over this rank's targets by the number of all targets: a rank without any adds 0.
            given.setdefault("num_items_in_batch", (shifted != IGNORED).sum().clamp(min=1))
            output = original(**given)
            output.loss = sum_losses(output.loss, context)
            return output
        output = original(**given)
        counts = torch.stack([(labels != IGNORED).sum(), (whole != IGNORED).sum()]).to(torch.float64)
        context.loss_combined = False
        output.loss = combine_loss(output.loss, counts[0] / counts[1].clamp(min=1), context)
        context.loss_combined = True
        return output

    return forward


def _shifts_labels(model: nn.Module) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return getattr(model, "loss_function", None) is ForCausalLMLoss
