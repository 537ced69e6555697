"""FairScaleShardedStrategy trains to the numbers of one process, and says so where it can't."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from lightning_dist.strategies import FairScaleShardedStrategy
from lightning_dist.testing import WorkerError
from tests.strategies import sharded_training as modules
from tests.strategies.sharded_training import WithoutFairscale, quiet, train
from tests.strategies.test_data_axes import global_steps
from tests.strategies.training import Classifier, MaskedClassifier, data, make, masked_data, reference, worst

ALL_ROUTES = {"fairscale": None, "zero": WithoutFairscale(0, 1, 2)}


def fit(pool, world, factory, dataset, batch_size, **kwargs):
    return pool.run(train, world, factory, dataset, batch_size, world, init_process_group=False, **kwargs)


def check(pool, world, dataset, batch_size, wanted, tolerance=1e-9, factory=Classifier, **kwargs):
    results = fit(pool, world, factory, dataset, batch_size, **kwargs)
    for result in results:
        assert worst(result["weights"], wanted) < tolerance
    return results


def one_process(pool, factory, dataset, batch_size, **kwargs):
    """The same by Lightning on one device, with the batches of all ranks in one."""
    return fit(pool, 1, factory, dataset, batch_size, strategy="auto", **kwargs)[0]


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weights_equal_one_process(pool, world, optimizer):
    dataset = data(24 * world)
    wanted, _ = reference(make(Classifier, optimizer=optimizer), global_steps(dataset, 2, world))
    check(pool, world, dataset, 2, wanted, factory_kwargs={"optimizer": optimizer})


@pytest.mark.parametrize("route", ALL_ROUTES)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_clipping_validation_and_a_short_last_window(pool, accumulate, route):
    """7 batches of 3 (the last of 2) in windows of 3: the last window holds one short batch; validation in between."""
    dataset = data(40)
    clip = partial(nn.utils.clip_grad_norm_, max_norm=0.05)
    steps = global_steps(dataset, 3, 2, accumulate, epochs=2)
    wanted, _ = reference(make(Classifier, optimizer="adamw"), steps, clip=clip)
    check(
        pool,
        2,
        dataset,
        3,
        wanted,
        factory=modules.Validating,
        factory_kwargs={"optimizer": "adamw"},
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.05,
        validate=True,
        max_epochs=2,
        remove=ALL_ROUTES[route],
    )


def test_clipping_by_value(pool):
    dataset = data(32)
    clip = partial(nn.utils.clip_grad_value_, clip_value=0.01)
    wanted, _ = reference(make(Classifier), global_steps(dataset, 2, 2), clip=clip)
    check(pool, 2, dataset, 2, wanted, gradient_clip_val=0.01, gradient_clip_algorithm="value")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_weight_is_exact_with_a_rank_that_counts_nothing(pool, accumulate):
    dataset = masked_data([1, 7, 3, 0, 0, 5, 2, 8], batch_size=8)
    wanted, _ = reference(make(MaskedClassifier), global_steps(dataset, 8, 2, accumulate))
    check(pool, 2, dataset, 8, wanted, factory=MaskedClassifier, accumulate_grad_batches=accumulate)


def test_ranks_with_unequal_numbers_of_batches_end_together(pool):
    """9 samples one by one: rank 0 has 5, rank 1 has 4, so four steps are made of 8."""
    dataset = data(9)
    wanted, _ = reference(make(Classifier), global_steps(torch.utils.data.Subset(dataset, range(8)), 1, 2))
    results = check(pool, 2, dataset, 1, wanted)
    assert [result["steps"] for result in results] == [4, 4]


def test_ranks_with_unequal_samples_count_each_alike(pool):
    """Rank 0's last batch has 2 samples, rank 1's has 1."""
    dataset = data(11)
    wanted, _ = reference(make(Classifier), global_steps(dataset, 4, 2))
    check(pool, 2, dataset, 4, wanted)


def test_ranks_seeded_differently_train_the_first_ones_model(pool):
    dataset = data(16)
    wanted, _ = reference(make(Classifier), global_steps(dataset, 2, 2))
    for result in pool.run(seeded_by_rank, 2, dataset, init_process_group=False):
        assert worst(result["weights"], wanted) < 1e-9


def seeded_by_rank(dataset):
    return train(Classifier, dataset, 2, 2, seed=modules.rank())


@pytest.mark.parametrize("factory", [modules.WarmUpInHook, modules.Freezing, modules.TiedClassifier])
@pytest.mark.parametrize("route", ALL_ROUTES)
def test_modules_that_change_what_they_train(pool, factory, route):
    """A learning rate set right before the step; layers that freeze and thaw under clipping; tied weights."""
    dataset = data(24)
    wanted = one_process(pool, factory, dataset, 4, gradient_clip_val=0.05)
    check(pool, 2, dataset, 2, wanted["weights"], factory=factory, gradient_clip_val=0.05, remove=ALL_ROUTES[route])


def test_layers_frozen_from_the_start_train_later(pool):
    dataset = data(24)
    wanted = one_process(pool, modules.Thawing, dataset, 4)
    check(pool, 2, dataset, 2, wanted["weights"], factory=modules.Thawing)
    with pytest.raises(WorkerError, match=r"model.embed.weight, .* began to train after DDP was set up"):
        fit(pool, 2, modules.Thawing, dataset, 2, remove=WithoutFairscale(0, 1))


@pytest.mark.parametrize("route", ALL_ROUTES)
def test_manual_optimization_with_two_optimizers(pool, route):
    dataset = data(16)
    wanted = one_process(pool, modules.TwoOptimizers, dataset, 4)
    check(pool, 2, dataset, 2, wanted["weights"], factory=modules.TwoOptimizers, remove=ALL_ROUTES[route])


def test_batch_statistics_are_those_of_ddp(pool):
    """Those of the first rank, in training and in every rank's evaluation."""
    dataset = data(24)
    kwargs = {"validate": True, "max_epochs": 2}
    ours = fit(pool, 2, modules.WithBatchNorm, dataset, 3, **kwargs)
    ddp = fit(pool, 2, modules.WithBatchNorm, dataset, 3, strategy="ddp", **kwargs)
    for mine, theirs in zip(ours, ddp, strict=True):
        learnt = [name for name in theirs["weights"] if "running" not in name and "batches" not in name]
        assert worst(*({name: of["weights"][name] for name in learnt} for of in (mine, theirs))) < 1e-9
        assert mine["metrics"] == pytest.approx(theirs["metrics"], rel=1e-9)
    statistics = [name for name in ddp[0]["weights"] if "running" in name]
    for mine in ours:
        for name in statistics:
            torch.testing.assert_close(mine["weights"][name], ddp[0]["weights"][name], rtol=1e-9, atol=0)


