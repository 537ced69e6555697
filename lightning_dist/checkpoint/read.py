"""Reading a checkpoint into any layout: each rank the bytes that it needs, every block of them checked."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeGuard

import numpy as np
import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemBase

from lightning_dist import _compat
from lightning_dist.checkpoint import commit
from lightning_dist.checkpoint.format import (
    DATA,
    MANIFEST,
    TENSOR_INDEX,
    TRAINER_STATE,
    CheckpointError,
    DamagedCheckpointError,
    FileRecord,
    Manifest,
    decode_manifest,
    digest,
    rank_state_file,
)
from lightning_dist.checkpoint.storage import PathLike, Storage, join, locate, split
from lightning_dist.checkpoint.team import Team


@dataclass(frozen=True)
class LoadReport:
    """Names that the given state dict has and the checkpoint has not (`missing`), and the other way (`unexpected`)."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class DamagedBlock(DamagedCheckpointError):
    """A block of a file is not as it was written."""

    def __init__(self, name: str, start: int, stop: int, why: str) -> None:
        super().__init__(f"{name} is damaged: {why}")
        self.name, self.start, self.stop = name, start, stop


def is_checkpoint(path: PathLike) -> bool:
    """Whether `path` is a committed checkpoint directory; says nothing about the state of its data (see `verify`)."""
    storage, directory = locate(path)
    try:
        return commit.is_committed(storage, directory)
    except OSError:
        return False


def read_manifest(path: PathLike) -> Manifest:
    """The manifest of a committed checkpoint; raises CheckpointError where it is not committed or damaged."""
    storage, directory = locate(path)
    return decode_manifest(read_manifest_bytes(storage, directory))


def read_manifest_bytes(storage: Storage, directory: str) -> bytes:
    expected = commit.read_commit(storage, directory).manifest
    try:
        data = storage.read(join(directory, MANIFEST))
    except OSError as error:
        raise DamagedCheckpointError(f"{directory}: {MANIFEST} cannot be read: {error}") from error
    if digest(data) != expected:
        raise DamagedCheckpointError(f"{directory}: {MANIFEST} is damaged: its checksum is not the one in COMMITTED")
    return data


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


def read_whole_file(storage: Storage, directory: str, manifest: Manifest, name: str) -> bytes:
    """All of one file that the manifest lists, checked."""
    if name not in manifest.files:
        raise CheckpointError(f"{directory} has no file {name}")
    with CheckedFile(storage, join(directory, name), name, manifest.files[name], manifest.block_bytes) as stream:
        return stream.read()


class CheckedFile(io.RawIOBase):
    """A read-only file whose blocks are compared with their checksums when they are first needed.

    Args:
        name: The file's name in messages.
        record: What the file was when it was written.
        block_bytes: Size in bytes of the blocks that were hashed.
    """

    _KEPT_BLOCKS = 2

    def __init__(self, storage: Storage, path: str, name: str, record: FileRecord, block_bytes: int) -> None:
        self._name, self._record, self._block_bytes = name, record, block_bytes
        self._position = 0
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self.bytes_read = 0
        size = storage.size(path)
        if size is None:
            raise DamagedBlock(name, 0, record.size, "the file is missing")
        if size != record.size:
            raise DamagedBlock(name, min(size, record.size), record.size, f"{size} bytes instead of {record.size}")
        self._stream: BinaryIO = storage.open(path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._record.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(view.nbytes, self._record.size - self._position))]
        done = 0
        while done < view.nbytes:
            block, within = divmod(self._position + done, self._block_bytes)
            length = self._length(block)
            if within == 0 and view.nbytes - done >= length and block not in self._kept:
                self._fetch(block, view[done : done + length])
                done += length
            else:
                taken = min(length - within, view.nbytes - done)
                view[done : done + taken] = self._keep(block)[within : within + taken]
                done += taken
        self._position += done
        return done

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._kept.clear()
        super().close()

    def check(self, block: int) -> None:
        """Reads one block and compares it; raises DamagedBlock."""
        self._keep(block)

    def _length(self, block: int) -> int:
        return min(self._block_bytes, self._record.size - block * self._block_bytes)

    def _keep(self, block: int) -> memoryview:
        if block not in self._kept:
            data = memoryview(bytearray(self._length(block)))
            self._fetch(block, data)
            while len(self._kept) >= self._KEPT_BLOCKS:
                self._kept.popitem(last=False)
            self._kept[block] = data
        return self._kept[block]

    def _fetch(self, block: int, target: memoryview) -> None:
        start = block * self._block_bytes
        try:
            self._stream.seek(start)
            done = 0
            while done < target.nbytes:
                count = self._stream.readinto(target[done:])  # type: ignore[attr-defined]
                if not count:
                    break
                done += count
        except OSError as error:
            raise DamagedBlock(self._name, start, start + target.nbytes, f"reading it failed: {error}") from error
        self.bytes_read += done
        if done < target.nbytes or digest(target) != self._record.blocks[block]:
            raise DamagedBlock(
                self._name,
                start,
                start + target.nbytes,
                f"bytes {start} to {start + target.nbytes} do not fit their checksum",
            )


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
    planner = _LoadPlanner()
    plan = LoadPlan([])

    def make_plan() -> _Asked:
        nonlocal plan
        planner.set_up_planner(tensors, index)
        plan = planner.create_local_plan()
        return _Asked.of(planner, index)

    report = _compare(index, team.gather(what, make_plan))
    if strict and (report.missing or report.unexpected):
        raise CheckpointError(f"{what} failed: {_describe(report)}")
    team.gather(what, lambda: _read_shards(storage, path, manifest, index, planner, plan))
    return report


