"""One gradient norm and one clip for the whole model, whatever meshes its parameters live on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from lightning_dist.parallel.data import local_tensor


def gradient_norm(
    parameters: Iterable[Tensor],
    norm_type: float = 2.0,
    *,
    holders: Callable[[Tensor], int] | int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The norm of all gradients of the model as one vector, each logical element counted once.

    Every rank adds what it holds, divided by the number of ranks that hold the same elements, so one reduction over
    ``group`` gives the same number on all ranks, for DTensors of any meshes beside plain tensors. A rank without
    gradients joins with 0.

    Collectives: one all-reduce of a scalar over ``group``.

    Args:
        parameters: This rank's parameters; those without a gradient are passed over.
        norm_type: 1, 2, any other positive p, or ``math.inf``.
        holders: How many ranks of ``group`` hold a (part of a) parameter: a number, or a function of the parameter;
            None means all of them.
        group: The ranks that hold the model, data ranks included; None is the world.

    Returns:
        A float64 scalar on the gradients' device.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    distributed = dist.is_initialized() and dist.get_world_size(group) > 1
    everyone = dist.get_world_size(group) if distributed else 1
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    device = gradient_device(grads, group)
    # One type on all ranks: a rank without gradients can't know what the others hold.
    dtype = torch.float32 if device.type == "mps" else torch.float64

    # Grouped by how often each part is counted, so that no list of numbers travels to the device.
    by_share: dict[float, list[Tensor]] = {}
    for parameter, grad in zip(parameters, grads, strict=True):
        if (part := local_tensor(grad)).numel():
            count = holders(parameter) if callable(holders) else holders or everyone
            by_share.setdefault(_distinct_parts(grad) / count, []).append(part)

    total = torch.zeros((), dtype=dtype, device=device)
    if norm_type == math.inf:
        if by_share:
            total = torch.stack([norm for parts in by_share.values() for norm in norms(parts, norm_type, dtype)]).max()
        return _max_with_nan(total, group) if distributed else total
    for share, parts in by_share.items():
        total = total + (torch.stack(norms(parts, norm_type, dtype)) ** norm_type).sum() * share
    if distributed:
        dist.all_reduce(total, group=group)
    return total ** (1.0 / norm_type)


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    holders: Callable[[Tensor], int] | int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scales all gradients by ``min(1, max_norm / norm)`` with the norm of :func:`gradient_norm`, in place.

    The coefficient stays on the device, so the host does not wait. Follows ``torch.nn.utils.clip_grad_norm_``,
    which raises where parameters live on different meshes or beside plain tensors (pytorch#180346).

    Collectives: one all-reduce of a scalar over ``group``.

    Returns:
        The norm before clipping, the same on every rank.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters, norm_type, holders=holders, group=group)
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scale_gradients_(parameters, coefficient)
    return norm


def clip_grad_value_(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Limits every gradient element to ``[-clip_value, clip_value]``, in place. No collectives."""
    local = _local_gradients(parameters)
    for grads in _by_device_and_dtype(local):
        torch._foreach_clamp_min_(grads, -clip_value)
        torch._foreach_clamp_max_(grads, clip_value)


def scale_gradients_(parameters: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiplies every gradient by ``factor``, in place. No collectives."""
    for grads in _by_device_and_dtype(_local_gradients(parameters)):
        if isinstance(factor, Tensor):
            torch._foreach_mul_(grads, factor.to(device=grads[0].device, dtype=_at_least_float32(grads[0].dtype)))
        else:
            torch._foreach_mul_(grads, factor)


def norms(tensors: list[Tensor], norm_type: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The norm of each local tensor that is not empty, in no certain order, as scalars of ``dtype``."""
    scalars: list[Tensor] = []
    for same in _by_device_and_dtype([tensor for tensor in tensors if tensor.numel()]):
        scalars += torch._foreach_norm(same, norm_type, dtype=_at_least_float32(same[0].dtype))
    return [scalar.to(dtype) for scalar in scalars]


def _local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    grads = (parameter.grad for parameter in parameters)
    return [part for grad in grads if grad is not None and (part := local_tensor(grad)).numel()]


def _by_device_and_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _distinct_parts(grad: Tensor) -> int:
    """In how many parts the ranks of the gradient's mesh hold it: the product of its sharded mesh axes."""
    if not isinstance(grad, DTensor):
        return 1
    parts = 1
    for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
        if isinstance(placement, Partial):
            raise RuntimeError(f"A gradient is still a partial sum over its mesh {grad.device_mesh}; reduce it first.")
        if not placement.is_replicate():
            parts *= size
    return parts


def _max_with_nan(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Maximum over ranks that is NaN if any rank's is: the reductions of Gloo and NCCL may drop a NaN."""
    both = torch.stack([value.nan_to_num(nan=0.0, posinf=math.inf), value.isnan().to(value.dtype)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return torch.where(both[1] > 0, torch.full_like(value, math.nan), both[0])


def gradient_device(grads: list[Tensor], group: dist.ProcessGroup | None = None) -> torch.device:
    """Where gradients live, on a rank that has none too."""
    if grads:
        return grads[0].device
    if dist.is_initialized() and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
