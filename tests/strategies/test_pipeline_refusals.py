"""Ways for a pipeline to be silently wrong, through the Trainer: each is right, or refused with one sentence."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MeanMetric

from lightning_dist.testing import WorkerError
from tests.strategies.test_pipeline_axis import Deep
from tests.strategies.test_pipeline_training import Batches, fit, together
from tests.strategies.training import CLASSES, Network, data, make, reference, trainer, worst

MICROBATCHES = 4


class Net(Network):
    def __init__(self):
        super().__init__(depth=6)


class Own(Deep):
    """Holds the network of a class of one's own."""

    network = Net

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model = self.network()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


# --- right -------------------------------------------------------------------------------------------------------


class CodeAround(Net):
    """Code and parameters in front of, between and behind the modules of the chain; in-place code too."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))
        self.shift = nn.Parameter(torch.zeros(CLASSES))
        self.register_buffer("scale", torch.tensor(1.3))

    def forward(self, x):
        x = self.embed(x * self.gain)
        for index, block in enumerate(self.blocks):
            x = block(x) * 1.1
            x += 0.01 * index
        return self.head(x) * self.scale + self.shift


class Around(Own):
    network = CodeAround

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls, self.seen = 0, []

    def training_step(self, batch, batch_idx):
        self.calls += 1
        loss = self.loss(batch) * 2 + 0.01 * self.model.gain.square().sum()
        self.seen.append(len(batch[1]))
        return loss


def count_calls(layout, schedule):
    counts = {}

    class Keep(L.Callback):
        def on_train_end(self, trainer, pl_module):
            counts.update(calls=pl_module.calls, seen=pl_module.seen)

    return fit(layout, Around, data(16), schedule, callbacks=[Keep()], gradient_clip_val=0.5) | counts


class AroundReference(Around):
    def loss(self, batch):
        return super().loss(batch) * 2 + 0.01 * self.model.gain.square().sum()


@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 1), ("ZBVZeroBubble", 2)])
def test_code_around_the_chain_and_parameters_outside_it(pool, schedule, stages):
    """The step runs once for each microbatch and stage; what stands behind the network on the last stage only."""
    dataset = data(16)
    steps = [[[t[start : start + 4] for t in dataset.tensors]] for start in range(0, 16, 4)]

    def clip(parameters):
        nn.utils.clip_grad_norm_(parameters, 0.5)

    wanted, _ = reference(make(AroundReference), steps, clip=clip)
    results = pool.run(count_calls, 2, "pp=2", schedule, init_process_group=False)
    assert worst(together(results), wanted) < 1e-9
    assert [result["calls"] for result in results] == [4 * MICROBATCHES * stages] * 2
    assert [len(result["seen"]) for result in results] == [4 * MICROBATCHES, 0]  # the last stage is on rank 0


class RandomNet(Net):
    """Dropout in blocks, and random masks in front of the chain, between its modules and behind it."""

    def forward(self, x):
        x = x * (torch.rand(len(x), 1, dtype=x.dtype) > 0.2)
        keep = (torch.rand(len(x), 1, dtype=x.dtype) > 0.2).to(x.dtype)
        x = F.dropout(self.embed(x), 0.2, self.training)
        for block in self.blocks:
            x = F.dropout(block(x), 0.1, self.training) * keep
        return F.dropout(self.head(x), 0.1, self.training)


class Random(Own):
    network = RandomNet

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for block in self.model.blocks:
            block.down = nn.Sequential(nn.Dropout(0.3), block.down)


def test_random_numbers_do_not_depend_on_how_the_network_is_cut(pool):
    """Dropout and masks are the same for 2 and 4 stages, on 2 and 4 ranks, in a loop and in a V."""
    ways = [("pp=2", "1F1B", 2), ("pp=4", "GPipe", 4), ("pp=2", "ZBVZeroBubble", 2)]
    first, *others = (
        together(pool.run(fit, world, layout, Random, data(16), schedule, init_process_group=False))
        for layout, schedule, world in ways
    )
    for other in others:
        assert worst(other, first) < 1e-9
    still, _ = reference(make(Random).eval(), [[[t[s : s + 4] for t in data(16).tensors]] for s in range(0, 16, 4)])
    assert worst(first, still) > 1e-3


class NormNet(Net):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.BatchNorm1d(6), self.embed)


class Norm(Own):
    network = NormNet


def test_running_statistics_move_once_for_each_batch(pool):
    """They are those of one device with whole batches; each microbatch is normalised by its own."""
    dataset = data(32)
    batches = [[t[start : start + 8] for t in dataset.tensors] for start in range(0, 32, 8)]
    wanted = nn.BatchNorm1d(6).double()
    for x, _ in batches:
        wanted(x)
    results = pool.run(fit, 2, "pp=2", Norm, Batches(batches), init_process_group=False)
    for name, value in wanted.state_dict().items():
        if not name.startswith(("weight", "bias")):
            torch.testing.assert_close(together(results)[f"model.embed.0.{name}"], value, rtol=1e-9, atol=1e-12)


# --- refused -----------------------------------------------------------------------------------------------------


class SkipNet(Net):
    def forward(self, x):
        x = embedded = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + embedded)


class TwiceNet(Net):
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.blocks[0](x))


class DirectNet(Net):
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + F.linear(self.embed.weight.sum(1), self.head.weight)


class ReadNet(Net):
    def forward(self, x):
        x = self.embed(x)
        if float(x.sum()) > 0:
            x = x * 2
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skip(Own):
    network = SkipNet


class Twice(Own):
    network = TwiceNet


class Direct(Own):
    network = DirectNet


class Read(Own):
    network = ReadNet


class ByHand(Own):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.automatic_optimization = False


class TwoOptimizers(Own):
    def configure_optimizers(self):
        halves = list(self.parameters())[::2], list(self.parameters())[1::2]
        return [torch.optim.SGD(half, lr=0.1) for half in halves]


class OwnBackward(Own):
    def backward(self, loss, *args, **kwargs):
        loss.backward()


class Penalty(Own):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        (gradient,) = torch.autograd.grad(loss, [self.model.head.weight], create_graph=True)
        return loss + gradient.square().sum()


class MetricInside(Own):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model.blocks[0].mean = MeanMetric()


class Hooked(Own):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model.embed.register_forward_hook(lambda module, inputs, output: output * 2)


REFUSED = [
    (Skip, r"The output of model\.embed \(stage 0\) reaches model\.head \(stage 1\).*skip connection"),
    (Twice, r"model\.blocks\.0 is called more than once in one step"),
    (Direct, r"model\.(embed|head)\.weight is used directly.*ModelPlan\.shared"),
    (Read, r"output of model\.embed are read on the host"),
    (ByHand, "uses manual optimization, which a pipeline can't run"),
    (TwoOptimizers, "multiple optimizers is only supported with manual optimization"),
    (OwnBackward, "overrides backward, which a pipeline's schedule would never call"),
    (Penalty, r"calls torch\.autograd\.grad, which under a pipeline"),
    (MetricInside, r"model\.blocks\.0\.mean is a metric object inside a module of the pipeline's chain"),
    (Hooked, r"model\.embed has a hook .*never runs"),
]


@pytest.mark.parametrize(("factory", "sentence"), REFUSED, ids=[factory.__name__ for factory, _ in REFUSED])
def test_what_can_not_be_exact_is_refused_with_one_sentence_on_every_rank(pool, factory, sentence):
    with pytest.raises(WorkerError, match=sentence) as error:
        pool.run(fit, 2, "pp=2", factory, data(8), init_process_group=False, timeout=60)
    assert sorted(failure.rank for failure in error.value.failures) == [0, 1]
    for failure in error.value.failures:
        assert failure.kind != "Stuck"
    one, other = (failure.message for failure in error.value.failures)
    assert one == other


class CallsNetwork(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.model(batch[0])


def test_a_callback_that_calls_the_network_is_told_who_has_it(pool):
    with pytest.raises(WorkerError) as error:
        pool.run(fit, 2, "pp=2", Own, data(8), init_process_group=False, callbacks=[CallsNetwork()], timeout=60)
    for failure in error.value.failures:
        assert "was called outside a step, but it belongs to stage" in failure.message
        assert failure.kind != "Stuck"


class ShortNet(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.Linear(8, CLASSES))


class Short(Own):
    network = ShortNet


def test_a_chain_that_is_too_short_says_so(pool):
    with pytest.raises(WorkerError, match="chain has 2 modules, fewer than its 4 stages"):
        pool.run(fit, 2, "pp=2", Short, data(8), "Interleaved1F1B", init_process_group=False)


def test_arguments_are_refused_before_any_process_meets():
    with pytest.raises(ValueError, match="pipeline_schedule='2F2B' is no schedule; there are GPipe"):
        trainer("pp=2", strategy_kwargs={"pipeline_schedule": "2F2B"})
    with pytest.raises(ValueError, match="microbatches=0 does not fit"):
        trainer("pp=2", strategy_kwargs={"microbatches": 0})
    with pytest.raises(ValueError, match="torch computes wrong gradients when parameters are freed"):
        settings = {"pipeline_schedule": "ZBVZeroBubble", "reshard_after_forward": True}
        trainer("pp=2,shard=2", strategy_kwargs=settings)
    with pytest.raises(ValueError, match=r"activation_checkpointing='selective' does not fit .* 'full' or 'none'"):
        settings = {"pipeline_schedule": "DualPipeV", "activation_checkpointing": "selective"}
        trainer("pp=2", strategy_kwargs=settings)
