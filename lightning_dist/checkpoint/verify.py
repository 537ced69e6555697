"""Is what lies on the disk what was written? Every file of a checkpoint, in parallel, damage traced to tensors."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lightning_dist.checkpoint import commit
from lightning_dist.checkpoint.checked_file import CheckedFile, DamagedBlock, read_manifest_bytes, read_whole_file
from lightning_dist.checkpoint.format import (
    COMMITTED,
    DATA,
    MANIFEST,
    TENSOR_INDEX,
    CheckpointError,
    Manifest,
    decode_manifest,
)
from lightning_dist.checkpoint.shards import describe_tensors
from lightning_dist.checkpoint.storage import PathLike, Storage, join, locate


@dataclass(frozen=True)
class Problem:
    """One damaged or missing file: its name, what is wrong with it, and the tensors it takes with it."""

    file: str
    what: str


@dataclass(frozen=True)
class Report:
    """What `verify` found. `foreign` lists files that the checkpoint does not know: harmless, never read."""

    directory: str
    step: int | None
    problems: tuple[Problem, ...] = ()
    foreign: tuple[str, ...] = ()
    bytes_checked: int = 0
    manifest: Manifest | None = field(default=None, repr=False)

    @property
    def intact(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self.intact:
            files = len(self.manifest.files) if self.manifest else 0
            lines = [f"{self.directory}: intact (step {self.step}, {files} files, {self.bytes_checked} bytes checked)"]
        else:
            lines = [f"{self.directory}: DAMAGED"] + [f"  {problem.file}: {problem.what}" for problem in self.problems]
        return "\n".join(lines + [f"  {name}: not part of the checkpoint" for name in self.foreign])


def verify(directory: PathLike, *, full: bool = True, threads: int | None = None) -> Report:
    """Checks a checkpoint in this one process and returns what is wrong with it; raises nothing for damage.

    Args:
        directory: The checkpoint's directory.
        full: True compares every byte with its checksum; False only looks for missing files and wrong sizes.
        threads: Files are checked in as many threads; None takes two for each CPU, eight at most. 1 starts none.
    """
    return verify_part(directory, 0, 1, full=full, threads=threads)


def verify_part(
    directory: PathLike,
    part: int,
    parts: int,
    *,
    full: bool = True,
    threads: int | None = None,
    manifest: Manifest | None = None,
) -> Report:
    """Checks every `parts`-th file of a checkpoint, counted from `part`, the largest first.

    Args:
        manifest: The manifest, where it has been read and found intact.
    """
    storage, path = locate(directory)
    name = os.fspath(directory)
    if manifest is None:
        try:
            manifest = decode_manifest(read_manifest_bytes(storage, path))
        except (CheckpointError, OSError, ValueError, KeyError) as error:
            file = COMMITTED if isinstance(error, commit.CommitError) else MANIFEST
            return Report(name, None, (Problem(file, str(error).removeprefix(f"{path}: ")),))
    files = sorted(manifest.files, key=lambda file: (-manifest.files[file].size, file))[part::parts]
    check = functools.partial(_check_file, storage, path, manifest, full=full)
    threads = min(threads or min(8, 2 * (os.cpu_count() or 1)), len(files))
    if threads <= 1:
        found = [check(file) for file in files]
    else:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(check, files))
    foreign: tuple[str, ...] = ()
    if part == 0:
        known = {*manifest.files, MANIFEST, COMMITTED}
        foreign = tuple(file for file in storage.files(path) if file not in known)
    problems = (problem for problems, _ in found for problem in problems)
    return Report(
        name,
        manifest.step,
        tuple(sorted(problems, key=lambda problem: problem.file)),
        foreign,
        sum(count for _, count in found),
        manifest,
    )


def _check_file(
    storage: Storage, directory: str, manifest: Manifest, name: str, full: bool
) -> tuple[list[Problem], int]:
    record = manifest.files[name]
    damages: list[DamagedBlock] = []
    try:
        stream = CheckedFile(storage, join(directory, name), name, record, manifest.block_bytes)
    except DamagedBlock as damage:
        return [_describe(storage, directory, manifest, damage)], 0
    with stream:
        for block in range(len(record.blocks) if full else 0):
            try:
                stream.check(block)
            except DamagedBlock as damage:
                last = damages[-1] if damages else None
                if last is not None and last.stop == damage.start and last.why is None and damage.why is None:
                    damages[-1] = DamagedBlock(name, last.start, damage.stop)
                else:
                    damages.append(damage)
        return [_describe(storage, directory, manifest, damage) for damage in damages], stream.bytes_read


def _describe(storage: Storage, directory: str, manifest: Manifest, damage: DamagedBlock) -> Problem:
    what = str(damage).removeprefix(f"{damage.name} is damaged: ")
    if damage.name != TENSOR_INDEX and damage.name.startswith(f"{DATA}/"):
        with contextlib.suppress(CheckpointError):  # the index may be damaged too, which is reported by itself
            index = pickle.loads(read_whole_file(storage, directory, manifest, TENSOR_INDEX))
            what += f"; it holds {describe_tensors(storage, directory, index, damage)}"
    return Problem(damage.name, what)
