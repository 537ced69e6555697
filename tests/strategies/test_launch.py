"""How the strategy is chosen and started, and what it refuses before anything is started."""

import datetime
import os
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI

import lightning_dist  # noqa: F401
from lightning_dist import HybridParallelStrategy, ModelPlan, ParallelLayout
from tests.strategies.training import Classifier, data

ROOT = Path(__file__).parents[2]
SCRIPT = "tests/strategies/run_module.py"


def command(*arguments: str) -> str:
    done = subprocess.run(arguments, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_lightning_starts_the_processes_by_itself():
    output = command(sys.executable, SCRIPT, "hybrid")
    for rank in (0, 1):
        assert f"rank {rank} of 2: 2 steps as shard=2" in output


@pytest.mark.slow
def test_torchrun_starts_the_processes():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    output = command(*torchrun, SCRIPT, "replicate=2")
    for rank in (0, 1):
        assert f"rank {rank} of 2: 2 steps as replicate=2" in output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]])
def test_a_rank_that_raises_ends_the_run_and_the_others_say_why(launcher):
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, *launcher, SCRIPT, "shard=2", "raise"],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode != 0
    assert "rank 0: rank 1 stopped the run: ZeroDivisionError: the sample at fault is number 7" in done.stderr
    assert time.monotonic() - start < 90


def test_a_world_of_one_needs_no_process_group():
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="hybrid",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        precision="64-true",
    )
    trainer.fit(Classifier(), torch.utils.data.DataLoader(data(8), 2))
    assert not torch.distributed.is_initialized()
    assert isinstance(trainer.train_dataloader.sampler, torch.utils.data.SequentialSampler)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"data_parallel_shard_size": 0}, "shard=0"),
        ({"tensor_parallel_size": 1.5}, "tensor=1.5"),
        ({"layout": "shard=2", "data_parallel_replicate_size": 2}, "beside sizes"),
        ({"layout": "shards=2"}, "'shards=2'"),
        ({"activation_checkpointing": "some"}, "activation_checkpointing='some'"),
        ({"batch_check": "never"}, "batch_check='never'"),
        ({"reshard_after_forward": "yes"}, "reshard_after_forward='yes'"),
        ({"gradient_norm_type": 0}, "gradient_norm_type=0"),
        ({"timeout": -1}, "timeout="),
    ],
)
def test_arguments_that_do_not_fit_are_named(kwargs, words):
    with pytest.raises(ValueError) as error:
        HybridParallelStrategy(**kwargs)
    assert words in str(error.value)


def test_a_layout_that_does_not_fit_the_world_is_refused_by_the_trainer():
    with pytest.raises(ValueError, match=r"2 \(replicate\) x 2 \(shard\) = 4, but the world has 2 ranks"):
        L.Trainer(accelerator="cpu", devices=2, strategy=HybridParallelStrategy(2, 2))
    assert not torch.distributed.is_initialized()


def test_the_other_packages_trainer_shows_what_to_import():
    import pytorch_lightning

    with pytest.raises(Exception, match=r"from lightning\.pytorch import Trainer"):
        pytorch_lightning.Trainer(strategy=HybridParallelStrategy(), accelerator="cpu", devices=1)


def test_lightning_cli_configures_it_from_yaml(tmp_path):
    (tmp_path / "config.yaml").write_text(
        """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  strategy:
    class_path: lightning_dist.HybridParallelStrategy
    init_args:
      layout: shard=1
      reshard_after_forward: false
      activation_checkpointing: full
      timeout: 20
      plan:
        class_path: lightning_dist.ModelPlan
        init_args:
          shard: ["blocks.*"]
model:
  optimizer: adamw
"""
    )
    cli = LightningCLI(
        Classifier, run=False, args=["--config", str(tmp_path / "config.yaml")], save_config_callback=None
    )
    strategy = cli.trainer.strategy
    assert isinstance(strategy, HybridParallelStrategy)
    assert strategy.layout == ParallelLayout(shard=1)
    assert strategy._plan == ModelPlan(shard=["blocks.*"])
    assert strategy._timeout == datetime.timedelta(seconds=20)
    assert cli.model.hparams.optimizer == "adamw"
