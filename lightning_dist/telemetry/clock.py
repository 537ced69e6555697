"""Where a rank's time goes: every moment of a step belongs to one phase, and nothing waits for the device."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch


class Phase(IntEnum):
    """What a rank is doing, as its loop sees it."""

    DATA_WAIT = 0
    FORWARD = 1
    BACKWARD = 2
    EXPOSED_COMM = 3
    BUBBLE = 4
    OPTIMIZER = 5
    CHECKPOINT = 6
    EVALUATION = 7
    OTHER = 8

    @property
    def word(self) -> str:
        """As it is written in reports and tags: ``"data_wait"``."""
        return self.name.lower()


COMPUTE = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
PRODUCTIVE = (*COMPUTE, Phase.EXPOSED_COMM, Phase.BUBBLE)
WAITING = (Phase.EXPOSED_COMM, Phase.BUBBLE)
"""Phases in which a rank waits for others; the rest is its own work."""


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank.

    Args:
        step: Its number.
        seconds: Time in each phase, in the order of :class:`Phase`.
        wall: Seconds from the end of the step before to this one's, by the host's clock.
    """

    step: int
    seconds: tuple[float, ...]
    wall: float

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds)


class PhaseClock:
    """Splits time into phases. On a GPU marks are events in the compute stream, read once they have passed.

    On a GPU the split is the compute stream's: time that the host waits for data while the GPU still computes counts
    as compute, which it is. No synchronisation with the device; no collectives.

    Args:
        device: Where the step computes.
        on_switch: Called with the phase at each change of the main line (not at waits inside it).
        unread: The most steps of a GPU that may wait to be read; the oldest is dropped beyond.
    """

    def __init__(
        self, device: torch.device, on_switch: Callable[[Phase], None] | None = None, unread: int = 1000
    ) -> None:
        self._on_device = device.type == "cuda"
        self._on_switch = on_switch
        self._thread = threading.get_ident()
        self._phase = Phase.OTHER
        self._seconds = [0.0] * len(Phase)
        self._last = self._began = time.perf_counter()
        self._marks: list[tuple[Phase, Any]] = []
        self._finished: deque[StepTimes] = deque(maxlen=unread)
        self._unread: deque[tuple[int, list[tuple[Phase, Any]], float]] = deque(maxlen=unread)
        if self._on_device:
            self._marks.append((self._phase, self._event()))

    @property
    def phase(self) -> Phase:
        """What is going on."""
        return self._phase

    def restart(self) -> None:
        """Forgets the step that has begun: time spent before now belongs to nobody."""
        self._thread = threading.get_ident()
        self._seconds = [0.0] * len(Phase)
        self._last = self._began = time.perf_counter()
        if self._on_device:
            self._marks = [(self._phase, self._event())]

    def switch(self, phase: Phase) -> None:
        """From here on the main line is in ``phase``."""
        self._to(phase)
        if self._on_switch is not None:
            self._on_switch(phase)

    def enter(self, phase: Phase) -> Phase | None:
        """Begins something inside the main line; returns what :meth:`leave` wants. Other threads are not counted."""
        if not self._counts():
            return None
        before = self._phase
        self._to(phase)
        return before

    def leave(self, before: Phase | None) -> None:
        """Ends what :meth:`enter` began."""
        if before is not None:
            self._to(before)

    def end_step(self, step: int) -> None:
        """Closes a step; the next one begins here."""
        self._to(self._phase)
        now = self._last if not self._on_device else time.perf_counter()
        wall, self._began = now - self._began, now
        if self._on_device:
            self._unread.append((step, self._marks, wall))
            self._marks = [self._marks[-1]]
        else:
            self._finished.append(StepTimes(step, tuple(self._seconds), wall))
            self._seconds = [0.0] * len(Phase)

    def take(self) -> list[StepTimes]:
        """The steps finished, and read, since the last call; a GPU's come a little later."""
        while self._unread and self._unread[0][1][-1][1].query():
            step, marks, wall = self._unread.popleft()
            seconds = [0.0] * len(Phase)
            for (phase, begin), (_, end) in pairwise(marks):
                seconds[phase] += begin.elapsed_time(end) / 1000
            self._finished.append(StepTimes(step, tuple(seconds), wall))
        finished = list(self._finished)
        self._finished.clear()
        return finished

    def _to(self, phase: Phase) -> None:
        if self._on_device:
            self._marks.append((phase, self._event()))
        else:
            now = time.perf_counter()
            self._seconds[self._phase] += now - self._last
            self._last = now
        self._phase = phase

    def _counts(self) -> bool:
        """The loop's thread, and autograd's threads while it waits for them."""
        if threading.get_ident() == self._thread:
            return True
        return (
            self._on_device
            and self._phase in (Phase.BACKWARD, *WAITING)
            and type(threading.current_thread()) is threading._DummyThread  # type: ignore[attr-defined]
        )

    @staticmethod
    def _event() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
