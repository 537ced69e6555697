"""Tensor parallelism inside experts: every rank computes its part of every expert's hidden width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from lightning_dist.parallel.tensor.collectives import sum_gradients_of, sum_parts
from lightning_dist.parallel.tensor.heads import fused_rows
from lightning_dist.parallel.tensor.shards import (
    Forward,
    RowExchange,
    distribute_parameter,
    local_parameters,
    override_forward,
    shown_as,
)
from lightning_dist.parallel.tensor.styles import TensorGroup, plain_replica


def cut_experts(module: nn.Module, group: TensorGroup, styles: Mapping[str, str]) -> None:
    """Cuts the hidden width of fused experts (``gate_up_proj [experts, 2 * inner, hidden]`` and the like).

    Called as ``module(hidden, top_k_index, top_k_weights)`` or ``module(hidden)``; routing is replicated.

    Collectives per call: an all-reduce of the output; in backward, one each of the gradients of hidden states and
    routing weights; an all-to-all of every packed parameter, and one in backward.

    Args:
        module: The experts.
        group: The tensor group.
        styles: For each of its parameters: ``"packed_colwise"`` (gate and up in one, along the last dimension but
            one), ``"packed_rowwise"`` (the same along the last), ``"colwise"`` or ``"rowwise"``.
    """
    exchanges = {}
    for name, style in styles.items():
        parameter = module._parameters[name]
        assert parameter is not None
        dim = parameter.dim() - (2 if style.endswith("colwise") else 1)
        if style.startswith("packed_"):
            width = parameter.shape[dim]
            exchanges[name] = (RowExchange(fused_rows(width, 2, group.size), width, group.group), dim)
        distribute_parameter(module, name, group.mesh, Shard(dim))

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        hidden, *routing = args
        if len(routing) >= 2:
            routing[1] = sum_gradients_of(plain_replica(routing[1]), group.group)
        values = local_parameters(self)
        for name, (exchange, dim) in exchanges.items():
            values[name] = exchange(values[name], dim)
        with shown_as(self, values):
            output = original(sum_gradients_of(plain_replica(hidden), group.group), *routing, **kwargs)
        return sum_parts(output, group.group)

    override_forward(module, forward)
