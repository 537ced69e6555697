"""Lightning's checkpoint dictionary to and from a checkpoint directory, for a module whose tensors are in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_dist import checkpoint as engine
from lightning_dist.checkpoint.read import tensor_index

PATH_KEY = "lightning_dist_path"
"""Where a loaded dictionary's optimizer state still lies: it is read when the optimizers ask for it."""


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter name, each tensor this rank's part."""
    return engine.optimizer_state_by_name(optimizer, _names(module))


def save(checkpoint: dict[str, Any], path: str, group: dist.ProcessGroup | None, names: Sequence[str]) -> None:
    """Writes a checkpoint directory: parts of tensors by each rank, the rest by the first. All ranks must call it.

    Collectives: those of :func:`lightning_dist.checkpoint.save` over ``group``, a CPU group.
    """
    checkpoint = dict(checkpoint)
    tensors = {"state_dict": checkpoint.pop("state_dict")}
    for index, state in enumerate(checkpoint.pop("optimizer_states", ())):
        tensors[f"optimizer_{index}"] = state
    for key in [key for key, value in checkpoint.items() if _holds_parts(value)]:
        tensors[key] = checkpoint.pop(key)
    order = [f"state_dict.{name}" for name in names]
    engine.save(path, tensors, checkpoint, info={"parameter_order": order}, group=group)


def load(
    path: str, module: nn.Module, group: dist.ProcessGroup | None, weights_only: bool | None, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Reads a directory written under any layout, or one file written on one device.

    The module's tensors are filled at once; of the optimizers only :func:`load_optimizers` reads.

    Args:
        path: The directory or file, the same on every rank.
        module: The module, already parallel.
        group: CPU group of all ranks.
        weights_only: As for ``torch.load``; None trusts the file as one's own.
        extra: Further dictionaries with parts of tensors to fill, under the names they were saved by, where the
            checkpoint has them.
    """
    if not engine.is_checkpoint(path):
        return _load_file(path, module, weights_only)
    checkpoint = engine.read_trainer_state(path, weights_only=weights_only)
    state_dict = module.state_dict()
    strict = getattr(module, "strict_loading", True)
    engine.load_into(path, {"state_dict": state_dict}, strict=strict, group=group)
    checkpoint["state_dict"] = state_dict
    saved = _top_level_names(path)
    for key, tensors in extra.items():
        if key in saved:
            engine.load_into(path, {key: tensors}, group=group)
            checkpoint[key] = tensors
    if "optimizer_0" in saved:
        checkpoint["optimizer_states"] = []
    return {**checkpoint, PATH_KEY: path}


def load_model(module: nn.Module, checkpoint: Mapping[str, Any], strict: bool) -> None:
    """Gives the module what the dictionary holds, with what ``on_load_checkpoint`` hooks have made of it."""
    module.load_state_dict(checkpoint["state_dict"], strict=strict)


def load_optimizers(
    module: nn.Module, optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Any], group: dist.ProcessGroup | None
) -> None:
    """Restores the optimizers, from the directory or from the file's dictionary.

    Raises:
        ValueError: If the checkpoint holds another number of optimizers.
    """
    path = checkpoint.get(PATH_KEY)
    saved = checkpoint.get("optimizer_states", ())
    number = sum(name.startswith("optimizer_") for name in _top_level_names(path)) if path else len(saved)
    if number != len(optimizers):
        raise ValueError(
            f"The checkpoint holds {number} optimizers and configure_optimizers made {len(optimizers)};"
            " load the weights alone (LightningModule.load_state_dict), or make the same optimizers."
        )
    names = _names(module)
    for index, optimizer in enumerate(optimizers):
        if path is None:
            optimizer.load_state_dict(_in_parts(optimizer, saved[index]))
            continue
        key = f"optimizer_{index}"
        room = engine.optimizer_state_to_fill(path, key, optimizer, names)
        engine.load_into(path, {key: room}, strict=False, group=group)
        engine.restore_optimizer(optimizer, names, room)


def remove(path: Any) -> None:
    filesystem = get_filesystem(path)
    if filesystem.exists(path):
        filesystem.rm(str(path), recursive=True)


def _load_file(path: str, module: nn.Module, weights_only: bool | None) -> dict[str, Any]:
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=bool(weights_only))
    parts = module.state_dict()
    checkpoint["state_dict"] = {
        name: _like(value, parts[name]) if name in parts else value for name, value in checkpoint["state_dict"].items()
    }
    return checkpoint


def _in_parts(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's full state with every tensor cut as its parameter is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    cut = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in state["state"]:
            values = state["state"][number]
            cut[number] = {
                name: _like(value, parameter) if isinstance(value, Tensor) and value.shape == parameter.shape else value
                for name, value in values.items()
            }
    return {**state, "state": cut}


def _like(full: Any, part: Any) -> Any:
    """The part of a full tensor that this rank holds of ``part``; no rank sends anything."""
    if not isinstance(part, DTensor) or not isinstance(full, Tensor):
        return full
    full = full.to(part.device)
    return distribute_tensor(full, part.device_mesh, part.placements, src_data_rank=None)


def _names(module: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def _top_level_names(path: str) -> set[str]:
    index = tensor_index(path)
    return {str(index.planner_data[name][0]) for name in index.state_dict_metadata}


def _holds_parts(value: Any) -> bool:
    return any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value))
