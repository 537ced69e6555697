"""Expert parallelism through the Trainer: experts spread over data ranks train to the numbers of one process."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lightning_dist import ModelPlan
from lightning_dist.testing import WorkerError
from tests.parallel.expert.networks import WIDTH, Network, force_routing
from tests.strategies.test_context_axis import Masked, fit, one_process
from tests.strategies.test_data_axes import check as check_weights
from tests.strategies.test_data_axes import global_steps
from tests.strategies.test_pipeline_axis import SCHEDULES, check, sizes
from tests.strategies.test_tensor_axis import LanguageModel
from tests.strategies.training import Classifier, data, make, merged, reference, train, worst


class Experts(Classifier):
    """Two blocks of eight experts, top 2, no auxiliary loss."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model = Network()

    def loss(self, batch):
        return self.model(*batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def mixtral():
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
    return T.MixtralForCausalLM(config)


class Mixtral(Classifier):
    """An unmodified Hugging Face model; its router computes in float32."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model = mixtral()

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


class Deep(Experts):
    """Four blocks, so that each of two stages may have two."""

    def __init__(self, **settings):
        super().__init__()
        self.model = Network(depth=4, **settings)


class Planned(Deep):
    """The dense layers are cut over tensor ranks as well."""

    def parallel_plan(self):
        return ModelPlan(tensor={"blocks.*.dense": "colwise_gather_output"})


@pytest.mark.parametrize("layout", ["shard=2,tp=2,ep=2", "pp=2,shard=2,ep=2"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_beside_tensor_and_pipeline_ranks(pool, layout, accumulate):
    dataset = vectors(48)
    clip = partial(nn.utils.clip_grad_norm_, max_norm=0.05)
    wanted, norms = reference(make(Planned), global_steps(dataset, 4, 2, accumulate), clip=clip)
    settings = {"gradient_clip_val": 0.05, "accumulate_grad_batches": accumulate}
    check(pool, layout, dataset, 4, wanted, norms, factory=Planned, **settings)


class Skewed(Deep):
    """Half of the experts are favoured."""

    routing = "skewed"

    def __init__(self):
        super().__init__(bias_update_rate=1e-12)  # the bias is there, and moves by nothing that changes a choice
        force_routing(self.model, self.routing, 0)


class AllToOne(Skewed):
    """All tokens go to the first two of eight experts: the rank with the others computes nothing."""

    routing = "all_to_one"


@pytest.mark.parametrize("factory", [Skewed, AllToOne])
def test_uneven_routing_in_a_pipeline(pool, factory):
    """C15: a rank without tokens stays in every exchange."""
    dataset = vectors(32)
    wanted, norms = reference(make(factory), global_steps(dataset, 4, 2))
    moved = {name for name in wanted if name.endswith("expert_bias")}
    results = pool.run(train, 4, "pp=2,shard=2,ep=2", factory, dataset, 4, init_process_group=False, timeout=120)
    found = merged(results)
    assert found.keys() == wanted.keys()
    left = {name: value for name, value in wanted.items() if name not in moved}
    assert worst({name: found[name] for name in left}, left) < 1e-9
    assert results[0]["steps"] == len(norms)


@pytest.mark.slow
def test_beside_both(pool):
    dataset = vectors(16)
    wanted, norms = reference(make(Planned), global_steps(dataset, 4, 2))
    check(pool, "pp=2,shard=2,tp=2,ep=2", dataset, 4, wanted, norms, factory=Planned)


@pytest.mark.parametrize("schedule", [schedule for schedule in SCHEDULES if schedule != "1F1B"])
def test_under_every_schedule(pool, schedule):
    dataset = vectors(32)
    wanted, norms = reference(make(Deep), global_steps(dataset, 8, 2))
    settings = {"pipeline_schedule": schedule, "microbatches": 4}
    check(pool, "pp=2,shard=2,ep=2", dataset, 8, wanted, norms, factory=Deep, strategy_kwargs=settings)


class Weighted(Deep):
    """With auxiliary losses, which only the step's end adds to the loss."""

    def __init__(self):
        super().__init__(balance_coefficient=0.1, z_coefficient=0.01)


@pytest.mark.parametrize("layout", ["pp=2", "pp=2,shard=2,ep=2"])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_auxiliary_losses_of_all_stages(pool, layout, schedule):
    """One process with the same microbatches, each that of all data ranks together."""
    _, data_ranks = sizes(layout)
    dataset = vectors(16 * data_ranks)
    module = make(Weighted).double()
    module.train()
    optimizer = module.configure_optimizers()
    wanted_losses = []
    for step in range(2):
        optimizer.zero_grad()
        losses = []
        for microbatch in range(4):
            first = data_ranks * (8 * step + 2 * microbatch)
            batch = torch.utils.data.default_collate([dataset[first + i] for i in range(2 * data_ranks)])
            losses.append(module.loss(batch))
            (losses[-1] / 4).backward()
        optimizer.step()
        wanted_losses.append(sum(loss.item() for loss in losses) / 4)
    settings = {"pipeline_schedule": schedule, "microbatches": 4}
    results = check(pool, layout, dataset, 8, dict(module.state_dict()), factory=Weighted, strategy_kwargs=settings)
    for rank, result in enumerate(results):
        if result["losses"]:
            assert len(result["losses"]) == 8, rank
    logged = [result["losses"] for result in results if result["losses"]]
    means = [sum(losses[4 * step + i] for losses in logged for i in range(4)) / 4 / len(logged) for step in range(2)]
    assert means == pytest.approx(wanted_losses, rel=1e-9)


class Balanced(LanguageModel):
    """A causal language model on sequences that are cut, with balancing biases."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model = mixtral()


class BalancedMasked(Masked, Balanced):
    pass


@pytest.mark.parametrize("layout", ["cp=2,ep=2", "shard=2,cp=2,ep=2", "shard=2,cp=2,ep=4", "pp=2,cp=2,ep=2"])
def test_beside_context_ranks(pool, layout):
    world, data_ranks = sizes(layout)
    wanted = one_process(BalancedMasked, 4 * data_ranks)
    results = pool.run(fit, world, layout, BalancedMasked, gradient_clip_val=0.3, init_process_group=False, timeout=120)
    assert worst(merged(results), wanted) < 1e-6


def test_auxiliary_losses_beside_context_ranks_are_refused(pool):
    with pytest.raises(WorkerError, match=r"context_parallel_size=2 does not fit model\.blocks\.0\.moe"):
        check(pool, "cp=2", vectors(8), 4, {}, factory=Weighted)


class WithRouterLogits(Mixtral):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model.config.output_router_logits = True


def test_balancing_loss_of_a_hugging_face_model_under_a_pipeline_is_refused(pool):
    with pytest.raises(WorkerError, match=r"pipeline_parallel_size=2 does not fit output_router_logits=True"):
        check(pool, "pp=2", tokens(8), 4, {}, factory=WithRouterLogits)
