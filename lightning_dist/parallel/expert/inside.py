"""Tensor parallelism inside spread experts: the ranks of a tensor group share the width of each expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.parallel.expert.experts import Experts
from lightning_dist.parallel.tensor.collectives import sum_gradients_of, sum_parts
from lightning_dist.parallel.tensor.heads import fused_rows
from lightning_dist.parallel.tensor.shards import RowExchange
from lightning_dist.plan.model_plan import expand_names

OUR_STYLES = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}


@dataclass(frozen=True)
class CutInside:
    """How a module's experts are cut: along which dimension, and which packed rows have to travel for it."""

    group: dist.ProcessGroup
    dims: Mapping[str, int]
    exchanges: Mapping[str, RowExchange]

    def enter(
        self, hidden: Tensor, weights: Tensor, parts: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """From replicated tokens into the shared work; in backward their gradients are summed over the group."""
        rows = {
            name: self.exchanges[name](part, self.dims[name]) if name in self.exchanges else part
            for name, part in parts.items()
        }
        return sum_gradients_of(hidden, self.group), sum_gradients_of(weights, self.group), rows

    def leave(self, output: Tensor) -> Tensor:
        return sum_parts(output, self.group)


def tensor_styles_of(network: nn.Module, name: str, ranks: int) -> dict[str, str]:
    """How each parameter of the named experts is cut for ``ranks`` tensor ranks; empty if that is not known for all
    of them, or does not divide."""
    experts = network.get_submodule(name)
    if isinstance(experts, Experts):
        styles = dict(OUR_STYLES)
    else:
        styles = {}
        for owner_name, owner in network.named_modules():
            plan = getattr(owner, "tp_plan", None) if hasattr(owner, "base_model_prefix") else None
            prefix = f"{owner_name}." if owner_name else ""
            for key, style in (plan or {}).items():
                module_pattern, _, parameter = key.rpartition(".")
                if parameter in experts._parameters and name in _matches(network, prefix + module_pattern):
                    styles[parameter] = style
    for parameter_name, parameter in experts.named_parameters():
        style = styles.get(parameter_name, "")
        if style not in ("colwise", "rowwise", "packed_colwise") or parameter.dim() != 3:
            return {}
        if parameter.shape[dimension_of(style)] % (ranks * (2 if style.startswith("packed") else 1)):
            return {}
    return styles


def cut_inside(experts: nn.Module, mesh: DeviceMesh, styles: Mapping[str, str]) -> CutInside:
    """Prepares the cut of ``styles`` over the one-dimensional tensor mesh."""
    exchanges = {}
    for name, style in styles.items():
        if style == "packed_colwise":  # gate and up one after the other: each rank needs its part of both
            width = experts.get_parameter(name).shape[1]
            exchanges[name] = RowExchange(fused_rows(width, 2, mesh.size()), width, mesh.get_group())
    dims = {name: dimension_of(style) for name, style in styles.items()}
    return CutInside(mesh.get_group(), dims, exchanges)


def dimension_of(style: str) -> int:
    """Experts are ``[experts, outputs, inputs]``: which dimension a style cuts."""
    return 1 if style.endswith("colwise") else 2


def _matches(network: nn.Module, pattern: str) -> list[str]:
    try:
        return expand_names(network, [pattern], "tensor")
    except ValueError:
        return []
