"""Dropout under tensor parallelism: one mask where activations are replicated, a rank's own where they are cut."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dist import ParallelLayout
from lightning_dist.parallel.tensor import apply_tensor_parallel, check_replicas, sum_replicated_gradients
from lightning_dist.parallel.tensor.dropout import RandomRegion
from lightning_dist.plan.huggingface import find_tensor_plan
from tests.parallel.tensor.compare import plan_for
from tests.parallel.tensor.models import batch_for, build, loss_of, text_batch


def mesh():
    return ParallelLayout.parse("tp=2").resolve(2).build_mesh("cpu")


def test_a_region_depends_on_rank_and_state_and_leaves_the_common_stream_alone():
    after, inside = [], []
    for rank in (0, 1, 0):
        torch.manual_seed(7)
        region = RandomRegion(rank)
        with region.on(torch.device("cpu")):
            inside.append(torch.rand(50))
            torch.rand(rank * 10)  # ranks may draw different amounts
        first = torch.rand(5)
        with region.on(torch.device("cpu")):
            inside.append(torch.rand(50))
        after.append(torch.cat([first, torch.rand(5)]))
    assert torch.equal(after[0], after[1])
    assert torch.equal(inside[0], inside[4]) and torch.equal(inside[1], inside[5])
    different = torch.stack([*inside[:4], torch.rand(50)])
    assert all(not torch.equal(a, b) for index, a in enumerate(different) for b in different[:index])


def masks(kind):
    """What dropout kept, by module: in an MLP between its matrices (cut), and after them (replicated)."""
    torch.manual_seed(3)
    if kind == "gpt2":
        network = build("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
        watched = {"after": "transformer.h.1.mlp.dropout", "embedding": "transformer.drop"}
    else:
        network = build("torch_encoder", dropout=0.3)
        watched = {"after": "encoder.layers.1.dropout2", "inside": "encoder.layers.1.dropout"}
    apply_tensor_parallel(network, mesh(), plan_for(kind, network))
    network.train()
    torch.manual_seed(3)
    kept = {}
    for place, name in watched.items():
        network.get_submodule(name).register_forward_hook(
            lambda module, args, output, place=place: kept.__setitem__(place, (output != 0).flatten().tolist())
        )
    loss = loss_of(network, batch_for(kind))
    return kept, float(loss)


def test_gpt2_drops_alike_on_replicated_activations(pool):
    (first, loss), (second, other_loss) = pool.run(masks, 2, "gpt2")
    assert first == second and loss == other_loss
    assert 0.6 < sum(first["after"]) / len(first["after"]) < 0.8


def test_the_cut_part_of_an_mlp_drops_differently(pool):
    (first, loss), (second, other_loss) = pool.run(masks, 2, "torch_encoder")
    assert first["after"] == second["after"] and loss == other_loss
    assert first["inside"] != second["inside"]


def attention_masks():
    """The attention probabilities that survive on each rank, through eager attention's dropout module."""
    network = build("gpt2", attn_pdrop=0.5, resid_pdrop=0.2, embd_pdrop=0.2, attention="eager")
    apply_tensor_parallel(network, mesh(), find_tensor_plan(network))
    network.train()
    torch.manual_seed(3)
    kept = []
    original = nn.functional.dropout

    def watch(x, p=0.5, training=True, inplace=False):
        output = original(x, p, training, inplace)
        if x.dim() == 4:
            kept.append((output == 0)[x != 0].tolist())
        return output

    nn.functional.dropout = watch
    try:
        loss_of(network, text_batch(length=8)).backward()
    finally:
        nn.functional.dropout = original
    return kept


def test_heads_of_different_ranks_drop_differently(pool):
    first, second = pool.run(attention_masks, 2)
    assert len(first) == len(second) == 2  # layers
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert first[0] != first[1]


def replicas_after_training(kind, sequence_parallel):
    settings = {"attention_dropout": 0.2} if kind == "llama" else {}
    network = build(kind, **settings) if kind != "torch_encoder" else build(kind, dropout=0.3)
    device_mesh = mesh()
    apply_tensor_parallel(network, device_mesh, plan_for(kind, network, sequence_parallel))
    network.train()
    torch.manual_seed(11)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for _ in range(3):
        loss_of(network, batch_for(kind)).backward()
        sum_replicated_gradients(network.parameters())
        optimizer.step()
        optimizer.zero_grad()
    check_replicas(network, device_mesh)
    return torch.rand(3).tolist()


@pytest.mark.parametrize(("kind", "sequence_parallel"), [("torch_encoder", False), ("llama", False), ("llama", True)])
def test_replicas_and_the_common_stream_stay_equal(pool, kind, sequence_parallel):
    first, second = pool.run(replicas_after_training, 2, kind, sequence_parallel)
    assert first == second


def recomputed():
    """With activation checkpointing the recomputed stretch draws the numbers of the first run."""
    gradients = []
    for again in (False, True):
        network = build("llama", attention_dropout=0.4)
        apply_tensor_parallel(network, mesh(), find_tensor_plan(network))
        network.train()
        if again:
            network.activation_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(5)
        loss_of(network, text_batch()).backward()
        gradients.append([p.grad.to_local() for p in network.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_recomputation_draws_the_same_numbers(pool):
    assert pool.run(recomputed, 2) == [True, True]


class WithDropout(nn.Module):
    """Hand-written, so on DTensors: dropout between the matrices and after them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x):
        inside = nn.functional.dropout(self.up(x), 0.5, self.training)
        self.inside = inside
        return nn.functional.dropout(self.down(inside), 0.5, self.training)


def on_dtensors():
    torch.manual_seed(0)
    network = WithDropout()
    apply_tensor_parallel(network, mesh(), {"up": "colwise", "down": "rowwise"})
    torch.manual_seed(1)
    output = network(torch.ones(4, 8))
    return (output == 0).tolist(), (network.inside.to_local() == 0).tolist(), dist.get_rank()


def test_dropout_on_dtensors(pool):
    (output, inside, _), (other_output, other_inside, _) = pool.run(on_dtensors, 2)
    assert output == other_output
    assert inside != other_inside
