"""State of an optimizer whose ranks each hold a part of it: as one ordinary state dict, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.utils import _pytree as pytree


@runtime_checkable
class ShardedState(Protocol):
    """An optimizer that steps a part of its parameters on each rank, such as FairScale's OSS or torch's
    ``ZeroRedundancyOptimizer``.

    Attributes:
        param_groups: All parameters, the same on every rank.
        optim: The optimizer of this rank's parameters; its groups correspond to ``param_groups``, and may be empty.
    """

    param_groups: list[dict[str, Any]]
    optim: Optimizer


class ClosureFirst(Optimizer):
    """For a sharded optimizer: a step evaluates its closure before it passes the groups' options to the rank's part.

    Lightning runs backward and the hooks in front of the step in the closure. Options that these set (a warm-up's
    learning rate) would otherwise miss the step and be overwritten after it.
    """

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True
        super().step(**kwargs)
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # Schedulers of the plain optimizer ask for it.


def gather_state(optimizer: ShardedState, group: dist.ProcessGroup) -> dict[str, Any]:
    """What the plain, unsharded optimizer's ``state_dict()`` would be, with tensors on the CPU, on the first rank only.

    Collectives: each further rank in turn sends its part to the first; no rank but that one sees another's part.

    Args:
        optimizer: The sharded optimizer.
        group: A CPU group of the ranks among which it is sharded. All of them must call.

    Returns:
        The whole on the group's first rank, an empty dict on the others.
    """
    place = _places(optimizer)
    local = optimizer.optim.state_dict()
    part = {
        place[key] if isinstance(key, int) else key: pytree.tree_map_only(Tensor, lambda tensor: tensor.cpu(), value)
        for key, value in local["state"].items()
    }
    ranks = dist.get_process_group_ranks(group)
    if dist.get_rank(group) != 0:
        dist.send_object_list([part], dst=ranks[0], group=group)
        return {}
    for source in ranks[1:]:
        box: list[Any] = [None]
        dist.recv_object_list(box, src=source, group=group)
        part = box[0] | part
    numbered = sorted(key for key in part if isinstance(key, int))
    named = [key for key in part if not isinstance(key, int)]
    return {**local, "state": {key: part[key] for key in (*numbered, *named)}, "param_groups": _pack(optimizer)}


def scatter_state(optimizer: ShardedState, state: dict[str, Any] | None, group: dist.ProcessGroup) -> None:
    """Loads the ``state_dict()`` of a plain optimizer, which only the first rank needs to have, each rank its part.

    The options of each group are written into the dicts that are there, so whoever holds one (a scheduler, the
    module) keeps seeing what the optimizer uses.

    Collectives: broadcast of the groups' options, gather of which parameters each rank holds, one message to each rank.

    Args:
        optimizer: The sharded optimizer.
        state: On the first rank of ``group``, what :func:`gather_state` gave, or any plain optimizer's state dict.
        group: A CPU group of the ranks among which it is sharded. All of them must call.

    Raises:
        ValueError: On all ranks, when the groups of ``state`` and of the optimizer do not have the same sizes.
    """
    ranks = dist.get_process_group_ranks(group)
    first = dist.get_rank(group) == 0
    box: list[Any] = [None]
    if first and state is not None:
        box = [{**state, "state": {key: value for key, value in state["state"].items() if not isinstance(key, int)}}]
    dist.broadcast_object_list(box, src=ranks[0], group=group)
    outline = box[0]
    saved_groups = outline["param_groups"]
    sizes = [[len(entry["params"]) for entry in groups] for groups in (saved_groups, optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The saved optimizer has parameter groups of {sizes[0]} tensors, this one of {sizes[1]}; load a checkpoint"
            " of the same module and the same configure_optimizers."
        )
    place = _places(optimizer)
    wanted: list[Any] | None = [None] * len(ranks) if first else None
    dist.gather_object(place, wanted, dst=ranks[0], group=group)
    if first:
        assert state is not None and wanted is not None
        saved_keys = [key for entry in saved_groups for key in entry["params"]]
        parts = ({at: state["state"].get(saved_keys[at]) for at in places} for places in wanted)
        mine = next(parts)
        for rank, part in zip(ranks[1:], parts, strict=True):
            dist.send_object_list([part], dst=rank, group=group)
    else:
        dist.recv_object_list(box, src=ranks[0], group=group)
        mine = box[0]
    local = {number: mine[at] for number, at in enumerate(place) if mine[at] is not None}
    options = [{key: value for key, value in entry.items() if key != "params"} for entry in saved_groups]
    packed = [
        option | {"params": entry["params"]} for option, entry in zip(options, _pack_local(optimizer), strict=True)
    ]
    optimizer.optim.load_state_dict({**outline, "state": outline["state"] | local, "param_groups": packed})
    for entry, option in zip(optimizer.param_groups, options, strict=True):
        entry.update(option)


def move_state(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Moves the tensors that optimizers keep for their parameters, in place. No collectives.

    The count of steps stays where the optimizer put it: most want it on the CPU.
    """
    for optimizer in optimizers:
        local = optimizer.optim if isinstance(optimizer, ShardedState) else optimizer
        for values in local.state.values():
            for name, value in values.items():
                if isinstance(value, Tensor) and name != "step":
                    values[name] = value.to(device)


