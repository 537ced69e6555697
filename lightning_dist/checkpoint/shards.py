"""torch's reader on checked files: what a plan asks for, and what a damaged block takes with it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import zipfile
from collections.abc import Generator
from typing import Any, BinaryIO, TypeGuard

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
from lightning_dist.checkpoint.checked_file import CheckedFile, DamagedBlock
from lightning_dist.checkpoint.format import DATA, MANIFEST, CheckpointError, DamagedCheckpointError, Manifest
from lightning_dist.checkpoint.storage import Storage, join, split


class ShardPlanner(DefaultLoadPlanner):
    """Plans to read what the checkpoint has; what it has not is reported by the caller, for all ranks at once."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        for name, value in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if saved is not None and is_tensor(saved) != isinstance(value, torch.Tensor):
                kinds = ("a tensor", "a plain value")
                raise CheckpointError(
                    f"{name} is {kinds[not is_tensor(saved)]} in the checkpoint "
                    f"and {kinds[not isinstance(value, torch.Tensor)]} here"
                )
        return create_default_local_load_plan(self.state_dict, self.metadata, strict=False)


def read_shards(
    storage: Storage, directory: str, manifest: Manifest, index: Metadata, planner: ShardPlanner, plan: LoadPlan
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
        raise DamagedCheckpointError(
            f"{damage}; it holds {describe_tensors(storage, directory, index, damage)}"
        ) from damage


def describe_tensors(storage: Storage, directory: str, index: Metadata, damage: DamagedBlock) -> str:
    """Names what a damaged block has damaged; what it may have, where the block alone cannot tell."""
    touched: dict[str, list[tuple[int, int]]] = {}
    for item, info in index.storage_data.items():
        name, start, length = _compat.checkpoint_item_place(info)
        if f"{DATA}/{name}" == damage.name and start < damage.stop and start + length > damage.start:
            touched.setdefault(item.fqn, []).append((start, length))
    certain = {}
    with contextlib.suppress(OSError), storage.open(join(directory, damage.name)) as stream:
        certain = {name: places for name, places in touched.items() if not _all_archives_fit(stream, places)}
    names = list(certain or touched)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "no tensors"


def _all_archives_fit(stream: BinaryIO, places: list[tuple[int, int]]) -> bool:
    """Each item is an archive with checksums of its own; they tell which of a block's items is the damaged one."""
    for start, length in places:
        stream.seek(start)
        try:
            with zipfile.ZipFile(io.BytesIO(stream.read(length))) as archive:
                if archive.testzip() is not None:
                    return False
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError):
            return False
    return True


def is_tensor(entry: Any) -> TypeGuard[TensorStorageMetadata]:
    return isinstance(entry, TensorStorageMetadata)


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
