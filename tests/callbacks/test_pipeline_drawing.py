"""The pipeline's schedule, measured in a real run and drawn."""

import io

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_dist.callbacks import PipelineDrawing
from lightning_dist.parallel.pipeline.timings import Action
from lightning_dist.telemetry.pipeline_drawing import COLOURS, IDLE, draw_schedule, idle_share
from tests.strategies.test_pipeline_training import Plain, fit
from tests.strategies.training import data


def colour_at(image, x, y):
    return tuple(image[:, y, x].tolist())


def test_boxes_stand_where_the_actions_were():
    """Two ranks, 4 seconds: one is busy for all of them, the other for the second and third."""
    ranks = [
        [Action("forward", 0, 0, 10.0, 12.0), Action("backward", 0, 0, 12.0, 14.0)],
        [Action("input", 1, 0, 11.0, 12.0), Action("weights", 1, 0, 12.0, 13.0)],
    ]
    assert idle_share(ranks) == pytest.approx(0.25)
    image = draw_schedule(ranks, width=464)  # 100 pixels a second, from pixel 54 on
    assert image.dtype == torch.uint8
    first, second = 58, 98  # near the bottom of the two rows
    assert [colour_at(image, x, first) for x in (60, 250, 260, 450)] == [
        COLOURS["forward"], COLOURS["forward"], COLOURS["backward"], COLOURS["backward"],
    ]  # fmt: skip
    assert [colour_at(image, x, second) for x in (60, 160, 260, 360)] == [
        IDLE,
        COLOURS["input"],
        COLOURS["weights"],
        IDLE,
    ]


def draw(folder, schedule):
    logger = TensorBoardLogger(folder, name="", version="")
    fit("pp=2", Plain, data(16), schedule, callbacks=[PipelineDrawing(every_n_batches=3)], logger=logger)


@pytest.mark.parametrize(("schedule", "kinds"), [("1F1B", 2), ("ZBVZeroBubble", 4)])
def test_a_real_run_is_drawn_to_tensorboard(pool, tmp_path, schedule, kinds):
    """4 batches, the last of which is measured; the file is read back."""
    pool.run(draw, 2, str(tmp_path), schedule, init_process_group=False)
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
    events.Reload()
    (drawn,) = events.Images("pipeline/schedule")
    assert drawn.step == 4
    (idle,) = events.Scalars("pipeline/idle")
    assert 0 < idle.value < 1
    image = np.asarray(Image.open(io.BytesIO(drawn.encoded_image_string)))
    rows = image[40:60].reshape(-1, 3), image[80:100].reshape(-1, 3)
    for row in rows:
        colours = {tuple(colour) for colour in row.tolist()}
        assert len(colours & set(COLOURS.values())) >= min(kinds, 2)
        assert IDLE in colours


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="every_n_batches=0 does not fit"):
        PipelineDrawing(every_n_batches=0)
