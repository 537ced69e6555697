"""Who holds a stalled run up, and why, from what all watchdogs see; and the report in words."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_dist.telemetry.watchdog.heartbeat import PHASES

HELD = 3.0
"""Seconds without a run of the rank's thread from which its interpreter counts as held."""


@dataclass
class RankState:
    """What a watchdog sees of its rank.

    Args:
        rank: The rank.
        place: Its mesh coordinates, host and process, in words.
        phase, kind, step: What it is in.
        inside: Seconds since it last went from one phase to another.
        limit: Seconds that it may stay there.
        waiting: Seconds that it has waited for the collective; 0 if it does not wait.
        operation, group: That collective, or the last one.
        counts: Collectives given to each group.
        process: The letter of the process's state: "T" is stopped, "D" waits for a disk or device.
        thread_age: Seconds since a thread of the rank last ran.
        alive: Whether its process, and its watchdog, are there.
        finished: Whether it ended in order.
        beat: Its number of beats.
        stack: Python stacks, once asked for.
    """

    rank: int
    place: str = ""
    phase: str = "other"
    kind: str = "other"
    step: int = 0
    inside: float = 0.0
    limit: float = float("inf")
    waiting: float = 0.0
    operation: str = ""
    group: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    process: str = "S"
    thread_age: float = 0.0
    alive: bool = True
    finished: bool = False
    beat: int = 0
    stack: str = ""

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped."""
        return self.process in ("T", "t")

    @property
    def answers(self) -> bool:
        """Whether the rank itself runs."""
        return self.alive and not self.stopped

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RankState:
        """From what a watchdog sent."""
        return cls(**{name: value for name, value in message.items() if name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Finding:
    """Who holds the run up.

    Args:
        ranks: They.
        cause: In two or three words.
        overdue: Whether it has lasted longer than allowed.
    """

    ranks: tuple[int, ...]
    cause: str
    overdue: bool


def find_culprits(states: Sequence[RankState]) -> Finding:
    """Says who is waited for. A rank that waits for others is not to blame, and its limit does not count.

    Args:
        states: Of all ranks that have not finished.
    """
    running = [state for state in states if not state.finished]
    late = any(state.inside > state.limit for state in running)
    if not running:
        return Finding((), "", False)
    for wanted, cause in (("alive", "process ended"), ("answers", "stopped process (SIGSTOP)")):
        found = [state.rank for state in running if not getattr(state, wanted)]
        if found:
            return Finding(tuple(found), cause, late)
    busy = [state for state in running if not state.waiting]
    if busy:
        overdue = [state for state in busy if state.inside > state.limit]
        blamed = overdue or busy
        worst = max(blamed, key=lambda state: state.inside)
        cause = "blocked in the Python line shown"
        if worst.thread_age > HELD:
            cause = "held interpreter lock (GIL)"
        elif worst.process == "D":
            cause = "waits for a disk or device"
        elif worst.phase == "data_wait":
            cause = "waits for data"
        return Finding(tuple(state.rank for state in blamed), cause, bool(overdue))
    # All wait, each for somebody: whoever has called fewer of the collectives that others wait for is behind.
    behind = []
    for state in running:
        for other in running:
            theirs, ours = other.counts.get(other.group), state.counts.get(other.group)
            if theirs is not None and ours is not None and ours < theirs:
                behind.append(state.rank)
    everyone_late = all(state.inside > state.limit for state in running)
    differ = len({(state.operation, state.group) for state in running}) > 1
    if behind or differ:
        # Each may be behind in what the other waits for. Who skipped one has gone on since, and is further in the step.
        suspects = [state for state in running if state.rank in behind] or running
        furthest = max((state.step, PHASES.index(state.phase)) for state in suspects)
        ranks = tuple(s.rank for s in suspects if (s.step, PHASES.index(s.phase)) == furthest)
        return Finding(ranks, "skipped collective", everyone_late)
    return Finding(tuple(state.rank for state in running), "communication does not get through", everyone_late)


def write_report(states: Sequence[RankState], finding: Finding, action: str) -> str:
    """The report, to be read at three in the morning.

    Args:
        states: Of all ranks, with stacks.
        finding: Who, and why.
        action: What is done about it.
    """
    by_rank = {state.rank: state for state in states}
    names = _ranks(finding.ranks)
    first = by_rank[finding.ranks[0]]
    others = [state for state in states if state.rank not in finding.ranks and state.waiting]
    waiting = ""
    if others:
        longest = max(others, key=lambda state: state.waiting)
        waiting = (
            f" {_ranks([state.rank for state in others])} wait{'s' * (len(others) == 1)} for it: {longest.operation} of"
            f" the {longest.group} group, for {longest.waiting:.1f} s."
        )
    lines = [
        f"lightning_dist: stall at step {first.step}, {time.strftime('%Y-%m-%d %H:%M:%S')}",
        f"stall: missing {names}: {finding.cause}, in phase {first.phase}.{waiting}",
        f"cause: {finding.cause}",
        f"action: {action}",
        "",
        "What each rank does:",
        *(f"  {describe(state, state.rank in finding.ranks)}" for state in states),
        "",
    ]
    for state in states:
        lines += [f"--- Python stacks of rank {state.rank} ---", state.stack.rstrip() or "(none)", ""]
    return "\n".join(lines)


def describe(state: RankState, missing: bool) -> str:
    """One line about a rank."""
    what = f"rank {state.rank} ({state.place}): "
    what += "MISSING, " if missing else ""
    if state.finished:
        return what + "has finished"
    if not state.alive:
        return what + f"its process has ended; it was in phase {state.phase}, step {state.step}"
    what += "stopped (SIGSTOP), " if state.stopped else ""
    what += f"step {state.step}, phase {state.phase} for {state.inside:.1f} s (limit {state.limit:.0f} s)"
    if state.waiting:
        what += f", waits {state.waiting:.1f} s for {state.operation} of group {state.group}"
    elif state.operation:
        what += f", last collective {state.operation} of group {state.group}"
    if state.counts:
        what += "; collectives given: " + ", ".join(f"{name} {number}" for name, number in sorted(state.counts.items()))
    return what


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
