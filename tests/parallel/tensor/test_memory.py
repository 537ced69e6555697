"""What tensor parallelism remembers during a step is freed after it."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_dist.parallel.tensor import apply_tensor_parallel
from lightning_dist.parallel.tensor.collectives import gather_for_both, sum_gradients_of
from lightning_dist.plan.huggingface import find_tensor_plan
from tests.parallel.tensor.models import hugging_face, text_batch


def outlives(kind):
    """Whether a tensor that entered sharded work is alive after backward, without anybody holding it."""
    group = dist.group.WORLD
    leaf = torch.ones(4, 4, requires_grad=True)
    x = leaf.clone().requires_grad_() if kind == "leaf" else leaf * 2
    if kind == "leaf":
        x = x.detach().requires_grad_()
    whole = gather_for_both(x, 0, group) if kind == "gathered" else x
    entries = [sum_gradients_of(whole, group) for _ in range(2)]
    assert (entries[0] is entries[1]) == (kind != "leaf")
    torch.stack(entries).sum().backward()
    seen = weakref.ref(whole)
    del x, whole, entries
    gc.collect()
    return seen() is not None


@pytest.mark.parametrize("kind", ["activation", "gathered", "leaf"])
def test_an_entry_does_not_keep_its_tensor_alive(pool, kind):
    assert pool.run(outlives, 1, kind) == [False]


def living_tensors(sequence_parallel):
    """How many tensors are alive after each of some steps."""
    network = hugging_face("llama")
    plan = find_tensor_plan(network, sequence_parallel=sequence_parallel)
    apply_tensor_parallel(network, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)), plan)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    counts = []
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        network(**text_batch(), use_cache=False).loss.backward()
        optimizer.step()
        gc.collect()
        counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    return counts


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_steps_leave_nothing_behind(pool, sequence_parallel):
    """Eight activations for each step stayed alive once: a view held its base, which remembered the view."""
    for _, second, *later in pool.run(living_tensors, 2, sequence_parallel):
        assert set(later) == {second}
