"""Which rank, or which link, holds the others up; why; and how much faster the job would be without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from lightning_dist.telemetry.clock import Phase
from lightning_dist.telemetry.window import RankWindow

Cause = Literal[
    "input imbalance", "data wait", "garbage collection", "slow device", "busy host", "disk", "other work", "slow link"
]
ADVICE: dict[Cause, str] = {
    "input imbalance": "its batches are larger than the others': balance by length, or pack sequences",
    "data wait": "its loader is slow: look at its storage and the number of loader workers",
    "garbage collection": "Python collects garbage in its steps: gc.freeze() after set-up, or collect now and then",
    "slow device": "the same work takes it longer: look at clocks, temperature and errors of this device",
    "busy host": "other processes use its cores",
    "disk": "saving takes it longer than before: look at the disk that checkpoints go to",
    "other work": "callbacks or logging on this rank take long",
    "slow link": "look at this group's network cards, cables and switch ports; `lightning-dist doctor` measures each",
}
LEAST_GAIN = 0.1
"""The least share of a step that a verdict is worth."""
SLOW_LINK, LEAST_TRANSFER = 3.0, 0.25
"""A link is slow at this many times its best, if transfers take at least this share of a step."""
WARM_UP = 2
"""The first windows of a run, which are not judged: memory is first filled there, and caches."""
PERSISTENT = 3
"""Windows in sequence that must agree."""
RESTLESS: dict[Cause, int] = {"busy host": 6, "slow link": 4, "disk": 2}
"""The same for causes of which a healthy machine has spells, and for one of which there are few windows."""
REPEAT = 20
"""After how many windows a verdict that still holds is said again."""


@dataclass(frozen=True)
class Verdict:
    """What holds the job up.

    Args:
        cause: Why.
        rank: Which rank; None for a link.
        group: Which mesh dimension, for a link.
        ratio: Own work of the rank ÷ that of its peers, or time of the link ÷ its best.
        gain: How much shorter a step would be without it, as a share of a step.
        step_seconds: Of a step as it is.
        evidence: The numbers compared, in words.
    """

    cause: Cause
    rank: int | None
    group: str | None
    ratio: float
    gain: float
    step_seconds: float
    evidence: str

    def sentence(self, world_size: int) -> str:
        """The verdict in words; with what it costs in device-hours a day."""
        who = f"rank {self.rank}" if self.rank is not None else f"the {self.group} group's link"
        hours = 24 * self.gain * world_size
        return (
            f"straggler: {who} holds the job up by {self.cause}: {self.evidence}. Without it a step would take"
            f" {100 * self.gain:.0f} % less ({hours:.1f} device-hours a day); {ADVICE[self.cause]}."
        )


@dataclass
class _Streak:
    """How long a verdict has held, in windows and seconds, and the window at which it is said next."""

    windows: int = 0
    seconds: float = 0.0
    next: int = 0


@dataclass
class StragglerJudge:
    """Compares ranks with their peers, and links with their own past. Pure arithmetic on exchanged windows.

    Args:
        threshold: Own work ÷ that of peers from which a rank is a straggler.
        roles: For each rank, what it does; ranks are compared with those of the same role only (the same stages of a
            pipeline). Alone in its role, a rank is compared with its own past.
        least_seconds: How long a rank or link must hold the others up, without a break, before it is named; windows of
            short steps are soon over, and every machine has spells. A disk is judged by its saves, not by time.
        link_bandwidth: Bytes per second that ``lightning-dist doctor`` measured, by mesh dimension.
    """

    threshold: float = 1.2
    roles: Sequence[int] = ()
    least_seconds: float = 10.0
    link_bandwidth: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._streaks: dict[tuple[Cause, int | None], _Streak] = {}
        self._own_past: dict[int, list[float]] = {}
        self._saves_past: dict[int, list[float]] = {}
        self._best_transfer: list[float] = []
        self._windows = 0

    def judge(self, windows: Sequence[RankWindow]) -> list[Verdict]:
        """The verdicts that are new, or due again, after one more window.

        Args:
            windows: Of all ranks, by rank.
        """
        if any(window.steps == 0 for window in windows):
            return []  # a GPU that is behind with its steps
        self._windows += 1
        if self._windows <= WARM_UP:
            return []
        found = [*self._stragglers(windows), *self._slow_links(windows)]
        due = []
        saved = any(window.saves for window in windows)
        for verdict in found:
            streak = self._streaks.setdefault((verdict.cause, verdict.rank), _Streak())
            streak.windows += 1
            streak.seconds += verdict.step_seconds * windows[0].steps
            lasting = verdict.cause == "disk" or streak.seconds >= self.least_seconds
            if lasting and streak.windows >= max(windows_needed(verdict.cause), streak.next):
                streak.next = streak.windows + REPEAT
                due.append(verdict)
        still = {(verdict.cause, verdict.rank) for verdict in found}
        for key in list(self._streaks):
            # A disk says nothing in a window without a save.
            if key not in still and (saved or key[0] != "disk"):
                del self._streaks[key]
        return due

    def _stragglers(self, windows: Sequence[RankWindow]) -> list[Verdict]:
        found = []
        step = median(window.total / max(window.steps, 1) for window in windows)
        parts = [self._parts(rank, window) for rank, window in enumerate(windows)]
        roles = self.roles or [0] * len(windows)
        for rank, window in enumerate(windows):
            own = sum(parts[rank].values())
            peers = [other for other, role in enumerate(roles) if role == roles[rank] and other != rank]
            others = [other for other in range(len(windows)) if other != rank]
            if not others:
                continue
            if peers:
                reference = {name: median(parts[other][name] for other in peers) for name in parts[rank]}
                usual = sum(reference.values())
                input_ratio = _ratio(window.elements, median(windows[other].elements for other in peers))
            else:
                past = self._own_past.setdefault(rank, [])
                past.append(own)
                usual = median(past[:5])
                reference, input_ratio = dict.fromkeys(parts[rank], 0.0), 1.0
                reference["compute"] = usual
                del past[5:]
            waited = median(windows[other].waiting for other in others) - window.waiting
            gain = min(own - usual, waited) / step if step else 0.0
            if own < self.threshold * usual or gain < LEAST_GAIN:
                continue
            excess = {name: parts[rank][name] - reference[name] for name in parts[rank]}
            by_input = reference["compute"] * (input_ratio - 1.0)
            causes: dict[Cause, float] = {
                "input imbalance": min(by_input, excess["compute"]),
                "slow device": excess["compute"] - max(by_input, 0.0),
                "data wait": excess["data"],
                "garbage collection": excess["collecting"],
                "busy host": excess["busy"],
                "disk": excess["disk"],
                "other work": excess["other"],
            }
            cause = max(causes, key=lambda name: causes[name])
            evidence = (
                f"its own work takes {1000 * own:.1f} ms a step, that of its peers {1000 * usual:.1f} ms"
                f" ({own / max(usual, 1e-9):.2f} times); {1000 * causes[cause]:.1f} ms of it are {cause}"
            )
            found.append(Verdict(cause, rank, None, own / max(usual, 1e-9), gain, step, evidence))
        return found

    def _parts(self, rank: int, window: RankWindow) -> dict[str, float]:
        """A rank's own work of a step, in seconds, by what it may be due to."""
        steps = max(window.steps, 1)
        busy = min(window.run_delay / steps, window.compute)
        return {
            "data": window.per_step(Phase.DATA_WAIT),
            "collecting": window.collecting / steps,
            "busy": busy,
            "compute": window.compute - busy,
            "disk": self._slower_saves(rank, window) / steps,
            "other": window.per_step(Phase.OTHER),
        }

    def _slower_saves(self, rank: int, window: RankWindow) -> float:
        """Seconds that saving took beyond what it took this rank before: ranks do not all write the same."""
        if not window.saves:
            return 0.0
        now = window.seconds[Phase.CHECKPOINT] / window.saves
        past = self._saves_past.setdefault(rank, [])
        usual = median(past) if past else now
        if now > 2 * usual:
            return (now - usual) * window.saves
        past.append(now)
        del past[:-9]
        return 0.0

    def _slow_links(self, windows: Sequence[RankWindow]) -> list[Verdict]:
        """The last rank to come waits for the transfer only, so the shortest wait of all is what the link takes."""
        if len(windows) < 2:
            return []
        step = median(window.total / max(window.steps, 1) for window in windows)
        transfer = min(window.wait_low for window in windows)
        name = _costliest(windows)
        payload = _payload(windows, name)
        bandwidth = self.link_bandwidth.get(name, 0.0)
        expected = payload / bandwidth if bandwidth else None
        if expected is None:
            # The second best of what was seen: one lucky window is no measure.
            expected = self._best_transfer[:2][-1] if self._best_transfer else None
        slow = expected is not None and transfer > SLOW_LINK * expected and transfer > LEAST_TRANSFER * step
        if not slow:
            self._best_transfer = sorted([*self._best_transfer, transfer])[:5]
            return []
        assert expected is not None
        speed = f", {payload / transfer / 1e6:.3g} MB/s" if payload else ""
        measure = "lightning-dist doctor's measure" if bandwidth else "its own best"
        times = transfer / max(expected, 1e-9)
        evidence = f"transfers take {1000 * transfer:.1f} ms a step{speed}, {times:.1f} times {measure}"
        gain = (transfer - expected) / step
        return [Verdict("slow link", None, name, times, gain, step, evidence)]


def windows_needed(cause: Cause) -> int:
    """How many windows in sequence a cause must be found in."""
    return RESTLESS.get(cause, PERSISTENT)


def _costliest(windows: Sequence[RankWindow]) -> str:
    seconds: dict[str, float] = {}
    for window in windows:
        for name, traffic in window.traffic.items():
            seconds[name] = seconds.get(name, 0.0) + traffic.seconds
    return max(seconds, key=lambda name: seconds[name]) if seconds else "data"


def _payload(windows: Sequence[RankWindow], name: str) -> float:
    """Bytes of a group's collectives in a step."""
    return max(
        (window.traffic[name].payload / max(window.steps, 1) for window in windows if name in window.traffic),
        default=0.0,
    )


def _ratio(value: float, usual: float) -> float:
    return value / usual if usual else 1.0
