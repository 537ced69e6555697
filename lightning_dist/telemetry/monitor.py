"""One rank's telemetry in any loop: clock, collectives, windows of N steps exchanged, verdicts, watchdog."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist import _compat
from lightning_dist.telemetry.clock import Phase, PhaseClock, StepTimes
from lightning_dist.telemetry.collectives import CollectiveWatch, watch_final_wait
from lightning_dist.telemetry.device import memory_of
from lightning_dist.telemetry.verdict import StragglerJudge, Verdict
from lightning_dist.telemetry.watchdog.heartbeat import KINDS
from lightning_dist.telemetry.watchdog.start import RankWatchdog
from lightning_dist.telemetry.window import CollectionTimer, RankWindow, run_delay, size_of, summarise, vector_size

# torch 2.13's name; the older one warns there.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class WindowReport:
    """What came of one exchange; the same on all ranks.

    Args:
        step: The last step of the window.
        windows: Of all ranks, by rank.
        verdicts: New ones.
    """

    step: int
    windows: list[RankWindow]
    verdicts: list[Verdict]


class RankMonitor:
    """Follows a rank through its loop.

    Call :meth:`switch` as the loop goes from one phase to the next, and :meth:`end_step` once for each step, on all
    ranks alike.

    Collectives: every ``every_n_steps`` steps one asynchronous all-gather of about 500 bytes over ``group``, read at a
    later step; none on other steps.

    Args:
        rank, world_size: This rank.
        device: Where it computes.
        every_n_steps: Steps from one exchange to the next.
        group: A CPU (Gloo) group of all ranks for nothing else; None alone.
        judge: Decides on stragglers.
        world_name: What the default group is for: ``"data"`` where all ranks are replicas.
        keep: How many steps' times are kept for pictures and percentiles.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        *,
        every_n_steps: int = 50,
        group: dist.ProcessGroup | None = None,
        judge: StragglerJudge | None = None,
        world_name: str = "world",
        keep: int = 1000,
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.every_n_steps = every_n_steps
        self.judge = judge or StragglerJudge()
        self.watchdog: RankWatchdog | None = None
        self.kind, self._kind = "first_step", KINDS.index("first_step")
        self.step = 0
        self.clock = PhaseClock(device, self._beat)
        self.watch = CollectiveWatch(self.clock, self._collective, world_name)
        self.recent: list[StepTimes] = []
        self._keep = keep
        self._group = group
        if group is not None:
            self.watch.ignore(group)
        self._collector = CollectionTimer()
        self._collecting: dict[int, float] = {}
        self._window: list[StepTimes] = []
        self._delay = run_delay()
        self._sizes = [0.0, 0.0, 0.0]
        self._saves = 0
        self._pending: tuple[Any, Tensor, int] | None = None
        self._since_exchange = self._steps = 0

    def start(self) -> None:
        """Begins to watch this process's collectives and garbage collections; until :meth:`stop`."""
        self.watch.install()
        self._collector.install()
        self.clock.restart()

    def stop(self) -> None:
        """Puts everything back. An exchange that is still under way is dropped."""
        self.watch.remove()
        self._collector.remove()
        self._pending = None

    def switch(self, phase: Phase, kind: str | None = None) -> None:
        """The loop goes on to a phase.

        Args:
            phase: Which.
            kind: What limits the time in it from here on, see ``watchdog.heartbeat.KINDS``; None is as before.
        """
        if kind is not None and kind != self.kind:
            self.kind, self._kind = kind, KINDS.index(kind)
        elif phase is self.clock.phase:
            return
        self.clock.switch(phase)

    def beat(self) -> None:
        """Says that the loop goes on, within a phase."""
        self._beat(self.clock.phase)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A checkpoint is saved inside."""
        before, kind = self.clock.phase, self.kind
        self.switch(Phase.CHECKPOINT, "checkpoint")
        self._saves += 1
        try:
            yield
        finally:
            self.switch(before, kind)

    def add_batch(self, batch: Any) -> None:
        """A batch is about to be trained on; only shapes are looked at."""
        size = size_of(batch)
        sizes = self._sizes
        sizes[0] += size.elements
        sizes[1] += size.tokens
        sizes[2] += size.samples

    def begin_backward(self, loss: Tensor, reduced_in_backward: bool) -> None:
        """Backward begins.

        Args:
            loss: From which.
            reduced_in_backward: Whether gradients are exchanged by DDP's reducer, whose waits Python does not see.
        """
        self.switch(Phase.BACKWARD)
        if reduced_in_backward:
            watch_final_wait(self.watch, loss)

    def end_backward(self) -> None:
        """Backward is over."""
        self.watch.end_final_wait()
        self.switch(Phase.OPTIMIZER)

    def end_step(self, step: int) -> WindowReport | None:
        """Closes a step, which may be one batch of several that are accumulated.

        Args:
            step: Its number in reports.

        Returns:
            The report of an exchange that has come through, if one has.
        """
        self._steps += 1
        self.clock.end_step(self._steps)
        self.step = step
        collecting = self._collector.take()
        if collecting:
            self._collecting[self._steps] = collecting
        self._window += self.clock.take()
        self._since_exchange += 1
        report = self._read()
        if self._since_exchange >= self.every_n_steps:
            if self._pending is not None:
                # N steps old: as good as certainly there, and all ranks must issue the same exchanges.
                self._pending[0].wait()
                report = self._read()
            self._exchange(step)
            report = report or self._read()
        return report

    def counts(self) -> dict[str, int]:
        """How many collectives each group was given so far; may be called from another thread."""
        groups = self.watch.groups()
        if self.world_size > 1 and dist.is_initialized():
            groups[self.watch.world_name] = dist.group.WORLD  # type: ignore[assignment]
        return {name: _compat.collectives_issued(group) for name, group in groups.items()}

    def _exchange(self, step: int) -> None:
        delay = run_delay()
        elements, tokens, samples = self._sizes
        window = summarise(
            self._window,
            self._collecting,
            self.watch.take(),
            run_delay=delay - self._delay,
            elements=elements,
            tokens=tokens,
            samples=samples,
            saves=float(self._saves),
            memory=memory_of(self.device)[1],
        )
        self.recent = [*self.recent, *self._window][-self._keep :]
        self._delay, self._sizes, self._saves = delay, [0.0, 0.0, 0.0], 0
        self._window, self._collecting, self._since_exchange = [], {}, 0
        vector = window.to_vector()
        everyone = torch.zeros(self.world_size * vector_size(), dtype=torch.float64)
        work = None
        if self._group is not None:
            work = all_gather_single(everyone, vector, group=self._group, async_op=True)
        else:
            everyone.copy_(vector)
        self._pending = (work, everyone, step)

    def _read(self) -> WindowReport | None:
        if self._pending is None or (self._pending[0] is not None and not self._pending[0].is_completed()):
            return None
        _, everyone, step = self._pending
        self._pending = None
        rows: Sequence[list[float]] = everyone.view(self.world_size, -1).tolist()
        windows = [RankWindow.from_vector(row) for row in rows]
        return WindowReport(step, windows, self.judge.judge(windows))

    def _beat(self, phase: Phase) -> None:
        if self.watchdog is not None:
            self.watchdog.page.beat(phase, self._kind, self.step)

    def _collective(self, operation: str | None, group: str) -> None:
        if self.watchdog is None:
            return
        if operation is None:
            self.watchdog.page.end_collective()
        else:
            self.watchdog.page.begin_collective(operation, group)
