"""The runner's behaviour: calls, memory, evaluation, statistics, random numbers, errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_dist.parallel.pipeline import SCHEDULES
from lightning_dist.testing import WorkerError, WorkerPool
from tests.parallel.pipeline import awkward, networks, workers
from tests.parallel.pipeline.networks import language_model, language_step, token_batches

ALL = tuple(SCHEDULES)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_the_step_runs_once_for_each_microbatch_and_stage(pool: WorkerPool, schedule: str) -> None:
    """Never once more to learn shapes, and each module once for each microbatch, on one rank only."""
    ranks = pool.run(workers.count_calls, 2, schedule, token_batches([8, 6], [5, 4]), timeout=60)
    for rank in ranks:
        wanted = 2 * rank["microbatches"]  # training and evaluation
        assert len(rank["calls"]) == wanted * rank["stages"]
        assert rank["forwards"] == dict.fromkeys(rank["own"], wanted)


@pytest.mark.parametrize(
    ("schedule", "train_between"),
    [
        ("1F1B", False),
        ("ZBVZeroBubble", False),
        ("DualPipeV", True),
        *(pytest.param(name, train, marks=pytest.mark.slow) for name in ALL for train in (False, True)),
    ],
)
def test_evaluation_before_between_and_after_training(pool: WorkerPool, schedule: str, train_between: bool) -> None:
    """C21, and V schedules, for which torch's own eval crashes; outputs are those of one process."""
    batches = token_batches([8, 3, 1], [5, 6, 5])
    module: Any = language_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    expected = []
    for batch in batches:
        with torch.no_grad():
            expected.append(module.model(batch[0]))
        if train_between:
            language_step(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    last, other = pool.run(workers.evaluate, 2, schedule, batches, train_between, timeout=60)
    assert other == [None] * 3
    for found, wanted in zip(last, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_1f1b_holds_activations_of_as_many_microbatches_as_stages_follow(pool: WorkerPool, ranks: int) -> None:
    microbatches = 8
    held = pool.run(workers.live_activations, ranks, "1F1B", microbatches, timeout=90)
    # rank r of n has stage n - 1 - r, which holds (stages - stage) microbatches
    assert held == [rank + 1 for rank in range(ranks)]
    assert pool.run(workers.live_activations, ranks, "GPipe", microbatches, timeout=90) == [microbatches] * ranks


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_rank_holds_its_own_parameters_only_also_on_meta(pool: WorkerPool, schedule: str) -> None:
    first, second = pool.run(workers.own_memory, 2, schedule, timeout=60)
    both = set(first["parameters"]) & set(second["parameters"])
    assert both == {"model.position"}
    with torch.device("meta"):
        whole: Any = language_model()
    assert set(first["parameters"]) | set(second["parameters"]) == {name for name, _ in whole.named_parameters()}
    assert first["text"] == second["text"] == repr(whole)
    assert first["isinstance"] and first["attributes"] == "Linear"


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("network", "was called outside a step, but it belongs to stage"),
        ("module", "was called outside a step, but it belongs to stage"),
        ("forward", "forward is called directly"),
        ("parameter", "is used directly, but it belongs to stage"),
    ],
)
def test_another_ranks_module_says_whose_it_is(pool: WorkerPool, part: str, says: str) -> None:
    last, first = pool.run(workers.call_outside, 2, part, timeout=60)
    assert says in last and says in first
    assert "model.embed" in last and "stage 0 on rank 1" in last
    assert ("model.blocks.3" if part == "network" else "model.head") in first and "stage 1 on rank 0" in first


