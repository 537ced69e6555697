"""The load of experts as a picture: a row for each layer, a field for each expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from PIL import Image, ImageDraw
from torch import Tensor

TOP, LOWEST_FIELD, HIGHEST_FIELD, WIDTH = 26, 3, 22, 1200


def load_colour(ratio: float) -> tuple[int, int, int]:
    """White for an expert with its even share, blue for one without tokens, red for twice its share or more."""
    if ratio < 1:
        faded = round(255 * ratio)
        return 60 + faded * 195 // 255, 110 + faded * 145 // 255, 255
    faded = round(255 * min(ratio - 1, 1))
    return 255, 255 - faded * 195 // 255, 255 - faded * 205 // 255


def draw_load(layers: Mapping[str, Sequence[float]]) -> Tensor:
    """Draws each expert's share of its layer's choices ÷ an even share.

    Args:
        layers: The shares of each layer's experts.

    Returns:
        An image, uint8 of shape [3, height, width].
    """
    most = max((len(load) for load in layers.values()), default=1)
    left = 12 + max((6 * len(name) for name in layers), default=0)
    wide = max(LOWEST_FIELD, min(HIGHEST_FIELD, WIDTH // most))
    high = HIGHEST_FIELD
    image = Image.new("RGB", (max(left + wide * most + 10, 460), TOP + (high + 2) * len(layers) + 6), "white")
    pen = ImageDraw.Draw(image)
    pen.text((6, 6), "load of each expert / even load: blue 0, white 1, red 2 or more", fill="black")
    for row, (name, load) in enumerate(layers.items()):
        top = TOP + (high + 2) * row
        pen.text((6, top + 5), name, fill="black")
        for expert, share in enumerate(load):
            corner = (left + wide * expert, top)
            pen.rectangle(
                (*corner, corner[0] + wide - 1, top + high - 1),
                fill=load_colour(share * len(load)),
                outline=(200, 200, 200) if wide > 8 else None,
            )
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1).contiguous()
