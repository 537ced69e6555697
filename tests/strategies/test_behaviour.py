"""What a user's module, loaders, metrics and callbacks meet under the data axes."""

import os
import re
from collections import Counter

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from lightning_dist.callbacks import ShardedWeightAveraging
from lightning_dist.parallel.scaler import GlobalGradScaler
from lightning_dist.strategies import HybridMixedPrecision
from lightning_dist.testing import WorkerError
from tests.strategies.training import Block, Classifier, data, full_state, make, train, trainer, worst


def run(pool, function, world, *args, **kwargs):
    return pool.run(function, world, *args, init_process_group=False, **kwargs)


# --- accumulation ------------------------------------------------------------------------------------------------


class CountCollectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def count_collectives(layout, window, steps):
    run = trainer(layout, accumulate_grad_batches=window, limit_train_batches=steps * window)
    with CountCollectives() as mode:
        run.fit(make(Classifier), DataLoader(data(64), 2))
    return mode.counts


@pytest.mark.parametrize(("layout", "operation"), [("shard=2", "reduce_scatter"), ("replicate=2", "allreduce_")])
def test_gradients_are_exchanged_once_per_step_whatever_the_window(pool, layout, operation):
    """3 blocks and the root: 4 exchanges a step, and nothing else that grows with the steps."""
    for window in (1, 4):
        few, many = (run(pool, count_collectives, 2, layout, window, steps)[0] for steps in (2, 4))
        gathers = {name: n for name, n in (many - few).items() if "allgather" not in name and "_allgather" not in name}
        gathers.pop("c10d.broadcast_.default")  # Lightning's own, one for each batch.
        assert sum(gathers.values()) == 4 * 2, (window, gathers)
        assert all(operation in name for name in gathers)


# --- manual optimization -----------------------------------------------------------------------------------------


class Gan(L.LightningModule):
    """Two networks, two optimizers, stepped by hand (C33: Lightning counts each optimizer's steps)."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def critic_loss(self, x):
        return self.critic(self.generator(x).detach()).mean() - self.critic(x).mean()

    def generator_loss(self, x):
        return -self.critic(self.generator(x)).mean()

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        self.toggle_optimizer(critic)
        critic.zero_grad()
        self.manual_backward(self.critic_loss(batch[0]))
        critic.step()
        self.untoggle_optimizer(critic)
        self.toggle_optimizer(generator)
        generator.zero_grad()
        self.manual_backward(self.generator_loss(batch[0]))
        generator.step()
        self.untoggle_optimizer(generator)

    def configure_optimizers(self):
        return torch.optim.SGD(self.generator.parameters(), 0.1), torch.optim.SGD(self.critic.parameters(), 0.05)


@pytest.mark.parametrize("layout", ["shard=2", "replicate=2"])
def test_two_optimizers_stepped_by_hand(pool, layout):
    dataset = data(24)
    module = make(Gan).double()
    generator, critic = module.configure_optimizers()
    for i in range(0, 24, 4):
        x = dataset.tensors[0][i : i + 4]
        critic.zero_grad()
        module.critic_loss(x).backward()
        critic.step()
        generator.zero_grad()
        module.generator_loss(x).backward()
        generator.step()
    for result in run(pool, train, 2, layout, Gan, dataset, 2):
        assert worst(result["weights"], dict(module.state_dict())) < 1e-9


# --- models ------------------------------------------------------------------------------------------------------


class OnItself(Classifier):
    """Parameters and layers on the LightningModule itself."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model = None
        self.scale = nn.Parameter(torch.ones(6))
        self.layers = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])


class Frozen(Classifier):
    """The embedding is frozen, and thawed after the second step, as fine-tuning callbacks do."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model.embed.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.model.embed.requires_grad_(True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Meta(Classifier):
    """Built on the meta device in ``configure_model``."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model = None

    def configure_model(self):
        if self.model is None:
            torch.manual_seed(5)
            with torch.device("meta"):
                from tests.strategies.training import Network

                self.model = Network()


