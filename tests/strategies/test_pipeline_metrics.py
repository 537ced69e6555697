"""What a step logs, returns and decides by under a pipeline: the values of one device, on every rank."""

from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall

from tests.strategies.test_pipeline_axis import Deep
from tests.strategies.training import CLASSES, InOrder, MaskedClassifier, data, full_state, make, merged, trainer, worst


class Logged(Deep):
    """Logs in every way there is, in training and in validation."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for stage in ("train", "val"):
            setattr(self, f"{stage}_accuracy", MulticlassAccuracy(CLASSES, average="micro"))
            setattr(self, f"{stage}_mean", MeanMetric())
            setattr(self, f"{stage}_confidences", CatMetric())
            both = {"precision": MulticlassPrecision(CLASSES), "recall": MulticlassRecall(CLASSES)}
            setattr(self, f"{stage}_late", MetricCollection(both, prefix=f"{stage}_late_"))
            called = MetricCollection([MulticlassPrecision(CLASSES), MulticlassRecall(CLASSES)])
            setattr(self, f"{stage}_together", called.clone(prefix=f"{stage}_"))

    def run_step(self, stage, batch):
        x, y = batch
        logits = self.model(x)
        loss = F.cross_entropy(logits, y)
        accuracy, mean, late = (getattr(self, f"{stage}_{name}") for name in ("accuracy", "mean", "late"))
        accuracy(logits, y)
        mean.update(logits.detach().double().abs().mean(-1))
        late.update(logits, y)
        together = getattr(self, f"{stage}_together")
        together(logits, y)
        getattr(self, f"{stage}_confidences").update(logits.detach().amax(-1))
        self.log(f"{stage}_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log(f"{stage}_synced", loss, sync_dist=True, on_step=False, on_epoch=True)
        self.log(f"{stage}_accuracy", accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict(together, on_step=True, on_epoch=True)
        self.log(f"{stage}_mean", mean, on_step=False, on_epoch=True)
        extremes = {"sum": y.sum().double(), "max": logits.max(), "min": logits.min()}
        for name, value in extremes.items():
            self.log(f"{stage}_{name}", value, reduce_fx=name, on_step=True, on_epoch=True)
        self.log_dict({f"{stage}_a": loss * 2, f"{stage}_b": 3.0}, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits, "ids": y, "count": torch.tensor(len(y)), "name": stage}

    def training_step(self, batch, batch_idx):
        return self.run_step("train", batch)

    def validation_step(self, batch, batch_idx):
        return self.run_step("val", batch)

    def end_of_epoch(self, stage):
        late = getattr(self, f"{stage}_late")
        self.log_dict(late.compute())
        late.reset()
        confidences = getattr(self, f"{stage}_confidences")
        self.log(f"{stage}_confidence", confidences.compute().max())
        confidences.reset()

    def on_train_epoch_end(self):
        self.end_of_epoch("train")

    def on_validation_epoch_end(self):
        self.end_of_epoch("val")


class Observe(L.Callback):
    """Keeps what callbacks are given and what the Trainer shows, batch by batch."""

    def __init__(self):
        self.train, self.val, self.shown, self.epochs = [], [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.train.append(outputs)
        self.shown.append(numbers(trainer.logged_metrics))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if not trainer.sanity_checking:
            self.val.append(outputs)

    def on_train_end(self, trainer, pl_module):
        self.epochs = [numbers(trainer.callback_metrics), numbers(trainer.progress_bar_metrics)]


def numbers(metrics):
    return {name: float(value) for name, value in metrics.items()}


def single(**kwargs):
    """Lightning alone, on one device."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(**{"accelerator": "cpu", "devices": 1, "precision": "64-true", "max_epochs": 1, **quiet, **kwargs})


def observe(layout, factory, dataset, batch_size, schedule="1F1B", **kwargs):
    module, seen, validation = make(factory), Observe(), data(12, seed=5)
    kwargs["callbacks"] = [seen]
    if layout is None:
        run = single(**kwargs)
        samplers = [None, None]
    else:
        settings = {"pipeline_schedule": schedule, "microbatches": 4}
        run = trainer(layout, strategy_kwargs=settings, use_distributed_sampler=False, **kwargs)
        samplers = [InOrder(dataset, run.strategy), InOrder(validation, run.strategy)]
    run.fit(
        module, DataLoader(dataset, batch_size, sampler=samplers[0]), DataLoader(validation, 6, sampler=samplers[1])
    )
    return {name: getattr(seen, name) for name in ("train", "val", "shown", "epochs")} | {"weights": full_state(module)}


