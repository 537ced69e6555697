"""A run that ends early and goes on is the run that never ended: weights to the bit, each sample once."""

from __future__ import annotations

import json
import os
import signal
import warnings
from contextlib import suppress
from itertools import chain
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_dist import HybridParallelStrategy, checkpoint
from lightning_dist.callbacks import FaultTolerantCheckpoint, RunRecord
from lightning_dist.testing import WorkerError
from lightning_dist.testing.faults import FaultAt, failing_disk, flip_bit
from tests.strategies.test_behaviour import CountCollectives
from tests.strategies.training import Block, Classifier, data, full_state, make, trainer

SAMPLES = 48


class Numbered(Dataset):
    """Each sample knows its number; augmented with NumPy's and torch's random numbers where no worker does it."""

    def __init__(self, noise=False):
        self.noise = noise
        self.x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        x = self.x[i]
        if self.noise:
            x = x + 0.1 * torch.rand(6) + float(np.random.rand())
        return {"x": x, "number": i}


class Noisy(L.LightningModule):
    """Dropout, AdamW, a scheduler that moves with each step; notes which samples it has trained on."""

    def __init__(self, log=None, dropout=0.3):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 10), Block(10), nn.Dropout(dropout), Block(10), nn.Linear(10, 3))
        self.log_file = log

    def training_step(self, batch, batch_idx):
        if self.log_file:
            with Path(f"{self.log_file}.{self.global_rank}").open("a") as file:
                file.write(json.dumps([self.trainer.global_step, batch["number"].tolist()]) + "\n")
        loss = self.model(batch["x"]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.model(batch["x"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Stop(L.Callback):
    """Ends the run by an exception after the given optimizer step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step >= self.step:
            raise KeyboardInterrupt


def fit(
    kind,
    folder=None,
    stop=None,
    workers=0,
    accumulate=1,
    epochs=3,
    log=None,
    noise=False,
    batch_size=4,
    resume="last",
    dropout=0.3,
    **settings,
):
    """Trains on this rank and returns the weights; ``kind`` is "one", "ddp" or a layout."""
    L.seed_everything(7, verbose=False)
    module = Noisy(log, dropout)
    world = int(os.environ.get("WORLD_SIZE", 1))
    plain = {"one": "auto", "ddp": "ddp", "fairscale": "fairscale_sharded"}
    strategy = plain.get(kind) or HybridParallelStrategy(layout=kind, timeout=60)
    callbacks = [Stop(stop)] if stop is not None else []
    keeper = None
    if folder is not None:
        keeper = FaultTolerantCheckpoint(folder, **{"every_n_train_steps": 2, "save_top_k": 0} | settings)
        callbacks.append(keeper)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        callbacks=callbacks,
        enable_checkpointing=folder is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Numbered(noise), batch_size, shuffle=True, num_workers=workers)
    try:
        with warnings.catch_warnings(record=True) as warned:
            trainer.fit(module, loader, ckpt_path=resume if folder is not None else None)
    except (KeyboardInterrupt, SystemExit):
        return {"stopped": trainer.global_step}
    return {
        "weights": {name: value.clone() for name, value in full_state(module).items()},
        "steps": trainer.global_step,
        "best": keeper.best_model_path if keeper else None,
        "warnings": [str(warning.message) for warning in warned],
    }


def run(pool, kind, world, *args, **kwargs):
    return pool.run(fit, world, kind, *args, init_process_group=False, timeout=120, **kwargs)


def assert_equal(results, wanted):
    for result, other in zip(results, wanted, strict=True):
        assert result["steps"] == other["steps"]
        assert result["weights"].keys() == other["weights"].keys()
        for name, value in other["weights"].items():
            assert torch.equal(result["weights"][name], value), name


@pytest.mark.parametrize(
    ("kind", "world", "settings"),
    [
        ("one", 1, {"noise": True}),
        ("one", 1, {"workers": 2}),
        ("one", 1, {"accumulate": 5}),
        ("ddp", 2, {}),
        ("fairscale", 2, {}),
        ("shard=2", 2, {"accumulate": 2}),
        pytest.param("replicate=2", 2, {"workers": 2}, marks=pytest.mark.cluster),
        ("pp=2", 2, {}),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value),
)
def test_it_goes_on_bit_for_bit(pool, tmp_path, kind, world, settings):
    """Ended at step 9 of an epoch's 12 (or 3) batches; the newest checkpoint is that of step 8, in the middle."""
    uninterrupted = run(pool, kind, world, tmp_path / "whole", **settings)
    stop = 5 if settings.get("accumulate") else 9
    run(pool, kind, world, tmp_path / "runs", stop=stop, **settings)
    assert checkpoint.newest_good(tmp_path / "runs").step == stop - 1
    assert_equal(run(pool, kind, world, tmp_path / "runs", **settings), uninterrupted)


def samples_by_step(log, world):
    """The samples of each optimizer step, of all ranks, in the order of the steps."""
    steps = {}
    for rank in range(world):
        for line in Path(f"{log}.{rank}").read_text().splitlines():
            step, numbers = json.loads(line)
            steps.setdefault(step, []).extend(numbers)
    return [steps[step] for step in sorted(steps)]


@pytest.mark.parametrize(("before", "after"), [(("one", 1), ("ddp", 2)), (("shard=2", 2), ("one", 1))])
def test_another_number_of_ranks_sees_each_sample_once(pool, tmp_path, before, after):
    """The batch of a rank stays 4, so a step has another number of samples; those of the epoch are used up once."""
    run(pool, *before, tmp_path / "runs", stop=3, epochs=1, log=str(tmp_path / "first"))
    step = checkpoint.newest_good(tmp_path / "runs").step
    assert step == 2
    run(pool, *after, tmp_path / "runs", epochs=1, log=str(tmp_path / "second"))
    seen = samples_by_step(tmp_path / "first", before[1])[:step] + samples_by_step(tmp_path / "second", after[1])
    assert sorted(chain.from_iterable(seen)) == list(range(SAMPLES))


@pytest.mark.parametrize(
    ("before", "after", "accumulate"), [(("shard=2", 2), ("one", 1), 1), (("one", 1), ("replicate=2", 2), 2)]
)
def test_another_number_of_ranks_takes_the_same_steps(pool, tmp_path, before, after, accumulate):
    """Stopped in the middle of an epoch; the samples of a step stay, whatever number of ranks shares them."""
    settings = {"accumulate": accumulate, "dropout": 0.0}
    whole = run(pool, *before, tmp_path / "whole", **settings)
    run(pool, *before, tmp_path / "runs", stop=5, **settings)
    results = run(pool, *after, tmp_path / "runs", **settings)
    assert results[0]["steps"] == whole[0]["steps"]
    for name, value in whole[0]["weights"].items():
        torch.testing.assert_close(results[0]["weights"][name], value, rtol=1e-4, atol=1e-5)
    assert any("keeps the samples of a step" in said for said in results[0]["warnings"])


def test_a_number_of_ranks_that_does_not_fit_is_refused(pool, tmp_path):
    run(pool, "one", 1, tmp_path, stop=3, batch_size=1)
    with pytest.raises(WorkerError, match=r"taken after 2 samples of an epoch, which do not divide among 3 data ranks"):
        run(pool, "ddp", 3, tmp_path, batch_size=1)


def test_it_falls_back_and_says_what_that_costs(pool, tmp_path):
    run(pool, "shard=2", 2, tmp_path, stop=9)
    newest = checkpoint.newest_good(tmp_path)
    flip_bit(next(Path(newest.path, "data").glob("*.distcp")))
    before = run(pool, "shard=2", 2, tmp_path / "whole")
    results = run(pool, "shard=2", 2, tmp_path)
    assert_equal(results, before)
    assert any("step_6" in said or "step=6" in said for said in results[0]["warnings"])
    assert any("2 steps are lost" in said for said in results[0]["warnings"])


@pytest.mark.parametrize(("kind", "world"), [("one", 1), ("shard=2", 2), ("pp=2", 2)])
def test_load_from_checkpoint_reads_a_directory(pool, tmp_path, kind, world):
    results = run(pool, kind, world, tmp_path, epochs=1)
    module = Noisy.load_from_checkpoint(checkpoint.newest_good(tmp_path).path)
    whole = {name: value for result in results for name, value in result["weights"].items()}
    assert whole.keys() == module.state_dict().keys()
    assert all(torch.equal(value, whole[name]) for name, value in module.state_dict().items())


def test_the_newest_and_the_best_stay(pool, tmp_path):
    results = run(pool, "one", 1, tmp_path, monitor="loss_step", save_top_k=1, keep_last=2, epochs=1)
    entries = checkpoint.list_checkpoints(tmp_path)
    assert [entry.step for entry in entries[:2]] == [12, 10]
    assert {entry.path for entry in entries} == {entries[0].path, entries[1].path, results[0]["best"]}
    assert all(checkpoint.verify(entry.path).intact for entry in entries)


def losses_of_best(folder):
    L.seed_everything(7, verbose=False)
    module = Noisy()
    keeper = FaultTolerantCheckpoint(folder, monitor="loss_epoch", save_top_k=1)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, callbacks=[keeper], **quiet)
    loader = DataLoader(Numbered(), 4)
    trainer.fit(module, loader)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    module.predict_step = lambda batch, batch_idx: module.model(batch["x"])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    outputs = trainer.predict(module, loader, ckpt_path="best")
    restored = {name: torch.equal(value, weights[name]) for name, value in module.state_dict().items()}
    return {"best": keeper.best_model_path, "restored": restored, "outputs": len(outputs)}


def test_best_is_read_back(tmp_path):
    result = losses_of_best(tmp_path)
    assert Path(result["best"]).parent == tmp_path and all(result["restored"].values()) and result["outputs"] == 12


def broken_disk(folder):
    """The disk fails from step 4 to step 8: no checkpoint then, but training goes on and is protected again."""
    L.seed_everything(7, verbose=False)

    class Disk(L.Callback):
        def __init__(self):
            self.fault = None

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 4:
                self.fault = failing_disk()
                self.fault.__enter__()
            if trainer.global_step == 8:
                self.fault.__exit__(None, None, None)

    keeper = FaultTolerantCheckpoint(folder, every_n_train_steps=2, save_top_k=0, async_save=False)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[Disk(), keeper], **quiet)
    with pytest.warns(UserWarning, match=r"goes on without a new checkpoint, unprotected for 0\.\d minutes"):
        trainer.fit(Noisy(), DataLoader(Numbered(), 4))
    return trainer.global_step


def test_a_failing_disk_costs_checkpoints_and_not_the_run(tmp_path):
    assert broken_disk(tmp_path) == 12
    assert [entry.step for entry in checkpoint.list_checkpoints(tmp_path)] == [12, 10]


def test_arguments_are_refused():
    for settings, sentence in [
        ({"keep_last": 0}, r"keep_last=0 does not fit"),
        ({"verify": "no"}, r"verify='no' does not fit"),
        ({"save_weights_only": True}, r"save_weights_only=True does not fit"),
        ({"save_on_exception": True}, r"save_on_exception=True does not fit"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            FaultTolerantCheckpoint("runs", **settings)


def test_other_strategies_are_refused_before_anything_runs(tmp_path):
    callbacks = [FaultTolerantCheckpoint(tmp_path)]
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy="ddp_find_unused_parameters_true", callbacks=callbacks)
    trainer.strategy.__class__ = type("OtherStrategy", (type(trainer.strategy),), {})
    with pytest.raises(ValueError, match="does not work with OtherStrategy"):
        trainer.fit(Noisy(), DataLoader(Numbered(), 4))


class SendSignal(L.Callback):
    """Sends this process a signal at one moment of the run."""

    def __init__(self, hook, step, rank, number, times=1):
        self.step, self.rank, self.number, self.times = step, rank, number, times
        setattr(self, hook, self.send)

    def send(self, trainer, *_):
        if trainer.global_step >= self.step and trainer.global_rank == self.rank and not trainer.sanity_checking:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
            self.times = 0


def fit_with_signal(kind, folder, hook, step, rank, number, times, **settings):
    """What `fit` gives, or the exit code and the step that the signal ended the run at."""
    L.seed_everything(7, verbose=False)
    module = Noisy()
    strategy = "ddp" if kind == "ddp" else HybridParallelStrategy(layout=kind, timeout=60)
    keeper = FaultTolerantCheckpoint(folder, save_top_k=0, every_n_train_steps=1000)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=3,
        callbacks=[SendSignal(hook, step, rank, number, times), keeper],
        val_check_interval=3 if settings.get("accumulate") is None else 1.0,
        accumulate_grad_batches=settings.get("accumulate") or 1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        trainer.fit(module, DataLoader(Numbered(), 4, shuffle=True), DataLoader(Numbered(), 4), ckpt_path="last")
    except SystemExit as error:
        return {"code": error.code, "step": trainer.global_step, "handler": signal.getsignal(signal.SIGTERM) == before}
    return {"weights": full_state(module), "steps": trainer.global_step}


@pytest.mark.parametrize(
    ("kind", "hook", "rank", "number", "times"),
    [
        ("ddp", "on_train_batch_start", 1, signal.SIGTERM, 1),
        ("shard=2", "on_train_batch_end", 0, signal.SIGUSR1, 2),
        ("pp=2", "on_validation_batch_start", 1, signal.SIGTERM, 1),
    ],
)
def test_a_signal_to_one_rank_ends_all_at_one_step(pool, tmp_path, kind, hook, rank, number, times):
    call = {"init_process_group": False, "timeout": 120}
    ended = pool.run(fit_with_signal, 2, kind, tmp_path / "runs", hook, 4, rank, number, times, **call)
    assert ended[0] == ended[1] == {"code": 75, "step": ended[0]["step"], "handler": True}
    assert 4 <= ended[0]["step"] <= 8
    assert [entry.step for entry in checkpoint.list_checkpoints(tmp_path / "runs")] == [ended[0]["step"]]
    never = 10**6
    went_on = pool.run(fit_with_signal, 2, kind, tmp_path / "runs", hook, never, rank, number, times, **call)
    whole = pool.run(fit_with_signal, 2, kind, tmp_path / "whole", hook, never, rank, number, times, **call)
    assert_equal(went_on, whole)


def test_a_signal_in_a_window_waits_for_its_end(pool, tmp_path):
    call = {"init_process_group": False, "timeout": 120, "accumulate": 3}
    arguments = ("on_train_batch_start", 2, 0, signal.SIGTERM, 1)
    ended = pool.run(fit_with_signal, 2, "shard=2", tmp_path / "runs", *arguments, **call)
    assert ended[0] == ended[1] and ended[0]["code"] == 75
    arguments = ("on_train_batch_start", 10**6, 0, signal.SIGTERM, 1)
    went_on = pool.run(fit_with_signal, 2, "shard=2", tmp_path / "runs", *arguments, **call)
    assert_equal(went_on, pool.run(fit_with_signal, 2, "shard=2", tmp_path / "whole", *arguments, **call))


def count_collectives(folder, steps):
    callbacks = [FaultTolerantCheckpoint(folder, every_n_train_steps=1000)]
    run = trainer("replicate=2", callbacks=callbacks, enable_checkpointing=True, limit_train_batches=steps)
    with CountCollectives() as mode:
        run.fit(make(Classifier), DataLoader(data(64), 2))
    return mode.counts


def test_an_ordinary_step_exchanges_gradients_and_one_number(pool, tmp_path):
    """Three blocks and the root are reduced; the flags are one all-reduce, and Lightning's broadcast is gone."""
    few, many = (pool.run(count_collectives, 2, tmp_path, steps, init_process_group=False)[0] for steps in (3, 6))
    assert dict(many - few) == {"c10d.allreduce_.default": 3 * (4 + 1)}


def crash_and_signal(folder, outcome, recorded):
    """Rank 1 dies; rank 0 is told to end at the same step, as torchrun tells those who are left."""
    L.seed_everything(7, verbose=False)
    told = SendSignal("on_train_batch_start", 4, 0, signal.SIGTERM)
    keeper = FaultTolerantCheckpoint(folder, save_top_k=0, every_n_train_steps=2)
    callbacks = [told, FaultAt(4, rank=1, action="kill"), keeper, RunRecord(dirpath=recorded)]
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    run = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=callbacks, **quiet)
    try:
        run.fit(Noisy(), DataLoader(Numbered(), 4))
    except BaseException as error:
        Path(outcome).write_text(f"{type(error).__name__} {getattr(error, 'code', None)} {run.global_step}")
        raise


def test_a_crash_is_never_taken_for_a_signal(pool, tmp_path):
    """No exit code 75, no checkpoint with a dead rank; the run goes on from the one before."""
    with pytest.raises(WorkerError):
        pool.run(
            crash_and_signal, 2, tmp_path / "runs", tmp_path / "outcome", tmp_path, init_process_group=False, timeout=60
        )
    name, code, step = (tmp_path / "outcome").read_text().split()
    assert name != "AgreedExit" and code == "None" and int(step) <= 4
    assert checkpoint.newest_good(tmp_path / "runs").step in (2, 4)


class Scripted(Noisy):
    """A monitored value that improves twice and then never again."""

    def validation_step(self, batch, batch_idx):
        self.log("score", (3.0, 2.0, 1.0)[min(self.trainer.current_epoch, 2)])


def epochs_until_stopped(folder, stop=None, stopper_last=False):
    L.seed_everything(7, verbose=False)
    stopper = EarlyStopping("score", patience=3)
    keeper = FaultTolerantCheckpoint(folder, monitor="score", save_top_k=1)
    callbacks = ([keeper, stopper] if stopper_last else [stopper, keeper]) + ([Stop(stop)] if stop else [])
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    run = L.Trainer(accelerator="cpu", devices=1, max_epochs=20, callbacks=callbacks, num_sanity_val_steps=0, **quiet)
    loader = DataLoader(Numbered(), 24)
    try:
        run.fit(Scripted(), loader, loader, ckpt_path="last")
    except (KeyboardInterrupt, SystemExit):
        return None
    return run.global_step, stopper.stopped_epoch, stopper.best_score.item()


@pytest.mark.parametrize("stopper_last", [False, True])
def test_early_stopping_stops_where_the_uninterrupted_run_does(tmp_path, stopper_last):
    """C32: ended at each epoch in turn; three epochs improve, and the third after them without is the last (6 of 2)."""
    assert epochs_until_stopped(tmp_path / "whole", stopper_last=stopper_last) == (12, 5, 1.0)
    for epoch in range(1, 6):
        assert epochs_until_stopped(tmp_path / str(epoch), stop=2 * epoch, stopper_last=stopper_last) is None
        assert epochs_until_stopped(tmp_path / str(epoch), stopper_last=stopper_last) == (12, 5, 1.0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Numbered())


def fit_loader(loader, folder, stop=None, log=None):
    """Steps of a run of one epoch over a loader, and what it warned of."""
    L.seed_everything(7, verbose=False)
    callbacks = [FaultTolerantCheckpoint(folder, every_n_train_steps=2, save_top_k=0)] + ([Stop(stop)] if stop else [])
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    run = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=callbacks, **quiet)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with suppress(KeyboardInterrupt, SystemExit):
            run.fit(Noisy(log), loader, ckpt_path="last")
    return [str(warning.message) for warning in warned]


