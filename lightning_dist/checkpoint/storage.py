"""Where checkpoints lie: the few file operations the engine needs, on local disks and on any fsspec path.

Every read and write of the engine goes through the methods of these two classes, so that a fault can be injected at
any single operation (`lightning_dist.testing.faults`).
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

PathLike = str | os.PathLike[str]


class LocalStorage:
    """Files on a disk or network file system that this machine has mounted."""

    renames_atomically = True

    def create(self, path: str) -> BinaryIO:
        return open(path, "xb", buffering=0)

    def write(self, stream: BinaryIO, data: memoryview) -> None:
        """Writes all of `data`; an unbuffered file may take less at a time than it is given."""
        while data.nbytes:
            written = stream.write(data)
            if not written:
                raise OSError(errno.EIO, "the file took no more bytes", getattr(stream, "name", None))
            data = data[written:]

    def sync(self, stream: BinaryIO) -> None:
        os.fsync(stream.fileno())

    def open(self, path: str) -> BinaryIO:
        return open(path, "rb", buffering=0)

    def read(self, path: str) -> bytes:
        with self.open(path) as stream:
            return stream.read()

    def read_into(self, stream: BinaryIO, start: int, target: memoryview) -> int:
        """Fills `target` from byte `start` on and returns how many bytes there were."""
        return _read_into(stream, start, target)

    def size(self, path: str) -> int | None:
        """The size of a file in bytes, or None if there is no such file."""
        try:
            return os.stat(path).st_size if not os.path.isdir(path) else None
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def names(self, path: str) -> list[str]:
        """Names of the entries of a directory, sorted; none if there is no such directory."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self, path: str) -> list[str]:
        """All files under a directory, as sorted paths relative to it with forward slashes."""
        root = Path(path)
        return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if not p.is_dir())

    def make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def sync_directory(self, path: str) -> None:
        """Makes the names in a directory durable; file systems that cannot sync a directory are left alone."""
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except PermissionError:  # Windows opens no directories
            return
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def copy_file(self, source: str, target: str) -> None:
        shutil.copyfile(source, target)

    def remove_file(self, path: str) -> None:
        os.unlink(path)

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(path)


class RemoteStorage:
    """Files behind an fsspec file system; a file becomes visible when its stream is closed."""

    renames_atomically = False

    def __init__(self, file_system: Any) -> None:
        self.file_system = file_system

    def create(self, path: str) -> BinaryIO:
        return self.file_system.open(path, "wb")

    def write(self, stream: BinaryIO, data: memoryview) -> None:
        stream.write(data)

    def sync(self, stream: BinaryIO) -> None:
        """Nothing to do: object stores acknowledge a file as a whole when it is closed."""

    def open(self, path: str) -> BinaryIO:
        return self.file_system.open(path, "rb")

    def read(self, path: str) -> bytes:
        with self.open(path) as stream:
            return stream.read()

    def read_into(self, stream: BinaryIO, start: int, target: memoryview) -> int:
        return _read_into(stream, start, target)

    def size(self, path: str) -> int | None:
        self.file_system.invalidate_cache()
        try:
            entry = self.file_system.info(path)
        except FileNotFoundError:
            return None
        return int(entry["size"]) if entry["type"] == "file" else None

    def is_directory(self, path: str) -> bool:
        self.file_system.invalidate_cache()
        return bool(self.file_system.isdir(path))

    def names(self, path: str) -> list[str]:
        self.file_system.invalidate_cache()
        try:
            entries = self.file_system.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries)

    def files(self, path: str) -> list[str]:
        self.file_system.invalidate_cache()
        root = self.file_system._strip_protocol(path).rstrip("/") + "/"
        return sorted(found.removeprefix(root) for found in self.file_system.find(path))

    def make_directory(self, path: str) -> None:
        self.file_system.makedirs(path, exist_ok=True)

    def sync_directory(self, path: str) -> None:
        """Nothing to do: an object store has no directories of its own."""

    def rename(self, source: str, target: str) -> None:
        self.file_system.mv(source, target, recursive=True)

    def copy_file(self, source: str, target: str) -> None:
        self.file_system.cp_file(source, target)

    def remove_file(self, path: str) -> None:
        self.file_system.rm_file(path)

    def remove_tree(self, path: str) -> None:
        self.file_system.rm(path, recursive=True)


Storage = LocalStorage | RemoteStorage


def _read_into(stream: BinaryIO, start: int, target: memoryview) -> int:
    stream.seek(start)
    done = 0
    while done < target.nbytes:
        count = stream.readinto(target[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done


def locate(path: PathLike) -> tuple[Storage, str]:
    """The storage that a path belongs to, and the path in the form which that storage takes."""
    text = os.fspath(path)
    if "://" not in text:
        return LocalStorage(), os.path.abspath(text)
    import fsspec

    file_system, inside = fsspec.core.url_to_fs(text)
    if "file" in (file_system.protocol if isinstance(file_system.protocol, tuple) else (file_system.protocol,)):
        return LocalStorage(), inside
    return RemoteStorage(file_system), inside.rstrip("/")


def join(directory: str, name: str) -> str:
    return f"{directory}/{name}"


def split(path: str) -> tuple[str, str]:
    """Parent and last name of a path in a storage's own form."""
    parent, _, name = path.rstrip("/").rpartition("/")
    return parent or "/", name
