"""Writing a checkpoint: every rank its own shards and state, replicated tensors once, all of it or nothing."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.storage import WriteResult

from lightning_dist.checkpoint import commit
from lightning_dist.checkpoint.format import (
    DATA,
    MANIFEST,
    RANKS,
    TRAINER_STATE,
    CheckpointError,
    ChecksummedWriter,
    Commit,
    FileRecord,
    Manifest,
    digest,
    encode_manifest,
    installed_versions,
    rank_state_file,
    write_file,
)
from lightning_dist.checkpoint.planner import LocalPlan, SnapshotPlanner
from lightning_dist.checkpoint.storage import PathLike, Storage, join, locate, split
from lightning_dist.checkpoint.team import Team


@dataclass
class Snapshot:
    """What one rank has to write. `error` is a failure to take it, raised on all ranks when they write together."""

    planner: SnapshotPlanner | None = None
    trainer_state: bytes = b""
    rank_state: bytes | None = None
    error: Exception | None = None

    @classmethod
    def take(
        cls,
        tensors: dict[str, Any],
        trainer_state: dict[str, Any],
        rank_state: dict[str, Any] | None,
        first: bool,
        like: SnapshotPlanner | None = None,
    ) -> Snapshot:
        """Plans what to write and pickles all that is not a tensor; tensors are referred to, not copied."""
        try:
            return cls(
                planner=SnapshotPlanner(tensors, like),
                trainer_state=_pickled(trainer_state) if first else b"",
                rank_state=None if rank_state is None else _pickled(rank_state),
            )
        except Exception as error:
            return cls(error=error)


@dataclass(frozen=True)
class SharedPlan:
    """What the ranks have agreed on: good for as long as every rank's state keeps its names, shapes and layout.

    `mine` is what this rank writes; rank 0 also has torch's index of the whole, and all names in order.
    """

    mine: SavePlan
    index: Metadata | None
    order: tuple[str, ...]


def save(
    directory: PathLike,
    tensors: dict[str, Any],
    trainer_state: dict[str, Any],
    *,
    rank_state: dict[str, Any] | None = None,
    info: dict[str, Any] | None = None,
    group: Any = None,
) -> None:
    """Writes one checkpoint and returns when it is committed; to be called by every rank of `group`.

    Args:
        directory: The checkpoint's own directory, on storage that all ranks share; local or any fsspec path. A
            checkpoint that is already there is replaced, and stays whole until the new one is committed.
        tensors: Flat or nested dict of tensors, DTensors and plain values. Each rank gives what it holds, under names
            that mean the same on every rank that has them; a shard held by several ranks is written by one.
        trainer_state: Written as rank 0 gives it.
        rank_state: What only this rank knows (random number generators, position in its data).
        info: Plain values for the manifest. `step` is what messages and retention count in (`global_step` of the
            trainer state where it is missing); `parameter_order` lists the parameter names in the order of the whole
            model, where no rank holds it all.
        group: CPU (Gloo) group for the exchanges; None is the default group, or a single process without one.

    Raises:
        CheckpointError: On every rank, naming the rank that failed and why. What was at `directory` is unchanged.

    Collectives: one gather, one scatter, one gather and one broadcast of small objects on `group`.
    """
    team = Team(group)
    snapshot = Snapshot.take(tensors, trainer_state, rank_state, team.is_first)
    write_snapshot(directory, snapshot, complete_info(info, trainer_state), team)


def complete_info(info: dict[str, Any] | None, trainer_state: dict[str, Any]) -> dict[str, Any]:
    """The manifest's plain values, with the step taken from the trainer state where it is not given."""
    return {"step": trainer_state.get("global_step")} | (info or {})


def write_snapshot(
    directory: PathLike, snapshot: Snapshot, info: dict[str, Any], team: Team, shared: SharedPlan | None = None
) -> tuple[Commit, SharedPlan]:
    """Writes what each rank's snapshot holds and commits it; to be called by every rank of `team`.

    Args:
        shared: What an earlier call returned, on all ranks or on none; then no plans are exchanged.
    """
    return _Save(directory, snapshot, info, team, shared).run()


