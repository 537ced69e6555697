"""``layout="auto"``: one decision for all ranks, with a reason, and the numbers of one process."""

import pytest
from torch import nn
from torch.utils.data import DataLoader

from lightning_dist.strategies import auto_layout
from lightning_dist.testing import WorkerError
from tests.strategies.test_data_axes import global_steps
from tests.strategies.training import Classifier, InOrder, data, full_state, make, merged, reference, trainer, worst


class OwnLoader(Classifier):
    """Its loader follows the layout, which is not known before there is a batch."""

    def train_dataloader(self):
        dataset = data(32)
        return DataLoader(dataset, 4, sampler=InOrder(dataset, self.trainer.strategy))


def fit(memory=None, factory=OwnLoader, **kwargs):
    if memory is not None:
        auto_layout.memory_of = lambda device, per_node: memory
    run = trainer("auto", devices=2, use_distributed_sampler=False, **kwargs)
    module = make(factory)
    module.train()
    run.fit(module)
    strategy = run.strategy
    advice = strategy.advice
    return {
        "weights": full_state(module),
        "layout": str(strategy.layout),
        "told": auto_layout.describe(advice) if advice is not None else None,
    }


def test_ranks_take_one_layout_and_train_to_the_numbers_of_one_process(pool):
    results = pool.run(fit, 2, init_process_group=False, timeout=120)
    assert results[0]["layout"] == results[1]["layout"]
    told = results[0]["told"]
    assert told is not None and results[1]["told"] is None
    assert told.startswith("layout='auto' takes ") and "plain DDP: " in told and "one device: " in told
    data_ranks = 2 if "pp" not in results[0]["layout"] and "tp" not in results[0]["layout"] else 1
    wanted, _ = reference(make(OwnLoader), global_steps(data(32), 4, data_ranks))
    assert worst(merged(results), wanted) < 1e-9


class Large(OwnLoader):
    """Four matrices of 128 x 128 in float64: 512 kB of weights, as much for gradients, as much for momentum."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 128), *[nn.Linear(128, 128) for _ in range(4)], nn.Linear(128, 5))


def test_what_does_not_fit_whole_is_shared_out(pool):
    """1.6 MB a copy and little besides: two copies do not fit into 1.3 MB each, two halves do."""
    results = pool.run(fit, 2, 1.3e6, Large, init_process_group=False, timeout=120)
    assert results[0]["layout"] not in ("replicate=2", "shard=1")
    assert "plain DDP: " in results[0]["told"] and "which does not fit" in results[0]["told"]


def test_nothing_that_fits_is_one_sentence_on_every_rank(pool):
    with pytest.raises(WorkerError, match=r"layout='auto' found no layout: ") as error:
        pool.run(fit, 2, 1000.0, init_process_group=False, timeout=60)
    assert len({failure.message for failure in error.value.failures}) == 1


class Tested(Classifier):
    def test_step(self, batch, batch_idx):
        self.loss(batch)


def evaluate():
    run = trainer("auto", devices=2)
    run.test(make(Tested), DataLoader(data(8), 4))


def test_it_is_not_decided_without_training_data(pool):
    with pytest.raises(WorkerError, match="decided with the first training batch"):
        pool.run(evaluate, 2, init_process_group=False, timeout=60)


def test_one_process_needs_no_decision():
    run = trainer("auto", devices=1, max_epochs=1)
    run.fit(make(Classifier), DataLoader(data(8), 4))
    assert run.strategy.advice is None and run.strategy.layout.data_size == 1
