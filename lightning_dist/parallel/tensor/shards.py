"""A module's own forward on this rank's parts of its parameters, which stay DTensors under their own names."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_dist.parallel.tensor.collectives import part_sizes

Forward = Callable[..., Any]


def distribute_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replaces a parameter by a DTensor that holds this rank's part; its values are taken as equal on all ranks.

    No collectives. A parameter that is a DTensor already is left alone.

    Args:
        module: The module that owns the parameter.
        name: The parameter's name in it; one that is None is passed over.
        mesh: One-dimensional tensor mesh.
        placement: ``Shard(dim)`` or ``Replicate()``.
    """
    parameter = module._parameters[name]
    if parameter is None or isinstance(parameter, DTensor):
        return
    whole = parameter.detach()
    part = whole
    if isinstance(placement, Shard):
        sizes = part_sizes(whole.shape[placement.dim], mesh.size())
        rank = mesh.get_local_rank()
        # A copy, so that the whole can be freed.
        part = whole.narrow(placement.dim, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)
    distributed = as_dtensor(part, mesh, placement, whole.shape)
    replacement = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
    replacement.__dict__.update(parameter.__dict__)  # marks that other libraries left on it
    setattr(module, name, replacement)


def override_forward(module: nn.Module, forward: Callable[[nn.Module, Forward, tuple, dict], Any]) -> None:
    """Makes calls of ``module`` run ``forward(module, original, args, kwargs)``; ``original`` is its forward before.

    By a subclass rather than a hook: it holds under any exception, survives ``copy.deepcopy``, and is what FSDP2 does.
    """
    if "forward" in vars(module):  # somebody replaced it on the instance, which hides the class's
        before = vars(module)["forward"]
        vars(module)["forward"] = functools.wraps(before)(lambda *args, **kwargs: forward(module, before, args, kwargs))
        return
    base = type(module)

    @functools.wraps(base.forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, functools.partial(base.forward, self), args, kwargs)

    names = {"forward": call, "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    module.__class__ = type(base.__name__, (base,), names)


@contextlib.contextmanager
def shown_as(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Lets ``module.name`` read ``values[name]`` for a while; its registered parameters are not touched."""
    attributes = vars(module)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                attributes[name] = before[name]
            else:
                attributes.pop(name, None)


def local_parameters(module: nn.Module, gradients: Placement | None = None) -> dict[str, Tensor]:
    """The local parts of the module's own parameters, through which gradients flow back.

    Args:
        module: Its own parameters, not those of submodules.
        gradients: What the ranks' gradients are to each other: None the same layout as the parameter, ``Partial()``
            for parts of a sum, as where replicated parameters meet sharded activations.
    """
    parts = {name: local_part(module, name, gradients) for name in module._parameters}
    return {name: part for name, part in parts.items() if part is not None}


def local_part(module: nn.Module, name: str, gradients: Placement | None = None) -> Tensor | None:
    """One of :func:`local_parameters`; None where the parameter is None or plain."""
    parameter: Any = module._parameters.get(name)
    if not isinstance(parameter, DTensor):
        return None
    return parameter.to_local(grad_placements=None if gradients is None else [gradients])


def as_dtensor(part: Tensor, mesh: DeviceMesh, placement: Placement, shape: Sequence[int]) -> DTensor:
    """This rank's part of a tensor of ``shape`` as a DTensor; no collectives."""
    return DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=_contiguous_stride(shape)
    )


def replicate_parameters(module: nn.Module, mesh: DeviceMesh, gradients: Placement | None = None) -> None:
    """Keeps the module's own parameters whole on every rank, as DTensors, and runs it on plain tensors.

    DTensors, so that all parameters of a network are of one kind: foreach and fused optimizers, ``clip_grad_norm_``
    and checkpoints refuse or confuse a mixture.

    Args:
        module: The module; submodules are left alone.
        mesh: One-dimensional tensor mesh.
        gradients: See :func:`local_parameters`.
    """
    for holder in _holders(module):
        for name in list(holder._parameters):
            distribute_parameter(holder, name, mesh, Replicate())

    def forward(self: nn.Module, original: Forward, args: tuple, kwargs: dict) -> Any:
        with contextlib.ExitStack() as stack:
            for holder in _holders(self):
                stack.enter_context(shown_as(holder, local_parameters(holder, gradients)))
            return original(*args, **kwargs)

    override_forward(module, forward)


def _holders(module: nn.Module) -> list[nn.Module]:
    """The module and its parameter lists, which have no forward of their own."""
    lists = (nn.ParameterList, nn.ParameterDict)
    return [module, *(child for child in module.children() if isinstance(child, lists))]


class RowExchange:
    """Hands each rank the rows it computes with, out of a parameter whose rows are cut in the ordinary way.

    Fused projections (query, key and value in one matrix) and key/value heads that several ranks share need rows that
    are not this rank's part. The parameter keeps the layout that checkpoints, FSDP2 and norms understand, and the
    rows travel when they are used: 1/size of the matrix for each rank, little beside the activations.

    Args:
        needed: For each rank of the group, the rows of the whole parameter, in the order in which it wants them.
        size: Number of rows of the whole parameter.
        group: The tensor group.
    """

    def __init__(self, needed: list[Tensor], size: int, group: dist.ProcessGroup) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.group = group
        starts = [0]
        for part in part_sizes(size, ranks):
            starts.append(starts[-1] + part)
        self.own_rows = starts[rank + 1] - starts[rank]
        sent = [rows[(rows >= starts[rank]) & (rows < starts[rank + 1])] - starts[rank] for rows in needed]
        received = [
            ((needed[rank] >= start) & (needed[rank] < end)).nonzero().flatten()
            for start, end in itertools.pairwise(starts)
        ]
        self.send_counts = [len(rows) for rows in sent]
        self.receive_counts = [len(rows) for rows in received]
        self._send = torch.cat(sent)
        self._place = torch.cat(received)

    def __call__(self, part: Tensor, dim: int) -> Tensor:
        """Returns the rows this rank needs along ``dim``, given its own part.

        Collectives: one all-to-all over the group; one more in backward.
        """
        rows = _ExchangeRows.apply(part.movedim(dim, 0), self)
        return rows.movedim(0, dim)

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._send.device != device:
            self._send, self._place = self._send.to(device), self._place.to(device)
        return self._send, self._place


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, plan: RowExchange) -> Tensor:
        ctx.plan = plan
        send, place = plan.indices(part.device)
        outgoing = part.index_select(0, send).contiguous()
        incoming = outgoing.new_empty((len(place), *part.shape[1:]))
        dist.all_to_all_single(incoming, outgoing, plan.receive_counts, plan.send_counts, group=plan.group)
        return torch.empty_like(incoming).index_copy_(0, place, incoming)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        plan: RowExchange = ctx.plan
        send, place = plan.indices(gradient.device)
        outgoing = gradient.index_select(0, place).contiguous()
        incoming = outgoing.new_empty((len(send), *gradient.shape[1:]))
        dist.all_to_all_single(incoming, outgoing, plan.send_counts, plan.receive_counts, group=plan.group)
        own = incoming.new_zeros((plan.own_rows, *gradient.shape[1:]))
        # Several ranks may have used one row; rank by rank, so that the order of the sum is the same in every run.
        for rows, rows_gradient in zip(send.split(plan.send_counts), incoming.split(plan.send_counts), strict=True):
            own.index_add_(0, rows, rows_gradient)
        return own, None


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    return tuple(stride[: len(shape)])
