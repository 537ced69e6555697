"""The parity check passes where numbers are equal, fails where a module was made to differ, and says what and where."""

import math

import pytest
import torch

from lightning_dist.testing import FactoryError, WorkerError, assert_parity, compare_with_one_process
from lightning_dist.testing.parity import cut_batch
from lightning_dist.testing.parity_report import relative_differences
from tests.testing import parity_modules as modules

LAYOUTS = ["shard=2", "replicate=2", "replicate=2,shard=2"]


def train_by_hand(batches, initial, steps, window):
    """The reference of the reference: no Lightning, one batch per optimizer step made of the whole window."""
    module = modules.Regression().double()
    module.load_state_dict(initial)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses, norms = [], []
    for step in range(steps):
        parts = batches[step * window : (step + 1) * window]
        inputs, targets = (torch.cat(part).double() for part in zip(*parts, strict=True))
        loss = module.training_step((inputs, targets), step)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(math.sqrt(sum(p.grad.square().sum().item() for p in module.parameters())))
        optimizer.step()
    return losses, norms, module.state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("factory", [modules.Regression, modules.regression_adamw])
def test_equal_training_is_found_equal(pool, layout, factory):
    report = assert_parity(factory, modules.batches, layout, pool=pool)
    assert report.same and report.verdict.startswith(f"SAME: layout {layout} ")
    assert len(report.losses) == len(report.gradient_norms) == report.steps == 5
    assert report.optimizers == ["AdamW" if factory is modules.regression_adamw else "SGD"]
    assert set(report.differences) == {
        "loss",
        "gradient norm",
        "gradients of the first step",
        "gradients of the last step",
        "weights",
    }
    assert report.losses[0][0] != report.losses[-1][0]  # it did train
    assert set(report.weights) == set(modules.Regression().state_dict())


