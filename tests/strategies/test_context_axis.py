"""Context parallelism through the Trainer: sequences cut over ranks train to the numbers of one process."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_dist import ModelPlan
from lightning_dist.testing import WorkerError
from tests.strategies.test_pipeline_axis import sizes
from tests.strategies.test_tensor_axis import LanguageModel
from tests.strategies.training import Classifier, InOrder, full_state, make, merged, trainer, worst


class Sequences(Dataset):
    """Mappings as tokenizers give them: padding at the end, labels of -100 there and in places."""

    def __init__(self, samples):
        generator = torch.Generator().manual_seed(4)
        self.ids = torch.randint(0, 32, (samples, 8), generator=generator)
        lengths = torch.randint(2, 9, (samples, 1), generator=generator)
        self.mask = (torch.arange(8) < lengths).long()
        ignored = torch.rand(samples, 8, generator=generator) < 0.2
        self.labels = self.ids.masked_fill((self.mask == 0) | ignored, -100)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": self.mask[i], "labels": self.labels[i]}


class Masked(LanguageModel):
    def loss(self, batch):
        return self.model(**batch, use_cache=False).loss

    def loss_weight(self, batch):
        return (batch["labels"][:, 1:] != -100).sum()

    def parallel_plan(self):
        return ModelPlan(network="model", sequence_dims={"input_ids": 1, "attention_mask": 1, "labels": 1})


def fit(layout, factory=Masked, samples=16, batch_size=4, trainers=1, **kwargs):
    module = make(factory)
    for _ in range(trainers):
        run = trainer(layout, use_distributed_sampler=False, **kwargs)
        dataset = Sequences(samples)
        run.fit(module, DataLoader(dataset, batch_size, sampler=InOrder(dataset, run.strategy)))
    return {"weights": full_state(module)}


def one_process(factory, samples, times=1):
    """The weights after clipped steps on all sequences, ``samples`` at a time."""
    module = make(factory).double()
    optimizer = module.configure_optimizers()
    dataset = Sequences(16)
    for start in [*range(0, 16, samples)] * times:
        rows = slice(start, start + samples)
        optimizer.zero_grad()
        module.loss(
            dict(input_ids=dataset.ids[rows], attention_mask=dataset.mask[rows], labels=dataset.labels[rows])
        ).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        optimizer.step()
    return dict(module.state_dict())


@pytest.mark.parametrize(
    ("layout", "trainers"),
    [("cp=2", 1), ("shard=2,cp=2", 1), ("cp=2,tp=2", 1), pytest.param("cp=2", 2, id="two trainers")],
)
def test_weights_equal_one_process(pool, layout, trainers):
    """C09, C12: uneven masks, targets on both sides of the cut. Hugging Face takes its loss in float32."""
    world, data_ranks = sizes(layout)
    wanted = one_process(Masked, 4 * data_ranks, trainers)
    results = pool.run(
        fit, world, layout, gradient_clip_val=0.3, trainers=trainers, init_process_group=False, timeout=120
    )
    assert worst(merged(results), wanted) < 1e-6


class Undeclared(Masked):
    def parallel_plan(self):
        return ModelPlan(network="model")


def test_sequences_that_no_plan_declares_are_refused(pool):
    with pytest.raises(WorkerError, match=r"needs ModelPlan\.sequence_dims"):
        pool.run(fit, 2, "cp=2", Undeclared, init_process_group=False)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_inside_a_pipeline(pool, schedule, accumulate):
    """Microbatches of one sample each, whose numbers of targets differ, also between the ranks that share them."""
    wanted = one_process(Masked, 4 * accumulate)
    results = pool.run(
        fit,
        4,
        "pp=2,cp=2",
        gradient_clip_val=0.3,
        accumulate_grad_batches=accumulate,
        strategy_kwargs={"pipeline_schedule": schedule, "microbatches": 4},
        init_process_group=False,
        timeout=120,
    )
    assert worst(merged(results), wanted) < 1e-6


class ByHand(Classifier):
    """Attention that no one can meet."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32))

    def loss(self, batch):
        return nn.functional.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def parallel_plan(self):
        return ModelPlan(network="model", sequence_dims={"input_ids": 1, "labels": 1})


@pytest.mark.parametrize("layout", ["cp=2", "pp=2,cp=2"])
def test_a_step_without_attention_is_refused(pool, layout):
    world, _ = sizes(layout)
    with pytest.raises(WorkerError, match=r"called no F\.scaled_dot_product_attention"):
        pool.run(fit, world, layout, ByHand, init_process_group=False, timeout=60)


class Shifted(Sequences):
    """Each token's label is the next token's, so that the step may take the loss by itself."""

    def __getitem__(self, i):
        sample = super().__getitem__(i)
        return {**sample, "labels": torch.cat([sample["labels"][1:], torch.tensor([-100])])}


class LogsByHand(Masked):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        accuracy = MulticlassAccuracy(32, average="micro", ignore_index=-100)
        self.accuracy = nn.ModuleDict({"train_batches": accuracy, "val_batches": accuracy.clone()})

    def take(self, batch, name):
        labels = batch["labels"]
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), ignore_index=-100)
        self.accuracy[f"{name}_batches"](logits.argmax(-1), labels)
        self.log_dict(
            {f"{name}_loss": loss, f"{name}_accuracy": self.accuracy[f"{name}_batches"]}, on_step=False, on_epoch=True
        )
        self.log(f"{name}_targets", (labels != -100).sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.take(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.take(batch, "val")

    def loss_weight(self, batch):
        return (batch["labels"] != -100).sum()


def logged(layout):
    module = make(LogsByHand)
    run = trainer(layout, use_distributed_sampler=False, strategy_kwargs={"microbatches": 2} if "pp" in layout else {})
    loader = DataLoader(Shifted(8), 4)
    run.fit(module, loader, loader)
    return {name: value.item() for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("layout", ["cp=2", "pp=2,cp=2"])
def test_logged_numbers_are_those_of_whole_sequences(pool, layout):
    """C09: the ranks hold different numbers of targets, so a mean of their means would be another number."""
    world, _ = sizes(layout)
    module = make(LogsByHand).double()
    module.log = module.log_dict = lambda *_, **__: None
    optimizer = module.configure_optimizers()
    batches = list(DataLoader(Shifted(8), 4))
    train_losses = []
    for batch in batches:
        optimizer.zero_grad()
        train_losses.append(module.training_step(batch, 0))
        train_losses[-1].backward()
        optimizer.step()
    with torch.no_grad():
        losses = [module.take(batch, "val").item() for batch in batches]
    wanted = {
        "train_loss": sum(loss.item() for loss in train_losses) / 2,
        "val_loss": sum(losses) / 2,
        "train_accuracy": module.accuracy["train_batches"].compute().item(),
        "val_accuracy": module.accuracy["val_batches"].compute().item(),
    }
    targets = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    for metrics in pool.run(logged, world, layout, init_process_group=False, timeout=120):
        assert metrics.pop("train_targets") == metrics.pop("val_targets") == targets
        assert metrics == pytest.approx(wanted, rel=1e-6)