def compare_with_one_rank(pool, factory, layouts, tolerance=1e-9, **kwargs):
    """The same samples in each step: 4 over all ranks."""
    dataset = data(24)
    wanted = run(pool, train, 1, "shard=1", factory, dataset, 4, **kwargs)[0]
    for layout in layouts:
        for result in run(pool, train, 2, layout, factory, dataset, 2, **kwargs):
            assert worst(result["weights"], wanted["weights"]) < tolerance
            assert result["norms"] == pytest.approx(wanted["norms"], rel=tolerance)
    return wanted


def test_parameters_of_the_lightning_module_itself(pool):
    compare_with_one_rank(pool, OnItself, ["shard=2", "replicate=2"])


def test_parameters_frozen_then_thawed(pool):
    wanted = compare_with_one_rank(pool, Frozen, ["shard=2", "replicate=2"])
    assert not torch.equal(wanted["weights"]["model.embed.weight"], make(Frozen).model.embed.weight.double())


def test_a_module_built_on_the_meta_device(pool):
    """Both worlds initialise unit by unit from the same seed, so both start and end alike."""
    wanted = compare_with_one_rank(pool, Meta, ["shard=2"])
    assert all(value.isfinite().all() for value in wanted["weights"].values())


class Uninitialised(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


class MetaWithoutReset(Meta):
    def configure_model(self):
        with torch.device("meta"):
            self.model = nn.Sequential(nn.Linear(6, 5), Uninitialised())


def test_a_meta_module_that_nobody_initialises_is_refused(pool):
    with pytest.raises(WorkerError, match=r"Uninitialised .*has no reset_parameters"):
        run(pool, train, 2, "shard=2", MetaWithoutReset, data(8), 2)


def init_module_empty(layout):
    strategy_trainer = trainer(layout, max_steps=1)
    with strategy_trainer.init_module(empty_init=True):
        module = Classifier()
    on_meta = module.model.head.weight.is_meta
    strategy_trainer.fit(module, DataLoader(data(8), 2))
    return on_meta, all(value.isfinite().all().item() for value in full_state(module).values())


def test_init_module_with_empty_weights(pool):
    assert run(pool, init_module_empty, 2, "shard=2") == [(True, True)] * 2


# --- precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bf16_stays_near_one_device(pool, precision):
    dataset = data(24, dtype=torch.float32)
    wanted = run(pool, train, 1, "shard=1", Classifier, dataset, 4, precision=precision)[0]["weights"]
    for result in run(pool, train, 2, "shard=2", Classifier, dataset, 2, precision=precision):
        assert worst(result["weights"], wanted) < 0.1


class Overflowing(Classifier):
    """At the second batch one rank's loss is too large for float16."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * 1e6 if batch_idx == 1 and self.global_rank == 1 else loss


def train_16_mixed(layout):
    scaler = GlobalGradScaler(init_scale=2.0**14, growth_interval=100)
    module = make(Overflowing)
    history = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            history.append((scaler.get_scale(), full_state(pl_module)["model.head.weight"].clone()))

    plugin = HybridMixedPrecision("16-mixed", "cpu", scaler)
    run = trainer(layout, precision=None, plugins=[plugin], callbacks=[Watch()], gradient_clip_val=1.0)
    run.fit(module, DataLoader(data(12, dtype=torch.float32), 2))
    return history


@pytest.mark.parametrize("layout", ["shard=2", "replicate=2"])
def test_an_overflow_on_one_rank_makes_every_rank_skip(pool, layout):
    one, two = run(pool, train_16_mixed, 2, layout)
    assert [scale for scale, _ in one] == [scale for scale, _ in two] == [2.0**14, 2.0**13, 2.0**13]
    for (_, a), (_, b) in zip(one, two, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(one[0][1], one[1][1])  # skipped
    assert not torch.equal(one[1][1], one[2][1])
    assert one[2][1].isfinite().all()


# --- one trainer, several calls ---


class Validated(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    test_step = validation_step


def several_calls(layout):
    """Sanity check, validate, fit with validation, validate, test, and a second fit."""
    module = make(Validated)
    strategy_trainer = trainer(layout, num_sanity_val_steps=1, val_check_interval=2)
    loaders = DataLoader(data(16), 2), DataLoader(data(6), 2)
    before = strategy_trainer.validate(module, loaders[1], verbose=False)[0]["val_loss"]
    strategy_trainer.fit(module, *loaders)
    once = full_state(module)
    after = strategy_trainer.validate(module, loaders[1], verbose=False)[0]["val_loss"]
    tested = strategy_trainer.test(module, loaders[1], verbose=False)[0]["val_loss"]
    strategy_trainer.fit_loop.max_epochs = 2
    strategy_trainer.fit(module, *loaders)
    plain = make(Classifier)
    trainer(layout).fit(plain, loaders[0])
    return (
        before,
        after,
        tested,
        worst(once, full_state(plain)),
        strategy_trainer.global_step,
        worst(full_state(module), once),
    )


@pytest.mark.parametrize("layout", ["shard=2", "replicate=2"])
def test_evaluation_between_fits_changes_no_weight(pool, layout):
    for before, after, tested, difference, steps, moved in run(pool, several_calls, 2, layout):
        assert after < before
        assert tested == pytest.approx(after)
        assert difference == 0
        assert steps == 8
        assert moved > 0


# --- evaluation and metrics --------------------------------------------------------------------------------------


class Evaluated(Classifier):
    """Sums sample numbers, so that a sample counted twice or never is seen."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mean_of_ids = MeanMetric()

    def evaluate(self, batch):
        x, ids = batch
        self.model(x)
        self.mean_of_ids.update(ids.double())
        self.log("metric", self.mean_of_ids)
        self.log("mean", ids.double().mean())
        self.log("sum", ids.double().sum(), reduce_fx="sum")
        self.log("max", ids.double().max(), reduce_fx="max")
        return ids

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.model(batch[0])
        return batch[1]


class Stream(IterableDataset):
    """Samples of this data rank, without a length: ranks have unequal numbers."""

    def __init__(self, dataset, rank, ranks):
        self.samples = [dataset[i] for i in range(len(dataset)) if i % 3 % ranks == rank]

    def __iter__(self):
        return iter(self.samples)


def evaluate(layout, samples, stream):
    module = make(Evaluated)
    strategy_trainer = trainer(layout)
    dataset = TensorDataset(data(samples).tensors[0], torch.arange(samples))
    if stream:
        kwargs = strategy_trainer.strategy.distributed_sampler_kwargs
        loader = DataLoader(Stream(dataset, kwargs["rank"], kwargs["num_replicas"]), batch_size=2)
    else:
        loader = DataLoader(dataset, batch_size=2)
    validated = strategy_trainer.validate(module, loader, verbose=False)[0]
    tested = strategy_trainer.test(module, loader, verbose=False)[0]
    predicted = strategy_trainer.predict(module, loader)
    return validated, tested, torch.cat(predicted).tolist()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("layout", ["shard=2", "replicate=2"])
@pytest.mark.parametrize("samples", [9, 13])
def test_every_sample_is_evaluated_exactly_once(pool, layout, samples, stream):
    """Loaders of unequal length (C18): 9 samples in batches of 2 are 3 and 2 batches, or 3 and 2 of a stream."""
    wanted = {
        "metric": (samples - 1) / 2,
        "mean": (samples - 1) / 2,
        "sum": samples * (samples - 1) / 2,
        "max": samples - 1,
    }
    results = run(pool, evaluate, 2, layout, samples, stream)
    for validated, tested, _ in results:
        assert validated == pytest.approx(wanted)
        assert tested == pytest.approx(wanted)
    assert sorted(results[0][2] + results[1][2]) == list(range(samples))


class CountSteps(L.Callback):
    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, *_):
        self.batches += 1


