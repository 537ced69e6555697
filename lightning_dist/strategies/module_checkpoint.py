"""Lightning's checkpoint dictionary to and from a checkpoint directory, for a module whose tensors are in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_dist import _compat
from lightning_dist import checkpoint as engine
from lightning_dist.checkpoint.export import weights_and_trainer_state
from lightning_dist.checkpoint.read import tensor_index

_compat.load_directories_by(weights_and_trainer_state, engine.is_checkpoint)


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint is saved; to be given as ``storage_options`` to ``Trainer.save_checkpoint``.

    Args:
        rank_state: What only this rank knows.
        writer: Saves in the background; None returns when the checkpoint is committed.
    """

    rank_state: dict[str, Any] | None = None
    writer: engine.BackgroundWriter | None = None


PATH_KEY = "lightning_dist_path"
"""Where a loaded dictionary's optimizer state still lies: it is read when the optimizers ask for it."""


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter name, each tensor this rank's part."""
    return engine.optimizer_state_by_name(optimizer, _names(module))


def save(
    checkpoint: dict[str, Any],
    path: str,
    group: dist.ProcessGroup | None,
    names: Sequence[str],
    options: SaveOptions | None = None,
    *,
    layout: str | None = None,
) -> None:
    """Writes a checkpoint directory: parts of tensors by each rank, the rest by the first. All ranks must call it.

    Collectives: those of :func:`lightning_dist.checkpoint.save` over ``group``, a CPU group, or those of the writer.

    Raises:
        CheckpointError: On every rank; with a writer also where an earlier save failed, or is still under way.
    """
    options = options or SaveOptions()
    checkpoint = dict(checkpoint)
    tensors = {"state_dict": checkpoint.pop("state_dict")}
    for index, state in enumerate(checkpoint.pop("optimizer_states", ())):
        tensors[f"optimizer_{index}"] = state
    for key in [key for key, value in checkpoint.items() if _holds_parts(value, names)]:
        tensors[key] = checkpoint.pop(key)
    order = [f"state_dict.{name}" for name in names]
    info: dict[str, Any] = {"parameter_order": order, "layout": layout}
    if options.writer is None:
        engine.save(path, tensors, checkpoint, rank_state=options.rank_state, info=info, group=group)
    elif not options.writer.save(path, tensors, checkpoint, rank_state=options.rank_state, info=info):
        raise engine.CheckpointError(f"no checkpoint was taken at {path}: the one before is still being written")


def load(
    path: str,
    module: nn.Module,
    group: dist.ProcessGroup | None,
    weights_only: bool | None,
    extra: Mapping[str, Any],
    names: Sequence[str],
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
        names: The names of the whole module's state, of which a pipeline rank has a part.
    """
    if not engine.is_checkpoint(path):
        return _load_file(path, module, weights_only, names)
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
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    checkpoint: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    stage_of: Sequence[str] | None = None,
) -> None:
    """Restores the optimizers, from the directory or from the file's dictionary.

    Args:
        module: The module, already parallel.
        optimizers: What ``configure_optimizers`` made.
        checkpoint: From :func:`load`, or a dictionary of one device.
        group: CPU group of all ranks.
        stage_of: Where the module is one rank's part of a pipeline: the names of the whole module's state.

    Raises:
        ValueError: If the checkpoint holds another number of optimizers, or a file's can't be told apart by stage.
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
            state = saved[index]
            if stage_of is not None:
                state = _of_stage(optimizer, state, names, stage_of, group)
            optimizer.load_state_dict(_in_parts(optimizer, state))
            continue
        key = f"optimizer_{index}"
        room = engine.optimizer_state_to_fill(path, key, optimizer, names)
        engine.load_into(path, {key: room}, strict=False, group=group)
        engine.restore_optimizer(optimizer, names, room)


def remove(path: Any) -> None:
    filesystem = get_filesystem(path)
    if filesystem.exists(path):
        filesystem.rm(str(path), recursive=True)


def _load_file(path: str, module: nn.Module, weights_only: bool | None, names: Sequence[str]) -> dict[str, Any]:
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=bool(weights_only))
    parts = module.state_dict()
    elsewhere = set(names) - set(parts)  # on another stage of the pipeline
    checkpoint["state_dict"] = {
        name: _like(value, parts[name]) if name in parts else value
        for name, value in checkpoint["state_dict"].items()
        if name not in elsewhere
    }
    return checkpoint


def _of_stage(
    optimizer: Optimizer,
    state: dict[str, Any],
    names: Mapping[nn.Parameter, str],
    whole: Sequence[str],
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """This rank's part of an optimizer's state in one file, where parameters are only numbered.

    The stages' groups together, in the order of the module, are taken to be the file's.

    Collectives: an all-gather of names over ``group``.
    """
    mine = [[names[parameter] for parameter in part["params"]] for part in optimizer.param_groups]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    place = {name: position for position, name in enumerate(whole)}
    number_of: dict[str, int] = {}
    for index, saved in enumerate(state["param_groups"]):
        parts = [groups[index] for groups in everyone] if index < len(mine) else []
        members = sorted({name for part in parts for name in part}, key=place.__getitem__)
        in_order = all(part == sorted(part, key=place.__getitem__) for part in parts)
        if len(state["param_groups"]) != len(mine) or len(members) != len(saved["params"]) or not in_order:
            raise ValueError(
                f"Group {index} of the optimizer in the file holds {len(saved['params'])} parameters by number, and"
                f" {len(members)} of the pipeline's are in that group, {'' if in_order else 'not '}in the module's"
                " order, so which is which can't be told; load a checkpoint directory, or the weights alone."
            )
        number_of |= dict(zip(members, saved["params"], strict=True))
    kept, groups, position = {}, [], 0
    for saved, members in zip(state["param_groups"], mine, strict=True):
        groups.append({**saved, "params": list(range(position, position + len(members)))})
        for name in members:
            if number_of[name] in state["state"]:
                kept[position] = state["state"][number_of[name]]
            position += 1
    return {"state": kept, "param_groups": groups}


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


def _holds_parts(value: Any, names: Sequence[str]) -> bool:
    """Whether ranks hold different parts: pieces of tensors, or the module's tensors of their own pipeline stages."""
    by_name = isinstance(value, dict) and bool(value) and set(names).issuperset(value)
    return by_name or any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value))
