"""What TensorBoard is given, read back from its files."""

import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.tensorboard import SummaryWriter

from lightning_dist.telemetry.clock import Phase
from lightning_dist.telemetry.collectives import GroupTraffic
from lightning_dist.telemetry.drawings import COLOURS, draw_heat_map, draw_mesh, draw_phase_bars, heat_colour
from lightning_dist.telemetry.pages import LAYOUT, TelemetryPages, own_work, scalars_of
from lightning_dist.telemetry.window import RankWindow


def window(forward, wait, **more):
    seconds = [0.0] * len(Phase)
    seconds[Phase.FORWARD], seconds[Phase.EXPOSED_COMM] = forward, wait
    return RankWindow(10, tuple(seconds), **more)


WINDOWS = [
    window(1.0, 1.0, memory=5.0, traffic={"shard": GroupTraffic(0.8, 1.0, 1)}),
    window(2.0, 0.0, memory=9.0),
]


def test_scalars_are_shares_of_a_step():
    values = scalars_of(WINDOWS)
    assert values["phase/forward"] == pytest.approx(0.75)
    assert values["phase/exposed_comm"] == pytest.approx(0.25)
    assert sum(values[f"phase/{phase.word}"] for phase in Phase) == pytest.approx(1.0)
    assert values["communication/shard"] == pytest.approx(0.2)
    assert values["step_time"] == pytest.approx(0.2)
    assert values["memory"] == 9.0
    assert [own_work(it) for it in WINDOWS] == pytest.approx([0.1, 0.2])


def test_the_pages_are_in_the_file(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    pages = TelemetryPages(writer, [{"shard": 0}, {"shard": 1}])
    for step in (50, 100, 150):
        values = {**scalars_of(WINDOWS), "goodput": 0.9, "stalls": 0.0, "step_time_p50": 0.2}
        pages.add(step, WINDOWS, values)
    pages.end(WINDOWS)
    pages.say("stall", "stall: missing rank 1\n--- stacks ---", 120)
    writer.close()
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("telemetry/goodput")] == [50, 100, 150]
    assert [event.step for event in events.Images("telemetry/ranks_over_time")] == [50, 150]
    assert set(events.Tags()["images"]) == {
        f"telemetry/{name}" for name in ("ranks_over_time", "phases_by_rank", "mesh")
    }
    (text,) = events.Tensors("telemetry/stall/text_summary")
    assert text.step == 120
    assert b"stall: missing rank 1" in text.tensor_proto.string_val[0]
    (stored,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(stored.tensor_proto.string_val[0])
    assert [page.title for page in layout.category] == list(LAYOUT)
    shown = [tag for page in layout.category for chart in page.chart for tag in chart.multiline.tag]
    for name in events.Tags()["scalars"]:
        if name != "telemetry/step_time":
            assert any(re.search(tag, name) for tag in shown), name


def pixel(image, x, y):
    return tuple(image[:, y, x].tolist())


def test_the_slow_rank_is_red_in_the_heat_map():
    image = draw_heat_map([[1.0, 1.0, 1.5], [1.0, 1.0, 1.0]], [50, 100])
    assert image.dtype == torch.uint8
    rows = [26 + 20 * rank + 10 for rank in range(3)]
    assert [pixel(image, 64 + 12, y) for y in rows] == [heat_colour(1.0), heat_colour(1.0), heat_colour(1.5)]
    assert [pixel(image, 64 + 24 + 12, y) for y in rows] == [heat_colour(1.0)] * 3
    assert heat_colour(1.0) == (255, 255, 255)
    assert heat_colour(1.5) == heat_colour(9.0)


def test_many_ranks_share_rows_and_the_slowest_shows():
    column = [1.0] * 4096
    column[1000] = 2.0
    image = draw_heat_map([column], [50])
    assert image.shape[1] < 1200
    assert (image[:, :, 64 + 12] == torch.tensor(heat_colour(2.0)).view(3, 1)).all(0).any()


def test_bars_are_as_long_as_the_phases():
    image = draw_phase_bars([WINDOWS[0].seconds, WINDOWS[1].seconds], width=274)  # 100 pixels a second
    assert pixel(image, 64 + 50, 36) == COLOURS[Phase.FORWARD]
    assert pixel(image, 64 + 150, 36) == COLOURS[Phase.EXPOSED_COMM]
    assert pixel(image, 64 + 150, 60) == COLOURS[Phase.FORWARD]


def test_the_mesh_has_a_box_for_each_rank():
    places = [{"pipeline": p, "shard": s} for p in range(2) for s in range(4)]
    image = draw_mesh(places, [1.0] * 7 + [2.0])
    colours = {tuple(colour) for colour in image.flatten(1).T.tolist()}
    assert heat_colour(2.0) in colours
    corner = pixel(image, 6 + 3 * 154 + 140, 26 + 48 + 40)  # the last box: second row, fourth column
    assert corner == heat_colour(2.0)