def same(got, wanted, path=""):
    """Asserts that two nestings of values are equal to 1e-9, naming the first that is not."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), (path, got.keys() ^ wanted.keys())
        for key in wanted:
            same(got[key], wanted[key], f"{path}/{key}")
    elif isinstance(wanted, list):
        assert len(got) == len(wanted), path
        for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
            same(one, other, f"{path}/{index}")
    elif isinstance(wanted, torch.Tensor):
        assert got.shape == wanted.shape, path
        assert got.dtype == wanted.dtype, path
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12, msg=lambda text: f"{path}: {text}")
    elif isinstance(wanted, str):
        assert got == wanted, path
    else:
        # a metric of float32 state, and Lightning's own reductions, are float32 on one device as well
        assert got == pytest.approx(wanted, rel=1e-6), path


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_everything_logged_and_returned_is_the_one_device_value_on_every_rank(pool, schedule):
    """Batches of 8, 8 and 3 samples; two epochs."""
    arguments = {"max_epochs": 2, "num_sanity_val_steps": 1}
    wanted = observe(None, Logged, data(19), 8, **arguments)
    results = pool.run(
        observe, 2, "pp=2", Logged, data(19), 8, schedule, init_process_group=False, timeout=120, **arguments
    )
    for result in results:
        for part in ("train", "val", "shown", "epochs"):
            same(result[part], wanted[part], part)
    assert worst(merged(results), wanted["weights"]) < 1e-9


def test_epoch_values_over_data_ranks(pool):
    """The means, sums and metric objects of an epoch do not know how its samples were spread."""
    wanted = observe(None, Logged, data(32), 16, val_check_interval=1.0)
    results = pool.run(observe, 4, "pp=2,replicate=2", Logged, data(32), 8, init_process_group=False, timeout=120)
    for result in results:
        for name, value in wanted["epochs"][0].items():
            if not name.endswith("_step") and name not in ("train_loss", "train_accuracy", "val_loss", "val_accuracy"):
                assert result["epochs"][0][name] == pytest.approx(value, rel=1e-6), name


class MaskedLogged(Deep, MaskedClassifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


def with_masks(samples):
    dataset = data(samples)
    dataset.tensors[1][1::3] = -100
    dataset.tensors[1][:2] = -100
    return dataset


def test_accumulation_divides_no_logged_loss(pool):
    """C39. Masked targets: microbatches' means count by their valid targets; the first microbatch has none."""
    arguments = {"accumulate_grad_batches": 4}
    wanted = observe(None, MaskedLogged, with_masks(16), 8, limit_train_batches=1, **arguments)
    results = pool.run(
        observe,
        2,
        "pp=2",
        MaskedLogged,
        with_masks(16),
        8,
        init_process_group=False,
        limit_train_batches=1,
        **arguments,
    )
    for result in results:
        same(result["shown"], wanted["shown"])
        loss = wanted["shown"][0]["train_loss_step"]
        assert float(result["train"][0]["loss"]) * 4 == pytest.approx(loss)  # Lightning's own division, for callbacks
    reference = observe(None, MaskedLogged, with_masks(16), 8, limit_train_batches=0)
    untrained = pool.run(
        observe, 2, "pp=2", MaskedLogged, with_masks(16), 8, init_process_group=False, limit_train_batches=0
    )
    assert untrained[1]["epochs"] == untrained[0]["epochs"]
    same(untrained[0]["epochs"], reference["epochs"])


class Scheduled(Deep):
    """Its learning rate follows the validation loss; its data are easy at first and impossible later."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 if self.current_epoch < 2 else -1)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def decide(layout, folder):
    module = make(Scheduled)
    keep = ModelCheckpoint(folder, "{epoch}-{val_loss:.6f}", monitor="val_loss", save_top_k=1)
    stop = EarlyStopping("val_loss", patience=2)
    build = single if layout is None else lambda **kwargs: trainer(layout, use_distributed_sampler=False, **kwargs)
    run = build(max_epochs=10, callbacks=[keep, stop], enable_checkpointing=True)
    run.fit(module, DataLoader(data(16), 4), DataLoader(data(8, seed=5), 4))
    trained, stopped = full_state(module), stop.stopped_epoch
    score = run.validate(module, DataLoader(data(8, seed=5), 4), ckpt_path="best", verbose=False, weights_only=False)
    return {
        "epochs": run.current_epoch,
        "stopped": stopped,
        "best": Path(keep.best_model_path).name,
        "best_score": float(keep.best_model_score),
        "score": score[0]["val_loss"],
        "lr": run.optimizers[0].param_groups[0]["lr"],
    }, trained


def test_checkpoint_stopping_and_plateau_decide_alike_on_every_rank(pool, tmp_path):
    """C20: one best path with one score, one epoch to stop at, one learning rate: those of one device."""
    wanted, weights = decide(None, tmp_path / "one")
    results = pool.run(decide, 2, "pp=2", tmp_path / "two", init_process_group=False, timeout=120)
    assert wanted["stopped"] > 0
    assert wanted["lr"] < 0.1
    for decisions, _ in results:
        assert decisions == pytest.approx(wanted)
    assert worst({**results[0][1], **results[1][1]}, weights) < 1e-9
    assert [path.name for path in (tmp_path / "two").iterdir()] == [wanted["best"]]