# --- what is silently wrong without its fix --------------------------------------------------------------------------


def default_reduce_buffer(patch):
    from lightning_dist.parallel.fairscale_adapter import ShardedDataParallel

    original = ShardedDataParallel.__init__

    def with_buffer(self, *args, **kwargs):
        original(self, *args, **{**kwargs, "reduce_buffer_size": 2**23})

    patch.setattr(ShardedDataParallel, "__init__", with_buffer)


def wrapper_left_in_evaluation(patch):
    patch.setattr(FairScaleShardedStrategy, "_wake_wrapper", lambda self: None)


def clipping_of_each_rank_by_itself(patch):
    def clip(self, optimizer, clip_val):
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip_val)

    patch.setattr(FairScaleShardedStrategy, "_clip_grad_by_norm", clip)


def no_guards(patch):
    from lightning_dist.parallel.fairscale_adapter import ShardedDataParallel, ShardedModule

    def forward(self, *args, **kwargs):
        self._order = []
        return ShardedDataParallel.forward(self, *args, **kwargs)

    patch.setattr(ShardedModule, "check_reduced", lambda self: None)
    patch.setattr(ShardedModule, "forward", forward)


class Both:
    def __init__(self, *removals):
        self.removals = removals

    def __call__(self, patch):
        for removal in self.removals:
            removal(patch)


