"""Parameters that every rank of a tensor group holds whole: their gradients summed, their equality checked."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_dist.parallel.tensor.collectives import all_gather_single


def sum_replicated_gradients(parameters: Iterable[Tensor]) -> None:
    """Sums the gradients that are parts of a sum over the tensor group: norms on cut activations, shared heads.

    Such gradients are DTensors with a ``Partial`` placement, through any number of backward passes; this makes them
    whole, in place, in one collective for each mesh and dtype. Calling it twice does no harm, and without it an
    optimizer still steps right, with a collective for each use. Call it once per optimizer step, before gradients are
    unscaled, measured or clipped.

    Collectives: one all-reduce over the tensor group for each dtype (none if no gradient is partial); one more for each
    cut matrix whose gradient torch left in another layout.

    Args:
        parameters: This rank's parameters.
    """
    partial: dict[tuple[DeviceMesh, int, torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
            continue
        axes = [axis for axis, placement in enumerate(gradient.placements) if placement.is_partial()]
        if len(axes) == 1 and parameter.placements[axes[0]].is_replicate():
            key = (gradient.device_mesh, axes[0], gradient.dtype, gradient.device)
            partial.setdefault(key, []).append(parameter)
        elif gradient.placements != parameter.placements:
            # Blocks on DTensors: torch may leave the gradient of a cut matrix as a sum, too.
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    for (mesh, axis, _, _), same in partial.items():
        parts = [parameter.grad.to_local() for parameter in same]  # type: ignore[union-attr]
        joined = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(joined, group=mesh.get_group(axis))
        for parameter, total in zip(same, joined.split([part.numel() for part in parts]), strict=True):
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            placements = list(gradient.placements)
            placements[axis] = Replicate()
            parameter.grad = DTensor.from_local(
                total.view(gradient.to_local().shape),
                mesh,
                placements,
                run_check=False,
                shape=gradient.shape,
                stride=gradient.stride(),
            )


def check_replicas(module: nn.Module, mesh: DeviceMesh) -> None:
    """Raises if a parameter or buffer that the ranks of the tensor group hold whole is not equal bit for bit.

    A debug check: it waits for the device. Replicas drift where a gradient is not the same on all ranks, for example
    for a norm on activations that are cut over the group, and nothing else would say so.

    Collectives: one all-gather over the tensor group; if something differs, two all-reduces for each such tensor.

    Args:
        module: The module; of a parameter that FSDP2 shards too, the ranks' equal shards are compared.
        mesh: A mesh with an axis ``tensor``, or a one-dimensional one.

    Raises:
        RuntimeError: Naming the tensors, the ranks and the largest difference, on every rank of the group alike.
    """
    if "tensor" in (mesh.mesh_dim_names or ()) and mesh.ndim > 1:
        mesh = mesh["tensor"]
    group = mesh.get_group()
    held = {name: part for name, tensor in _tensors(module) if (part := _replica(tensor, mesh)) is not None}
    if not held:
        return
    own = torch.stack([_fingerprint(part) for part in held.values()])
    everybody = own.new_empty((mesh.size(), *own.shape))
    all_gather_single(everybody.view(-1, own.shape[-1]), own, group=group)
    differs = (everybody != everybody[0]).any(dim=-1)  # [ranks, tensors]
    drifted = differs.any(dim=0).nonzero().flatten().tolist()
    if not drifted:
        return
    names = list(held)
    accounts = []
    for index in drifted:
        part = held[names[index]].detach().to(torch.float64)
        highest, lowest = part.clone(), part.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
        ranks = ", ".join(str(rank) for rank in differs[:, index].nonzero().flatten().tolist())
        accounts.append(f"{names[index]} (tensor rank {ranks} against 0, by up to {(highest - lowest).max():.3g})")
    raise RuntimeError(
        "Replicas have drifted apart over the tensor group: "
        + "; ".join(accounts)
        + ". Their gradients were not equal on all ranks: a module on cut activations needs the style"
        " 'replicated_with_grad_allreduce'."
    )


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _replica(tensor: Tensor, mesh: DeviceMesh) -> Tensor | None:
    """This rank's part of a tensor that the tensor ranks of ``mesh`` hold alike; None where each holds its own."""
    if not isinstance(tensor, DTensor):
        return tensor
    axes = tensor.device_mesh.mesh_dim_names or ()
    name = (mesh.mesh_dim_names or ("",))[0]
    axis = axes.index(name) if name in axes else 0 if tensor.device_mesh == mesh else None
    if axis is not None and not tensor.placements[axis].is_replicate():
        return None
    return tensor.to_local()


def _fingerprint(tensor: Tensor) -> Tensor:
    """Two sums over a tensor's bits that differ, with near certainty, where one bit does."""
    if tensor.numel() == 0:
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)
    bits = tensor.detach().contiguous().reshape(-1)
    if bits.dtype.is_complex:
        bits = torch.view_as_real(bits).reshape(-1)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    numbers = bits.view(kinds[bits.element_size()]).to(torch.int64)
    weights = torch.arange(1, numbers.numel() + 1, device=numbers.device) * 0x9E3779B1 % (2**31 - 1)
    return torch.stack([numbers.sum(), (numbers * weights).sum()])
