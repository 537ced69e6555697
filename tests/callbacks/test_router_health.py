"""Router health in a real run: the event files are read back and hold what one process counts."""

import io

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.data import DataLoader

from lightning_dist.callbacks import RouterHealth
from lightning_dist.parallel.expert import TopKRouter, find_experts
from lightning_dist.telemetry.published import published
from lightning_dist.telemetry.router_drawing import draw_load, load_colour
from tests.parallel.expert.networks import WIDTH
from tests.strategies.test_expert_axis import Deep, Planned, vectors
from tests.strategies.training import Classifier, InOrder, make, trainer

STEPS, EVERY = 5, 2


class Still(Planned):
    """Four blocks that do not change, so that a window's choices are known beforehand."""

    def __init__(self):
        Deep.__init__(self, capacity_factor=1.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train(layout, folder, samples, batch_size, accumulate, checkpointing):
    settings = {"activation_checkpointing": checkpointing}
    if "pp" in layout:
        settings["microbatches"] = 4
    loggers = [TensorBoardLogger(folder, name="", version=""), CSVLogger(folder, name="csv", version="")]
    run = trainer(
        layout,
        callbacks=[RouterHealth(every_n_steps=EVERY)],
        logger=loggers,
        accumulate_grad_batches=accumulate,
        strategy_kwargs=settings,
        use_distributed_sampler=False,
        num_sanity_val_steps=1,
    )
    dataset = vectors(samples)
    loader = DataLoader(dataset, batch_size, sampler=InOrder(dataset, run.strategy))
    module = make(Still)
    run.fit(module, loader, DataLoader(vectors(4), 4))
    hooks = sum(len(module.get_submodule(name)._forward_hooks) for name in find_experts(module))
    return published(), hooks


def expected(samples, rows, ranks):
    """For each window of ``EVERY`` steps and each layer: load, entropy, fullest / mean, drops, and bytes that travel.

    The batches of one process: ``rows`` samples whose capacity counts together.
    """
    network = make(Still).double().model
    chosen = {}
    for name, module in network.named_modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(
                lambda _, args, routing, name=name: chosen.setdefault(name, []).append(routing.chosen)
            )
    x, y = vectors(samples).tensors
    for start in range(0, samples, rows):
        # The order of ranks, each with every other sample: it decides who is dropped.
        order = [start + row for rank in range(ranks) for row in range(rank, rows, ranks)]
        network(x[order], y[order])
    windows = []
    parts = samples // rows // STEPS  # batches of a step
    for first in range(0, STEPS, EVERY):
        steps = min(EVERY, STEPS - first)
        layers = {}
        for name, batches in chosen.items():
            counts, dropped, travelled = np.zeros(8), 0, 0
            for batch in batches[first * parts : (first + steps) * parts]:
                capacity = -(-batch.numel() // 8)
                sizes = np.zeros(8)
                for expert, token in ((int(e), t) for column in batch.T for t, e in enumerate(column)):
                    sizes[expert] += 1
                    if sizes[expert] > capacity:
                        dropped += 1
                        continue
                    counts[expert] += 1
                    travelled += int(ranks == 2 and expert // 4 != token * ranks // len(batch))
            load = counts / counts.sum()
            positive = load[load > 0]
            layers[name.replace("router", "experts")] = {
                "load": load,
                "entropy": float(-(positive * np.log(positive)).sum() / np.log(8)),
                "max_over_mean": float(load.max() * 8),
                "drop_rate": dropped / (counts.sum() + dropped),
                "exchanged_bytes": 2 * travelled * WIDTH * 8 / steps,  # there and back, in doubles
            }
        windows.append(layers)
    return windows


@pytest.mark.parametrize(
    ("layout", "ranks", "rows", "accumulate", "checkpointing"),
    [
        ("shard=1", 1, 8, 1, "none"),
        ("shard=2,ep=2", 2, 8, 3, "full"),
        ("pp=2", 1, 2, 2, "full"),
        ("tp=2", 1, 8, 1, "selective"),
    ],
)
def test_event_files_hold_what_one_process_counts(pool, tmp_path, layout, ranks, rows, accumulate, checkpointing):
    """Microbatches of two samples under the pipeline; sanity checks, recomputation and copies count nothing."""
    world = 1 if layout == "shard=1" else 2
    samples = 8 * STEPS * accumulate
    results = pool.run(
        train,
        world,
        layout,
        str(tmp_path),
        samples,
        8 // ranks,
        accumulate,
        checkpointing,
        init_process_group=False,
        timeout=120,
    )
    windows = expected(samples, rows, ranks)
    events = EventAccumulator(str(tmp_path / "router_health"), size_guidance={"images": 0})
    events.Reload()
    for key in ("entropy", "max_over_mean", "drop_rate", "exchanged_bytes"):
        for layer in windows[0]:
            written = events.Scalars(f"router/{key}/model.{layer}")
            assert [event.step for event in written] == [2, 4, 5]
            wanted = [window[layer][key] for window in windows]
            assert [event.value for event in written] == pytest.approx(wanted, rel=1e-5), (key, layer)
    assert any(window[layer]["drop_rate"] > 0 for window in windows for layer in window)
    seconds = [event.value for event in events.Scalars("router/exchange_seconds/model.blocks.0.moe.experts")]
    assert all(0 < value < 1 for value in seconds) if "ep=2" in layout else not any(seconds)
    picture = events.Images("router/load")[-1]
    shown = torch.from_numpy(np.array(Image.open(io.BytesIO(picture.encoded_image_string)))).permute(2, 0, 1)
    wanted = draw_load({f"model.{name}": values["load"].tolist() for name, values in windows[-1].items()})
    assert (shown.int() - wanted.int()).abs().max() <= 1
    page = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [category.title for category in page.category] == ["Are the routers well?"]
    assert {chart.multiline.tag[0] for chart in page.category[0].chart} >= {"router/entropy/.*", "router/drop_rate/.*"}
    header = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()[0]
    assert "router/max_over_mean/model.blocks.3.moe.experts" in header
    for values, hooks in results:
        last = windows[-1].values()
        assert values["router_entropy"] == pytest.approx(min(layer["entropy"] for layer in last), rel=1e-5)
        assert values["router_max_over_mean"] == pytest.approx(max(layer["max_over_mean"] for layer in last), rel=1e-5)
        assert hooks == 0


def test_the_picture_shows_each_share():
    image = draw_load({"a": [0.0, 0.25, 0.25, 0.5], "b": [0.5, 0.5]})

    def field(row, expert):
        return tuple(image[:, 26 + 24 * row + 10, 18 + 22 * expert + 10].tolist())

    assert [field(0, expert) for expert in range(4)] == [load_colour(share) for share in (0, 1, 1, 2)]
    assert field(0, 0) == (60, 110, 255) and field(0, 1) == (255, 255, 255) and field(0, 3) == (255, 60, 50)
    assert field(1, 0) == field(1, 1) == (255, 255, 255) == field(1, 2)


def test_refuses_what_does_not_fit(tmp_path):
    with pytest.raises(ValueError, match="every_n_steps=0 does not fit"):
        RouterHealth(every_n_steps=0)
    from tests.strategies.training import data

    with pytest.raises(ValueError, match="RouterHealth finds no experts in Classifier"):
        trainer(None, devices=1, callbacks=[RouterHealth()]).fit(make(Classifier), DataLoader(data(8), 4))