def test_both_columns_are_what_a_loop_by_hand_gives(pool):
    """Nine batches of unequal size, two per step, uneven parts: a window is one mean over all its samples."""
    torch.manual_seed(0)
    batches = modules.nine_batches()
    torch.manual_seed(0)
    initial = modules.Regression().state_dict()
    losses, norms, weights = train_by_hand(batches, initial, steps=5, window=2)
    report = assert_parity(
        modules.Regression, modules.nine_batches, "shard=2", accumulate_grad_batches=2, steps=5, pool=pool
    )
    for side in (0, 1):
        assert [pair[side] for pair in report.losses] == pytest.approx(losses, rel=1e-12)
        assert [pair[side] for pair in report.gradient_norms] == pytest.approx(norms, rel=1e-12)
        for name, pair in report.weights.items():
            torch.testing.assert_close(pair[side], weights[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["shard=2", "replicate=2"])
def test_parts_of_unequal_size_are_weighted_by_their_samples(pool, layout):
    assert_parity(modules.Regression, modules.uneven_batches, layout, pool=pool)


def test_loss_weight_counts_what_the_module_counts(pool):
    assert_parity(modules.MaskedMean, modules.masked_batches, "shard=2", accumulate_grad_batches=2, pool=pool)
    report = compare_with_one_process(modules.MaskedMeanWithoutWeight, modules.masked_batches, "shard=2", pool=pool)
    assert not report.same


def test_a_part_of_weight_zero_has_no_say(pool):
    assert_parity(modules.MaskedMean, modules.batches_with_an_empty_part, "shard=2", pool=pool)


def test_clipping_is_compared(pool):
    report = assert_parity(modules.Regression, modules.batches, "shard=2", gradient_clip_val=0.01, pool=pool)
    assert all(one > 0.01 for one, _ in report.gradient_norms)  # recorded before clipping, and clipped every time


@pytest.mark.parametrize("module", [modules.SumLoss, modules.UsesTheRank])
@pytest.mark.parametrize("layout", ["shard=2", "replicate=2"])
def test_modules_that_differ_are_found(pool, module, layout):
    with pytest.raises(AssertionError, match=f"DIFFERENT: layout {layout} .* does not train like one process"):
        assert_parity(module, modules.batches, layout, steps=2, pool=pool)


def test_a_factor_that_adam_hides_is_found_in_the_gradients(pool):
    report = compare_with_one_process(modules.hidden_factor_adamw, modules.batches, "shard=2", steps=1, pool=pool)
    assert not report.same
    assert report.differences["loss"].largest < 1e-12
    assert report.differences["gradients of the first step"].largest == pytest.approx(1.0)
    assert report.gradient_norms[0][1] == pytest.approx(2 * report.gradient_norms[0][0])
    assert report.differences["weights"].largest < 1e-5  # nearly invisible here


def test_a_module_made_in_configure_model_starts_from_the_same_weights(pool):
    assert_parity(modules.BuiltLate, modules.batches, "shard=2", pool=pool)


def test_manual_optimization_without_a_returned_loss(pool):
    report = assert_parity(modules.TwoOptimizers, modules.batches, "shard=2", steps=3, pool=pool)
    assert report.losses == [] and len(report.gradient_norms) == 6
    assert report.optimizers == ["SGD", "SGD"]


def test_batches_come_from_the_factory_or_the_loader(pool):
    given = assert_parity(modules.with_batches, None, "shard=2", pool=pool)
    loader = assert_parity(modules.Regression, None, "shard=2", steps=4, pool=pool)
    assert len(given.losses) == 5 and len(loader.losses) == 4  # three batches, the first used again
    assert given.losses[0] != loader.losses[0]


def test_float32_is_held_to_its_own_tolerance(pool):
    report = assert_parity(
        modules.Regression, modules.batches, "shard=2", precision="32-true", tolerance=1e-5, pool=pool
    )
    assert report.differences["weights"].largest > 1e-12


def test_one_rank_is_an_ordinary_layout(pool):
    assert assert_parity(modules.Regression, modules.batches, "shard=1", steps=2, pool=pool).world_size == 1


def test_layers_that_parity_excludes_are_named(pool):
    report = compare_with_one_process(modules.with_dropout, modules.batches, "shard=2", steps=1, pool=pool)
    assert report.notes == ["model.3 drops values at random (p=0.5); set it to 0 to compare numbers."]


def test_a_run_that_fails_says_so(pool):
    with pytest.raises(WorkerError, match="rank 1: RuntimeError: no luck on rank one"):
        assert_parity(modules.FailsUnderLayout, modules.batches, "shard=2", steps=1, pool=pool)


def test_wrong_use_is_one_sentence(pool):
    with pytest.raises(ValueError, match=r"module_factory=.*lambda.* cannot be found by name"):
        assert_parity(lambda: modules.Regression(), modules.batches, "shard=2", pool=pool)
    with pytest.raises(ValueError, match="batch_factory is of type list, not callable: give a function"):
        assert_parity(modules.Regression, modules.batches(), "shard=2", pool=pool)
    with pytest.raises(ValueError, match="layout='sharded=2'"):
        assert_parity(modules.Regression, modules.batches, "sharded=2", pool=pool)
    with pytest.raises(FactoryError, match=r"returned a torch.nn.modules.linear.Linear; it must return"):
        assert_parity(modules.not_a_module, modules.batches, "shard=2", pool=pool)
    with pytest.raises(FactoryError, match="NoData has no train_dataloader"):
        assert_parity(modules.NoData, None, "shard=2", pool=pool)
    with pytest.raises(FactoryError, match="gave no batches"):
        assert_parity(modules.Regression, list, "shard=2", pool=pool)
    with pytest.raises(ValueError, match="A global batch of 1 sample cannot be cut for 2 data ranks"):
        assert_parity(modules.Regression, modules.single_samples, "shard=2", pool=pool)


def test_batches_are_cut_into_contiguous_parts_of_all_their_samples():
    batch = {"x": torch.arange(7), "nested": [torch.arange(14).view(7, 2), "text"], "scale": torch.ones(3)}
    parts = [cut_batch(batch, part, 3) for part in range(3)]
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    assert torch.equal(torch.cat([part["nested"][0] for part in parts]), batch["nested"][0])
    assert all(part["nested"][1] == "text" and torch.equal(part["scale"], torch.ones(3)) for part in parts)


def test_relative_differences_name_the_worst_and_forgive_only_noise():
    one = {"large": torch.tensor([1.0, -2.0]), "noise": torch.tensor([1e-18]), "nan": torch.tensor([0.0])}
    other = {"large": torch.tensor([1.0, -2.2]), "noise": torch.tensor([-1e-18]), "nan": torch.tensor([math.nan])}
    found = dict(relative_differences(one, other, absent_is_zero=False))
    assert found["large"] == pytest.approx(0.1) and found["noise"] < 1e-15 and found["nan"] == math.inf
    assert relative_differences({"a": torch.ones(1)}, {}, absent_is_zero=False) == [("a", math.inf)]
    assert relative_differences({"a": torch.ones(1)}, {}, absent_is_zero=True) == [("a", 1.0)]
    masked = {"mask": torch.tensor([0.0, -math.inf])}
    assert relative_differences(masked, masked, absent_is_zero=False) == [("mask", 0.0)]