def read_tensors(directory: PathLike, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Full tensors and plain values of a checkpoint in this one process, nested as they were saved.

    Needs no process group and no GPU, and no more memory than what it returns and one piece.

    Args:
        names: Names, or leading parts of names (`"state_dict"`, `"state_dict.blocks.0"`), to read; None reads all.

    Raises:
        CheckpointError: Not a complete checkpoint, a name that is not there, or damage (file and tensors named).
    """
    storage, path = locate(directory)
    manifest_bytes, index_bytes = _read_index(storage, path)
    index: Metadata = pickle.loads(index_bytes)
    tensors: dict[str, Any] = {}
    for name in _matching(index, names):
        entry = index.state_dict_metadata[name]
        value = torch.empty(entry.size, dtype=entry.properties.dtype) if _is_tensor(entry) else None
        _put(tensors, index.planner_data[name], value)
    planner = _LoadPlanner()
    planner.set_up_planner(tensors, index)
    _read_shards(storage, path, decode_manifest(manifest_bytes), index, planner, planner.create_local_plan())
    return tensors


def tensor_index(directory: PathLike) -> Metadata:
    """torch's metadata of what a checkpoint holds: names, shapes, dtypes and where each piece lies."""
    storage, path = locate(directory)
    return pickle.loads(_read_index(storage, path)[1])


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


def _is_tensor(entry: Any) -> TypeGuard[TensorStorageMetadata]:
    return isinstance(entry, TensorStorageMetadata)


@dataclass(frozen=True)
class _Asked:
    """What one rank asks for: names the checkpoint lacks, top-level keys, and one bit for each name that it has."""

    missing: tuple[str, ...]
    top_levels: frozenset[Any]
    asked: bytes

    @classmethod
    def of(cls, planner: _LoadPlanner, index: Metadata) -> _Asked:
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


class _LoadPlanner(DefaultLoadPlanner):
    """Plans to read what the checkpoint has; what it has not is reported by the caller, for all ranks at once."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        for name, value in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if saved is not None and _is_tensor(saved) != isinstance(value, torch.Tensor):
                kinds = ("a tensor", "a plain value")
                raise CheckpointError(
                    f"{name} is {kinds[not _is_tensor(saved)]} in the checkpoint "
                    f"and {kinds[not isinstance(value, torch.Tensor)]} here"
                )
        return create_default_local_load_plan(self.state_dict, self.metadata, strict=False)


class _CheckedFileSystem(FileSystemBase):
    """What torch's reader sees: a folder whose files are checked while they are read."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self.storage, self.manifest = storage, manifest

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "rb"
        name = f"{DATA}/{split(str(path))[1]}"
        if name not in self.manifest.files:
            raise DamagedCheckpointError(f"{name} is not listed in {MANIFEST}")
        with CheckedFile(self.storage, str(path), name, self.manifest.files[name], self.manifest.block_bytes) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> str:
        return join(str(path), suffix)

    def init_path(self, path: Any) -> str:
        return str(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return self.storage.size(str(path)) is not None

    def rename(self, path: Any, new_path: Any) -> None:
        raise NotImplementedError("a reader renames nothing")

    def mkdir(self, path: Any) -> None:
        raise NotImplementedError("a reader makes no directories")

    def rm_file(self, path: Any) -> None:
        raise NotImplementedError("a reader removes nothing")


class _ShardReader(FileSystemReader):
    """torch's file reader on our storage."""

    def __init__(self, storage: Storage, path: str, manifest: Manifest) -> None:
        super().__init__(path)
        self.fs: Any = _CheckedFileSystem(storage, manifest)
        self.path: Any = path


def _read_shards(
    storage: Storage, directory: str, manifest: Manifest, index: Metadata, planner: _LoadPlanner, plan: LoadPlan
) -> None:
    reader = _ShardReader(storage, join(directory, DATA), manifest)
    reader.set_up_storage_reader(index, is_coordinator=False)

    def place(item: Any) -> tuple[str, int]:
        name, start, _ = _compat.checkpoint_item_place(index.storage_data[item.storage_index])
        return name, start

    in_file_order = dataclasses.replace(plan, items=sorted(plan.items, key=place))
    try:
        reader.read_data(planner.finish_plan(in_file_order), planner).wait()
    except DamagedBlock as damage:
        raise DamagedCheckpointError(f"{damage}; it holds {describe_tensors(index, damage)}") from damage


def tensors_in(index: Metadata, damage: DamagedBlock) -> list[str]:
    """Names of the tensors and values that lie in a damaged block."""
    found: dict[str, None] = {}
    for item, info in index.storage_data.items():
        name, start, length = _compat.checkpoint_item_place(info)
        if f"{DATA}/{name}" == damage.name and start < damage.stop and start + length > damage.start:
            found[item.fqn] = None
    return list(found)


def describe_tensors(index: Metadata, damage: DamagedBlock) -> str:
    names = tensors_in(index, damage)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "no tensors"