def test_an_iterable_dataset_has_no_position_and_it_says_so(tmp_path):
    said = fit_loader(DataLoader(Stream(), 4), tmp_path)
    assert any("can't set the position" in sentence and "StatefulDataLoader" in sentence for sentence in said)


class EachRanksStream(IterableDataset):
    """Rank r's samples are r, r + world, …, so each rank's loader stands elsewhere."""

    def __iter__(self):
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        numbered = Numbered()
        return (numbered[i] for i in range(rank, SAMPLES, world))


def fit_stateful(folder, dataset, log=None, stop=None):
    """Weights after an epoch over a ``StatefulDataLoader``, with dropout's random numbers in them."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    L.seed_everything(7 + int(os.environ.get("RANK", 0)), verbose=False)
    world = int(os.environ.get("WORLD_SIZE", 1))
    keeper = FaultTolerantCheckpoint(folder, every_n_train_steps=2, save_top_k=0)
    callbacks = [keeper, *([Stop(stop)] if stop else [])]
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    strategy = "ddp" if world > 1 else "auto"
    run = L.Trainer(accelerator="cpu", devices=world, strategy=strategy, max_epochs=2, callbacks=callbacks, **quiet)
    module = Noisy(log)
    loader = StatefulDataLoader(dataset, 4, shuffle=isinstance(dataset, Numbered))
    try:
        run.fit(module, loader, ckpt_path="last")
    except (KeyboardInterrupt, SystemExit):
        return None
    return {"weights": full_state(module), "steps": run.global_step}


@pytest.mark.parametrize(("data_set", "world"), [(EachRanksStream, 1), (EachRanksStream, 2), (Numbered, 1)])
def test_a_stateful_loader_goes_on_at_its_next_sample(pool, tmp_path, data_set, world):
    """Lightning fetches one batch of a stream ahead; that batch isn't left out, and each rank has its own position."""
    pytest.importorskip("torchdata.stateful_dataloader")
    call = {"init_process_group": False, "timeout": 120}
    whole = pool.run(fit_stateful, world, tmp_path / "whole", data_set(), tmp_path / "log", **call)
    pool.run(fit_stateful, world, tmp_path / "runs", data_set(), tmp_path / "first", 5, **call)
    assert checkpoint.newest_good(tmp_path / "runs").step == 4
    went_on = pool.run(fit_stateful, world, tmp_path / "runs", data_set(), tmp_path / "second", **call)
    seen = samples_by_step(tmp_path / "first", world)[:4] + samples_by_step(tmp_path / "second", world)
    assert seen == samples_by_step(tmp_path / "log", world)
    assert_equal(went_on, whole)


def saved_by_hand(kind, folder):
    """A checkpoint saved by ``trainer.save_checkpoint`` after a fit, read by ``load_from_checkpoint``."""
    L.seed_everything(7, verbose=False)
    strategy = "ddp" if kind == "ddp" else HybridParallelStrategy(layout=kind, timeout=60)
    keeper = FaultTolerantCheckpoint(folder / "runs", every_n_train_steps=1000)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    run = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, callbacks=[keeper], **quiet)
    module = Noisy()
    run.fit(module, DataLoader(Numbered(), 4))
    run.save_checkpoint(folder / "by_hand")
    weights = full_state(module)
    loaded = Noisy.load_from_checkpoint(folder / "by_hand", weights_only=False)
    return all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items()) and len(weights)


@pytest.mark.parametrize("kind", ["ddp", "shard=2"])
def test_save_checkpoint_and_load_from_checkpoint_work_with_directories(pool, tmp_path, kind):
    number = len(Noisy().state_dict())
    assert pool.run(saved_by_hand, 2, kind, tmp_path, init_process_group=False, timeout=120) == [number, number]
    assert checkpoint.verify(tmp_path / "by_hand").intact
