"""Batches of every size, precisions, frozen and empty stages, memory and initial weights on a pipeline."""

from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_dist import ModelPlan
from lightning_dist.callbacks import ShardedWeightAveraging
from lightning_dist.parallel.scaler import GlobalGradScaler
from lightning_dist.strategies import HybridMixedPrecision
from tests.strategies.test_pipeline_axis import Deep
from tests.strategies.training import (
    FEATURES,
    Classifier,
    InOrder,
    Network,
    data,
    full_state,
    held_bytes,
    make,
    reference,
    trainer,
    worst,
)


def fit(layout, factory, batches, schedule="1F1B", *, seed=0, microbatches=4, **kwargs):
    """Fits on given batches; weights on this rank, and the steps made."""
    import os

    module = make(factory, int(os.environ["RANK"]) if seed == "rank" else seed)
    chosen = {"pipeline_schedule": schedule, "microbatches": microbatches, **kwargs.pop("strategy_kwargs", {})}
    run = trainer(layout, strategy_kwargs=chosen, use_distributed_sampler=False, **kwargs)
    loader = batches if isinstance(batches, Batches) else DataLoader(batches, 4, sampler=InOrder(batches, run.strategy))
    run.fit(module, loader)
    return {"weights": full_state(module), "steps": run.global_step}


class Batches:
    """A loader over given batches."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def together(results):
    return {name: value for result in results for name, value in result["weights"].items()}


def run(pool, *args, world=2, **kwargs):
    return pool.run(fit, world, *args, init_process_group=False, timeout=120, **kwargs)


# --- batches -----------------------------------------------------------------------------------------------------


class Sequences(Deep):
    def loss(self, batch):
        x, y = batch  # [batch, sequence, features]
        return F.cross_entropy(self.model(x).mean(1), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_batches_of_any_size_and_length_in_windows(pool, schedule):
    """C06. Fewer samples than microbatches or stages, one sample, other lengths; windows of 3, 3 and 1 batches."""
    generator = torch.Generator().manual_seed(2)
    batches = [
        (torch.randn(size, length, FEATURES, generator=generator).double(), torch.randint(0, 5, (size,)))
        for size, length in [(8, 3), (8, 5), (7, 5), (1, 2), (3, 7), (8, 3), (2, 4)]
    ]
    wanted, norms = reference(make(Sequences), [batches[:3], batches[3:6], batches[6:]])
    results = run(pool, "pp=2", Sequences, Batches(batches), schedule, accumulate_grad_batches=3)
    assert worst(together(results), wanted) < 1e-9
    assert [result["steps"] for result in results] == [len(norms)] * 2


# --- frozen and empty stages -------------------------------------------------------------------------------------


class FrozenFront(Deep):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for part in (self.model.embed, *self.model.blocks[:4]):
            part.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class FrozenBack(FrozenFront):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.requires_grad_(False)
        self.model.embed.requires_grad_(True)


class EmptyStage(Classifier):
    """The last stage has no parameters at all."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh())

    def parallel_plan(self):
        return ModelPlan(network="model", pipeline=[["0", "1", "2"], ["3"]])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


@pytest.mark.parametrize("factory", [FrozenFront, FrozenBack, EmptyStage])
@pytest.mark.parametrize("layout", ["pp=2", "pp=2,shard=2"])
def test_a_stage_without_trainable_parameters(pool, factory, layout):
    """C03: it has no part in the norm, and every collective has it."""
    ranks = layout.count("=2") // 2 + 1
    dataset = data(24)
    steps = [[[t[start : start + 4 * ranks] for t in dataset.tensors]] for start in range(0, 24, 4 * ranks)]
    wanted, _ = reference(make(factory), steps, clip=partial(nn.utils.clip_grad_norm_, max_norm=0.1))
    results = run(pool, layout, factory, dataset, world=2 * ranks, gradient_clip_val=0.1)
    assert worst(together(results), wanted) < 1e-9


# --- precision ---------------------------------------------------------------------------------------------------


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e30


class Fuse(nn.Module):
    """Blows up the gradient of a microbatch that holds the number 100."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x.clamp(max=99))
        return Explode.apply(y) if bool((x > 99).any()) else y


class OverflowFirst(Deep):
    """Only the first stage sees the overflow."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model.embed = Fuse(self.model.embed)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


