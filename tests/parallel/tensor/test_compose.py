"""What users do to a network beside tensor parallelism: compile it, copy it, run it in mixed precision, export it."""

import copy

import pytest
import torch

from lightning_dist import ParallelLayout
from lightning_dist.parallel.tensor import apply_tensor_parallel, sum_replicated_gradients
from lightning_dist.plan.huggingface import find_tensor_plan
from tests.parallel.tensor.compare import gradients, plan_for, weights, worst_difference
from tests.parallel.tensor.models import batch_for, build, loss_of


def parallel(kind, sequence_parallel=False, **settings):
    mesh = ParallelLayout.parse("tp=2").resolve(2).build_mesh("cpu")
    network = build(kind, **settings)
    apply_tensor_parallel(network, mesh, plan_for(kind, network, sequence_parallel))
    return network


def compiled(kind, sequence_parallel):
    reference, network = build(kind), parallel(kind, sequence_parallel)
    batch = batch_for(kind)
    for block in network.blocks if kind == "hand_written" else network.model.layers:
        block.compile(backend="aot_eager")
    loss_of(reference, batch).backward()
    for _ in range(2):  # the second call uses what the first compiled
        network.zero_grad()
        loss_of(network, batch).backward()
    sum_replicated_gradients(network.parameters())
    return worst_difference(gradients(reference), gradients(network))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sequence_parallel"), [("llama", False), ("llama", True), ("hand_written", False)])
def test_compiled_blocks_equal_one_process(pool, kind, sequence_parallel):
    for difference, name in pool.run(compiled, 2, kind, sequence_parallel, timeout=170):
        assert difference <= 1e-9, name


def copied():
    """A copy (weight averaging makes one) computes with its own weights, not with those it was copied from."""
    network = parallel("qwen3")
    twin = copy.deepcopy(network)
    batch = batch_for("qwen3")
    before = loss_of(network, batch).item()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.5)
    assert loss_of(network, batch).item() != before
    return loss_of(twin, batch).item() == before


def test_a_copy_has_weights_of_its_own(pool):
    assert pool.run(copied, 2) == [True, True]


def mixed_precision(kind):
    batch = batch_for(kind)
    losses = []
    for network in (build(kind, dtype=torch.float32), parallel(kind, dtype=torch.float32)):
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        curve = []
        for _ in range(5):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(network, batch)
            loss.backward()
            sum_replicated_gradients(network.parameters())
            assert all(parameter.grad.dtype == torch.float32 for parameter in network.parameters())
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        losses.append(curve)
    return losses


def test_bf16_mixed_follows_one_process(pool):
    for expected, found in pool.run(mixed_precision, 2, "llama"):
        assert expected[-1] < expected[0] - 0.05
        # bf16 has 8 bits: products of 64 terms differ by about 1e-3, far below what five steps change.
        assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 5e-3


def state():
    network = parallel("gpt2")
    names = set(network.state_dict())
    again = parallel("gpt2")
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    again.load_state_dict(network.state_dict())
    equal = all(torch.equal(a, b) for a, b in zip(weights(network).values(), weights(again).values(), strict=True))
    return (
        names == set(build("gpt2").state_dict()),
        equal,
        type(network).__name__,
        again.lm_head.weight is (again.transformer.wte.weight),
    )


def test_names_classes_and_state_dicts_stay(pool):
    assert pool.run(state, 2) == [(True, True, "GPT2LMHeadModel", True)] * 2


class Steps(torch.nn.Module):
    """Stands for a LightningModule: its step uses layers and parameters of its own past its forward."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.first, self.second = torch.nn.Linear(6, 10), torch.nn.Linear(10, 6)
        self.model = layers
        self.double()

    def training_step(self, batch):
        output = self.second(torch.tanh(self.first(batch["x"]))).square().mean() * self.scale
        return output + self.model(batch["input_ids"], labels=batch["labels"]).loss


def steps():
    batch = batch_for("llama") | {
        "x": torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    }
    modules = [Steps(build("llama")) for _ in range(2)]
    mesh = ParallelLayout.parse("tp=2").resolve(2).build_mesh("cpu")
    found = {f"model.{name}": style for name, style in find_tensor_plan(modules[1].model).items()}
    plan = found | {"first": "colwise", "second": "rowwise", "model.lm_head": "loss_parallel"}
    apply_tensor_parallel(modules[1], mesh, plan)
    for module in modules:
        module.training_step(batch).backward()
    sum_replicated_gradients(modules[1].parameters())
    return worst_difference(gradients(modules[0]), gradients(modules[1]))


def test_a_modules_steps_may_use_its_layers_directly(pool):
    for difference, name in pool.run(steps, 2):
        assert difference <= 1e-6, name  # the sharded loss is computed in float32


class TiedByHand(torch.nn.Module):
    """A head that is the embedding's matrix, used from outside of the embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(20, 8)
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)
        self.double()

    def forward(self, ids, labels):
        x = self.embed(ids)
        x = x + self.down(torch.relu(self.up(x)))
        logits = torch.nn.functional.linear(x, self.embed.weight)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tied_by_hand(embedding):
    ids = torch.arange(12).view(3, 4)
    reference, network = TiedByHand(), TiedByHand()
    mesh = ParallelLayout.parse("tp=2").resolve(2).build_mesh("cpu")
    plan = {"": "global_shapes", "embed": embedding, "up": "colwise", "down": "rowwise"}
    apply_tensor_parallel(network, mesh, plan)
    losses = [each(ids, ids + 1) for each in (reference, network)]
    for loss in losses:
        loss.backward()
    sum_replicated_gradients(network.parameters())
    return abs(losses[0].item() - losses[1].item()), worst_difference(gradients(reference), gradients(network))


@pytest.mark.parametrize("embedding", ["replicate", "embedding_rowwise", "embedding_colwise"])
def test_a_matrix_used_from_outside_of_its_module(pool, embedding):
    for loss, (gradient, name) in pool.run(tied_by_hand, 2, embedding):
        assert loss <= 1e-12
        assert gradient <= 1e-9, name
