"""What lies in a folder, what is in one checkpoint, and how two differ; on any machine, without a GPU or a group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dist.checkpoint.format import COMMITTED, DATA, MANIFEST
from lightning_dist.checkpoint.history import list_checkpoints
from lightning_dist.checkpoint.read import OpenedCheckpoint, open_checkpoint, read_names
from lightning_dist.checkpoint.shards import is_tensor
from lightning_dist.checkpoint.storage import PathLike, locate
from lightning_dist.checkpoint.verify import Report, verify


@dataclass(frozen=True)
class Row:
    """One checkpoint of a folder. `problem` is None if it is committed and no file is missing or cut."""

    path: str
    step: int | None
    saved_at: str | None = None
    world_size: int | None = None
    layout: str | None = None
    size: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Content:
    """One tensor or plain value of a checkpoint. `size` is in bytes, `pieces` counts where it was written."""

    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    size: int | None = None
    pieces: int = 1


@dataclass(frozen=True)
class ValueDifference:
    """How one name differs; `largest` is the largest absolute difference between two tensors of one shape."""

    name: str
    what: str
    largest: float | None = None


def overview(path: PathLike) -> list[Row]:
    """The checkpoints of a folder, newest first, or the one at `path`; damage that only reading finds is not seen."""
    if _looks_like_checkpoint(path):
        return [_row(os.fspath(path), None)]
    return [_row(entry.path, entry.step) for entry in list_checkpoints(path)]


def _row(path: str, step: int | None) -> Row:
    report = verify(path, full=False)
    problem = "; ".join(f"{problem.file}: {problem.what}" for problem in report.problems) or None
    manifest = report.manifest
    if manifest is None:
        return Row(path, step, problem=problem)
    size = sum(record.size for record in manifest.files.values())
    layout = manifest.info.get("layout")
    return Row(
        path,
        manifest.step,
        manifest.saved_at,
        manifest.world_size,
        None if layout is None else str(layout),
        size,
        problem,
    )


def verify_all(path: PathLike, *, full: bool = True) -> list[Report]:
    """Verifies the checkpoint at `path`, or every checkpoint of a folder, the newest first.

    Where there is neither, the one report says that nothing complete is there.
    """
    entries = [] if _looks_like_checkpoint(path) else list_checkpoints(path)
    return [verify(entry.path, full=full) for entry in entries] or [verify(path, full=full)]


def contents(directory: PathLike) -> list[Content]:
    """Names, shapes and sizes of all that a checkpoint holds, in the order of the model."""
    opened = open_checkpoint(directory)
    order = {name: position for position, name in enumerate(opened.manifest.parameter_order)}
    found = []
    for name, entry in opened.index.state_dict_metadata.items():
        if is_tensor(entry):
            dtype = entry.properties.dtype
            size = entry.size.numel() * dtype.itemsize
            text = str(dtype).removeprefix("torch.")
            found.append(Content(name, tuple(entry.size), text, size, len(entry.chunks)))
        else:
            found.append(Content(name))
    return sorted(found, key=lambda content: order.get(content.name, len(order)))


def diff(one: PathLike, other: PathLike) -> list[ValueDifference]:
    """Where two checkpoints hold other names, shapes, dtypes or values; empty if they are equal to the bit.

    Reads one name at a time: memory for the largest tensor, twice. Trainer and rank state are not compared.
    """
    opened = open_checkpoint(one), open_checkpoint(other)
    names = [set(checkpoint.index.state_dict_metadata) for checkpoint in opened]
    found = [ValueDifference(name, f"only in {one}") for name in sorted(names[0] - names[1])]
    found += [ValueDifference(name, f"only in {other}") for name in sorted(names[1] - names[0])]
    for name in sorted(names[0] & names[1]):
        values = [_value(checkpoint, name) for checkpoint in opened]
        found.extend(_compare(name, *values))
    return found


def _value(opened: OpenedCheckpoint, name: str) -> Any:
    value: Any = read_names(opened, [name])
    for key in opened.index.planner_data[name]:
        value = value[key]
    return value


def _compare(name: str, one: Any, other: Any) -> Iterator[ValueDifference]:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor) or one != other:
            yield ValueDifference(name, f"{_short(one)} and {_short(other)}")
    elif one.shape != other.shape:
        yield ValueDifference(name, f"shapes {tuple(one.shape)} and {tuple(other.shape)}")
    elif one.dtype != other.dtype:
        yield ValueDifference(name, f"dtypes {one.dtype} and {other.dtype}")
    elif not torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)):
        differs = (one != other) & ~(one.isnan() & other.isnan()) if one.is_floating_point() else one != other
        exact = (one.double() - other.double()).abs() if not one.is_complex() else (one - other).abs()
        largest = float(exact.nan_to_num(nan=float("inf")).max())
        yield ValueDifference(name, f"{int(differs.sum())} of {one.numel()} values differ", largest)


def _short(value: Any) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _looks_like_checkpoint(path: PathLike) -> bool:
    storage, directory = locate(path)
    return bool({COMMITTED, MANIFEST, DATA} & set(storage.names(directory)))
