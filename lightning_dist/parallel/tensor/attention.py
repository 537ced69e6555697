"""``torch.nn.MultiheadAttention`` with its heads spread over a tensor group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from lightning_dist.parallel.tensor.collectives import gather, sum_gradients_of, sum_parts
from lightning_dist.parallel.tensor.heads import fitting_sizes, fused_rows
from lightning_dist.parallel.tensor.shards import RowExchange, distribute_parameter, override_forward
from lightning_dist.parallel.tensor.styles import TensorGroup

NEEDS_NO_WEIGHTS = (
    "nn.MultiheadAttention with need_weights=True does not work over context ranks, which see parts of the sequence:"
    " call it with need_weights=False."
)
_weights_refused = [0]  # how many contexts refuse them


@contextlib.contextmanager
def without_attention_weights() -> Iterator[None]:
    """Inside, asking for attention weights raises: context parallelism never has them whole."""
    _weights_refused[0] += 1
    try:
        yield
    finally:
        _weights_refused[0] -= 1


def check_attention(name: str, attention: nn.MultiheadAttention, size: int) -> None:
    """Raises a ValueError if the heads do not divide by ``size``, or an option of the module is not supported."""
    if attention.num_heads % size:
        raise ValueError(
            f"tensor_parallel_size={size} does not fit {name}: its {attention.num_heads} heads do not divide by"
            f" {size}; sizes that fit: {fitting_sizes(attention.num_heads)}."
        )
    if attention.bias_k is not None or attention.add_zero_attn:
        raise ValueError(f"{name} uses add_bias_kv or add_zero_attn, which the style 'attention' does not support.")


def cut_attention(module: nn.MultiheadAttention, group: TensorGroup) -> None:
    """Gives each rank its heads: projections cut by outputs, the output projection by inputs.

    Collectives per call: an all-reduce of the output, and in backward one of each distinct input's gradient; an
    all-to-all of the fused projection's weights (and bias), and one in backward; where weights are asked for
    (``need_weights``, torch's default), one more all-reduce or all-gather for them.
    """
    size, rank = group.size, group.rank
    width, heads = module.embed_dim, module.num_heads
    fused = module.in_proj_weight is not None
    exchange = RowExchange(fused_rows(3 * width, 3, size), 3 * width, group.group)
    for name in ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
        distribute_parameter(module, name, group.mesh, Shard(0))
    distribute_parameter(module.out_proj, "weight", group.mesh, Shard(1))
    distribute_parameter(module.out_proj, "bias", group.mesh, Replicate())

    def project(self: Any, inputs: list[Tensor]) -> list[Tensor]:
        bias = None if self.in_proj_bias is None else exchange(_local(self.in_proj_bias), 0)
        biases = bias.chunk(3) if bias is not None else (None, None, None)
        if fused:
            weight = exchange(_local(self.in_proj_weight), 0)
            if inputs[0] is inputs[1] is inputs[2]:
                return list(F.linear(inputs[0], weight, bias).chunk(3, dim=-1))
            weights = weight.chunk(3)
        else:
            weights = tuple(_local(w) for w in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight))
        return [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if need_weights and _weights_refused[0]:
            raise RuntimeError(NEEDS_NO_WEIGHTS)
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched = query.dim() == 3
        transposed = batched and not self.batch_first
        entered = [sum_gradients_of(x, group.group) for x in (query, key, value)]
        projected = project(self, entered)
        if not batched:
            projected = [x.unsqueeze(0) for x in projected]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif transposed:
            projected = [x.transpose(0, 1) for x in projected]
        # [batch, own heads, length, head size]
        q, k, v = (x.unflatten(-1, (heads // size, self.head_dim)).transpose(1, 2) for x in projected)
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _joint_mask(attn_mask, key_padding_mask, q, k, heads, rank)
        dropout = self.dropout if self.training else 0.0
        with group.random.on(q.device):
            if need_weights:
                scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
                weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
                weights = F.dropout(weights, dropout)
                output = weights @ v
            else:
                output = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        output = output.transpose(1, 2).flatten(2)
        output = sum_parts(F.linear(output, _local(self.out_proj.weight)), group.group)
        if self.out_proj.bias is not None:
            output = output + _local(self.out_proj.bias).to(output.dtype)
        output = output.transpose(0, 1) if transposed else output if batched else output.squeeze(0)
        if not need_weights:
            return output, None
        if average_attn_weights:
            weights = sum_parts(weights.sum(dim=1), group.group) / heads
        else:
            weights = gather(weights, 1, heads, group.group)
        return output, weights if batched else weights.squeeze(0)

    override_forward(module, lambda self, original, args, kwargs: forward(self, *args, **kwargs))


def leave_fast_paths(network: nn.Module) -> None:
    """Keeps torch's transformer layers off their inference kernels, which read whole weights past any forward."""
    for module in network.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        elif isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0


def _joint_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor, heads: int, rank: int
) -> Tensor | None:
    """Both masks as one that is added to the scores, ``[batch or 1, own heads or 1, queries or 1, keys]``."""
    mask = None
    if attn_mask is not None:
        mask = _additive(attn_mask, q.dtype)
        if mask.dim() == 3:
            own = q.shape[1]
            mask = mask.unflatten(0, (q.shape[0], heads))[:, rank * own : (rank + 1) * own]
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q.dtype)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)


def _local(parameter: Any) -> Tensor:
    return parameter.to_local()