FAULTS = {
    "buffer": (default_reduce_buffer, "gradients of .* were not reduced"),
    "evaluation": (wrapper_left_in_evaluation, "wrapper is in evaluation mode"),
    "clipping": (clipping_of_each_rank_by_itself, None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_without_its_fix_training_is_wrong(pool, fault):
    """Each fix is needed: without it, and without the guards behind it, weights are off by percents in 6 steps."""
    removal, _ = FAULTS[fault]
    dataset = data(24)
    kwargs = {"gradient_clip_val": 0.05, "validate": True}
    clip = partial(nn.utils.clip_grad_norm_, max_norm=0.05)
    wanted, _ = reference(make(Classifier), global_steps(dataset, 2, 2), clip=clip)
    check(pool, 2, dataset, 2, wanted, factory=modules.Validating, **kwargs)
    results = fit(pool, 2, modules.Validating, dataset, 2, remove=Both(removal, no_guards), **kwargs)
    assert max(worst(result["weights"], wanted) for result in results) > 1e-3


@pytest.mark.parametrize("fault", [name for name, (_, message) in FAULTS.items() if message])
def test_a_guard_stands_behind_the_fix(pool, fault):
    removal, message = FAULTS[fault]
    with pytest.raises(WorkerError, match=message):
        fit(pool, 2, modules.Validating, data(24), 2, validate=True, remove=removal)


def options_replaced_on_load(patch):
    """As the optimizers of torch and of FairScale do when they load their state."""
    from lightning_dist.parallel import optimizer_shards

    original = optimizer_shards.scatter_state

    def load(optimizer, state, group):
        original(optimizer, state, group)
        optimizer.param_groups = [dict(group) for group in optimizer.param_groups]

    patch.setattr(optimizer_shards, "scatter_state", load)


def schedulers_left_on_the_plain_optimizer(patch):
    patch.setattr(FairScaleShardedStrategy, "_point_schedulers", lambda *_: None)


SCHEDULES = {
    "options loaded in place, schedulers pointed": (None, True),
    "schedulers pointed": (options_replaced_on_load, True),
    "options loaded in place": (schedulers_left_on_the_plain_optimizer, True),
    "neither": (Both(options_replaced_on_load, schedulers_left_on_the_plain_optimizer), False),
}


@pytest.mark.parametrize("fixes", SCHEDULES)
def test_schedule_goes_on_after_resume(pool, tmp_path, fixes):
    """Either fix keeps the schedule attached; without both it is lost."""
    removal, right = SCHEDULES[fixes]
    dataset = data(12)
    whole = one_process(pool, modules.Scheduled, dataset, 4, max_epochs=2)
    fit(pool, 2, modules.Scheduled, dataset, 2, save_as=tmp_path / "half.ckpt")
    for result in fit(
        pool, 2, modules.Scheduled, dataset, 2, max_epochs=2, ckpt_path=tmp_path / "half.ckpt", remove=removal
    ):
        assert (worst(result["weights"], whole["weights"]) < 1e-9) is right
        assert ([group["lr"] for group in result["groups"]] == [group["lr"] for group in whole["groups"]]) is right


def adascale_reference(module, steps, smoothing):
    """SGD whose learning rate is scaled by a gain from the spread of the gradients, written from the paper."""
    module = module.double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    variance = square = kept = 0.0
    gains = []
    for batches in steps:
        singles = torch.stack([modules.flat_gradient(module, module.loss(batch)) for batch in batches])
        mean, count = singles.mean(0), len(batches)
        spread = float((singles - mean).square().sum() / (count - 1))
        variance = smoothing * variance + (1 - smoothing) * spread
        square = smoothing * square + (1 - smoothing) * max(float(mean.square().sum()) - spread / count, 0.0)
        kept = smoothing * kept + (1 - smoothing)
        v, m = variance / kept, square / kept
        gains.append((v + m) / (v / count + m))
        optimizer.param_groups[0]["lr"] = 0.05 * gains[-1]
        parameters = list(module.parameters())
        for parameter, part in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, gains


def hooks_removed_as_fairscale_does(patch):
    """Lightning's wrapper of an optimizer is of a subclass, so it inherits the destructor of what it wraps."""
    from lightning_dist.strategies import AdaScale

    def unhook(self):
        for handle in self._window.handles:
            handle.remove()

    patch.setattr(AdaScale, "__del__", unhook, raising=False)
    original = FairScaleShardedStrategy.setup_optimizers

    def setup(self, trainer):
        original(self, trainer)
        self.optimizers = self.optimizers  # The wrappers of before end here, as they do when ours replaces them.

    patch.setattr(FairScaleShardedStrategy, "setup_optimizers", setup)


@pytest.mark.parametrize(("strategy", "accumulate"), [(None, 1), (None, 2), ("ddp", 1), ("ddp", 2), ("zero", 2)])
def test_adascale_uses_the_gain_of_its_own_step(pool, strategy, accumulate):
    dataset = data(32)
    steps = global_steps(dataset, 2, 2, accumulate)
    wanted, gains = adascale_reference(make(modules.AdaScaled), steps, smoothing=0.5)
    assert min(gains) > 1.05
    kwargs = {"remove": WithoutFairscale(0, 1)} if strategy == "zero" else {"strategy": strategy}
    results = check(
        pool,
        2,
        dataset,
        2,
        wanted,
        factory=modules.AdaScaled,
        factory_kwargs={"accumulate": accumulate},
        accumulate_grad_batches=accumulate,
        **kwargs,
    )
    for result in results:
        assert result["seen"][accumulate - 1 :: accumulate] == pytest.approx(gains, rel=1e-9)


def test_adascale_without_its_hooks_is_plain_sgd(pool):
    results = fit(pool, 2, modules.AdaScaled, data(32), 2, remove=hooks_removed_as_fairscale_does)
    assert results[0]["seen"] == [1.0] * 8


# --- precision -------------------------------------------------------------------------------------------------------


def test_float32_within_1e_5(pool):
    dataset = data(32, dtype=torch.float32)
    wanted, _ = reference(make(Classifier), global_steps(dataset, 2, 2), dtype=torch.float32)
    check(pool, 2, dataset, 2, wanted, 1e-5, precision="32-true")


def test_bf16_mixed_is_that_of_ddp(pool):
    """The same batches on the same ranks, so only the order of sums may differ."""
    dataset = data(32, dtype=torch.float32)
    wanted = fit(pool, 2, Classifier, dataset, 2, strategy="ddp", precision="bf16-mixed")[0]["weights"]
    check(pool, 2, dataset, 2, wanted, 1e-4, precision="bf16-mixed")


def half_precision():
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3))


