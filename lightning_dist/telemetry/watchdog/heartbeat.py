"""The page of memory that a rank and its watchdog share: what the rank does, since when, and which limits hold."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PHASES = (
    "data_wait",
    "forward",
    "backward",
    "exposed_comm",
    "bubble",
    "optimizer",
    "checkpoint",
    "evaluation",
    "other",
)
"""In the order of ``clock.Phase``, which is not imported here: it needs torch."""
KINDS = ("step", "first_step", "loader_start", "evaluation", "checkpoint", "other")
"""What has a limit of its own."""
GROUPS = 16
"""Of how many groups the number of collectives is kept."""

CLOSED, CRASHED, EXITING, ENABLED, ABORT = 1, 2, 4, 8, 16
"""Flags: the run ended in order; the rank raised; its interpreter ends; the watchdog is to watch; and to abort."""

_FLAGS, _BEAT, _THREAD, _COLLECTIVE, _COUNTS, _LEARNT, _LIMITS, _REPORTS = 0, 8, 64, 128, 256, 1024, 1152, 1280
_SIZE = 2048
_beat = struct.Struct("<QdqII")
_double = struct.Struct("<d")
_flags = struct.Struct("<I")
_collective = struct.Struct("<dQ32s48s")
_count = struct.Struct("<32sQ")
_learnt = struct.Struct("<dQ")
_reports = struct.Struct("<Id")

# `pack_into` clears the place first, and a reader between the two sees zeros; assigning a slice copies in one go.


@dataclass(frozen=True)
class Beat:
    """What a rank was doing when its page was read.

    Args:
        count: How many times the rank has gone from one phase to another.
        since: When it last did, in seconds of the system's monotonic clock.
        step: Its step.
        phase, kind: What it is in, see ``PHASES`` and ``KINDS``.
        thread: When a thread of the rank last ran: it needs the interpreter's lock.
        waiting_since: When it began to wait for a collective; 0 if it does not.
        operation, group: The collective that it waits for, or the last one.
        collectives: How many collectives it has waited for.
        counts: How many collectives each group was given.
        flags: See the constants.
        longest: For each kind, the longest time from one beat to the next, and the number of beats.
        limits: For each kind, the limit that was set, in seconds; 0 where it is learnt.
    """

    count: int
    since: float
    step: int
    phase: str
    kind: str
    thread: float
    waiting_since: float
    operation: str
    group: str
    collectives: int
    flags: int
    counts: dict[str, int] = field(default_factory=dict)
    longest: dict[str, tuple[float, int]] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)


class HeartbeatPage:
    """The page, from either side.

    Args:
        path: A file in memory (``/dev/shm``) or elsewhere.
        create: Whether to make it: the rank does, its watchdog opens it.
    """

    def __init__(self, path: str | os.PathLike[str], create: bool = False) -> None:
        self.path = Path(path)
        if create:
            self.path.write_bytes(bytes(_SIZE))
        with self.path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._count, self._last, self._kind = 0, time.monotonic(), KINDS.index("other")
        self._longest, self._beats = [0.0] * len(KINDS), [0] * len(KINDS)
        self._calls = 0
        self._names: dict[str, bytes] = {}
        if create:
            # A watchdog that looks before the first beat must not take zero for a time.
            self._put(_BEAT, _beat.pack(0, self._last, 0, PHASES.index("other"), KINDS.index("first_step")))
            self._put(_THREAD, _double.pack(self._last))

    # --- the rank's side ---------------------------------------------------------------------------------------------

    def beat(self, phase: int, kind: int, step: int) -> None:
        """The rank goes on to a phase. Takes about a microsecond."""
        now = time.monotonic()
        gap, before = now - self._last, self._kind
        self._beats[before] += 1
        if gap > self._longest[before] or not self._beats[before] % 16:
            self._longest[before] = max(gap, self._longest[before])
            self._put(_LEARNT + 16 * before, _learnt.pack(self._longest[before], self._beats[before]))
        self._count += 1
        self._last, self._kind = now, kind
        self._memory[_BEAT : _BEAT + _beat.size] = _beat.pack(self._count, now, step, phase, kind)

    def begin_collective(self, operation: str, group: str) -> None:
        """The rank begins to wait for a collective."""
        self._calls += 1
        names = self._names
        op = names.get(operation) or names.setdefault(operation, operation.encode()[:32])
        of = names.get(group) or names.setdefault(group, group.encode()[:48])
        self._put(_COLLECTIVE, _collective.pack(time.monotonic(), self._calls, op, of))

    def end_collective(self) -> None:
        """It has waited."""
        self._put(_COLLECTIVE, _double.pack(0.0))

    def thread_runs(self, counts: Mapping[str, int]) -> None:
        """A thread of the rank runs; it has found these numbers of collectives by group."""
        for place, (name, number) in enumerate(list(counts.items())[:GROUPS]):
            self._put(_COUNTS + _count.size * place, _count.pack(name.encode()[:32], number))
        self._put(_THREAD, _double.pack(time.monotonic()))

    def set_flags(self, flags: int, on: bool = True) -> None:
        """Sets or clears flags."""
        (now,) = _flags.unpack_from(self._memory, _FLAGS)
        self._put(_FLAGS, _flags.pack(now | flags if on else now & ~flags))

    def set_limits(self, limits: Mapping[str, float]) -> None:
        """Sets limits in seconds by kind; 0 has it learnt."""
        for place, kind in enumerate(KINDS):
            if kind in limits:
                self._put(_LIMITS + 8 * place, _double.pack(limits[kind]))

    def reports(self) -> tuple[int, float]:
        """How many stalls were reported, and how many seconds they have taken together."""
        number, seconds = _reports.unpack_from(self._memory, _REPORTS)
        return number, seconds

    # --- the watchdog's side -----------------------------------------------------------------------------------------

    def note_reports(self, number: int, seconds: float) -> None:
        """Tells the rank of stalls reported."""
        self._put(_REPORTS, _reports.pack(number, seconds))

    def read(self) -> Beat:
        """What the rank does now."""
        while True:
            beat = _beat.unpack_from(self._memory, _BEAT)
            since, calls, operation, group = _collective.unpack_from(self._memory, _COLLECTIVE)
            if beat == _beat.unpack_from(self._memory, _BEAT):
                break
        counts = {}
        for place in range(GROUPS):
            name, number = _count.unpack_from(self._memory, _COUNTS + _count.size * place)
            if name.strip(b"\0"):
                counts[_text(name)] = number
        return Beat(
            count=beat[0],
            since=beat[1],
            step=beat[2],
            phase=PHASES[beat[3]],
            kind=KINDS[beat[4]],
            thread=_double.unpack_from(self._memory, _THREAD)[0],
            waiting_since=since,
            operation=_text(operation),
            group=_text(group),
            collectives=calls,
            flags=_flags.unpack_from(self._memory, _FLAGS)[0],
            counts=counts,
            longest={kind: _learnt.unpack_from(self._memory, _LEARNT + 16 * i) for i, kind in enumerate(KINDS)},
            limits={kind: _double.unpack_from(self._memory, _LIMITS + 8 * i)[0] for i, kind in enumerate(KINDS)},
        )

    def _put(self, place: int, data: bytes) -> None:
        self._memory[place : place + len(data)] = data

    def remove(self) -> None:
        """Takes the file away; the page goes with its last user."""
        with contextlib.suppress(OSError):
            self.path.unlink()


class RunningThread:
    """A thread that runs twice a second if it can: while C code holds the interpreter's lock, it can't.

    Args:
        page: Where it says so.
        counts: Gives the number of collectives by group.
    """

    def __init__(self, page: HeartbeatPage, counts: object) -> None:
        self._page, self._counts, self._stopped = page, counts, threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_dist heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        self._stopped.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        while not self._stopped.wait(0.5):
            counts: dict[str, int] = {}
            with contextlib.suppress(RuntimeError):  # a group has been destroyed
                counts = self._counts()  # type: ignore[operator]
            self._page.thread_runs(counts)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