def fit_stream(layout, accumulate):
    counter = CountSteps()
    strategy_trainer = trainer(layout, callbacks=[counter], max_epochs=2, accumulate_grad_batches=accumulate)
    kwargs = strategy_trainer.strategy.distributed_sampler_kwargs
    module = make(Classifier)
    strategy_trainer.fit(module, DataLoader(Stream(data(15), kwargs["rank"], kwargs["num_replicas"]), batch_size=2))
    return counter.batches, strategy_trainer.global_step, full_state(module)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_on_unequal_streams_stops_with_the_shortest(pool, accumulate):
    """10 and 5 samples in batches of 2: 5 and 3 batches, so 3 in each of 2 epochs."""
    one, two = run(pool, fit_stream, 2, "shard=2", accumulate)
    assert one[0] == two[0] == 6
    assert one[1] == two[1] == (6 if accumulate == 1 else 4)
    assert worst(one[2], two[2]) == 0


class Logging(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("one", 1.0, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("rank", float(self.global_rank), on_step=True, on_epoch=True, sync_dist=True)
        self.log("local", float(self.global_rank), on_step=False, on_epoch=True)
        return self.loss(batch)


def logged(layout):
    strategy_trainer = trainer(layout)
    strategy_trainer.fit(make(Logging), DataLoader(data(16), 2))
    decide = strategy_trainer.strategy.reduce_boolean_decision
    rank = strategy_trainer.global_rank
    return {k: float(v) for k, v in strategy_trainer.callback_metrics.items()}, [
        decide(rank == 0),
        decide(True),
        decide(rank == 0, all=False),
        decide(False, all=False),
    ]


def test_logged_values_are_reduced_over_the_data_ranks(pool):
    for metrics, decisions in run(pool, logged, 2, "replicate=2"):
        assert metrics["one"] == 8  # 4 batches on each of 2 ranks
        assert metrics["rank_step"] == metrics["rank_epoch"] == metrics["local"] == 0.5
        assert decisions == [False, True, True, False]


class OtherKeys(Classifier):
    def __init__(self, on_step=False, **kwargs):
        super().__init__(**kwargs)
        self.on_step = on_step

    def training_step(self, batch, batch_idx):
        self.log(f"value_{self.global_rank}", 1.0, sync_dist=True, on_step=self.on_step, on_epoch=True)
        return self.loss(batch)


@pytest.mark.parametrize("on_step", [False, True])
def test_ranks_that_log_different_names_are_told_so(pool, on_step):
    """C19: not one average of two unrelated values."""
    with pytest.raises(WorkerError) as error:
        run(pool, train, 2, "shard=2", OtherKeys, data(8), 2, factory_kwargs={"on_step": on_step}, timeout=60)
    for failure in error.value.failures:
        assert re.search(r"value_0.*value_1|value_0.* not by 1", str(failure), re.S)


# --- ranks that differ -------------------------------------------------------------------------------------------


class Branches(Classifier):
    """Each rank, or each batch, takes another branch (C16)."""

    def __init__(self, by="rank", **kwargs):
        super().__init__(**kwargs)
        self.by = by
        self.model = nn.ModuleDict({name: nn.Sequential(Block(6), nn.Linear(6, 5)) for name in ("a", "b")})

    def parallel_plan(self):
        from lightning_dist import ModelPlan

        return ModelPlan(network="model", shard=["a", "b"])

    def forward(self, x):
        turn = {
            "rank": self.global_rank,
            "batch": self.trainer.global_step,
            "later": self.global_rank * (self.trainer.global_step > 1),
        }
        return self.model["ab"[turn[self.by] % 2]](x)

    def loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize("by", ["rank", "later"])
@pytest.mark.parametrize("layout", ["shard=2", "replicate=2"])
def test_ranks_on_different_branches_are_named_before_their_weights_mix(pool, layout, by):
    with pytest.raises(WorkerError) as error:
        run(pool, train, 2, layout, Branches, data(16), 2, factory_kwargs={"by": by}, patience=10.0)
    text = str(error.value)
    assert "next module in the step" in text
    assert "model.b" in text


def test_branches_that_all_ranks_take_together_train(pool):
    compare_with_one_rank(pool, Branches, ["shard=2", "replicate=2"], factory_kwargs={"by": "batch"})


class NoneOnOneRank(Classifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return None if batch_idx == 1 and self.global_rank == 1 else loss


def test_a_step_that_returns_none_on_one_rank_ends_the_run_with_its_reason(pool):
    """C17. The rank that waits in a collective can leave it only when the other's process ends."""
    with pytest.raises(WorkerError) as error:
        run(pool, train, 2, "shard=2", NoneOnOneRank, data(16), 2)
    assert "returning None in distributed training is not supported" in str(error.value)


# --- seeds, samplers ---------------------------------------------------------------------------------------------


class RandomData(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(6), torch.tensor(index % 5)


def seeds(layout):
    L.seed_everything(3, workers=True)
    seen = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(batch[0][0, 0].item())

    strategy_trainer = trainer(layout, callbacks=[Watch()], precision="32-true")
    strategy_trainer.fit(make(Classifier), DataLoader(RandomData(), 2, shuffle=True, num_workers=2))
    sampler = strategy_trainer.train_dataloader.sampler
    return seen, type(sampler).__name__, sampler.num_replicas, sampler.rank


def test_samplers_and_worker_seeds_follow_the_data_coordinate(pool):
    (one, kind, replicas, rank), (two, *other) = run(pool, seeds, 2, "shard=2")
    assert (kind, replicas, rank) == ("DistributedSampler", 2, 0)
    assert other == ["DistributedSampler", 2, 1]
    assert len(set(one + two)) == len(one + two) == 4


# --- averaging ---------------------------------------------------------------------------------------------------


class LinearDescent(Classifier):
    """The head's bias goes down by 1 at each step."""

    def loss(self, batch):
        return self.model(batch[0]).sum() * 0 + self.model.head.bias.sum()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.model(batch[0])
        bias = self.model.head.bias
        self.log("bias", (bias.full_tensor() if hasattr(bias, "full_tensor") else bias)[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def averaged(layout, start_step):
    module = make(LinearDescent)
    nn.init.zeros_(module.model.head.bias)
    callback = ShardedWeightAveraging(decay=None, start_step=start_step)
    strategy_trainer = trainer(layout, callbacks=[callback], num_sanity_val_steps=0)
    strategy_trainer.fit(module, DataLoader(data(20), 2), DataLoader(data(4), 2))
    return float(strategy_trainer.callback_metrics["bias"]), full_state(module)["model.head.bias"][0].item()


@pytest.mark.parametrize(("start_step", "wanted"), [(0, -3.0), (2, -4.0), (1000, -5.0)])
def test_weights_are_averaged_shard_by_shard_and_a_late_start_overwrites_nothing(pool, start_step, wanted):
    """C35, C36. After 5 steps of -1: the mean of -1 … -5, of -3 … -5, or what was trained."""
    for seen, final in run(pool, averaged, 2, "shard=2", start_step):
        assert seen == pytest.approx(wanted)
        assert final == pytest.approx(wanted)


def with_lightning_averaging():
    trainer("shard=2", callbacks=[L.pytorch.callbacks.EMAWeightAveraging()]).fit(
        make(Classifier), DataLoader(data(8), 2)
    )


def test_lightnings_own_averaging_is_refused(pool):
    with pytest.raises(WorkerError, match=r"copies the whole model .*ShardedWeightAveraging"):
        run(pool, with_lightning_averaging, 2)


def test_environment_is_left_alone():
    assert "RANK" not in os.environ
