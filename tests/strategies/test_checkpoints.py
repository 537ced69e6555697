"""Checkpoints of the strategy: in parts, on any layout, and as one file."""

import os
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dist.checkpoint import consolidate, is_checkpoint
from tests.strategies.training import Classifier, InOrder, data, full_state, make, trainer, worst


class TwoGroups(Classifier):
    def configure_optimizers(self):
        blocks = list(self.model.blocks.parameters())
        rest = [p for n, p in self.named_parameters() if ".blocks." not in n]
        groups = [{"params": blocks, "lr": 0.01, "weight_decay": 0.1}, {"params": [], "lr": 7.0}, {"params": rest}]
        optimizer = torch.optim.AdamW(groups, lr=0.005)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"},
        }


def fit(layout, folder, epochs, resume=None, factory=Classifier, save=True):
    """Trains to ``epochs`` of 3 steps, with 4 samples a step over all ranks, and keeps the last epoch's checkpoint."""
    module = make(factory, seed=0 if resume is None else 99)
    keep = ModelCheckpoint(folder, f"epochs-{epochs}")
    run = trainer(
        layout,
        max_epochs=epochs,
        use_distributed_sampler=False,
        callbacks=[keep] if save else [],
        enable_checkpointing=save,
    )
    dataset = data(12)
    ranks = run.strategy.distributed_sampler_kwargs["num_replicas"]
    run.fit(module, DataLoader(dataset, 4 // ranks, sampler=InOrder(dataset, run.strategy)), ckpt_path=resume)
    schedulers = [config.scheduler.get_last_lr() for config in run.lr_scheduler_configs]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in run.optimizers[0].param_groups]
    return {"weights": full_state(module), "groups": groups, "lr": schedulers, "step": run.global_step}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("shard=2", "shard=4"),
        ("shard=4", "replicate=2"),
        ("replicate=2,shard=2", "shard=2"),
        ("shard=2", "shard=1"),
        ("shard=1", "shard=2"),
    ],
)
def test_resumes_on_another_layout_with_every_option_of_every_group(pool, tmp_path, before, after):
    """AdamW with two groups and an empty one (C25); rows that do not divide by the ranks (C26); a schedule (C31)."""
    world = {"shard=1": 1, "shard=2": 2, "replicate=2": 2}
    kwargs = {"factory": TwoGroups, "init_process_group": False}
    whole = pool.run(fit, 1, "shard=1", tmp_path, 2, save=False, **kwargs)[0]
    pool.run(fit, world.get(before, 4), before, tmp_path, 1, **kwargs)
    saved = str(tmp_path / "epochs-1.ckpt")
    for resumed in pool.run(fit, world.get(after, 4), after, tmp_path, 2, saved, save=False, **kwargs):
        assert worst(resumed["weights"], whole["weights"]) < 1e-9
        assert resumed["groups"] == whole["groups"]
        assert resumed["lr"] == whole["lr"]
        assert resumed["step"] == 6


def one_device(epochs: int) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, precision="64-true", enable_checkpointing=False, **quiet
    )


def test_one_file_loads_without_this_package(pool, tmp_path):
    trained = pool.run(fit, 2, "shard=2", tmp_path, 1, init_process_group=False)[0]
    whole = pool.run(fit, 1, "shard=1", tmp_path, 2, save=False, init_process_group=False)[0]
    assert is_checkpoint(tmp_path / "epochs-1.ckpt")
    consolidate(tmp_path / "epochs-1.ckpt", tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=False)
    assert worst(saved["state_dict"], trained["weights"]) == 0
    assert Classifier.load_from_checkpoint(tmp_path / "one.ckpt", weights_only=False).hparams.optimizer == "sgd"
    module = make(Classifier, seed=3)
    single = one_device(2)
    single.fit(module, DataLoader(data(12), 4), ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    # Lightning loads into the float32 module and makes it float64 only then.
    assert worst(dict(module.state_dict()), whole["weights"]) < 1e-6


def test_a_single_file_of_one_device_goes_on_in_shards(pool, tmp_path):
    whole = pool.run(fit, 1, "shard=1", tmp_path, 2, save=False, init_process_group=False)[0]
    single = one_device(1)
    single.callbacks.append(SaveAtEpochEnd(tmp_path / "plain.ckpt"))
    single.fit(make(Classifier), DataLoader(data(12), 4))
    for resumed in pool.run(
        fit, 2, "shard=2", tmp_path, 2, str(tmp_path / "plain.ckpt"), save=False, init_process_group=False
    ):
        assert worst(resumed["weights"], whole["weights"]) < 1e-9


class SaveAtEpochEnd(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


class RankDependentScore(Classifier):
    """Logs another value on each rank, without ``sync_dist`` (C20)."""

    scores = ((0.4, 0.9), (0.6, 0.1), (0.5, 0.5), (0.2, 0.2))

    def validation_step(self, batch, batch_idx):
        self.log("score", self.scores[min(self.current_epoch, 3)][self.global_rank])


def fit_and_load_best(folder):
    keep = ModelCheckpoint(folder, "{epoch}-{score:.3f}", monitor="score", save_top_k=2, mode="min")
    module = make(RankDependentScore)
    run = trainer("shard=2", max_epochs=4, callbacks=[keep], enable_checkpointing=True)
    loaders = DataLoader(data(8), 2), DataLoader(data(8), 2)
    run.fit(module, *loaders)
    weights = full_state(module)
    run.validate(module, loaders[1], ckpt_path="best")
    return {
        "best": keep.best_model_path,
        "score": float(keep.best_model_score),
        "paths": sorted(keep.best_k_models),
        "moved": worst(full_state(module), weights),
    }


def test_ranks_agree_on_the_best_checkpoint(pool, tmp_path):
    """Means over the ranks are 0.65, 0.35, 0.5, 0.2."""
    one, two = pool.run(fit_and_load_best, 2, str(tmp_path), init_process_group=False)
    assert one == two
    assert one["score"] == pytest.approx(0.2)
    assert Path(one["best"]).name == "epoch=3-score=0.200.ckpt"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch=1-score=0.350.ckpt", "epoch=3-score=0.200.ckpt"]


def memory_of_save_and_load(folder):
    """Bytes this rank wrote, and its peak memory above the model's parts, for 64 MB of weights."""
    import resource

    class Wide(Classifier):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Sequential(*(torch.nn.Linear(1448, 1448, bias=False) for _ in range(8)))

        def loss(self, batch):
            return self.model(batch[0].new_ones(1, 1448)).sum()

    module = make(Wide)
    run = trainer("shard=4", max_steps=1, precision="32-true")
    run.fit(module, DataLoader(data(8, dtype=torch.float32), 2))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run.save_checkpoint(os.path.join(folder, "wide"))
    saved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run.strategy.load_checkpoint(os.path.join(folder, "wide"))
    return {
        "save": (saved - before) * 1024,
        "load": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - saved) * 1024,
        "rank": run.global_rank,
    }


@pytest.mark.slow
def test_no_rank_holds_or_writes_the_whole_model(pool, tmp_path):
    """64 MB of weights on 4 ranks (C38)."""
    whole = 8 * 1448 * 1448 * 4
    for rank in pool.run(memory_of_save_and_load, 4, str(tmp_path), init_process_group=False):
        assert rank["save"] < 0.7 * whole
        assert rank["load"] < 0.7 * whole
    written = {}
    for file in (tmp_path / "wide" / "data").iterdir():
        rank = file.name.split("_")[2] if file.name.startswith("__") else None
        written[rank] = written.get(rank, 0) + file.stat().st_size
    assert max(written.values()) < 0.6 * whole