def local_part(optimizer: Optimizer, groups: list[dict[str, Any]], **_: Any) -> Optimizer:
    """An optimizer like ``optimizer``, of its class and options, for ``groups``, sharing the state of their parameters.

    Args:
        optimizer: Loses the state of parameters that are in none of the groups, and keeps its own groups.
        groups: This rank's part of each group; they may be empty.
    """
    local = object.__new__(type(optimizer))
    local.__dict__.update(optimizer.__dict__)
    local.__dict__.pop("step", None)  # A scheduler's counter of steps, bound to the optimizer.
    local.param_groups = groups
    kept = {parameter for group in groups for parameter in group["params"]}
    optimizer.state = defaultdict(dict, {key: value for key, value in optimizer.state.items() if key in kept})
    local.state = optimizer.state
    return local


def refuse_unsuited(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Names what optimizer-state sharding can't do, before anything is changed. No collectives.

    Raises:
        ValueError: An optimizer without parameters, LBFGS, parameters of several dtypes or devices or of DTensor,
            sparse gradients, a parameter in two optimizers.
    """
    sparse = [name for name, part in module.named_modules() if getattr(part, "sparse", False)]
    if sparse:
        raise ValueError(f"{', '.join(sparse)}: sparse gradients can't be sharded; use sparse=False.")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    seen: set[int] = set()
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "LBFGS works on all parameters at once and evaluates its closure many times, so its state"
                " can't be sharded; use strategy='ddp'."
            )
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        twice = [names.get(id(parameter), "?") for parameter in parameters if id(parameter) in seen]
        if twice:
            raise ValueError(f"{', '.join(twice)}: a parameter that is in two optimizers can't be part of two buffers.")
        seen |= {id(parameter) for parameter in parameters}
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            raise ValueError(f"{kind} has DTensor parameters, which are sharded already; use HybridParallelStrategy.")
        trained = [parameter for parameter in parameters if parameter.requires_grad] or parameters
        dtypes, devices = ({str(getattr(p, what)) for p in trained} for what in ("dtype", "device"))
        if len(dtypes) != 1 or len(devices) != 1:
            raise ValueError(
                f"{kind} has parameters of {', '.join(sorted(dtypes))} on {', '.join(sorted(devices))}; each rank's"
                " parameters share one buffer, so give each optimizer those of one dtype and device."
            )


def _places(optimizer: ShardedState) -> list[int]:
    """For each parameter of this rank, in the order of its own optimizer, its number among all."""
    number = {id(parameter): at for at, parameter in enumerate(_parameters(optimizer.param_groups))}
    return [number[id(parameter)] for parameter in _parameters(optimizer.optim.param_groups)]


def _parameters(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [parameter for entry in groups for parameter in entry["params"]]


def _pack(optimizer: ShardedState) -> list[dict[str, Any]]:
    """The groups as a state dict has them: parameters by number, and today's options."""
    packed, start = [], 0
    for entry in optimizer.param_groups:
        end = start + len(entry["params"])
        packed.append({**entry, "params": list(range(start, end))})
        start = end
    return packed


def _pack_local(optimizer: ShardedState) -> list[dict[str, Any]]:
    return optimizer.optim.state_dict()["param_groups"]
