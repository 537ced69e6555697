"""Spreads the experts of a network over ranks, and what each rank holds of them over the data ranks that are left."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_dist import _compat
from lightning_dist.layout import ParallelLayout
from lightning_dist.parallel.data import ReshardAfterForward
from lightning_dist.parallel.expert.exchange import exchange_tokens
from lightning_dist.parallel.expert.inside import cut_inside, tensor_styles_of
from lightning_dist.parallel.tensor.shards import Forward, local_parameters, override_forward, shown_as

TOKEN_AXES = ("replicate", "expert_shard", "expert")
"""Axes of the expert mesh whose ranks see different tokens."""


@dataclass(frozen=True)
class ExpertReport:
    """What was done with the experts of a network."""

    experts: dict[str, range] = field(default_factory=dict)
    """Which experts of each module this rank holds (before they are sharded further)."""
    cut_inside: list[str] = field(default_factory=list)
    """Modules in which the ranks of the ``tensor`` axis share each expert; in the others they do the same work."""
    whole_parameters: list[nn.Parameter] = field(default_factory=list)
    """This rank's parameters that FSDP2 does not manage; units around them must ignore them."""


def build_expert_mesh(layout: ParallelLayout, device_type: str) -> DeviceMesh:
    """The mesh as experts see it: axes pipeline, replicate, expert_shard, expert and tensor, those larger than 1.

    ``expert_shard x expert`` are the ranks of ``shard x context``, expert innermost: the ranks of one expert group are
    neighbours in data (or sequence) order.

    Collectives: those of ``torch.distributed.new_group``; all ranks must call it.

    Args:
        layout: A resolved layout with ``expert`` above 1.
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    if layout.expert == 1:
        raise ValueError("expert=1 needs no expert mesh; give the layout an expert size above 1.")
    sizes = layout.sizes()
    axes = {
        "pipeline": sizes["pipeline"],
        "replicate": sizes["replicate"],
        "expert_shard": sizes["shard"] * sizes["context"] // layout.expert,
        "expert": layout.expert,
        "tensor": sizes["tensor"],
    }
    axes = {axis: size for axis, size in axes.items() if size > 1}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def apply_expert_parallel(
    network: nn.Module,
    names: Iterable[str],
    mesh: DeviceMesh,
    *,
    gradient_divisor: int | None = None,
    reshard_after_forward: ReshardAfterForward = "auto",
) -> ExpertReport:
    """Spreads each of the named experts over the mesh; before FSDP2 is applied to what is around them.

    Module and parameter names stay, and parameters are DTensors of the full shape, so state dicts are those of one
    device. Weights must be equal on all ranks. The ranks of a ``tensor`` axis, which see the same tokens, share the
    width of each expert where it is known how to cut it and divides; leave the experts out of the tensor plan then.

    Collectives: none here; in a forward those of :func:`~lightning_dist.parallel.expert.exchange.exchange_tokens` over
    ``expert``, FSDP2's over ``replicate`` and ``expert_shard``, and over ``tensor`` an all-reduce of the output, in
    backward of the gradients of hidden states and weights.

    Args:
        network: The network.
        names: Modules called as ``experts(hidden, top_k_index, top_k_weights)``, see
            :func:`~lightning_dist.parallel.expert.find_experts`.
        mesh: From :func:`build_expert_mesh`.
        gradient_divisor: What the sum of all ranks' gradients of dense parameters is divided by; None is the number
            of ranks with different tokens, as data parallelism averages.
        reshard_after_forward: As for FSDP2's units; ``"auto"`` is True.

    Raises:
        ValueError: If a module is not of that kind, or its experts do not divide among the ranks.
    """
    report = ExpertReport()
    for name in names:
        experts = network.get_submodule(name)
        check_experts(experts, name, mesh["expert"].size())
        styles = tensor_styles_of(network, name, mesh["tensor"].size()) if "tensor" in _axes(mesh) else {}
        if styles:
            report.cut_inside.append(name)
        report.experts[name] = spread_experts(experts, mesh, gradient_divisor, styles)
        if not shard_further(experts, mesh, reshard_after_forward):
            report.whole_parameters.extend(experts.parameters())
    return report


def check_experts(experts: nn.Module, name: str, ranks: int) -> None:
    """Raises ValueError, with what fits, if the experts cannot be spread over ``ranks`` ranks."""
    number = getattr(experts, "num_experts", None)
    if not isinstance(number, int) or len(_arguments_of(experts)) < 3:
        raise ValueError(
            f"{name} ({type(experts).__name__}) does not fit expert parallelism: it needs an attribute num_experts and"
            " a forward(hidden, top_k_index, top_k_weights); name the module that holds the experts' stacked weights."
        )
    if number % ranks:
        raise ValueError(f"{name} has {number} experts, which do not divide among {ranks} expert ranks.")
    for parameter_name, parameter in experts.named_parameters():
        if "." in parameter_name or parameter.dim() == 0 or parameter.shape[0] != number:
            raise ValueError(
                f"{name}.{parameter_name} of shape {tuple(parameter.shape)} does not fit expert parallelism: the first"
                f" dimension of every parameter must be its {number} experts."
            )


def spread_experts(
    experts: nn.Module,
    mesh: DeviceMesh,
    gradient_divisor: int | None = None,
    tensor_styles: Mapping[str, str] | None = None,
) -> range:
    """Leaves this rank its part of the experts and exchanges tokens in forward; returns which they are."""
    expert_mesh = mesh["expert"]
    group, ranks, rank = expert_mesh.get_group(), expert_mesh.size(), expert_mesh.get_local_rank()
    total = int(experts.num_experts)  # type: ignore[arg-type]
    own = total // ranks
    cut = cut_inside(experts, mesh["tensor"], tensor_styles) if tensor_styles else None
    for name, _ in list(experts.named_parameters(recurse=False)):
        if cut is None:
            _distribute(experts, name, expert_mesh, [Shard(0)])
        else:
            _distribute(experts, name, mesh["expert", "tensor"], [Shard(0), Shard(cut.dims[name])])
    # FSDP2 averages over the ranks that hold the same experts, while the exchange has summed over the others.
    averaged = math.prod(mesh[axis].size() for axis in TOKEN_AXES[:2] if axis in _axes(mesh))
    scale = averaged / (gradient_divisor or averaged * ranks)

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Tensor:
        hidden, index, weights = routed_arguments(original, args, kwargs)
        parts = {name: scale_gradient(part, scale) for name, part in local_parameters(self).items()}
        if cut is not None:
            hidden, weights, parts = cut.enter(hidden, weights, parts)
        with shown_as(self, {**parts, "num_experts": own}):
            output, vars(self)["last_exchange"] = exchange_tokens(hidden, index, weights, total, group, original)
        return output if cut is None else cut.leave(output)

    override_forward(experts, forward)
    return range(rank * own, (rank + 1) * own)


def shard_further(experts: nn.Module, mesh: DeviceMesh, reshard_after_forward: ReshardAfterForward) -> bool:
    """Puts spread experts under FSDP2 over the data ranks that hold the same; False where there are none."""
    axes = tuple(axis for axis in TOKEN_AXES[:2] if axis in _axes(mesh))
    if axes == ("replicate",):
        _compat.replicate_module(experts, mesh=mesh["replicate"])
    elif axes:
        size = mesh["expert_shard"].size()
        fully_shard(
            experts,
            mesh=mesh[axes],
            reshard_after_forward=True if reshard_after_forward == "auto" else reshard_after_forward,
            shard_placement_fn=lambda parameter: _even_dimension(parameter, size),
        )
    return bool(axes)


def _even_dimension(parameter: Any, ranks: int) -> Shard:
    """Whole experts for each rank where they divide among the ranks, else equal parts of every expert."""
    local = parameter.to_local().shape
    return Shard(next((dim for dim, size in enumerate(local) if size % ranks == 0), 0))


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placements: list[Shard]) -> None:
    """Replaces a parameter by a DTensor of this rank's part; its values are taken as equal on all ranks."""
    parameter = module._parameters[name]
    assert parameter is not None
    part = parameter.detach()
    for axis, placement in enumerate(placements):
        size = part.shape[placement.dim] // mesh.size(axis)
        part = part.narrow(placement.dim, mesh.get_local_rank(axis) * size, size)
    # A copy, so that the whole can be freed.
    part = part.clone(memory_format=torch.contiguous_format)
    distributed = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    replacement = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
    replacement.__dict__.update(parameter.__dict__)  # marks that other libraries left on it
    setattr(module, name, replacement)


def routed_arguments(forward: Callable[..., Any], args: tuple, kwargs: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, chosen experts and weights out of a call of experts, whatever the parameters are called."""
    if kwargs:
        args = tuple(inspect.signature(forward).bind(*args, **kwargs).arguments.values())
    hidden, index, weights = args[:3]
    return hidden, index, weights


def _arguments_of(experts: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(experts.forward).parameters


def _axes(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def scale_gradient(tensor: Tensor, scale: float) -> Tensor:
    """Returns ``tensor``; its gradient is multiplied by ``scale``."""
    return tensor if scale == 1.0 else _ScaleGradient.apply(tensor, scale)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.scale, None
