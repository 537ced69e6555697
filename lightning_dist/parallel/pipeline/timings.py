"""When each forward and backward of a batch really ran on this rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["forward", "backward", "input", "weights"]
"""What a stage did; schedules that split the backward do the inputs' gradients and the weights' at different times."""


@dataclass(frozen=True)
class Action:
    """One microbatch's forward or backward on one stage.

    Args:
        kind: What was done.
        stage: The stage.
        microbatch: Its index in the batch.
        start: Seconds since the batch began on this rank.
        end: The same.
    """

    kind: Kind
    stage: int
    microbatch: int
    start: float
    end: float


class ActionClock:
    """Notes when actions begin and end; on a GPU by events that are read at the end, without waiting in between.

    Args:
        device: Where the stages compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._begin = self._now()
        self._noted: list[tuple[Kind, int, int, Any, Any]] = []

    @contextmanager
    def measure(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        """Runs an action inside."""
        start = self._now()
        yield
        self._noted.append((kind, stage, microbatch, start, self._now()))

    def actions(self) -> list[Action]:
        """All actions in the order they ran. Waits for a GPU to finish them."""
        if self._on_device:
            torch.cuda.synchronize()
        return [
            Action(kind, stage, microbatch, self._since_begin(start), self._since_begin(end))
            for kind, stage, microbatch, start, end in self._noted
        ]

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since_begin(self, moment: Any) -> float:
        return self._begin.elapsed_time(moment) / 1000 if self._on_device else moment - self._begin
