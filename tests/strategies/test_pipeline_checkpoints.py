"""Checkpoints move freely between pipelines, virtual stages, data layouts and one device."""

import fnmatch

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dist.checkpoint import consolidate
from tests.strategies.test_pipeline_axis import Deep, Tied
from tests.strategies.test_pipeline_metrics import single
from tests.strategies.training import InOrder, data, full_state, make, trainer, worst

GROUPS = {
    "model.embed*": (0.02, 0.1),
    "model.blocks.1.*": (0.004, 0.0),
    "model.blocks.*": (0.01, 0.2),
    "*": (0.03, 0.05),
}
"""Learning rate and weight decay by pattern; most stages have nothing that fits the second."""


class Grouped(Deep):
    def configure_optimizers(self):
        found = {pattern: [] for pattern in GROUPS}
        for name, parameter in self.named_parameters():
            found[next(pattern for pattern in GROUPS if fnmatch.fnmatch(name, pattern))].append(parameter)
        groups = [
            {"params": found[pattern], "lr": lr, "weight_decay": decay, "name": pattern}
            for pattern, (lr, decay) in GROUPS.items()
        ]
        optimizer = torch.optim.AdamW(groups)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class GroupedTied(Grouped, Tied):
    pass


def fit(layout, folder, epochs, resume=None, schedule="1F1B", factory=Grouped):
    """Trains to ``epochs`` epochs of 3 steps, 4 samples a step, and keeps the last epoch's checkpoint."""
    module = make(factory, seed=0 if resume is None else 99)
    keep = ModelCheckpoint(folder, f"epochs-{epochs}")
    settings = {"max_epochs": epochs, "callbacks": [keep], "enable_checkpointing": True}
    dataset = data(12)
    if layout is None:
        run, ranks, sampler = single(**settings), 1, None
    else:
        chosen = {"pipeline_schedule": schedule}
        run = trainer(layout, use_distributed_sampler=False, strategy_kwargs=chosen, **settings)
        ranks, sampler = run.strategy.distributed_sampler_kwargs["num_replicas"], InOrder(dataset, run.strategy)
    run.fit(module, DataLoader(dataset, 4 // ranks, sampler=sampler), ckpt_path=resume)
    optimizer = run.optimizers[0]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"weights": full_state(module), "groups": groups, "step": run.global_step}


def check(results, wanted):
    weights = {name: value for result in results for name, value in result["weights"].items()}
    assert worst(weights, wanted["weights"]) < 1e-9
    for result in results:
        for name, value in result["weights"].items():
            assert torch.equal(value, weights[name])  # a tied weight is one
        assert result["groups"] == wanted["groups"]
        assert result["step"] == wanted["step"]


def test_one_run_wanders_over_every_layout(pool, tmp_path):
    """C24, C25: each epoch under another layout; after every one, weights and groups are the uninterrupted run's."""
    journey = [
        ("shard=1", "1F1B", 1),
        ("pp=2", "1F1B", 2),
        ("pp=2,shard=2", "Interleaved1F1B", 4),
        ("pp=4", "GPipe", 4),
        ("pp=2", "ZBVZeroBubble", 2),
        ("pp=2,replicate=2", "1F1B", 4),
        ("shard=2", "1F1B", 2),
    ]
    resume = None
    for epochs, (layout, schedule, world) in enumerate(journey, 1):
        results = pool.run(
            fit, world, layout, tmp_path, epochs, resume, schedule, init_process_group=False, timeout=120
        )
        wanted = fit(None, tmp_path / "one", epochs)
        check(results, wanted)
        resume = str(tmp_path / f"epochs-{epochs}.ckpt")


def test_one_file_goes_on_anywhere(pool, tmp_path):
    """A tied weight, consolidated from two stages to one file, goes on as stages and on one device."""
    pool.run(fit, 2, "pp=2", tmp_path, 1, None, "1F1B", GroupedTied, init_process_group=False)
    consolidate(tmp_path / "epochs-1.ckpt", tmp_path / "one.ckpt")
    wanted = fit(None, tmp_path / "one", 2, factory=GroupedTied)
    saved = torch.load(tmp_path / "one.ckpt", weights_only=False)
    assert list(saved["state_dict"]) == list(wanted["weights"])
    check(
        pool.run(
            fit, 2, "pp=2", tmp_path, 2, str(tmp_path / "one.ckpt"), "ZBVZeroBubble", GroupedTied,
            init_process_group=False,
        ),
        wanted,
    )  # fmt: skip
    module = make(GroupedTied, seed=3).double()
    run = single(max_epochs=2)
    run.fit(module, DataLoader(data(12), 4), ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    assert worst(full_state(module), wanted["weights"]) < 1e-9
