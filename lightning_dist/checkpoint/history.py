"""The checkpoints of one run: which is the newest good one, which may go, and in what order.

Order is that of the number which each save takes from the checkpoints beside it, not of clocks, which go backwards,
nor of steps, which do so after a roll-back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from lightning_dist.checkpoint import commit
from lightning_dist.checkpoint.format import COMMITTED, DATA, MANIFEST, CheckpointError
from lightning_dist.checkpoint.storage import PathLike, Storage, join, locate, split
from lightning_dist.checkpoint.team import Team
from lightning_dist.checkpoint.verify import Problem, Report, verify, verify_part

_log = logging.getLogger(__name__)
_STEP_IN_NAME = re.compile(r"step[=_-]?0*(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Entry:
    """One checkpoint directory as it is listed, before its data is looked at.

    `problem` says why it cannot be used, where that is known without reading it; `step` may then be a guess from its
    name.
    """

    path: str
    name: str
    sequence: int
    step: int | None
    problem: str | None = None


@dataclass(frozen=True)
class Choice:
    """The newest good checkpoint, and what choosing it costs.

    Attributes:
        path: Where it is.
        step: The step that it was saved at.
        steps_lost: Steps between it and the newest damaged one; 0 if it is the newest, None where it cannot be told.
        rejected: Newer checkpoints, each with the reason.
    """

    path: str
    step: int | None
    steps_lost: int | None = 0
    rejected: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        if not self.rejected:
            return f"{self.path} (step {self.step})"
        reasons = "; ".join(f"{path}: {reason}" for path, reason in self.rejected)
        lost = "an unknown number of steps is lost" if self.steps_lost is None else f"{self.steps_lost} steps are lost"
        return f"falling back to {self.path} (step {self.step}), {lost}, because of {reasons}"


def list_checkpoints(root: PathLike) -> list[Entry]:
    """The checkpoint directories in a folder, newest first; what is not a checkpoint is left out.

    Those that cannot be used (never committed, or `COMMITTED` damaged) are listed with their problem, at the place
    that their name or manifest gives them.
    """
    storage, folder = locate(root)
    entries = []
    for name in storage.names(folder):
        if name.startswith("."):
            continue
        path = join(folder, name)
        if {COMMITTED, MANIFEST, DATA} & set(storage.names(path)):
            entries.append(_entry(storage, path, join(os.fspath(root).rstrip("/"), name)))
    for position, entry in enumerate(entries):
        if entry.sequence == 0:
            # Its number is lost. By its step it comes after the checkpoints of earlier steps; without one, last.
            before = [e.sequence for e in entries if (e.step or 0) <= (entry.step or 0)]
            entries[position] = dataclasses.replace(entry, sequence=max(before))
    return sorted(entries, key=lambda e: (e.sequence, e.step or 0, e.problem is not None, e.name), reverse=True)


def _entry(storage: Storage, path: str, shown: str) -> Entry:
    name = split(path)[1]
    sequence, step = commit.place_in_order(storage, path)
    if step is None and (guess := _STEP_IN_NAME.search(name)):
        step = int(guess[1])
    try:
        commit.read_commit(storage, path)
    except CheckpointError as error:
        return Entry(shown, name, sequence, step, str(error))
    return Entry(shown, name, sequence, step)


def newest_good(root: PathLike, *, full: bool = True) -> Choice | None:
    """Finds the newest checkpoint of a folder that is intact, in this one process.

    Args:
        root: The folder that holds the run's checkpoint directories.
        full: True compares every byte with its checksum, False only looks for missing files and wrong sizes.

    Returns:
        The choice, which says what falling back to it costs; None if there is none.
    """
    storage, folder = locate(root)
    _recover_all(storage, folder)
    return _choose(list_checkpoints(root), lambda path: verify(path, full=full))


def agree_on_newest(root: PathLike, *, full: bool = True, group: Any = None) -> Choice | None:
    """Like `newest_good`, decided once for all ranks: rank 0 lists, all ranks verify, each its share of the files.

    What a rank itself sees of the folder does not count (its file system may cache an old listing).

    Raises:
        CheckpointError: On every rank, if a rank fails at more than finding damage.

    Collectives: one broadcast, and for each checkpoint looked at one more and one all-gather, on `group`.
    """
    team = Team(group)
    what = f"looking for a checkpoint in {root}"

    def find() -> list[Entry]:
        storage, folder = locate(root)
        _recover_all(storage, folder)
        return list_checkpoints(root)

    entries = team.from_first(what, find)
    return _choose(entries, lambda path: verify_together(path, full=full, group=group))


def verify_together(directory: PathLike, *, full: bool = True, threads: int | None = None, group: Any = None) -> Report:
    """Like `verify`, each rank its share of the files; the same report on every rank.

    Collectives: one broadcast and one all-gather of small objects on `group`.
    """
    team = Team(group)
    what = f"verifying the checkpoint {directory}"
    # Every rank reads the manifest that rank 0 has read, so that all share out the same list of files.
    report = team.from_first(what, lambda: verify_part(directory, 0, team.world_size, full=full, threads=threads))
    if report.manifest is None:
        return report
    parts = team.gather(
        what,
        lambda: (
            report
            if team.is_first
            else verify_part(
                directory, team.rank, team.world_size, full=full, threads=threads, manifest=report.manifest
            )
        ),
    )
    return Report(
        report.directory,
        report.step,
        tuple(sorted((p for part in parts for p in part.problems), key=lambda problem: problem.file)),
        report.foreign,
        sum(part.bytes_checked for part in parts),
        report.manifest,
    )


def _recover_all(storage: Storage, folder: str) -> None:
    for name in {name for name, kind in commit.left_over(storage, folder) if kind != "deleting"}:
        with contextlib.suppress(OSError):
            if commit.recover(storage, join(folder, name)):
                _log.warning("put back %s, whose replacement a crash had cut short", join(folder, name))


def _choose(entries: list[Entry], check: Callable[[str], Report]) -> Choice | None:
    rejected: list[tuple[str, str]] = []
    newest_step: int | None = None
    for entry in entries:
        problem = entry.problem
        if problem is None:
            report = check(entry.path)
            problem = _summary(report.problems) if not report.intact else None
        if problem is None:
            lost: int | None = 0
            if rejected:
                known = newest_step is not None and entry.step is not None
                lost = max(0, newest_step - entry.step) if known else None  # type: ignore[operator]
            return Choice(entry.path, entry.step, lost, tuple(rejected))
        rejected.append((entry.path, problem))
        if entry.step is not None:
            newest_step = entry.step if newest_step is None else max(newest_step, entry.step)
    return None


def _summary(problems: tuple[Problem, ...]) -> str:
    first = "; ".join(f"{problem.file}: {problem.what}" for problem in problems[:2])
    return first + (f"; and {len(problems) - 2} more problems" if len(problems) > 2 else "")


def delete(directory: PathLike, *, full: bool = True, known_good: Collection[str] = ()) -> bool:
    """Removes a checkpoint, unless that would leave its folder without a good one; to be called by one rank.

    Args:
        directory: The checkpoint to remove. One that was never committed may always go.
        full: Whether the one that stays is compared with its checksums, or only its files' presence and sizes.
        known_good: Paths (as `locate` gives them) of checkpoints that were compared already; not read again.

    Returns:
        Whether it is gone. False: no other checkpoint beside it is good; it is the last.
    """
    storage, path = locate(directory)
    commit.check_target(storage, path)
    if not storage.is_directory(path):
        return True
    # Asked of the listing, not of the file: a read that fails for once must not make a good checkpoint look broken.
    if COMMITTED in storage.names(path):
        others = (e for e in list_checkpoints(_parent(directory)) if e.name != split(path)[1])
        if not any(_is_good(entry, full, known_good) for entry in others):
            return False
    commit.discard(storage, path)
    return True


def retain(
    root: PathLike,
    keep_last: int,
    *,
    keep: Iterable[PathLike] = (),
    full: bool = True,
    known_good: Collection[str] = (),
) -> list[str]:
    """Removes what is older than the newest good checkpoints of a folder; to be called by one rank after a save.

    A damaged one that is newer than these stays: a read may have failed just once.

    Args:
        root: The folder of checkpoint directories.
        keep_last: How many good ones stay, 1 at least.
        keep: Further directories to leave alone.
        full: As in `verify`, for those that stay.
        known_good: Paths (as `locate` gives them) of checkpoints that were compared already; not read again.

    Returns:
        The directories that were removed; none while there is no good checkpoint.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; at least 1 checkpoint has to stay")
    storage, _ = locate(root)
    protected = {locate(path)[1] for path in keep}
    good = 0
    removed = []
    for entry in list_checkpoints(root):
        if good < keep_last:
            good += _is_good(entry, full, known_good)
        elif locate(entry.path)[1] not in protected:
            commit.discard(storage, locate(entry.path)[1])
            removed.append(entry.path)
    return removed


def _is_good(entry: Entry, full: bool, known_good: Collection[str]) -> bool:
    if entry.problem is not None:
        return False
    return verify(entry.path, full=full and locate(entry.path)[1] not in known_good).intact


def sweep(root: PathLike) -> list[str]:
    """Removes what crashes left half-written or half-deleted in a folder; one rank calls it before the first save.

    A replacement that was cut short is finished first. A folder belongs to one run at a time.
    """
    storage, folder = locate(root)
    return commit.sweep(storage, folder)


def _parent(directory: PathLike) -> str:
    """The folder of a path as the user gave it."""
    text = os.fspath(directory).rstrip("/")
    parent, _, _ = text.rpartition("/")
    return parent or ("/" if text.startswith("/") else ".")
