"""Optimizer state under parameter names instead of numbers, so that any stage and any layout finds its own.

torch numbers parameters and groups in the order in which an optimizer holds them. On a pipeline stage that is another
order than in the whole model, and one number means different parameters on different stages (pytorch#126595).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import empty as empty_dtensor

from lightning_dist.checkpoint.read import tensor_index
from lightning_dist.checkpoint.storage import PathLike

OPTIMIZER_PREFIX = "optimizer_"
"""The first optimizer is saved under the top-level key `optimizer_0`."""

Names = Mapping[torch.nn.Parameter, str]
# One group as one rank saw it: its number, its options, and the names in it. A tuple, which is saved as one value;
# a dict would be taken apart into one value for each option.
_Group = tuple[int, dict[str, Any], list[str]]


def optimizer_state_by_name(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """The state of an optimizer keyed by parameter name: what to save under `optimizer_0`, `optimizer_1`, ….

    Args:
        optimizer: Its parameters may be sharded, and may be a part of the model's.
        names: The fully qualified name of each parameter.

    Returns:
        `state`: name → {"exp_avg": tensor, …}; `groups`: one value for each group, with its number, options and names.

    Raises:
        ValueError: A parameter of the optimizer has no name.
    """
    state: dict[str, Any] = {}
    groups: dict[str, _Group] = {}
    for number, group in enumerate(optimizer.param_groups):
        members = [_name(names, parameter) for parameter in group["params"]]
        options = {key: value for key, value in group.items() if key != "params"}
        groups[f"{number}:{members[0] if members else ''}"] = (number, options, members)
        for name, parameter in zip(members, group["params"], strict=True):
            if optimizer.state.get(parameter):
                state[name] = dict(optimizer.state[parameter])
    return {"state": state, "groups": groups}


def optimizer_state_to_fill(
    directory: PathLike, key: str, optimizer: torch.optim.Optimizer, names: Names
) -> dict[str, Any]:
    """Room for what a checkpoint holds for this rank's parameters, to be given to `load_into` under `key`.

    Works for an optimizer that has not made a step. Empty where the checkpoint has nothing under `key`.

    Args:
        directory: The checkpoint to load.
        key: Top-level key of the optimizer, for example `optimizer_0`.
        optimizer: The optimizer that is to be restored.
        names: The fully qualified name of each parameter.
    """
    index = tensor_index(directory)
    saved: dict[str, dict[str, Any]] = {}
    groups: dict[str, None] = {}
    for path, entry in _entries(index, key):
        if path[0] == "groups":
            groups[path[1]] = None
        elif len(path) == 3:
            saved.setdefault(path[1], {})[path[2]] = entry
    state: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = _name(names, parameter)
            if name in saved:
                have = optimizer.state.get(parameter, {})
                state[name] = {key: _room(key, entry, parameter, have.get(key)) for key, entry in saved[name].items()}
    return {"state": state, "groups": groups} if groups else {}


def restore_optimizer(optimizer: torch.optim.Optimizer, names: Names, filled: Mapping[str, Any]) -> None:
    """Gives an optimizer the state that `load_into` has put into what `optimizer_state_to_fill` returned.

    Every option of every group is restored: by parameter name, and by the group's number for a group that holds no
    parameter on this rank (pytorch#143828).

    Raises:
        ValueError: A parameter is in no saved group, or parameters that are in one group now had different options.
    """
    by_name: dict[str, dict[str, Any]] = {}
    by_number: dict[int, dict[str, Any]] = {}
    for number, options, members in _groups(filled):
        by_name |= dict.fromkeys(members, options)
        if members or number not in by_number:
            by_number[number] = options
    groups, state, position = [], {}, 0
    for number, group in enumerate(optimizer.param_groups):
        members = [_name(names, parameter) for parameter in group["params"]]
        options = by_number.get(number, {})
        for name in members:
            if name not in by_name:
                raise ValueError(f"parameter {name} is in no group of the saved optimizer")
            options = by_name[members[0]]
            if not _equal(by_name[name], options):
                raise ValueError(
                    f"parameters {members[0]} and {name} are in one group of the optimizer now, "
                    f"and had different options when they were saved: {options} and {by_name[name]}"
                )
        current = {key: value for key, value in group.items() if key != "params"}
        groups.append(current | options | {"params": list(range(position, position + len(members)))})
        for name in members:
            if name in filled["state"]:
                state[position] = filled["state"][name]
            position += 1
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    _keep_dtypes(optimizer, state)


def numbered_optimizer_state(saved: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """The `state_dict()` of an optimizer over the whole model, out of what was saved under names.

    Args:
        saved: What was saved, complete.
        order: All parameter names in the order of the model; that is the order inside a group whose parts come from
            several pipeline stages.
    """
    positions = {name: position for position, name in enumerate(order)}
    merged: dict[int, tuple[dict[str, Any], list[str]]] = {}
    parts: dict[int, int] = {}
    for number, options, members in sorted(_groups(saved), key=lambda group: group[0]):
        known_options, known_members = merged.get(number, (options, []))
        if members and not known_members:
            known_options = options
        parts[number] = parts.get(number, 0) + bool(members)
        merged[number] = (known_options, list(dict.fromkeys([*known_members, *members])))
    state, groups, position = {}, [], 0
    for number, (options, members) in sorted(merged.items()):
        if parts[number] > 1:
            members = sorted(members, key=lambda name: positions.get(name, len(positions)))
        groups.append(options | {"params": list(range(position, position + len(members)))})
        for name in members:
            if name in saved["state"]:
                state[position] = saved["state"][name]
            position += 1
    return {"state": state, "param_groups": groups}


def names_in_optimizers(state_dict: Mapping[str, Any]) -> set[str]:
    """Of a state dict with nested keys joined by dots, what optimizers hold: their state, and their parameters."""
    found: set[str] = set()
    for name, value in state_dict.items():
        if name.startswith(OPTIMIZER_PREFIX):
            found.add(name)
            if name.split(".")[1] == "groups":
                found |= {f"state_dict.{parameter}" for parameter in value[2]}
    return found


def _name(names: Names, parameter: torch.nn.Parameter) -> str:
    name = names.get(parameter)
    if name is None:
        raise ValueError(f"names: a parameter of shape {tuple(parameter.shape)} of the optimizer is not in the model")
    return name


def _entries(index: Metadata, key: str) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for name, entry in index.state_dict_metadata.items():
        path = index.planner_data[name]
        if path[0] == key:
            yield path[1:], entry


def _groups(saved: Mapping[str, Any]) -> list[_Group]:
    return list(saved.get("groups", {}).values())


def _room(key: str, entry: Any, parameter: torch.nn.Parameter, have: Any) -> Any:
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if isinstance(have, torch.Tensor) and have.size() == entry.size:
        return torch.empty_like(have, dtype=entry.properties.dtype)
    dtype = entry.properties.dtype
    if entry.size == parameter.size():
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and len(entry.size):
        placements = [Replicate()] * parameter.device_mesh.ndim
        return empty_dtensor(*entry.size, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements)
    return torch.empty(entry.size, dtype=dtype, device="cpu" if key == "step" else parameter.device)


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one is other or (
        one.keys() == other.keys()
        and all(
            torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
            for key, value in one.items()
        )
    )


def _keep_dtypes(optimizer: torch.optim.Optimizer, state: Mapping[int, dict[str, Any]]) -> None:
    """torch casts what it loads to the parameter's dtype; state that is kept in another dtype must stay exact."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for position, values in state.items():
        loaded = optimizer.state[parameters[position]]
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)
