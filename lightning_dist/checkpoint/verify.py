"""Is what lies on the disk what was written? Every file of a checkpoint, in parallel, damage traced to tensors."""

from __future__ import annotations

import contextlib
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch.distributed.checkpoint import Metadata

from lightning_dist.checkpoint import commit
from lightning_dist.checkpoint.format import (
    COMMITTED,
    MANIFEST,
    TENSOR_INDEX,
    CheckpointError,
    DamagedCheckpointError,
    Manifest,
    decode_manifest,
)
from lightning_dist.checkpoint.read import (
    CheckedFile,
    DamagedBlock,
    describe_tensors,
    read_manifest_bytes,
    read_whole_file,
)
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
        threads: Files are checked in as many threads; None takes two for each CPU, eight at most.
    """
    storage, path = locate(directory)
    name = os.fspath(directory)
    try:
        manifest = decode_manifest(read_manifest_bytes(storage, path))
    except (CheckpointError, OSError, ValueError, KeyError) as error:
        file = MANIFEST if MANIFEST in str(error) and COMMITTED not in str(error).split(":")[0] else COMMITTED
        return Report(name, None, (Problem(file, str(error)),))
    index: Metadata | None = None
    if full:
        with contextlib.suppress(CheckpointError):  # damage of this file is reported with the others
            index = pickle.loads(read_whole_file(storage, path, manifest, TENSOR_INDEX))
    with ThreadPoolExecutor(threads or min(8, 2 * (os.cpu_count() or 1))) as pool:
        found = list(
            pool.map(lambda file: _check_file(storage, path, manifest, file, index, full), sorted(manifest.files))
        )
    foreign = [file for file in storage.files(path) if file not in manifest.files and file not in (MANIFEST, COMMITTED)]
    return Report(
        name,
        manifest.step,
        tuple(problem for problems, _ in found for problem in problems),
        tuple(foreign),
        sum(count for _, count in found),
        manifest,
    )


def _check_file(
    storage: Storage, directory: str, manifest: Manifest, name: str, index: Metadata | None, full: bool
) -> tuple[list[Problem], int]:
    record = manifest.files[name]

    def describe(damage: DamagedCheckpointError) -> Problem:
        what = str(damage).removeprefix(f"{name} is damaged: ")
        if index is not None and isinstance(damage, DamagedBlock) and name.startswith("data/"):
            what += f"; it holds {describe_tensors(index, damage)}"
        return Problem(name, what)

    problems: list[Problem] = []
    try:
        stream = CheckedFile(storage, join(directory, name), name, record, manifest.block_bytes)
    except DamagedCheckpointError as damage:
        return [describe(damage)], 0
    with stream:
        for block in range(len(record.blocks) if full else 0):
            try:
                stream.check(block)
            except DamagedCheckpointError as damage:
                problems.append(describe(damage))
        return problems, stream.bytes_read


def step_of(directory: PathLike) -> int | None:
    """The step that a committed checkpoint was saved at; None where it cannot be told."""
    storage, path = locate(directory)
    try:
        return commit.read_commit(storage, path).step
    except (CheckpointError, OSError):
        return None
