"""Files whose every block is compared with its checksum when it is read."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any, BinaryIO

from lightning_dist.checkpoint import commit
from lightning_dist.checkpoint.format import (
    MANIFEST,
    CheckpointError,
    DamagedCheckpointError,
    FileRecord,
    Manifest,
    digest,
)
from lightning_dist.checkpoint.storage import Storage, join


class DamagedBlock(DamagedCheckpointError):
    """Bytes `start` to `stop` of a file are not as written; `why` is None if they do not fit their checksum."""

    def __init__(self, name: str, start: int, stop: int, why: str | None = None) -> None:
        super().__init__(f"{name} is damaged: {why or f'bytes {start} to {stop} do not fit their checksum'}")
        self.why = why
        self.name, self.start, self.stop = name, start, stop


def read_manifest_bytes(storage: Storage, directory: str) -> bytes:
    expected = commit.read_commit(storage, directory).manifest
    try:
        data = storage.read(join(directory, MANIFEST))
    except OSError as error:
        raise DamagedCheckpointError(f"{directory}: {MANIFEST} cannot be read: {error}") from error
    if digest(data) != expected:
        raise DamagedCheckpointError(f"{directory}: {MANIFEST} is damaged: its checksum is not the one in COMMITTED")
    return data


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
        self._storage, self._name, self._record, self._block_bytes = storage, name, record, block_bytes
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
            done = self._storage.read_into(self._stream, start, target)
        except OSError as error:
            raise DamagedBlock(self._name, start, start + target.nbytes, f"reading it failed: {error}") from error
        self.bytes_read += done
        if done < target.nbytes or digest(target) != self._record.blocks[block]:
            raise DamagedBlock(self._name, start, start + target.nbytes)
