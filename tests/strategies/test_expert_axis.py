"""Expert parallelism through the Trainer: experts spread over data ranks train to the numbers of one process."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lightning_dist import HybridParallelStrategy
from lightning_dist.testing import WorkerError
from tests.parallel.expert.networks import WIDTH, Network
from tests.strategies.test_data_axes import check as check_weights
from tests.strategies.test_data_axes import global_steps
from tests.strategies.training import Classifier, data, make, reference


class Experts(Classifier):
    """Two blocks of eight experts, top 2, no auxiliary loss."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model = Network()

    def loss(self, batch):
        return self.model(*batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Mixtral(Classifier):
    """An unmodified Hugging Face model; its router computes in float32."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        import transformers as T

        config = T.MixtralConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=32,
            num_local_experts=4,
        )
        config._experts_implementation = "eager"
        self.model = T.MixtralForCausalLM(config)

    def loss(self, batch):
        logits = self.model(input_ids=batch[0], use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


def vectors(samples):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 5, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(samples, 5, 3, generator=generator, dtype=torch.float64))


def tokens(samples):
    ids = torch.randint(0, 32, (samples, 6), generator=torch.Generator().manual_seed(3))
    return TensorDataset(ids, torch.zeros(samples))


@pytest.mark.parametrize(
    ("layout", "ranks"), [("shard=2,ep=2", 2), ("shard=4,ep=2", 4), ("replicate=2,shard=2,ep=2", 4)]
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_weights_equal_one_process(pool, layout, ranks, accumulate, monkeypatch):
    """C03, C04: dense and expert gradients have the right size, and one norm clips both."""
    monkeypatch.setattr("tests.strategies.test_data_axes.world", lambda _: ranks)
    dataset = vectors(20 * ranks)
    clip = partial(nn.utils.clip_grad_norm_, max_norm=0.05)
    wanted, norms = reference(make(Experts), global_steps(dataset, 4, ranks, accumulate), clip=clip)
    check_weights(
        pool,
        layout,
        dataset,
        4,
        wanted,
        norms,
        factory=Experts,
        gradient_clip_val=0.05,
        accumulate_grad_batches=accumulate,
    )


def test_mixtral_unchanged(pool, monkeypatch):
    monkeypatch.setattr("tests.strategies.test_data_axes.world", lambda _: 2)
    dataset = tokens(16)
    wanted, norms = reference(make(Mixtral), global_steps(dataset, 2, 2))
    check_weights(pool, "shard=2,ep=2", dataset, 2, wanted, norms, 1e-6, factory=Mixtral)


def test_a_network_without_experts_is_refused(pool, monkeypatch):
    monkeypatch.setattr("tests.strategies.test_data_axes.world", lambda _: 2)
    with pytest.raises(WorkerError, match=r"no experts were found in Network"):
        check_weights(pool, "shard=2,ep=2", data(8), 2, {})


@pytest.mark.parametrize("other", ["tp", "cp", "pp"])
def test_experts_beside_other_axes_are_refused(other):
    with pytest.raises(ValueError, match="expert_parallel_size=2 does not fit"):
        HybridParallelStrategy(layout=f"shard=2,ep=2,{other}=2")