@pytest.mark.parametrize("route", ALL_ROUTES)
def test_16_mixed_skips_a_step_on_all_ranks_when_one_sees_the_overflow(pool, route):
    """Weights stay those of one process to half precision's rounding (batches are rounded apart)."""
    dataset = data(24, dtype=torch.float32)
    kwargs = {"precision": None, "gradient_clip_val": 1.0}
    wanted = one_process(pool, modules.Overflowing, dataset, 4, plugins=[half_precision()], **kwargs)
    results = check(
        pool,
        2,
        dataset,
        2,
        wanted["weights"],
        0.02,
        factory=modules.Overflowing,
        plugins=[half_precision()],
        remove=ALL_ROUTES[route],
        **kwargs,
    )
    for result in results:
        # 1024, halved by the overflow of step 2, doubled after the three good steps that followed.
        assert result["precision"]["scale"] == wanted["precision"]["scale"] == 1024.0
        assert worst(result["weights"], results[0]["weights"]) == 0.0


def scaler_that_does_not_agree(patch):
    patch.setattr(FairScaleShardedStrategy, "precision_plugin", L.pytorch.strategies.DDPStrategy.precision_plugin)


@pytest.mark.slow
def test_16_mixed_with_a_scaler_of_each_rank_breaks(pool):
    with pytest.raises((WorkerError, TimeoutError)):
        fit(
            pool,
            2,
            modules.Overflowing,
            data(24, dtype=torch.float32),
            2,
            precision=None,
            plugins=[half_precision()],
            remove=scaler_that_does_not_agree,
            patience=3.0,
            timeout=20,
        )


