"""Experts beside the other axes of a layout: what is refused, and what a tensor plan leaves to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_dist.layout import ParallelLayout
from lightning_dist.parallel.expert.layer import MixtureOfExperts
from lightning_dist.plan.model_plan import matches


def check_beside_other_axes(
    network: nn.Module,
    layout: ParallelLayout,
    experts: Sequence[str],
    tensor_plan: Mapping[str, Any] | None,
) -> None:
    """Raises ValueError where a mixture of experts would train on other numbers than one device's.

    Args:
        network: The whole network.
        layout: The resolved layout.
        experts: Names of the modules whose experts are spread; empty without expert parallelism.
        tensor_plan: Tensor-parallel styles by name, None without tensor parallelism.
    """
    for name, module in network.named_modules():
        weighted = isinstance(module, MixtureOfExperts) and (module.balance_coefficient or module.z_coefficient)
        if weighted and layout.context > 1:
            raise ValueError(
                f"context_parallel_size={layout.context} does not fit {name}, which has auxiliary losses: ranks with"
                " other numbers of targets would count them with other weights; balance by bias_update_rate instead."
            )
        if getattr(getattr(module, "config", None), "output_router_logits", False) is True:
            axis = "pipeline" if layout.pipeline > 1 else "context"
            if getattr(layout, axis) > 1:
                raise ValueError(
                    f"{axis}_parallel_size={getattr(layout, axis)} does not fit output_router_logits=True of"
                    f" {name or type(module).__name__}: its balancing loss needs the routers of all layers and tokens"
                    " on one rank; set config.output_router_logits = False."
                )
    if experts and tensor_plan is not None:
        cut = [name for name, style in tensor_plan.items() if style == "sequence_parallel"]
        if cut:
            raise ValueError(
                f"expert_parallel_size={layout.expert} does not fit the style 'sequence_parallel' of {cut[0]}: the"
                " ranks of a tensor group must see the same tokens to share experts; leave it out of the tensor plan."
            )


def leave_experts_out(network: nn.Module, plan: Mapping[str, Any], experts: Iterable[str]) -> dict[str, Any]:
    """A tensor plan without the styles of experts that are spread, and of what is inside them.

    Args:
        network: What the names are relative to.
        plan: Styles by the name, with ``*`` for one part, of a module or a parameter.
        experts: Names of the experts.
    """
    experts = list(experts)
    names = [name for name, _ in network.named_modules()] + [name for name, _ in network.named_parameters()]

    def inside(name: str) -> bool:
        return any(name == owner or name.startswith(f"{owner}.") for owner in experts)

    left: dict[str, Any] = {}
    for pattern, style in plan.items():
        found = [name for name in names if matches(name, pattern)]
        if any(map(inside, found)):
            left.update({name: style for name in found if not inside(name)})
        else:
            left[pattern] = style
    return left
