"""Writing checkpoints while training goes on: the loop waits for a copy in host memory, and for nothing else.

One thread for each rank does the rest in the order in which it was asked: write, commit, verify, delete. Its
exchanges run on a group of its own. What went wrong there is raised by the next call, on every rank, and at the end.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_dist.checkpoint import commit, history
from lightning_dist.checkpoint.format import CheckpointError, Commit
from lightning_dist.checkpoint.planner import SnapshotPlanner, host_buffer
from lightning_dist.checkpoint.storage import PathLike, locate
from lightning_dist.checkpoint.team import LostContact, Team
from lightning_dist.checkpoint.write import SharedPlan, Snapshot, complete_info, write_snapshot

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _State:
    """What each rank tells the others when they meet."""

    busy: bool
    error: str | None = None
    lost_contact: bool = False
    same_plan: bool = False


class BackgroundWriter:
    """Saves and deletes checkpoints in the background; to be made, and called, by every rank alike.

    It keeps one copy of what this rank writes in host memory (pinned where the tensors are on a GPU) for its whole
    life: allocating it anew for each save costs more than the copy.

    Args:
        group: CPU (Gloo) group for the exchanges of the calling thread; None is the default group, or a single
            process without one.
        verify: Compare every checkpoint with its checksums once it is committed, each rank its share of the files.
            One that is found damaged counts as a failure.
        timeout: How long the ranks' background threads wait for each other, for example for one whose disk is slow.

    Collectives: creates one Gloo group; `save`, `wait` and `close` issue one all-gather of small objects on `group`.
    """

    def __init__(self, group: Any = None, *, verify: bool = True, timeout: timedelta = timedelta(minutes=30)) -> None:
        self._team = Team(group)
        self._verify = verify
        self._timeout = timeout
        self._background_group = self._new_group()
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}
        self._planner: SnapshotPlanner | None = None
        self._shared_plan: SharedPlan | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._error: CheckpointError | None = None
        self._lost_contact = False
        self._protected_at = time.monotonic()
        self._protected_step: int | None = None
        self._good: dict[str, tuple[str, str]] = {}
        self._refused_deletes: list[str] = []

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing or deleting."""
        return not self._idle.is_set()

    @property
    def unprotected_seconds(self) -> float:
        """Seconds of training that would be lost now: the age of the state in the newest checkpoint that is safe.

        Counted from the making of this object before there is one. A save that is under way does not count, nor
        does one that failed.
        """
        return time.monotonic() - self._protected_at

    @property
    def protected_step(self) -> int | None:
        """The step of the newest checkpoint that is committed, and verified where that is asked for."""
        return self._protected_step

    def prepare(self, tensors: dict[str, Any]) -> None:
        """Allocates host memory for a state like this in the background, so that the first save need not.

        Issues no collective.
        """
        planner = SnapshotPlanner(tensors)

        def touch() -> None:
            for index, value in planner.data.items():
                if isinstance(value, torch.Tensor) and index not in self._buffers:
                    self._buffers[index] = host_buffer(value).zero_()

        self._submit(touch)

    def save(
        self,
        directory: PathLike,
        tensors: dict[str, Any],
        trainer_state: dict[str, Any],
        *,
        rank_state: dict[str, Any] | None = None,
        info: dict[str, Any] | None = None,
        patience: float | None = 60.0,
    ) -> bool:
        """Copies the state and returns; it is written and committed in the background. Arguments as for `save`.

        Args:
            patience: Seconds to wait for the save before, where the disk is slower than the interval; None waits
                until it is done.

        Returns:
            False if on some rank the save before was still not done: nothing was copied, and nothing will be written.

        Raises:
            CheckpointError: On every rank, for a failure of an earlier save. It is raised once; this save was then
                not begun, and calling again begins it.

        Collectives: one all-gather of small objects on the group of this object.
        """
        before = self._planner
        snapshot = Snapshot.take(tensors, trainer_state, rank_state, self._team.is_first, before)
        planner = snapshot.planner
        same = planner is not None and before is not None and planner.local_plan is before.local_plan
        states = self._meet(f"saving {directory}", patience, same)
        if any(state.busy for state in states):
            _log.warning(
                "no checkpoint was taken at %s: the save before it is still being written; "
                "the newest safe state is %.0f seconds old",
                directory,
                self.unprotected_seconds,
            )
            return False
        shared = self._shared_plan if all(state.same_plan for state in states) else None
        taken_at = time.monotonic()
        if planner is not None:
            try:
                # Of what every replica holds, only the one that writes it has to copy it, once that is agreed on.
                planner.copy_into(self._buffers, only=shared.mine if shared else None)
                self._planner = planner
            except Exception as error:  # out of memory: told to the others when they write together
                snapshot = Snapshot(error=error)
        completed = complete_info(info, trainer_state)
        self._submit(lambda: self._write(os.fspath(directory), snapshot, completed, shared, taken_at))
        return True

    def delete(self, directory: PathLike) -> None:
        """Removes a checkpoint after all that was asked for before, if another good one is there by then.

        One that is the last good one stays, and goes after the next save that succeeds. Issues no collective; ranks
        other than the first do nothing.
        """
        if self._team.is_first:
            self._submit(lambda: self._delete(os.fspath(directory)))

    def retain(self, root: PathLike, keep_last: int, *, keep: tuple[PathLike, ...] = ()) -> None:
        """Like `history.retain`, after all that was asked for before. Issues no collective."""
        if self._team.is_first:
            self._submit(lambda: self._retain(root, keep_last, keep))

    def wait(self, patience: float | None = None) -> bool:
        """Waits until all ranks have done all that was asked for; call it before reading what was saved.

        Returns:
            Whether it is done; False if `patience` seconds were not enough on some rank.

        Raises:
            CheckpointError: On every rank, for a failure that was not raised yet.

        Collectives: one all-gather of small objects on the group of this object.
        """
        return not any(state.busy for state in self._meet("waiting for checkpoints", patience))

    def close(self, *, together: bool = True, patience: float | None = None) -> None:
        """Waits for what is under way and gives the memory back.

        Args:
            together: False where the other ranks may not come here, as after an exception: this rank then waits for
                its own part only, and issues no collective.
            patience: Seconds to wait; None waits until it is done.

        Raises:
            CheckpointError: For a failure that was not raised yet, or if `patience` was not enough.
        """
        try:
            if together:
                if not self.wait(patience):
                    raise CheckpointError("a checkpoint is still being written")
            elif not self._idle.wait(patience):
                raise CheckpointError(f"rank {self._team.rank} is still writing a checkpoint")
            elif self._error is not None:
                error, self._error = self._error, None
                raise error
        finally:
            if self._thread is not None and self._idle.is_set():
                self._jobs.put(None)
                self._thread.join()
                self._thread = None
                self._buffers.clear()
                self._planner = self._shared_plan = None

    def _meet(self, what: str, patience: float | None, same_plan: bool = False) -> list[_State]:
        """Waits for this rank's thread, then learns how the others fare; all leave with the same knowledge."""
        idle = self._idle.wait(patience)
        with self._lock:
            same_plan = same_plan and self._shared_plan is not None
            mine = _State(not idle, str(self._error) if self._error else None, self._lost_contact, same_plan)
        states = self._team.gather(what, lambda: mine)
        failed = list(dict.fromkeys(state.error for state in states if state.error))
        if any(state.lost_contact for state in states) and not any(state.busy for state in states):
            # Exchanges that were cut short leave the group out of step. All threads are idle: begin with a new one.
            self._background_group = self._new_group()
            self._lost_contact = False
        if failed:
            with self._lock:
                self._error = None
            self._shared_plan = self._planner = None
            raise CheckpointError(
                f"{'; '.join(failed)}. The newest safe state is {self.unprotected_seconds:.0f} seconds old"
            )
        return states

    def _submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._idle.clear()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="checkpoint writer")
                self._thread.start()
            self._jobs.put(job)

    def _work(self) -> None:
        # Not a daemon, and it outlives the main thread for as long as there is work: a script that ends without
        # `close` still finishes its last checkpoint.
        main = threading.main_thread()
        while True:
            try:
                job = self._jobs.get(timeout=0.2)
            except queue.Empty:
                if not main.is_alive():
                    return
                continue
            if job is None:
                return
            self._run(job)
            with self._lock:
                if self._jobs.empty():
                    self._idle.set()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            known = error if isinstance(error, CheckpointError) else CheckpointError(f"{type(error).__name__}: {error}")
            with self._lock:
                self._lost_contact |= isinstance(error, LostContact)
                self._error = known
            _log.error("%s; the newest safe state is %.0f seconds old", error, self.unprotected_seconds)

    def _write(
        self,
        directory: str,
        snapshot: Snapshot,
        info: dict[str, Any],
        shared: SharedPlan | None,
        taken_at: float,
    ) -> None:
        self._refused_deletes = [path for path in self._refused_deletes if path != directory]
        self._good.pop(locate(directory)[1], None)
        team = Team(self._background_group)
        self._shared_plan = None
        made, plan = write_snapshot(directory, snapshot, info, team, shared)
        self._shared_plan = plan
        if self._verify:
            self._verify_new(directory, made)
        self._protected_at, self._protected_step = taken_at, made.step
        refused, self._refused_deletes = self._refused_deletes, []
        for path in refused:
            self._delete(path)

    def _verify_new(self, directory: str, made: Commit) -> None:
        threads = None if threading.main_thread().is_alive() else 1  # a program that ends can start no more threads
        report = history.verify_together(directory, threads=threads, group=self._background_group)
        if not report.intact:
            raise CheckpointError(f"the checkpoint just written is not what was to be written: {report}")
        self._good[locate(directory)[1]] = directory, made.manifest

    def _retain(self, root: PathLike, keep_last: int, keep: tuple[PathLike, ...]) -> None:
        history.retain(root, keep_last, keep=keep, known_good=self._still_good())

    def _delete(self, directory: str) -> None:
        self._good.pop(locate(directory)[1], None)
        if not history.delete(directory, known_good=self._still_good()):
            _log.warning("%s is the only good checkpoint and stays until there is another", directory)
            self._refused_deletes.append(directory)

    def _still_good(self) -> list[str]:
        """Those that were verified in this run and are still what they were; their data is not read again."""
        return [
            path
            for path, (directory, manifest) in self._good.items()
            if commit.is_committed(*locate(directory)) and commit.read_commit(*locate(directory)).manifest == manifest
        ]

    def _new_group(self) -> Any:
        if not self._team.together:
            return None
        ranks = dist.get_process_group_ranks(self._team.group or dist.group.WORLD)
        return dist.new_group(ranks, backend="gloo", timeout=self._timeout)
