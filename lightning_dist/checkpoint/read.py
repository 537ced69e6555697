"""Reading a checkpoint into any layout: each rank the bytes that it needs, every block of them checked."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import LoadPlan, Metadata

from lightning_dist.checkpoint import commit
from lightning_dist.checkpoint.checked_file import read_manifest_bytes, read_whole_file
from lightning_dist.checkpoint.format import (
    TENSOR_INDEX,
    TRAINER_STATE,
    CheckpointError,
    Manifest,
    decode_manifest,
    rank_state_file,
)
from lightning_dist.checkpoint.shards import ShardPlanner, is_tensor, read_shards
from lightning_dist.checkpoint.storage import PathLike, Storage, locate
from lightning_dist.checkpoint.team import Team


@dataclass(frozen=True)
class LoadReport:
    """Names that the given state dict has and the checkpoint has not (`missing`), and the other way (`unexpected`)."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def is_checkpoint(path: PathLike) -> bool:
    """Whether `path` is a committed checkpoint directory; says nothing about the state of its data (see `verify`)."""
    return commit.is_committed(*locate(path))


def read_manifest(path: PathLike) -> Manifest:
    """The manifest of a committed checkpoint; raises CheckpointError where it is not committed or damaged."""
    storage, directory = locate(path)
    return decode_manifest(read_manifest_bytes(storage, directory))


def read_trainer_state(directory: PathLike, *, weights_only: bool | None = None) -> dict[str, Any]:
    """The trainer state that rank 0 saved (loops, callbacks, schedulers, hyperparameters).

    Args:
        weights_only: True unpickles tensors and plain values only, False anything (which can run code); None tries
            the first and falls back to the second, for checkpoints that one trusts as one trusts one's own files.

    Raises:
        DamagedCheckpointError: The file is not as it was written.
    """
    return _load_pickled(directory, TRAINER_STATE, weights_only)


def read_rank_state(directory: PathLike, rank: int, *, weights_only: bool | None = None) -> dict[str, Any] | None:
    """What rank `rank` of the run that saved the checkpoint kept for itself; None if it kept nothing."""
    if rank_state_file(rank) not in read_manifest(directory).files:
        return None
    return _load_pickled(directory, rank_state_file(rank), weights_only)


def _load_pickled(path: PathLike, name: str, weights_only: bool | None) -> dict[str, Any]:
    storage, directory = locate(path)
    data = read_whole_file(storage, directory, read_manifest(path), name)
    if weights_only is not None:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def load_into(directory: PathLike, tensors: dict[str, Any], *, strict: bool = True, group: Any = None) -> LoadReport:
    """Fills a state dict in place from a checkpoint written by any number of ranks; to be called by every rank.

    Args:
        directory: The checkpoint's directory.
        tensors: Nested dict like the one that was saved; tensors and DTensors are overwritten (and keep their dtype),
            plain values are replaced. Top-level keys that are left out are not read.
        strict: Whether a name that only one of the two sides has is an error. With False such names are left alone
            and reported.
        group: CPU (Gloo) group for the exchanges; None is the default group, or a single process without one.

    Returns:
        The names that did not match, the same on every rank.

    Raises:
        CheckpointError: On every rank: no complete checkpoint there, names or shapes that do not fit (then nothing
            was changed), or damage, with the file and the tensors in it (then `tensors` is partly overwritten).

    Collectives: one broadcast and two all-gathers of small objects on `group`.
    """
    team = Team(group)
    storage, path = locate(directory)
    what = f"loading the checkpoint {directory}"
    manifest_bytes, index_bytes = team.from_first(what, lambda: _read_index(storage, path))
    manifest, index = decode_manifest(manifest_bytes), pickle.loads(index_bytes)
    planner = ShardPlanner()
    plan = LoadPlan([])

    def make_plan() -> _Asked:
        nonlocal plan
        planner.set_up_planner(tensors, index)
        plan = planner.create_local_plan()
        return _Asked.of(planner, index)

    report = _compare(index, team.gather(what, make_plan))
    if strict and (report.missing or report.unexpected):
        raise CheckpointError(f"{what} failed: {_describe(report)}")
    team.gather(what, lambda: read_shards(storage, path, manifest, index, planner, plan))
    return report