class OverflowLast(FrozenFront):
    """Only the last stage sees the overflow; the first has no gradients at all."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1e6 if bool((batch[0] > 99).any()) else 1)


def scaled(layout, factory):
    scaler = GlobalGradScaler(init_scale=2.0**12, growth_interval=2)
    history = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            history.append((scaler.get_scale(), full_state(pl_module)))

    module = make(factory)
    plugin = HybridMixedPrecision("16-mixed", "cpu", scaler)
    chosen = {"microbatches": 4}
    fitter = trainer(
        layout, precision=None, plugins=[plugin], callbacks=[Watch()], gradient_clip_val=1.0, strategy_kwargs=chosen,
        use_distributed_sampler=False,
    )  # fmt: skip
    dataset = data(40, dtype=torch.float32)
    dataset.tensors[0][8 + 5, 0] = 100.0  # in the third microbatch of the second batch
    fitter.fit(module, DataLoader(dataset, 8))
    return history


@pytest.mark.parametrize("factory", [OverflowFirst, OverflowLast])
def test_an_overflow_of_one_microbatch_on_one_stage_makes_every_stage_skip(pool, factory):
    wanted = pool.run(scaled, 1, "shard=1", factory, init_process_group=False)[0]
    scales = [scale for scale, _ in wanted]
    assert scales == [2.0**12, 2.0**11, 2.0**11, 2.0**12, 2.0**12]
    results = pool.run(scaled, 2, "pp=2", factory, init_process_group=False)
    for history in results:
        assert [scale for scale, _ in history] == scales
    states = [{**results[0][step][1], **results[1][step][1]} for step in range(5)]
    assert worst(states[1], states[0]) == 0
    assert worst(states[2], states[1]) > 0
    assert worst(states[4], wanted[4][1]) < 0.05  # float16, in microbatches


def several_precisions(layout):
    dataset = data(24, dtype=torch.float32)
    precisions = ("32-true", "bf16-mixed", "bf16-true")
    return {precision: fit(layout, Plain, dataset, precision=precision) for precision in precisions}


class Plain(Deep):
    def training_step(self, batch, batch_idx):
        return self.loss(batch)


def test_precisions(pool):
    wanted = pool.run(several_precisions, 1, "shard=1", init_process_group=False)[0]
    results = pool.run(several_precisions, 2, "pp=2", init_process_group=False)
    for precision, bound in {"32-true": 1e-4, "bf16-mixed": 0.1, "bf16-true": 0.1}.items():
        weights = together([result[precision] for result in results])
        assert worst(weights, wanted[precision]["weights"]) < bound, precision
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        assert {value.dtype for value in weights.values()} == {dtype}


# --- units -------------------------------------------------------------------------------------------------------


def with_setting(layout, **strategy_kwargs):
    selective = strategy_kwargs.get("activation_checkpointing") == "selective"
    schedule = "Interleaved1F1B" if selective else "ZBVZeroBubble"
    return fit(layout, Plain, data(16), schedule, strategy_kwargs=strategy_kwargs)


@pytest.mark.parametrize(
    "setting",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
    ],
    ids=["full", "selective", "compile"],
)
def test_units_are_checkpointed_and_compiled_stage_by_stage(pool, setting):
    dataset = data(16)
    steps = [[[t[start : start + 4] for t in dataset.tensors]] for start in range(0, 16, 4)]
    wanted, _ = reference(make(Plain), steps)
    results = pool.run(with_setting, 2, "pp=2", init_process_group=False, timeout=300, **setting)
    assert worst(together(results), wanted) < 1e-9


# --- averaging ---------------------------------------------------------------------------------------------------


class Validated(Plain):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


def averaged(layout, folder):
    """The averaged weights are validated and kept; the run's own come back from a checkpoint."""
    final = []
    for epochs, resume in ((1, None), (2, f"{folder}/{layout}")):
        module = make(Validated)
        callback = ShardedWeightAveraging(decay=0.7)
        run = trainer(layout, max_epochs=epochs, callbacks=[callback], use_distributed_sampler=False)
        loaders = DataLoader(data(16), 4), DataLoader(data(8, seed=5), 4)
        run.fit(module, *loaders, ckpt_path=resume)
        if resume is None:
            run.save_checkpoint(f"{folder}/{layout}")
        final.append((float(run.callback_metrics["val_loss"]), full_state(module)))
    return final


def test_weights_are_averaged_stage_by_stage(pool, tmp_path):
    wanted = pool.run(averaged, 1, "shard=1", tmp_path, init_process_group=False)[0]
    results = pool.run(averaged, 2, "pp=2", tmp_path, init_process_group=False)
    for epoch in (0, 1):
        assert results[0][epoch][0] == results[1][epoch][0] == pytest.approx(wanted[epoch][0], rel=1e-9)
        assert worst({**results[0][epoch][1], **results[1][epoch][1]}, wanted[epoch][1]) < 1e-9


# --- initial weights and memory ----------------------------------------------------------------------------------


class OnMeta(Plain):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model = None

    def configure_model(self):
        if self.model is None:
            with torch.device("meta"):
                self.model = Network(depth=6)


def holdings(layout):
    """Equal layers' weights before training, bytes held after it, and the trained weights."""
    module = make(OnMeta, optimizer="adamw")
    first = {}

    class Start(L.Callback):
        def on_train_start(self, trainer, pl_module):
            first.update(full_state(pl_module))

    run = trainer(layout, callbacks=[Start()], use_distributed_sampler=False)
    run.fit(module, DataLoader(data(16), 4))
    state = [value for values in run.optimizers[0].state.values() for value in values.values() if value.ndim]
    held = {"parameters": held_bytes(module.parameters()), "optimizer": held_bytes(state)}
    return {"first": first, "held": held, "weights": full_state(module)}


def test_a_stage_is_all_that_a_rank_materialises(pool):
    """C14: one seed, one model, whatever the layout; equal layers of different stages differ."""
    (wanted,) = pool.run(holdings, 1, "shard=1", init_process_group=False)
    results = pool.run(holdings, 2, "pp=2", init_process_group=False)
    first = {**results[0]["first"], **results[1]["first"]}
    assert worst(first, wanted["first"]) == 0
    assert worst(together(results), wanted["weights"]) < 1e-9
    ups = [first[f"model.blocks.{index}.up.weight"] for index in range(6)]
    assert not any(torch.equal(one, other) for place, one in enumerate(ups) for other in ups[:place])
    for kind, whole in wanted["held"].items():
        parts = [result["held"][kind] for result in results]
        assert sum(parts) == whole
        assert max(parts) < 0.6 * whole


def test_ranks_seeded_differently_train_one_model(pool):
    """The pipelines' copies of each stage are equal, though every rank drew its own weights."""
    results = run(pool, "pp=2,replicate=2", Plain, data(32), world=4, seed="rank")
    weights = together(results)
    for result in results:
        for name, value in result["weights"].items():
            assert torch.equal(value, weights[name])
    ups = [weights[f"model.blocks.{index}.up.weight"] for index in range(6)]
    assert not any(torch.equal(one, other) for place, one in enumerate(ups) for other in ups[:place])
