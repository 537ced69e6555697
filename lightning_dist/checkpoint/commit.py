"""How a checkpoint becomes visible all at once, how it goes away, and what a crash in between leaves behind.

A new checkpoint is written into a hidden sibling, `.NAME.writing-TOKEN`. When every file is durable the sibling is
renamed to its name, and then `COMMITTED` is written into it. Where a checkpoint of that name exists already, the new
one is committed while it is still hidden, and then the two change places, so that a crash at any point leaves one of
them whole; `recover` puts it back under its name. Object stores cannot rename: there the files of a new checkpoint
are written at their place, invisible to readers until `COMMITTED` arrives.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid

from lightning_dist.checkpoint.format import (
    COMMITTED,
    DATA,
    MANIFEST,
    RANKS,
    TRAINER_STATE,
    CheckpointError,
    Commit,
    DamagedCheckpointError,
    decode_commit,
    digest,
    encode_commit,
    write_file,
)
from lightning_dist.checkpoint.storage import Storage, join, split

_HIDDEN = re.compile(r"^\.(?P<name>.+)\.(?P<kind>writing|replaced|deleting)-(?P<token>[0-9a-f]{12})$")


class CommitError(DamagedCheckpointError):
    """A directory is not committed, or its `COMMITTED` is damaged."""


def hidden_sibling(path: str, kind: str) -> str:
    parent, name = split(path)
    return join(parent, f".{name}.{kind}-{uuid.uuid4().hex[:12]}")


def read_commit(storage: Storage, path: str) -> Commit:
    """What `COMMITTED` in a directory says; raises CheckpointError where it is missing or damaged."""
    marker = join(path, COMMITTED)
    try:
        return decode_commit(storage.read(marker))
    except (FileNotFoundError, NotADirectoryError):
        raise CommitError(f"{path} is not a complete checkpoint: it has no file {COMMITTED}") from None
    except OSError as error:
        raise CommitError(f"{path}: {COMMITTED} cannot be read: {error}") from error
    except CheckpointError as error:
        raise CommitError(f"{path}: {error}") from None


def is_committed(storage: Storage, path: str) -> bool:
    """Whether a directory holds an intact `COMMITTED` that fits its manifest.

    Raises:
        OSError: It cannot be told: a read that failed must not make a good checkpoint look like rubbish.
    """
    try:
        commit = decode_commit(storage.read(join(path, COMMITTED)))
        return digest(storage.read(join(path, MANIFEST))) == commit.manifest
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        return False


def place_in_order(storage: Storage, path: str) -> tuple[int, int | None]:
    """Sequence number and step of a directory, by its manifest where `COMMITTED` is no use; (0, None) if unknown."""
    with contextlib.suppress(CheckpointError):
        found = read_commit(storage, path)
        return found.sequence, found.step
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(storage.read(join(path, MANIFEST)))
        return int(content["sequence"]), content["step"]
    return 0, None


def write_commit(storage: Storage, path: str, commit: Commit) -> None:
    """Writes `COMMITTED` so that it is either absent or whole, and makes it durable."""
    marker = join(path, COMMITTED)
    if not storage.renames_atomically:  # an object appears as a whole
        write_file(storage, marker, encode_commit(commit))
        return
    write_file(storage, f"{marker}.new", encode_commit(commit))
    storage.rename(f"{marker}.new", marker)
    storage.sync_directory(path)


def check_target(storage: Storage, path: str) -> None:
    """Raises CheckpointError if saving to `path` would remove something that is not a checkpoint."""
    if storage.size(path) is not None:
        raise CheckpointError(f"{path} is a file; a checkpoint is a directory: give another path or remove the file")
    entries = storage.names(path)
    ours = {DATA, RANKS, TRAINER_STATE}  # all there is where a write to an object store was cut short
    if not {MANIFEST, COMMITTED} & set(entries) and not ours.issuperset(entries):
        raise CheckpointError(
            f"{path} is there and is not a checkpoint (it holds {', '.join(entries[:3])}): give another path"
        )


def place_to_write(storage: Storage, path: str) -> str:
    """Where the files of the checkpoint `path` are to be written before it is published."""
    if storage.renames_atomically or storage.is_directory(path):
        return hidden_sibling(path, "writing")
    return path


def publish(storage: Storage, written: str, path: str, commit: Commit) -> None:
    """Gives a fully written directory its name and commits it; on any error what was at `path` before is there still.

    Raises:
        OSError: From the storage; nothing half-written is then visible as a checkpoint.
    """
    parent, _ = split(path)
    if written == path:
        write_commit(storage, path, commit)
        return
    if not storage.is_directory(path):
        storage.rename(written, path)
        storage.sync_directory(parent)
        try:
            write_commit(storage, path, commit)
        except BaseException:
            with contextlib.suppress(OSError):
                discard(storage, path)
            raise
        return
    write_commit(storage, written, commit)
    if not storage.renames_atomically:
        discard(storage, path)
        _move_in(storage, written, path)
        return
    replaced = hidden_sibling(path, "replaced")
    storage.rename(path, replaced)
    try:
        storage.rename(written, path)
    except BaseException:
        storage.rename(replaced, path)
        raise
    storage.sync_directory(parent)
    with contextlib.suppress(OSError):  # the new one is in place; `sweep` removes what stays of the old one
        discard(storage, replaced)


def _move_in(storage: Storage, source: str, target: str) -> None:
    """Gives a committed directory its name; where that takes copies, `COMMITTED` is copied last."""
    if storage.renames_atomically:
        storage.rename(source, target)
        storage.sync_directory(split(target)[0])
        return
    for name in sorted(storage.files(source), key=lambda name: name == COMMITTED):
        storage.copy_file(join(source, name), join(target, name))
    discard(storage, source)


def discard(storage: Storage, path: str) -> None:
    """Removes a directory so that a crash half-way leaves nothing that looks like a checkpoint."""
    name = split(path)[1]
    if storage.renames_atomically and not _HIDDEN.match(name):
        hidden = hidden_sibling(path, "deleting")
        storage.rename(path, hidden)
        storage.sync_directory(split(path)[0])
        path = hidden
    if storage.size(join(path, COMMITTED)) is not None:
        storage.remove_file(join(path, COMMITTED))
    storage.remove_tree(path)


def clean_up(storage: Storage, written: str, path: str) -> None:
    """Removes what a failed save has written, unless by now it is the only whole checkpoint of that name."""
    if storage.is_directory(written) and not (
        is_committed(storage, written) and (written == path or not is_committed(storage, path))
    ):
        discard(storage, written)


def left_over(storage: Storage, parent: str) -> list[tuple[str, str]]:
    """Name and kind (writing, replaced, deleting) of each hidden directory in a folder of checkpoints."""
    matches = map(_HIDDEN.match, storage.names(parent))
    return [(match["name"], match["kind"]) for match in matches if match]


def recover(storage: Storage, path: str) -> bool:
    """Finishes a replacement that a crash cut short; true if a whole checkpoint was put back at `path`.

    Of a new one that was committed but not yet renamed and the old one that was moved aside, the newer is taken.
    """
    if is_committed(storage, path):
        return False
    parent, name = split(path)
    candidates = []
    for entry in storage.names(parent):
        match = _HIDDEN.match(entry)
        if match and match["name"] == name and match["kind"] != "deleting":
            hidden = join(parent, entry)
            if is_committed(storage, hidden):
                candidates.append((read_commit(storage, hidden).sequence, hidden))
    if not candidates:
        return False
    if storage.is_directory(path):
        discard(storage, path)
    _move_in(storage, max(candidates)[1], path)
    return True


def sweep(storage: Storage, parent: str) -> list[str]:
    """Removes what crashes left in a folder of checkpoints: half-written, replaced and half-deleted directories.

    To be called by one rank before a run writes its first checkpoint; a folder belongs to one run at a time.

    Returns:
        Names of what was removed.
    """
    removed = []
    matches = [match for match in map(_HIDDEN.match, storage.names(parent)) if match]
    for match in matches:
        if match["kind"] != "deleting":
            recover(storage, join(parent, match["name"]))
    for match in matches:
        if storage.is_directory(join(parent, match.string)):
            discard(storage, join(parent, match.string))
            removed.append(match.string)
    return removed
