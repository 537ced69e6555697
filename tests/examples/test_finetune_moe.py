"""The mixture of experts, as a user runs it: its loss falls as that of one device, and its routers are shown."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

FOLDER = Path(__file__).parents[2] / "examples" / "finetune_moe"
STEPS = 30


def run(*command: object, folder: Path = FOLDER) -> subprocess.CompletedProcess:
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        list(map(str, command)), cwd=folder, env=settings, capture_output=True, text=True, timeout=150
    )


def train(layout: str, text: Path, output: Path) -> tuple[str, EventAccumulator]:
    sizes = f"--hidden-size 32 --layers 2 --experts 4 --context-length 64 --steps-per-epoch {STEPS} --batch-size 8"
    options = [*sizes.split(), "--data", text, "--epochs", 1, "--learning-rate", 0.01, "--validation-windows", 32]
    done = run(sys.executable, "train.py", *options, "--layout", layout, "--output", output)
    assert done.returncode == 0, done.stdout + done.stderr
    events = EventAccumulator(str(output / "version_0"))
    events.Reload()
    return done.stdout, events


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_its_loss_falls_as_on_one_device(tmp_path):
    text = tmp_path / "source.txt"
    text.write_text(Path(argparse.__file__).read_text().encode("ascii", "ignore").decode()[:60000])
    outputs, losses = {}, {}
    for layout in ("ep=2", "shard=1"):
        outputs[layout], events = train(layout, text, tmp_path / layout)
        losses[layout] = [event.value for event in events.Scalars("train/loss")]
    assert "Devices: 2, layout shard=2,ep=2" in outputs["ep=2"] and "Devices: 1, layout shard=1" in outputs["shard=1"]
    assert losses["ep=2"] == pytest.approx(losses["shard=1"], rel=1e-3)
    before, after = (
        [float(re.search(rf"{word}: ([0-9.]+) bits per byte", outputs[layout])[1]) for layout in outputs]
        for word in ("Before", "After")
    )
    assert before[0] == pytest.approx(before[1], abs=1.1e-3) and 7.5 < before[0] < 8.8
    assert after[0] == pytest.approx(after[1], abs=5e-3) and after[0] < before[0] - 2
    health = EventAccumulator(str(tmp_path / "ep=2" / "version_0" / "router_health"))
    health.Reload()
    tags = health.Tags()
    assert "router/load" in tags["images"] and "custom_scalars__config__" in tags["tensors"]
    entropy = health.Scalars("router/entropy/model.blocks.1.moe.experts")
    assert [event.step for event in entropy] == [10, 20, 30] and all(0.3 < event.value <= 1 for event in entropy)
    assert all(event.value > 0 for event in health.Scalars("router/exchanged_bytes/model.blocks.0.moe.experts"))


@pytest.mark.cluster
@pytest.mark.parametrize("layout", ["pp=2", "tp=2", "shard=2,tp=2,ep=2", "pp=2,shard=2,ep=2"])
def test_every_combination_keeps_its_numbers(layout):
    script = Path(sys.executable).parent / "lightning-dist"
    done = run(script, "verify", "small:factory", "--layout", layout, "--steps", 3, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["same"]


def test_wrong_use_is_told_in_one_sentence(tmp_path):
    done = run(sys.executable, "train.py", "--batch-size", 3, "--output", tmp_path)
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr.strip().endswith(
        "train.py: --batch-size 3 does not divide into 2 equal parts, one per data rank."
    )
