"""Pictures of all ranks: a heat map of ranks x time, a bar of phases for each rank, the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from lightning_dist.telemetry.clock import Phase

COLOURS = {
    Phase.DATA_WAIT: (214, 96, 77),
    Phase.FORWARD: (88, 140, 200),
    Phase.BACKWARD: (120, 110, 185),
    Phase.EXPOSED_COMM: (228, 150, 70),
    Phase.BUBBLE: (240, 205, 120),
    Phase.OPTIMIZER: (105, 170, 110),
    Phase.CHECKPOINT: (150, 110, 80),
    Phase.EVALUATION: (120, 180, 190),
    Phase.OTHER: (200, 200, 200),
}
ROW, GAP, LEFT, TOP = 20, 4, 64, 26
MOST_ROWS = 256
"""Beyond this many ranks neighbours share a row: its slowest stands for them."""


def heat_colour(ratio: float) -> tuple[int, int, int]:
    """White for as fast as the median or faster, red for half as slow again."""
    share = min(max((ratio - 1.0) / 0.5, 0.0), 1.0)
    return 255, round(255 - 195 * share), round(255 - 205 * share)


def draw_heat_map(columns: Sequence[Sequence[float]], steps: Sequence[int]) -> Tensor:
    """Each rank's own work ÷ the median of all ranks, in one column for each window.

    Args:
        columns: For each window, each rank's own work of a step in seconds.
        steps: The last step of each window.

    Returns:
        An image, uint8 of shape [3, height, width].
    """
    rows = _gathered_rows(columns)
    wide = max(4, min(24, 1200 // max(len(columns), 1)))
    high = max(4, min(ROW, 900 // max(len(rows), 1)))
    image = Image.new("RGB", (LEFT + wide * len(columns) + 10, TOP + high * len(rows) + TOP), "white")
    pen = ImageDraw.Draw(image)
    pen.text((LEFT, 6), "own work of a step / median of the ranks: white 1, red 1.5 or more", fill="black")
    medians = [median(column) or 1.0 for column in columns]
    for place, (name, row) in enumerate(rows):
        top = TOP + high * place
        if high >= 10 or place % 8 == 0:
            pen.text((4, top), name, fill="black")
        for column, value in enumerate(row):
            left = LEFT + wide * column
            pen.rectangle((left, top, left + wide - 1, top + high - 1), fill=heat_colour(value / medians[column]))
    if steps:
        bottom = TOP + high * len(rows) + 4
        pen.text((LEFT, bottom), f"step {steps[0]}", fill="black")
        pen.text((max(LEFT + 80, LEFT + wide * len(columns) - 70), bottom), f"step {steps[-1]}", fill="black")
    return _tensor(image)


def draw_phase_bars(ranks: Sequence[Sequence[float]], width: int = 1200) -> Tensor:
    """One bar for each rank: where the time of its steps went.

    Args:
        ranks: For each rank, seconds of each phase.
        width: Of the picture.

    Returns:
        An image, uint8 of shape [3, height, width].
    """
    image = Image.new("RGB", (width, TOP + len(ranks) * (ROW + GAP) + TOP), "white")
    pen = ImageDraw.Draw(image)
    scale = (width - LEFT - 10) / max(max((sum(seconds) for seconds in ranks), default=1.0), 1e-12)
    for rank, seconds in enumerate(ranks):
        top, left = TOP + rank * (ROW + GAP), float(LEFT)
        pen.text((4, top + 4), f"rank {rank}", fill="black")
        for phase in Phase:
            right = left + seconds[phase] * scale
            if right - left >= 1:
                pen.rectangle((left, top, right - 1, top + ROW), fill=COLOURS[phase])
            left = right
    place = LEFT
    for phase in Phase:
        pen.rectangle((place, 8, place + 10, 18), fill=COLOURS[phase])
        pen.text((place + 14, 6), phase.word, fill="black")
        place += 24 + 7 * len(phase.word)
    return _tensor(image)


def draw_mesh(coordinates: Sequence[Mapping[str, int]], load: Sequence[float], hosts: Sequence[str] = ()) -> Tensor:
    """The mesh: a box for each rank with its coordinates, the colour is its own work ÷ the median.

    Args:
        coordinates: For each rank, its place on each axis; the last axis runs to the right.
        load: For each rank, its own work of a step in seconds.
        hosts: For each rank, where it runs.

    Returns:
        An image, uint8 of shape [3, height, width].
    """
    axes = list(coordinates[0]) if coordinates else []
    columns = max((place[axes[-1]] for place in coordinates), default=0) + 1 if axes else 1
    columns = max(columns, min(8, len(coordinates)) if columns < 4 else columns)
    wide, high = 150, 44
    rows = -(-len(coordinates) // columns)
    image = Image.new("RGB", (columns * (wide + GAP) + 10, rows * (high + GAP) + TOP), "white")
    pen = ImageDraw.Draw(image)
    pen.text((6, 6), "mesh: " + (" x ".join(axes) or "one device"), fill="black")
    usual = median(load) if load else 1.0
    for rank, place in enumerate(coordinates):
        left, top = 6 + (rank % columns) * (wide + GAP), TOP + (rank // columns) * (high + GAP)
        colour = heat_colour(load[rank] / usual if usual else 1.0)
        pen.rectangle((left, top, left + wide - 1, top + high - 1), fill=colour, outline="black")
        host = f" {hosts[rank]}"[:14] if hosts else ""
        pen.text((left + 4, top + 4), f"rank {rank}{host}", fill="black")
        pen.text((left + 4, top + 18), " ".join(f"{axis[:9]}={value}" for axis, value in place.items()), fill="black")
        pen.text((left + 4, top + 31), f"{1000 * load[rank]:.1f} ms", fill="black")
    return _tensor(image)


def _gathered_rows(columns: Sequence[Sequence[float]]) -> list[tuple[str, list[float]]]:
    ranks = len(columns[0]) if columns else 0
    together = -(-ranks // MOST_ROWS) if ranks else 1
    rows = []
    for first in range(0, ranks, together):
        last = min(first + together, ranks) - 1
        name = f"rank {first}" if last == first else f"{first}-{last}"
        rows.append((name, [max(column[first : last + 1]) for column in columns]))
    return rows


def _tensor(image: Image.Image) -> Tensor:
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1).contiguous()