# --- checkpoints -----------------------------------------------------------------------------------------------------

WAYS = {"fairscale": {}, "zero": {"remove": WithoutFairscale(0, 1, 2, 3)}, "ddp": {"strategy": "ddp"}}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("fairscale", 2), ("fairscale", 4)),
        (("fairscale", 4), ("fairscale", 1)),
        (("fairscale", 1), ("fairscale", 2)),
        (("fairscale", 2), ("ddp", 2)),
        (("ddp", 2), ("fairscale", 2)),
        (("zero", 2), ("fairscale", 2)),
        (("fairscale", 2), ("zero", 2)),
    ],
)
def test_a_checkpoint_resumes_under_any_number_of_ranks_and_under_ddp(pool, tmp_path, before, after):
    dataset, path = data(12), tmp_path / "half.ckpt"
    whole = one_process(pool, modules.Scheduled, dataset, 4, max_epochs=2)
    (way, world), (next_way, next_world) = before, after
    fit(pool, world, modules.Scheduled, dataset, 4 // world, save_as=path, **WAYS[way])
    for result in fit(
        pool,
        next_world,
        modules.Scheduled,
        dataset,
        4 // next_world,
        seed=7,
        max_epochs=2,
        ckpt_path=path,
        **WAYS[next_way],
    ):
        # Lightning's own DDP loads the weights before the module has become float64, and rounds them.
        assert worst(result["weights"], whole["weights"]) < (1e-6 if next_way == "ddp" else 1e-9)
        assert result["groups"] == whole["groups"]
        assert result["steps"] == whole["steps"] == 6


def test_the_file_is_the_one_of_ddp(pool, tmp_path):
    """Same entries, options and values, tensors in memory of their own; read with weights_only."""
    dataset = data(12)
    fit(pool, 2, modules.Scheduled, dataset, 2, save_as=tmp_path / "ours.ckpt")
    fit(pool, 2, modules.Scheduled, dataset, 2, save_as=tmp_path / "ddp.ckpt", strategy="ddp")
    ours, ddp = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("ours", "ddp"))
    assert ours.keys() == ddp.keys()
    assert ours["lr_schedulers"] == ddp["lr_schedulers"]
    (mine,), (theirs,) = ours["optimizer_states"], ddp["optimizer_states"]
    assert mine["param_groups"] == theirs["param_groups"]
    assert list(mine["state"]) == list(theirs["state"])
    for number, values in theirs["state"].items():
        torch.testing.assert_close(mine["state"][number], values, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(ours["state_dict"], ddp["state_dict"], rtol=1e-9, atol=1e-15)
    for value in ours["state_dict"].values():
        assert value.untyped_storage().nbytes() == value.nbytes


def test_only_the_first_rank_ever_holds_the_whole_state(pool, tmp_path):
    """What travels between ranks, in bytes of tensors: at a save each sends its part once, at a load it gets that."""
    sizes = pool.run(traffic, 3, tmp_path / "a.ckpt", init_process_group=False)
    whole, parts = sizes[0]["whole"], [size["part"] for size in sizes]
    assert sum(parts) == whole
    assert max(parts) < 0.4 * whole
    assert [size["save"]["received"] for size in sizes] == [parts[1] + parts[2], 0, 0]
    assert [size["load"]["received"] for size in sizes] == [0, *parts[1:]]


def traffic(path):
    """Tensor bytes of optimizer state (AdamW's two moments) received while saving and loading."""
    counts = {"received": 0}

    def count(original, at):
        def counted(objects, *args, **kwargs):
            result = original(objects, *args, **kwargs)
            if at:
                counts["received"] += moments(objects)
            return result

        return counted

    dataset = data(12)
    module = make(Classifier, optimizer="adamw")
    run = quiet(devices=3, strategy=FairScaleShardedStrategy(timeout=30.0))
    run.fit(module, DataLoader(dataset, 2))
    result = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "recv_object_list", count(dist.recv_object_list, True))
        patch.setattr(dist, "broadcast_object_list", count(dist.broadcast_object_list, modules.rank() > 0))
        state = run.strategy.optimizer_state(run.optimizers[0])
        result["save"] = dict(counts)
        counts["received"] = 0
        run.strategy.load_optimizer_state_dict({"optimizer_states": [state or None]})
        result["load"] = dict(counts)
    result["whole"] = moments([state])
    result["part"] = moments([list(run.optimizers[0].optim.state.values())])
    return result


