"""The pages in TensorBoard: scalars by name, a layout that groups them, pictures, and reports as text at their step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_dist.telemetry.clock import WAITING, Phase
from lightning_dist.telemetry.drawings import draw_heat_map, draw_mesh, draw_phase_bars
from lightning_dist.telemetry.window import RankWindow

PREFIX = "telemetry/"
LAYOUT: dict[str, dict[str, list[Any]]] = {
    "1 Is the run well?": {
        "goodput (productive share of the run's whole life)": ["Multiline", ["telemetry/goodput$"]],
        "throughput": ["Multiline", ["telemetry/(tokens|samples)_per_second$"]],
        "model FLOPs utilisation": ["Multiline", ["telemetry/mfu$"]],
        "stalls reported": ["Multiline", ["telemetry/stalls$"]],
    },
    "2 Where does a step's time go?": {
        "share of each phase": ["Multiline", ["telemetry/phase/.*"]],
        "step time: median, 90 %, 99 %": ["Multiline", ["telemetry/step_time_p.*"]],
        "communication by mesh dimension": ["Multiline", ["telemetry/communication/.*"]],
        "pipeline bubble": ["Multiline", ["telemetry/phase/bubble$"]],
    },
    "3 Is it safe?": {
        "memory of the fullest rank": ["Multiline", ["telemetry/memory$"]],
        "time in checkpoints": ["Multiline", ["telemetry/phase/checkpoint$"]],
        "minutes without protection": ["Multiline", ["telemetry/unprotected_minutes$"]],
        "restarts": ["Multiline", ["telemetry/restarts$"]],
    },
}
"""What ``add_custom_scalars`` is given: pages, charts, and the scalars that each shows."""
MOST_COLUMNS = 200
"""How many windows the heat map shows."""


class TelemetryPages:
    """Writes the pages of one run; one rank has it.

    Args:
        writer: TensorBoard's ``SummaryWriter``.
        coordinates: For each rank, its place on each mesh axis.
        hosts: For each rank, where it runs.
        picture_seconds: The least time from one set of pictures to the next: one takes a few hundredths of a second.
    """

    def __init__(
        self,
        writer: Any,
        coordinates: Sequence[Mapping[str, int]],
        hosts: Sequence[str] = (),
        picture_seconds: float = 60.0,
    ) -> None:
        self._writer = writer
        self._coordinates, self._hosts = coordinates, hosts
        self._picture_seconds = picture_seconds
        self._drawn_at, self._drawn_step = float("-inf"), -1
        self._columns: list[list[float]] = []
        self._steps: list[int] = []
        writer.add_custom_scalars(LAYOUT)

    def add(self, step: int, windows: Sequence[RankWindow], values: Mapping[str, float]) -> None:
        """Adds what one exchange gave.

        Args:
            step: The last step of the window.
            windows: Of all ranks.
            values: Scalars by name, such as ``"goodput"``.
        """
        for name, value in values.items():
            self._writer.add_scalar(PREFIX + name, value, step)
        self._columns = [*self._columns, [own_work(window) for window in windows]][-MOST_COLUMNS:]
        self._steps = [*self._steps, step][-MOST_COLUMNS:]
        if time.monotonic() - self._drawn_at >= self._picture_seconds:
            self._draw(step, windows)

    def say(self, tag: str, text: str, step: int) -> None:
        """Adds a text at its step, as it is."""
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._writer.add_text(PREFIX + tag, indented, step)
        self._writer.flush()

    def end(self, windows: Sequence[RankWindow]) -> None:
        """Draws the last pictures."""
        if self._steps and self._drawn_step != self._steps[-1]:
            self._draw(self._steps[-1], windows)

    def _draw(self, step: int, windows: Sequence[RankWindow]) -> None:
        self._drawn_at, self._drawn_step = time.monotonic(), step
        self._writer.add_image(PREFIX + "ranks_over_time", draw_heat_map(self._columns, self._steps), step)
        self._writer.add_image(PREFIX + "phases_by_rank", draw_phase_bars([w.seconds for w in windows]), step)
        mesh = draw_mesh(self._coordinates, self._columns[-1], self._hosts)
        self._writer.add_image(PREFIX + "mesh", mesh, step)


def own_work(window: RankWindow) -> float:
    """Seconds of a step in which a rank did not wait for others; saving and evaluating are left out."""
    left_out = (*WAITING, Phase.CHECKPOINT, Phase.EVALUATION)
    return window.per_step(*(phase for phase in Phase if phase not in left_out))


def scalars_of(windows: Sequence[RankWindow]) -> dict[str, float]:
    """What a window says of the run: means over ranks as shares of a step, sums where they add up.

    Args:
        windows: Of all ranks.
    """
    total = sum(window.total for window in windows) or 1.0
    steps = max(max(window.steps for window in windows), 1)
    values = {f"phase/{phase.word}": sum(window.seconds[phase] for window in windows) / total for phase in Phase}
    names = {name for window in windows for name in window.traffic}
    for name in sorted(names):
        waited = sum(window.traffic[name].seconds for window in windows if name in window.traffic)
        values[f"communication/{name}"] = waited / total
    values["step_time"] = total / len(windows) / steps
    values["memory"] = max(window.memory for window in windows)
    return values
