"""Tensor parallelism through the Trainer: alone, with the other axes, and with metrics counted on data axes only."""

from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_dist import ModelPlan
from lightning_dist.parallel.tensor import check_replicas
from lightning_dist.testing import WorkerError
from tests.strategies.test_data_axes import global_steps
from tests.strategies.test_pipeline_axis import check, sizes
from tests.strategies.training import Classifier, Network, data, make, reference, trainer

PLAN = ModelPlan(tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})


class Planned(Classifier):
    """Four blocks, cut inside; norms, embedding and head are whole on every rank."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model = Network(depth=4)

    def parallel_plan(self):
        return PLAN


@pytest.mark.parametrize("layout", ["tp=2", "shard=2,tp=2", "replicate=2,tp=2", "pp=2,tp=2"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weights_equal_one_process(pool, layout, optimizer):
    _, data_ranks = sizes(layout)
    dataset = data(40 * data_ranks)
    clip = partial(nn.utils.clip_grad_norm_, max_norm=0.1)
    steps = global_steps(dataset, 4, data_ranks, 3)
    wanted, norms = reference(make(Planned, optimizer=optimizer), steps, clip=clip)
    settings = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1, "factory_kwargs": {"optimizer": optimizer}}
    check(pool, layout, dataset, 4, wanted, norms, factory=Planned, **settings)


@pytest.mark.slow
def test_two_by_two_by_two(pool):
    dataset = data(32)
    wanted, norms = reference(make(Planned), global_steps(dataset, 4, 2))
    check(pool, "pp=2,shard=2,tp=2", dataset, 4, wanted, norms, factory=Planned)


def test_a_network_without_a_plan_is_told_where_to_start(pool):
    dataset = data(8)
    with pytest.raises(WorkerError, match=r"blocks\.\*\.up: 10 -> 20"):
        check(pool, "tp=2", dataset, 4, {}, factory=Classifier)


class Counting(Planned):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.samples = SumMetric()

    def training_step(self, batch, batch_idx):
        self.samples.update(len(batch[1]))
        self.log("metric", self.samples, on_step=False, on_epoch=True)
        self.log("sum", float(len(batch[1])), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return self.loss(batch)


def counts(layout):
    run = trainer(layout)
    module = make(Counting)
    run.fit(module, DataLoader(data(32), 4))
    if "tensor" in (run.strategy.device_mesh.mesh_dim_names or ()):
        check_replicas(module, run.strategy.device_mesh["tensor"])
    return {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("layout", ["tp=2", "shard=2,tp=2", "pp=2,tp=2", "pp=2"])
def test_sums_count_data_ranks_only(pool, layout):
    """C11: 32 samples, whatever the layout."""
    world, _ = sizes(layout)
    for metrics in pool.run(counts, world, layout, init_process_group=False):
        assert metrics == {"metric": 32.0, "sum": 32.0}


class LanguageModel(L.LightningModule):
    """A Hugging Face causal language model with grouped-query attention, as a user writes it."""

    def __init__(self, tied=False):
        super().__init__()
        import transformers as T

        config = T.LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=32,
            tie_word_embeddings=tied,
        )
        self.model = T.LlamaForCausalLM(config)

    def loss(self, batch):
        ids, _ = batch
        logits = self.model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def tokens(samples: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 32, (samples, 9), generator=generator)
    return torch.utils.data.TensorDataset(ids, torch.zeros(samples))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "shard=2,tp=2", "pp=2,tp=2"])
def test_hugging_face_model_by_its_own_plan(pool, layout, tied):
    _, data_ranks = sizes(layout)
    dataset = tokens(12 * data_ranks)
    clip = partial(nn.utils.clip_grad_norm_, max_norm=0.5)
    wanted, norms = reference(make(LanguageModel, tied=tied), global_steps(dataset, 4, data_ranks), clip=clip)
    kwargs = {"factory_kwargs": {"tied": tied}, "gradient_clip_val": 0.5}
    check(pool, layout, dataset, 4, wanted, norms, factory=LanguageModel, **kwargs)


class ShardedLogits(LanguageModel):
    """The loss is computed outside of the network, on logits that stay cut along the vocabulary."""

    def parallel_plan(self):
        return ModelPlan(network="model", tensor={"lm_head": "loss_parallel"})

    def loss(self, batch):
        ids, _ = batch
        logits = self.model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        return F.cross_entropy(logits, ids.roll(-1, 1).flatten())


@pytest.mark.parametrize("layout", ["tp=2", "pp=2,tp=2"])
def test_loss_on_sharded_logits(pool, layout):
    dataset = tokens(12)
    wanted, norms = reference(make(ShardedLogits), global_steps(dataset, 4, 1))
    check(pool, layout, dataset, 4, wanted, norms, factory=ShardedLogits)