def read_tensors(directory: PathLike, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Full tensors and plain values of a checkpoint in this one process, nested as they were saved.

    Needs no process group and no GPU, and no more memory than what it returns and one piece.

    Args:
        names: Names, or leading parts of names (`"state_dict"`, `"state_dict.blocks.0"`), to read; None reads all.

    Raises:
        CheckpointError: Not a complete checkpoint, a name that is not there, or damage (file and tensors named).
    """
    opened = open_checkpoint(directory)
    return read_names(opened, _matching(opened.index, names))


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A committed checkpoint whose manifest and tensor index have been read and found intact."""

    storage: Storage
    path: str
    manifest: Manifest
    index: Metadata


def open_checkpoint(directory: PathLike) -> OpenedCheckpoint:
    """Reads what is needed to read the rest; raises CheckpointError where it is not complete or damaged."""
    storage, path = locate(directory)
    manifest_bytes, index_bytes = _read_index(storage, path)
    return OpenedCheckpoint(storage, path, decode_manifest(manifest_bytes), pickle.loads(index_bytes))


def read_names(opened: OpenedCheckpoint, names: Iterable[str]) -> dict[str, Any]:
    """Full tensors and plain values under exactly these names of the index, nested as they were saved."""
    tensors: dict[str, Any] = {}
    for name in names:
        entry = opened.index.state_dict_metadata[name]
        value = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor(entry) else None
        _put(tensors, opened.index.planner_data[name], value)
    planner = ShardPlanner()
    planner.set_up_planner(tensors, opened.index)
    plan = planner.create_local_plan()
    read_shards(opened.storage, opened.path, opened.manifest, opened.index, planner, plan)
    return tensors


def tensor_index(directory: PathLike) -> Metadata:
    """torch's metadata of what a checkpoint holds: names, shapes, dtypes and where each piece lies."""
    return open_checkpoint(directory).index


def top_level_names(directory: PathLike) -> set[str]:
    """The top-level keys of the tensors that were saved: `state_dict`, `optimizer_0`, …."""
    index = tensor_index(directory)
    return {str(index.planner_data[name][0]) for name in index.state_dict_metadata}


def _read_index(storage: Storage, directory: str) -> tuple[bytes, bytes]:
    manifest_bytes = read_manifest_bytes(storage, directory)
    return manifest_bytes, read_whole_file(storage, directory, decode_manifest(manifest_bytes), TENSOR_INDEX)


def _matching(index: Metadata, names: Iterable[str] | None) -> list[str]:
    if names is None:
        return list(index.state_dict_metadata)
    found: dict[str, None] = {}
    for wanted in names:
        matches = [name for name in index.state_dict_metadata if name == wanted or name.startswith(f"{wanted}.")]
        if not matches:
            raise CheckpointError(f"names: the checkpoint holds nothing called {wanted!r}")
        found |= dict.fromkeys(matches)
    return list(found)


def _put(root: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Sets a value in nested dicts and lists, making those that are not there yet."""
    here: Any = root
    for key, below in itertools.pairwise(path):
        if isinstance(here, list):
            here.extend([None] * (int(key) + 1 - len(here)))
            present = here[int(key)]
        else:
            present = here.get(key)
        if present is None:
            here[key] = present = [] if isinstance(below, int) else {}
        here = present
    if isinstance(here, list):
        here.extend([None] * (int(path[-1]) + 1 - len(here)))
    here[path[-1]] = value


@dataclass(frozen=True)
class _Asked:
    """What one rank asks for: names the checkpoint lacks, top-level keys, and one bit for each name that it has."""

    missing: tuple[str, ...]
    top_levels: frozenset[Any]
    asked: bytes

    @classmethod
    def of(cls, planner: ShardPlanner, index: Metadata) -> _Asked:
        known = index.state_dict_metadata
        return cls(
            missing=tuple(name for name in planner.state_dict if name not in known),
            top_levels=frozenset(path[0] for path in planner.mappings.values()) | set(planner.original_state_dict),
            asked=np.packbits([name in planner.state_dict for name in known]).tobytes(),
        )


def _compare(index: Metadata, ranks: list[_Asked]) -> LoadReport:
    """What all ranks together do not find, and do not ask for; a pipeline stage alone asks for few of the names."""
    asked = np.bitwise_or.reduce([np.frombuffer(rank.asked, np.uint8) for rank in ranks])
    top_levels = frozenset().union(*(rank.top_levels for rank in ranks))
    is_asked = np.unpackbits(asked, count=len(index.state_dict_metadata))
    unexpected = (
        name
        for name, found in zip(index.state_dict_metadata, is_asked, strict=True)
        if not found and index.planner_data[name][0] in top_levels
    )
    return LoadReport(tuple(dict.fromkeys(n for rank in ranks for n in rank.missing)), tuple(unexpected))


def _describe(report: LoadReport) -> str:
    def some(names: tuple[str, ...]) -> str:
        return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

    parts = []
    if report.missing:
        parts.append(f"it does not have {some(report.missing)}")
    if report.unexpected:
        parts.append(f"it has {some(report.unexpected)}, which the model or optimizer has not")
    return "; ".join(parts) + " (strict=False loads what fits)"
