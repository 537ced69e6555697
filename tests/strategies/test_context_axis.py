"""Context parallelism through the Trainer: sequences cut over ranks train to the numbers of one process."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

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


@pytest.mark.parametrize(
    ("layout", "trainers"),
    [("cp=2", 1), ("shard=2,cp=2", 1), ("cp=2,tp=2", 1), pytest.param("cp=2", 2, id="two trainers")],
)
def test_weights_equal_one_process(pool, layout, trainers):
    """C09, C12: uneven masks, targets on both sides of the cut. Hugging Face takes its loss in float32."""
    world, data_ranks = sizes(layout)
    module = make(Masked).double()
    optimizer = module.configure_optimizers()
    dataset = Sequences(16)
    for start in [*range(0, 16, 4 * data_ranks)] * trainers:
        rows = slice(start, start + 4 * data_ranks)
        optimizer.zero_grad()
        module.loss(
            dict(input_ids=dataset.ids[rows], attention_mask=dataset.mask[rows], labels=dataset.labels[rows])
        ).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        optimizer.step()
    results = pool.run(
        fit, world, layout, gradient_clip_val=0.3, trainers=trainers, init_process_group=False, timeout=120
    )
    assert worst(merged(results), dict(module.state_dict())) < 1e-6


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
    module = make(Masked).double()
    optimizer = module.configure_optimizers()
    dataset = Sequences(16)
    for start in range(0, 16, 4 * accumulate):
        rows = slice(start, start + 4 * accumulate)
        optimizer.zero_grad()
        module.loss(
            dict(input_ids=dataset.ids[rows], attention_mask=dataset.mask[rows], labels=dataset.labels[rows])
        ).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        optimizer.step()
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
    assert worst(merged(results), dict(module.state_dict())) < 1e-6


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