class _Save:
    """One checkpoint being written: what every rank does, and what rank 0 does in between."""

    def __init__(
        self, directory: PathLike, snapshot: Snapshot, info: dict[str, Any], team: Team, shared: SharedPlan | None
    ) -> None:
        self.directory, self.snapshot, self.info, self.team, self.shared = directory, snapshot, info, team, shared
        self.storage, self.path = locate(directory)
        self.place: str | None = None
        self.writer: _ShardWriter | None = None
        self.index = shared.index if shared else None
        self.order = shared.order if shared else ()

    def run(self) -> tuple[Commit, SharedPlan]:
        what = f"writing the checkpoint {self.directory}"
        try:
            self.place, mine = self.team.scatter(what, self._plan, self._start)
            shared = self.shared
            if shared is None:
                assert mine is not None
                shared = SharedPlan(mine, self.index, self.order)
            plan = shared.mine
            return self.team.reduce(what, lambda: self._write(plan), self._finish), shared
        except BaseException:
            if self.team.is_first and self.place is not None:
                with contextlib.suppress(OSError):
                    commit.clean_up(self.storage, self.place, self.path)
            raise
        finally:
            if self.writer is not None:
                self.writer.abandon()

    def _plan(self) -> LocalPlan | None:
        if self.snapshot.error is not None:
            raise self.snapshot.error
        return None if self.shared else self._planner.local_plan

    def _start(self, found: list[LocalPlan | None]) -> list[tuple[str, SavePlan | None]]:
        """On rank 0: shares out the work and makes the folders."""
        commit.check_target(self.storage, self.path)
        commit.recover(self.storage, self.path)
        plans: list[SavePlan | None] = [None] * self.team.world_size
        new = [plan for plan in found if plan is not None]
        if new:
            made, self.index = self._planner.create_plans(new)
            plans = list(FileSystemWriter(self.path).prepare_global_plan(made))
            self.order = tuple(dict.fromkeys(name for plan in new for name in plan.names))
        self.place = commit.place_to_write(self.storage, self.path)
        for folder in (self.place, join(self.place, DATA), join(self.place, RANKS)):
            self.storage.make_directory(folder)
        return [(self.place, plan) for plan in plans]

    def _write(self, plan: SavePlan) -> tuple[list[WriteResult], dict[str, FileRecord]]:
        """On every rank: its shards and its own state; on rank 0 the trainer's too."""
        assert self.place is not None
        if self.storage.renames_atomically and not self.storage.is_directory(self.place):
            raise CheckpointError(f"{self.place} is not there: is {self.directory} on storage that all ranks share?")
        self.writer = _ShardWriter(self.storage, join(self.place, DATA))
        results = self.writer.write(plan, self._planner) if plan.items else []
        files = {rank_state_file(self.team.rank): self.snapshot.rank_state}
        if self.team.is_first:
            files[TRAINER_STATE] = self.snapshot.trainer_state
        records = self._data_records()
        for name, content in files.items():
            if content is not None:
                records[name] = write_file(self.storage, join(self.place, name), content)
        return results, records

    def _finish(self, found: list[tuple[list[WriteResult], dict[str, FileRecord]]]) -> Commit:
        """On rank 0: torch's index, the manifest, the name, and the commit."""
        assert self.place is not None and self.writer is not None and self.index is not None
        self.writer.finish(self.index, [results for results, _ in found])
        records = {name: record for _, one in found for name, record in one.items()} | self._data_records()
        _check_sizes(self.storage, self.place, records)
        sequence = _next_sequence(self.storage, self.path)
        manifest = encode_manifest(
            Manifest(
                step=self.info.get("step"),
                sequence=sequence,
                world_size=self.team.world_size,
                saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
                files=records,
                info=self.info,
                parameter_order=tuple(self.info.get("parameter_order", self.order)),
                versions=installed_versions(),
            )
        )
        write_file(self.storage, join(self.place, MANIFEST), manifest)
        for folder in (join(self.place, DATA), join(self.place, RANKS), self.place):
            self.storage.sync_directory(folder)
        made = Commit(digest(manifest), self.info.get("step"), sequence)
        commit.publish(self.storage, self.place, self.path, made)
        return made

    @property
    def _planner(self) -> SnapshotPlanner:
        assert self.snapshot.planner is not None
        return self.snapshot.planner

    def _data_records(self) -> dict[str, FileRecord]:
        assert self.writer is not None
        return {f"{DATA}/{name}": record for name, record in self.writer.records.items()}


def _check_sizes(storage: Storage, place: str, records: dict[str, FileRecord]) -> None:
    """Rank 0 must see every file that the others say they wrote: storage may not be shared, or not be what it seems."""
    for name, record in records.items():
        size = storage.size(join(place, name))
        if size != record.size:
            raise CheckpointError(
                f"rank 0 sees {'no file' if size is None else f'{size} bytes of'} {name}, where {record.size} bytes "
                f"were written: is {split(place)[0]} on storage that all ranks share?"
            )


def _next_sequence(storage: Storage, path: str) -> int:
    """One more than that of any checkpoint beside `path`: their order, whatever clocks say and steps do."""
    parent, _ = split(path)
    siblings = (name for name in storage.names(parent) if not name.startswith("."))
    return 1 + max((commit.place_in_order(storage, join(parent, name))[0] for name in siblings), default=0)


def _pickled(state: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


class _ChecksummedFileSystem(FileSystemBase):
    """What torch's writer sees: a folder whose files are hashed while they are written."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.records: dict[str, FileRecord] = {}
        self.open_files: list[ChecksummedWriter] = []

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb"
        stream = ChecksummedWriter(self.storage, str(path))
        self.open_files.append(stream)
        yield stream  # type: ignore[misc]  # it has the few methods that torch's writer calls
        stream.close()
        assert stream.record is not None
        self.records[split(str(path))[1]] = stream.record

    def concat_path(self, path: Any, suffix: str) -> str:
        return join(str(path), suffix)

    def rename(self, path: Any, new_path: Any) -> None:
        self.storage.rename(str(path), str(new_path))
        self.records[split(str(new_path))[1]] = self.records.pop(split(str(path))[1])

    def init_path(self, path: Any) -> str:
        return str(path)

    def mkdir(self, path: Any) -> None:
        self.storage.make_directory(str(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return self.storage.size(str(path)) is not None

    def rm_file(self, path: Any) -> None:
        self.storage.remove_file(str(path))


class _ShardWriter(FileSystemWriter):
    """torch's file writer on our storage; each file is synced by its stream as it is closed."""

    def __init__(self, storage: Storage, path: str) -> None:
        super().__init__(path, sync_files=False)
        self.fs: Any = _ChecksummedFileSystem(storage)
        self.path: Any = path

    @property
    def records(self) -> dict[str, FileRecord]:
        return self.fs.records

    def write(self, plan: SavePlan, planner: SnapshotPlanner) -> list[WriteResult]:
        future = self.write_data(planner.finish_plan(plan), planner)
        future.wait()
        return future.value()

    def abandon(self) -> None:
        """Closes what an error left open."""
        for stream in self.fs.open_files:
            stream.abandon()