def moments(objects):
    leaves = torch.utils._pytree.tree_leaves(objects)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim > 0)


def test_a_file_that_is_not_there_is_an_error_on_all_ranks(pool, tmp_path):
    with pytest.raises(WorkerError, match="Rank 0 could not read") as caught:
        fit(pool, 2, Classifier, data(8), 2, ckpt_path=tmp_path / "missing.ckpt")
    assert {failure.rank for failure in caught.value.failures} == {0, 1}


@pytest.mark.slow
def test_a_checkpoint_of_another_module_is_an_error_on_all_ranks(pool, tmp_path):
    fit(pool, 2, Classifier, data(8), 2, save_as=tmp_path / "one_group.ckpt")
    with pytest.raises(WorkerError, match=r"parameter groups of \[22\] tensors, this one of \[18, 4\]") as caught:
        fit(pool, 2, modules.Scheduled, data(8), 2, ckpt_path=tmp_path / "one_group.ckpt", max_epochs=2)
    assert {failure.rank for failure in caught.value.failures} == {0, 1}


def test_adascale_resumes_with_its_estimates_and_its_schedule(pool, tmp_path):
    dataset, path = data(16), tmp_path / "half.ckpt"
    kwargs = {"factory_kwargs": {"schedule": True}}
    whole = fit(pool, 2, modules.AdaScaled, dataset, 2, max_epochs=2, **kwargs)[0]
    fit(pool, 2, modules.AdaScaled, dataset, 2, save_as=path, **kwargs)
    assert torch.load(path, weights_only=True)["optimizer_states"][0]["adascale"]["steps"] > 4
    for strategy, tolerance in ((None, 1e-9), ("ddp", 1e-6)):  # Lightning's DDP rounds on the way in, see above.
        for half in fit(
            pool, 2, modules.AdaScaled, dataset, 2, max_epochs=2, ckpt_path=path, strategy=strategy, **kwargs
        ):
            assert half["seen"] == pytest.approx(whole["seen"][4:], rel=tolerance)
            assert worst(half["weights"], whole["weights"]) < tolerance
            assert half["groups"][0]["lr"] == whole["groups"][0]["lr"] < 0.05 * 0.8**3


# --- what each rank holds and sends ----------------------------------------------------------------------------------


def test_each_rank_holds_its_part_of_gradients_and_state(pool):
    results = [result["seen"] for result in fit(pool, 2, modules.Holdings, data(16), 2)]
    for what in ("gradients", "state"):
        assert sum(result[what] for result in results) == results[0]["parameters"]
        assert max(result[what] for result in results) < 0.55 * results[0]["parameters"]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_reductions_do_not_grow_with_accumulation(pool, accumulate):
    tensors = len(list(Classifier().parameters()))
    for steps, reductions, broadcasts in pool.run(count_collectives, 2, accumulate, init_process_group=False):
        assert (steps, reductions, broadcasts) == (3, 3 * tensors, 3 * 2)


