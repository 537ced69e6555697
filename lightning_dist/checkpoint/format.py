"""What lies in a checkpoint directory: names, checksums, the manifest, and the file that commits it.

A checkpoint is complete if and only if `COMMITTED` is there and intact; it holds the checksum of `manifest.json`,
which holds the size and the checksums of every other file. Files are hashed in blocks of `BLOCK_BYTES`, so that a
reader can check just the part that it needs, and a damaged block can be traced to the tensors in it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch
import xxhash

from lightning_dist.checkpoint.storage import Storage

FORMAT_NAME = "lightning_dist.checkpoint"
FORMAT_VERSION = 1
CHECKSUM = "xxh3_128"
BLOCK_BYTES = 4 * 1024 * 1024

COMMITTED = "COMMITTED"
MANIFEST = "manifest.json"
TRAINER_STATE = "trainer.pt"
DATA = "data"
TENSOR_INDEX = "data/.metadata"
RANKS = "ranks"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the rank, the file and the cause."""


class DamagedCheckpointError(CheckpointError):
    """What is on the disk is not what was written; the message names the file and the tensors in it."""


def digest(data: bytes | bytearray | memoryview) -> str:
    """The checksum of some bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and the checksum of every block of a file, in hexadecimal."""

    size: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says; `files` maps paths relative to the directory to their records."""

    step: int | None
    sequence: int
    world_size: int
    saved_at: str
    files: Mapping[str, FileRecord]
    info: Mapping[str, Any] = field(default_factory=dict)
    parameter_order: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    block_bytes: int = field(default_factory=lambda: BLOCK_BYTES)


@dataclass(frozen=True)
class Commit:
    """What `COMMITTED` says."""

    manifest: str
    step: int | None
    sequence: int


def rank_state_file(rank: int) -> str:
    return f"{RANKS}/rank_{rank:05d}.pt"


def installed_versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("lightning-dist", "lightning"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def encode_manifest(manifest: Manifest) -> bytes:
    content = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "world_size": manifest.world_size,
        "saved_at": manifest.saved_at,
        "versions": dict(manifest.versions),
        "info": dict(manifest.info),
        "parameter_order": list(manifest.parameter_order),
        "checksum": {"algorithm": CHECKSUM, "block_bytes": manifest.block_bytes},
        "files": {
            name: {"size": record.size, "blocks": list(record.blocks)}
            for name, record in sorted(manifest.files.items())
        },
    }
    return (json.dumps(content, indent=1, default=str) + "\n").encode()


def decode_manifest(data: bytes) -> Manifest:
    """Reads a manifest whose checksum was found right; raises CheckpointError for a format this version cannot read."""
    content = json.loads(data)
    if content.get("format") != FORMAT_NAME or content.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{MANIFEST} has format {content.get('format')!r} version {content.get('version')!r}; "
            f"this version reads {FORMAT_NAME!r} version {FORMAT_VERSION}"
        )
    if content["checksum"]["algorithm"] != CHECKSUM:
        raise CheckpointError(f"{MANIFEST} uses the checksum {content['checksum']['algorithm']!r}, not {CHECKSUM!r}")
    return Manifest(
        step=content["step"],
        sequence=content["sequence"],
        world_size=content["world_size"],
        saved_at=content["saved_at"],
        files={name: FileRecord(r["size"], tuple(r["blocks"])) for name, r in content["files"].items()},
        info=content["info"],
        parameter_order=tuple(content["parameter_order"]),
        versions=content["versions"],
        block_bytes=content["checksum"]["block_bytes"],
    )


def encode_commit(commit: Commit) -> bytes:
    """One line of JSON and one line with its checksum, so that a flipped bit in this file is found too."""
    line = json.dumps(
        {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "algorithm": CHECKSUM,
            "manifest": commit.manifest,
            "step": commit.step,
            "sequence": commit.sequence,
        }
    ).encode()
    return line + b"\n" + digest(line).encode() + b"\n"


def decode_commit(data: bytes) -> Commit:
    """Reads `COMMITTED`; raises DamagedCheckpointError if any bit of it is not as written."""
    line, _, rest = data.partition(b"\n")
    if rest != digest(line).encode() + b"\n":
        raise DamagedCheckpointError(f"{COMMITTED} is damaged: its checksum does not fit its content")
    content = json.loads(line)
    if content.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{COMMITTED} has version {content.get('version')!r}, this version reads {FORMAT_VERSION}"
        )
    return Commit(content["manifest"], content["step"], content["sequence"])


class ChecksummedWriter:
    """A write-only file that hashes each block while it passes through, and syncs the file before it closes it.

    Small writes are gathered into one block (saving a tensor issues about forty of them); large ones are passed on
    without a copy. After `close`, `record` is the file's record.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self.storage = storage
        self.path = path
        self.record: FileRecord | None = None
        self._stream: BinaryIO = storage.create(path)
        self._pending = bytearray(BLOCK_BYTES)
        self._pending_view = memoryview(self._pending)
        self._pending_bytes = 0
        self._written = 0
        self._blocks: list[str] = []

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written + self._pending_bytes

    def flush(self) -> None:
        """Nothing is flushed before the block is full."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        total = view.nbytes
        while view.nbytes:
            if self._pending_bytes == 0 and view.nbytes >= BLOCK_BYTES:
                self._write_block(view[:BLOCK_BYTES])
                view = view[BLOCK_BYTES:]
                continue
            taken = min(BLOCK_BYTES - self._pending_bytes, view.nbytes)
            self._pending_view[self._pending_bytes : self._pending_bytes + taken] = view[:taken]
            self._pending_bytes += taken
            view = view[taken:]
            if self._pending_bytes == BLOCK_BYTES:
                self._pending_bytes = 0
                self._write_block(self._pending_view)
        return total

    def _write_block(self, block: memoryview) -> None:
        self._blocks.append(digest(block))
        self.storage.write(self._stream, block)
        self._written += block.nbytes

    def close(self) -> None:
        """Writes what is pending and makes the file durable; a second call does nothing."""
        if self.record is not None or self._stream.closed:
            return
        try:
            if self._pending_bytes:
                pending, self._pending_bytes = self._pending_bytes, 0
                self._write_block(self._pending_view[:pending])
            self.storage.sync(self._stream)
        finally:
            self._stream.close()
        self.record = FileRecord(self._written, tuple(self._blocks))

    def abandon(self) -> None:
        """Closes without writing what is pending, after an error."""
        self._stream.close()


def write_file(storage: Storage, path: str, data: bytes | memoryview) -> FileRecord:
    """Writes one file durably and returns its record."""
    writer = ChecksummedWriter(storage, path)
    try:
        writer.write(data)
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    assert writer.record is not None
    return writer.record
