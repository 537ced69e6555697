"""A pipeline's batch drawn as it really ran: a row for each rank, time to the right, idle time left grey."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from lightning_dist.parallel.pipeline.timings import Action

COLOURS = {
    "forward": (88, 140, 200),
    "backward": (228, 150, 70),
    "input": (228, 180, 110),
    "weights": (130, 175, 110),
}
"""Colour of each kind of action; a rank's later stages are drawn lighter."""
IDLE = (225, 225, 225)
ROW, GAP, MARGIN = 34, 6, 26


def idle_share(ranks: Sequence[Sequence[Action]]) -> float:
    """The part of ranks x time, from the first action to the last, in which nothing was computed."""
    actions = [action for rank in ranks for action in rank]
    if not actions:
        return 0.0
    whole = max(action.end for action in actions) - min(action.start for action in actions)
    busy = sum(action.end - action.start for action in actions)
    return 1.0 - busy / (whole * len(ranks))


def draw_schedule(ranks: Sequence[Sequence[Action]], width: int = 1400) -> Tensor:
    """Draws what each rank did.

    Args:
        ranks: The actions of each pipeline rank, their times on one clock.
        width: Of the picture, in pixels.

    Returns:
        An image, uint8 of shape [3, height, width]; numbers in the boxes are microbatches.
    """
    actions = [action for rank in ranks for action in rank]
    begin = min((action.start for action in actions), default=0.0)
    end = max((action.end for action in actions), default=1.0)
    image = Image.new("RGB", (width, MARGIN + len(ranks) * (ROW + GAP) + MARGIN), "white")
    pen = ImageDraw.Draw(image)
    left, right = 54, width - 10
    scale = (right - left) / max(end - begin, 1e-12)
    pen.text((left, 6), f"{1000 * (end - begin):.1f} ms, idle {100 * idle_share(ranks):.1f} %", fill="black")
    for rank, row in enumerate(ranks):
        top = MARGIN + rank * (ROW + GAP)
        pen.text((6, top + ROW // 3), f"rank {rank}", fill="black")
        pen.rectangle((left, top, right, top + ROW), fill=IDLE)
        stages = sorted({action.stage for action in row})
        for action in row:
            start, stop = left + (action.start - begin) * scale, left + (action.end - begin) * scale
            fill = _lighter(COLOURS[action.kind], 0.35 * stages.index(action.stage) / max(len(stages) - 1, 1))
            pen.rectangle((start, top, max(stop - 1, start), top + ROW), fill=fill)
            if stop - start > 16:
                pen.text((start + 3, top + ROW // 3), str(action.microbatch), fill="black")
    place = left
    for kind, colour in COLOURS.items():
        if any(action.kind == kind for action in actions):
            pen.rectangle((place, image.height - 18, place + 10, image.height - 8), fill=colour)
            pen.text((place + 14, image.height - 19), kind, fill="black")
            place += 90
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1).contiguous()


def _lighter(colour: tuple[int, int, int], by: float) -> tuple[int, int, int]:
    red, green, blue = (round(part + (255 - part) * by) for part in colour)
    return red, green, blue