def count_collectives(accumulate):
    counts = {"reduce": 0, "broadcast": 0}

    def counted(name):
        original = getattr(dist, name)

        def call(tensor, *args, **kwargs):
            counts[name] += tensor.is_floating_point()  # Lightning itself broadcasts an object for each batch.
            return original(tensor, *args, **kwargs)

        return call

    run = quiet(devices=2, strategy=FairScaleShardedStrategy(timeout=30.0), accumulate_grad_batches=accumulate)
    loader = DataLoader(modules.share(data(2 * 6 * accumulate), 2), 2)
    with pytest.MonkeyPatch.context() as patch:
        for name in counts:
            patch.setattr(dist, name, counted(name))
        run.fit(make(Classifier), loader)
    return run.global_step, counts["reduce"], counts["broadcast"]


# --- Trainer ---------------------------------------------------------------------------------------------------------


def test_registered_name_samplers_and_reductions(pool):
    results = pool.run(use_by_name, 2, init_process_group=False)
    assert sorted(results[0]["samples"] + results[1]["samples"]) == list(range(8))
    for rank, result in enumerate(results):
        assert result["strategy"] == ("FairScaleShardedStrategy", True, {"num_replicas": 2, "rank": rank})
        assert result["logged"] == pytest.approx(3.5)
        assert result["reduced"] == (0.5, 0.5, 1.0, 1.0, "text")
        assert result["decisions"] == (False, True)
        assert result["evaluated"] == pytest.approx(3.5)


class Numbers(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.samples = []

    def training_step(self, batch, batch_idx):
        self.samples += batch[0].flatten().int().tolist()
        self.log("mean", batch[0].mean(), sync_dist=True, on_epoch=True, on_step=False)
        return self.layer(batch[0]).mean()

    def test_step(self, batch, batch_idx):
        self.log("mean", batch[0].mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def use_by_name():
    run = quiet(devices=2, strategy="fairscale_sharded", use_distributed_sampler=True, precision="32-true")
    module = Numbers()
    loader = DataLoader(torch.utils.data.TensorDataset(torch.arange(8.0).view(-1, 1)), 2)
    run.fit(module, loader)
    strategy = run.strategy
    result = {
        "samples": list(module.samples),
        "strategy": (type(strategy).__name__, strategy.is_distributed, strategy.distributed_sampler_kwargs),
        "logged": float(run.callback_metrics["mean"]),
    }
    mine = torch.tensor(modules.rank())
    reduced = [
        strategy.reduce(mine),
        strategy.reduce(mine.double(), reduce_op="avg"),
        strategy.reduce(mine, None, "sum"),
    ]
    reduced.append(strategy.reduce(mine, reduce_op=dist.ReduceOp.MAX))
    result["reduced"] = (*map(float, reduced), strategy.reduce("text"))
    vote = modules.rank() == 1
    result["decisions"] = (strategy.reduce_boolean_decision(vote), strategy.reduce_boolean_decision(vote, all=False))
    result["evaluated"] = run.test(module, loader, verbose=False)[0]["mean"]
    return result


def test_one_trainer_fits_evaluates_and_fits_again(pool):
    """The second fit goes on from the weights, with fresh optimizers, and leaves no hook of the first behind."""
    dataset = data(16)
    steps = global_steps(dataset, 2, 2)
    module = make(Classifier)
    reference(module, steps)
    wanted, _ = reference(module, steps)
    for weights in pool.run(fit_twice, 2, dataset, init_process_group=False):
        assert worst(weights, wanted) < 1e-9


def fit_twice(dataset):
    module = make(modules.Validating)
    run = quiet(devices=2, strategy=FairScaleShardedStrategy(timeout=30.0))
    loader = DataLoader(modules.share(dataset, 2), 2)
    run.fit(module, loader)
    run.validate(module, loader, verbose=False)
    run.fit_loop.epoch_progress.reset()
    run.fit(module, loader)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_says_that_fairscale_is_missing_and_trains_with_torchs_sharding(pool, ranks):
    dataset = data(16)
    wanted, _ = reference(make(Classifier), global_steps(dataset, 2, 2))
    results = check(pool, 2, dataset, 2, wanted, remove=WithoutFairscale(*ranks))
    assert any("ZeroRedundancyOptimizer with DDP" in warning for warning in results[0]["warnings"])


def test_warns_of_nothing_when_all_is_well(pool):
    """A scheduler would warn that the optimizer's step was replaced, or that it came before it."""
    usual = one_process(pool, modules.Scheduled, data(12), 4)["warnings"]
    for result in fit(pool, 2, modules.Scheduled, data(12), 2):
        new = set(result["warnings"]) - set(usual)
        assert not [text for text in new if "scheduler" in text or "fairscale" in text or "optimizer" in text]


def test_gain_is_logged(pool, tmp_path):
    pool.run(fit_logged, 2, tmp_path, init_process_group=False)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(tmp_path.rglob("events*")).parent)).Reload()
    gains = [event.value for event in events.Scalars("adascale/gain")]
    assert [event.step for event in events.Scalars("adascale/gain")] == [1, 2, 3, 4]
    assert min(gains) > 1.0
    assert events.Scalars("adascale/scale_invariant_steps")[-1].value == pytest.approx(sum(gains), rel=1e-6)


