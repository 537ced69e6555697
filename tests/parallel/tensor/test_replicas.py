"""Parameters that all tensor ranks hold stay equal bit for bit, and one that drifts is named (C10)."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from lightning_dist import ParallelLayout
from lightning_dist.parallel.tensor import apply_tensor_parallel, check_replicas, sum_replicated_gradients
from lightning_dist.parallel.tensor.replicas import _fingerprint
from lightning_dist.testing import WorkerError
from tests.parallel.tensor.compare import plan_for, weights, worst_difference
from tests.parallel.tensor.models import batch_for, build, loss_of


def parallel(kind, *, sequence_parallel=False, **settings):
    mesh = ParallelLayout.parse(f"tp={dist.get_world_size()}").resolve(dist.get_world_size()).build_mesh("cpu")
    network = build(kind, **settings)
    report = apply_tensor_parallel(network, mesh, plan_for(kind, network, sequence_parallel))
    return network, mesh, report


def train(network, kind, steps, finish=sum_replicated_gradients):
    batch = batch_for(kind)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(steps):
        for _ in range(2):
            loss_of(network, batch).backward()
        finish(network.parameters())
        optimizer.step()
        optimizer.zero_grad()


def twenty_steps(kind, sequence_parallel):
    network, mesh, report = parallel(kind, sequence_parallel=sequence_parallel)
    train(network, kind, 20)
    check_replicas(network, mesh)
    reference = build(kind)
    train(reference, kind, 20, finish=lambda parameters: None)
    return worst_difference(weights(reference), weights(network)), report.summed


@pytest.mark.parametrize(("kind", "sequence_parallel"), [("qwen3", False), ("llama", True)])
def test_replicas_are_equal_after_twenty_steps(pool, kind, sequence_parallel):
    for (difference, name), summed in pool.run(twenty_steps, 2, kind, sequence_parallel):
        assert difference <= 1e-9, name
        assert any("norm" in name for name in summed)


def manual_steps():
    """An optimizer that is stepped without `sum_replicated_gradients`, as manual optimization may do (C10)."""
    network, mesh, _ = parallel("qwen3")
    train(network, "qwen3", 3, finish=lambda parameters: None)
    check_replicas(network, mesh)
    reference = build("qwen3")
    train(reference, "qwen3", 3, finish=lambda parameters: None)
    return worst_difference(weights(reference), weights(network))


def test_an_optimizer_steps_right_without_the_sum(pool):
    for difference, name in pool.run(manual_steps, 2):
        assert difference <= 1e-9, name


def drift():
    network, mesh, _ = parallel("llama")
    with torch.no_grad():
        weight = network.model.layers[1].input_layernorm.weight
        weight.to_local()[3] += 1e-13 * dist.get_rank()
    check_replicas(network, mesh)


def test_a_drifting_parameter_is_named_on_every_rank(pool):
    with pytest.raises(WorkerError) as error:
        pool.run(drift, 2)
    assert sorted(failure.rank for failure in error.value.failures) == [0, 1]
    for failure in error.value.failures:
        assert "model.layers.1.input_layernorm.weight (tensor rank 1 against 0, by up to 1e-13)" in failure.message
        assert failure.message.count("tensor rank") == 1


def count_collectives():
    network, _, report = parallel("llama", sequence_parallel=True)
    for _ in range(3):
        loss_of(network, batch_for("llama")).backward()
    before = {name: p.grad for name, p in network.named_parameters()}
    partial = {name for name, grad in before.items() if any(place.is_partial() for place in grad.placements)}
    with CommDebugMode() as counted:
        sum_replicated_gradients(network.parameters())
    once = counted.get_total_counts()
    first = {name: p.grad.to_local().clone() for name, p in network.named_parameters()}
    with CommDebugMode() as counted:
        sum_replicated_gradients(network.parameters())
    assert all(torch.equal(first[name], p.grad.to_local()) for name, p in network.named_parameters())
    assert all(isinstance(p.grad, DTensor) and p.grad.placements == p.placements for p in network.parameters())
    return partial == set(report.summed), once, counted.get_total_counts()


def test_the_sum_is_one_collective_and_may_be_repeated(pool):
    assert pool.run(count_collectives, 2) == [(True, 1, 0)] * 2


def forward_and_backward():
    network, _, _ = parallel("llama")
    batch = batch_for("llama")
    with CommDebugMode() as forward, torch.no_grad():
        loss_of(network, batch)
    loss = loss_of(network, batch)  # not under the mode, which gives every module tensors of its own
    with CommDebugMode() as backward:
        loss.backward()
    return forward.get_total_counts(), backward.get_total_counts()


def test_projections_with_one_input_share_its_sum(pool):
    # Forward: embedding, attention and MLP of two layers, the logits' gather. Backward: one sum for each attention
    # and MLP, whatever the number of their projections, and one for the head.
    assert pool.run(forward_and_backward, 2) == [(6, 5)] * 2


def test_fingerprints_differ_where_a_bit_or_the_order_does():
    values = torch.randn(100)
    other = values.clone()
    other.view(torch.int32)[17] ^= 1
    assert not torch.equal(_fingerprint(values), _fingerprint(other))
    assert not torch.equal(_fingerprint(values), _fingerprint(values.flip(0)))
    assert torch.equal(_fingerprint(values), _fingerprint(values.clone()))
    assert torch.equal(_fingerprint(torch.empty(0)), torch.zeros(2, dtype=torch.int64))
