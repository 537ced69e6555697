"""Validation, test and prediction on a pipeline, before, between and after training."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.strategies.test_behaviour import evaluate
from tests.strategies.test_pipeline_axis import Deep
from tests.strategies.test_pipeline_metrics import single
from tests.strategies.training import data, full_state, make, trainer, worst


class Evaluated(Deep):
    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return {"logits": self.model(batch[0]), "labels": batch[1], "batch": batch_idx}


def all_calls(layout, schedule="1F1B"):
    """The sanity check, a validation before, in and after fit, test, predict: the numbers, and the weights."""
    module = make(Evaluated)
    if layout is None:
        run = single(num_sanity_val_steps=1, val_check_interval=2)
    else:
        settings = {"pipeline_schedule": schedule, "microbatches": 4}
        run = trainer(
            layout,
            num_sanity_val_steps=1,
            val_check_interval=2,
            strategy_kwargs=settings,
            use_distributed_sampler=False,
        )
    training, validation, more = (
        DataLoader(data(20), 4),
        DataLoader(data(11, seed=5), 4),
        DataLoader(data(5, seed=6), 4),
    )
    got = {"before": run.validate(module, [validation, more], verbose=False)}
    run.fit(module, training, validation)
    got["after"] = run.validate(module, validation, verbose=False)
    got["test"] = run.test(module, [more, validation], verbose=False)
    weights = full_state(module)
    return got, run.predict(module, validation), weights


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble", "DualPipeV", "Interleaved1F1B"])
def test_every_call_of_the_trainer_gives_one_devices_numbers_on_every_rank(pool, schedule):
    """C21: forward only first, then training. 11 samples are batches of 4, 4 and 3; 5 are 4 and 1."""
    wanted, predictions, weights = all_calls(None)
    results = pool.run(all_calls, 2, "pp=2", schedule, init_process_group=False, timeout=120)
    for got, predicted, _ in results:
        for name, dictionaries in wanted.items():
            for one, other in zip(got[name], dictionaries, strict=True):
                assert one == pytest.approx(other, rel=1e-9)
        assert [batch["batch"] for batch in predicted] == [0, 1, 2]
        for one, other in zip(predicted, predictions, strict=True):
            assert torch.equal(one["labels"], other["labels"])
            torch.testing.assert_close(one["logits"], other["logits"], rtol=1e-9, atol=1e-12)
    assert worst({**results[0][2], **results[1][2]}, weights) < 1e-9


def evaluate_unequal(layout, samples):
    return [evaluate(layout, samples, stream) for stream in (False, True)]


def test_every_sample_is_evaluated_exactly_once_on_unequal_data_ranks(pool):
    """Loaders of unequal length (C18): padding takes part in the pipeline and counts for nothing."""
    samples = 13
    wanted = {"metric": 6.0, "mean": 6.0, "sum": 78.0, "max": 12.0}
    results = pool.run(evaluate_unequal, 4, "pp=2,replicate=2", samples, init_process_group=False, timeout=120)
    for kind in (0, 1):
        predicted = []
        for result in results:
            validated, tested, ids = result[kind]
            assert validated == pytest.approx(wanted)
            assert tested == pytest.approx(wanted)
            predicted.append(ids)
        assert predicted[0] == predicted[2]  # the two stages of one pipeline
        assert sorted(predicted[0] + predicted[1]) == list(range(samples))


def predict_ids(layout):
    run = trainer(layout)
    dataset = TensorDataset(data(9).tensors[0], torch.arange(9))
    return [batch["labels"].tolist() for batch in run.predict(make(Evaluated), DataLoader(dataset, 4))]


def test_predictions_keep_the_order_of_samples(pool):
    assert pool.run(predict_ids, 2, "pp=2", init_process_group=False) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8]]] * 2


def two_trainers(layout):
    """One Trainer after the other with the same module."""
    module, got = make(Evaluated), []
    for _ in range(2):
        run = single() if layout is None else trainer(layout, use_distributed_sampler=False)
        run.fit(module, DataLoader(data(16), 4))
        got += (single() if layout is None else trainer(layout)).validate(module, DataLoader(data(5), 4), verbose=False)
    return got, full_state(module)


def test_a_module_goes_from_one_trainer_to_the_next(pool):
    wanted, weights = two_trainers(None)
    results = pool.run(two_trainers, 2, "pp=2", init_process_group=False, timeout=120)
    for got, _ in results:
        assert got == [pytest.approx(one, rel=1e-9) for one in wanted]
    assert worst({**results[0][1], **results[1][1]}, weights) < 1e-9