def fit_logged(folder):
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(folder)
    run = quiet(devices=2, strategy=FairScaleShardedStrategy(timeout=30.0), logger=logger, log_every_n_steps=1)
    dataset = data(16)
    run.fit(make(modules.AdaScaled), DataLoader(modules.share(dataset, 2), 2))


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"reduce_buffer_size": 2**23}, "reduce_buffer_size=8388608 does not fit"), ({"timeout": 0}, "timeout=0:00:00")],
)
def test_refused_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        FairScaleShardedStrategy(**kwargs)


class InTwoOptimizers(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.model.head.parameters(), 0.1)]


class AddsAGroup(Classifier):
    def on_train_start(self):
        self.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


class ReplacesMemory(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        self.model.head.weight.data = self.model.head.weight.data.clone()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (InTwoOptimizers, "model.head.weight, model.head.bias: a parameter that is in two optimizers"),
        (AddsAGroup, "A parameter group can't be added after"),
        (ReplacesMemory, "memory of a parameter was replaced"),
    ],
)
def test_refused_on_all_ranks(pool, factory, message):
    with pytest.raises(WorkerError, match=message) as caught:
        fit(pool, 2, factory, data(8), 2)
    assert {failure.rank for failure in caught.value.failures} == {0, 1}


@pytest.mark.slow
def test_ranks_that_reduce_different_parameters_are_named(pool):
    with pytest.raises(WorkerError, match=r"next gradient to reduce: (rank|the ranks differ)"):
        fit(pool, 2, modules.Divergent, data(24), 2, patience=3.0, timeout=30)


@pytest.mark.slow
def test_a_gradient_of_an_earlier_batch_only_is_named(pool):
    with pytest.raises(WorkerError, match=r"gradients of model.blocks.1.norm.weight, .* were not reduced"):
        fit(pool, 2, modules.UsedEarlyOnly, data(24), 2, accumulate_grad_batches=2)


@pytest.mark.slow
def test_fairscale_stays_out_of_the_import():
    code = (
        "import sys, lightning_dist; sys.exit('fairscale' in sys.modules or 'torch.distributed.optim' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_one_module_imports_fairscale():
    package = Path(__file__).parents[2] / "lightning_dist"
    importing = [
        path.name
        for path in package.rglob("*.py")
        if any(
            line.strip().startswith(("import fairscale", "from fairscale")) for line in path.read_text().splitlines()
        )
    ]
    assert importing == ["fairscale_adapter.py"]
