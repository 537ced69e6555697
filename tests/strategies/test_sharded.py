"""FairScaleShardedStrategy trains to the numbers of one process."""

from functools import partial

import pytest
from torch import nn

from tests.strategies.sharded_training import train
from tests.strategies.test_data_axes import global_steps
from tests.strategies.training import Classifier, data, make, reference, worst


def check(pool, world, dataset, batch_size, wanted, tolerance=1e-9, factory=Classifier, **kwargs):
    results = pool.run(train, world, factory, dataset, batch_size, world, init_process_group=False, **kwargs)
    for result in results:
        assert worst(result["weights"], wanted) < tolerance
    return results


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weights_equal_one_process(pool, world, optimizer):
    dataset = data(24 * world)
    wanted, _ = reference(make(Classifier, optimizer=optimizer), global_steps(dataset, 2, world))
    check(pool, world, dataset, 2, wanted, factory_kwargs={"optimizer": optimizer})


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_clipping_accumulation_and_a_short_last_window(pool, optimizer):
    """7 batches of 3 (the last of 2) in windows of 3: the last window holds one short batch."""
    dataset = data(40)
    clip = partial(nn.utils.clip_grad_norm_, max_norm=0.05)
    wanted, _ = reference(make(Classifier, optimizer=optimizer), global_steps(dataset, 3, 2, accumulate=3), clip=clip)
    kwargs = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05, "factory_kwargs": {"optimizer": optimizer}}
    check(pool, 2, dataset, 3, wanted, **kwargs)