def test_another_ranks_parameter_answers_for_its_shape(pool: WorkerPool) -> None:
    assert pool.run(workers.call_outside, 2, "shape", timeout=60) == ["(11, 8) torch.float64 True"] * 2


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_whole_batches(pool: WorkerPool, momentum: float | None) -> None:
    """Of a normalisation whose input does not depend on the cut into microbatches: exactly one process's."""
    batches = networks.labelled_batches("normalised", [8, 9, 11])
    torch.manual_seed(0)
    module = networks.Wrapper(awkward.NormalisedFirst(momentum)).double()
    for batch in batches:
        networks.classification_step(module, batch)
    _, first = pool.run(workers.statistics, 2, momentum, batches, timeout=60)
    expected = dict(module.named_buffers())
    assert first.keys() == expected.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_residual_network_equals_the_same_microbatches_in_one_process(pool: WorkerPool, schedule: str) -> None:
    """Statistics of each microbatch normalise it; a batch of one microbatch moves the running ones as torch does."""
    batches = networks.labelled_batches("residual_network", [8])
    module = networks.residual_network()
    for part in zip(*(tensor.chunk(4) for tensor in batches[0]), strict=True):
        (networks.classification_step(module, part) / 4).backward()
    expected = {name: value.grad for name, value in module.named_parameters()}
    ranks = pool.run(workers.residual_statistics, 2, schedule, batches, 4, timeout=60)
    found = {name: value for rank in ranks for name, value in rank.items()}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)
    assert {int(value) for name, value in found.items() if name.endswith("num_batches_tracked")} == {1}

    module = networks.residual_network()
    networks.classification_step(module, batches[0])
    ranks = pool.run(workers.residual_statistics, 2, schedule, batches, 1, timeout=60)
    found = {name: value for rank in ranks for name, value in rank.items()}
    for name, value in module.named_buffers():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("as_tensors", [False, True])
def test_a_microbatch_of_weight_zero_adds_nothing_and_no_nan(pool: WorkerPool, as_tensors: bool) -> None:
    """1, 0, 5 and 3 valid labels (C08): the gradient is that of the mean over all nine."""
    ids, labels = token_batches([4])[0]
    counts = [1, 0, 5, 3]
    for row, count in enumerate(counts):
        labels[row, count:] = -100
    module: Any = language_model()
    F.cross_entropy(module.model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    ranks = pool.run(workers.masked_mean, 2, [float(count) for count in counts], as_tensors, (ids, labels), timeout=60)
    for rank in ranks:
        for name, gradient in rank.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def test_gradients_can_be_taken_off_and_added_later(pool: WorkerPool) -> None:
    assert pool.run(workers.taken_off, 2, token_batches([8])[0], timeout=60) == [True, True]


@pytest.mark.parametrize("kind", ["DropoutNetwork", "RandomPrefix"])
def test_random_numbers_do_not_depend_on_the_number_of_stages(pool: WorkerPool, kind: str) -> None:
    """Dropout in modules, draws in front of and between them: one rank, two, and a V give the same gradients."""
    factory = partial(awkward.build, kind)
    batches = token_batches([8, 8])
    (alone,) = pool.run(workers.draws, 1, factory, "GPipe", batches, timeout=60)
    layouts = [(2, "GPipe"), (2, "1F1B"), (2, "ZBVZeroBubble")]
    gradients = {
        layout: pool.run(workers.draws, layout[0], factory, layout[1], batches, timeout=60) for layout in layouts
    }
    for ranks in gradients.values():
        found = {name: value for rank in ranks for name, value in rank.items()}
        assert found.keys() == alone.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-9, atol=1e-12, msg=name)


def test_a_users_error_arrives_as_it_was_raised(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"KeyError.*a user's mistake"):
        pool.run(workers.failing, 2, "behind", timeout=60)


@pytest.mark.parametrize(("where", "says"), [("nothing", "returned NoneType"), ("vector", r"shape \[2\]")])
def test_a_step_without_a_scalar_loss_is_refused(pool: WorkerPool, where: str, says: str) -> None:
    with pytest.raises(WorkerError, match=says):
        pool.run(workers.failing, 2, where, timeout=60)


def test_a_step_that_swallows_the_boundary_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="StageBoundary"):
        pool.run(workers.swallowing, 2, timeout=60)


def test_what_several_stages_have_begins_equal_on_ranks_that_were_not_seeded_alike(pool: WorkerPool) -> None:
    """And equal-shaped layers of different stages do not (C14)."""
    last, first = pool.run(workers.unseeded, 2, "TiedNetwork", timeout=60)
    assert last.keys() & first.keys() == {"model.position", "model.embed.weight", "model.head.weight"}
    for name in last.keys() & first.keys():
        assert torch.equal(last[name], first[name])
    assert not torch.equal(first["model.blocks.0.up.weight"], last["model.blocks.5.up.weight"])
