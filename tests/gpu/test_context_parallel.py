"""torch's own context parallelism (ring and all-gather), whose attention has no CPU implementation."""

import os

import pytest
import torch
import torch.distributed as dist

from lightning_dist import ParallelLayout
from lightning_dist.parallel.context import (
    ContextParallel,
    combine_loss,
    context_attention,
    cut_batch,
    loss_share,
    prepare_network,
    sum_context_gradients,
)
from tests.parallel.tensor.compare import gradients, worst_difference
from tests.parallel.tensor.models import build, loss_of, text_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs CUDA: torch 2.13 registers no sharding for attention on CPU"
    ),
]


def parity(method):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = ParallelLayout.parse(f"cp={dist.get_world_size()}").resolve(dist.get_world_size()).build_mesh("cuda")
    context = ContextParallel(mesh, method)
    batch = {name: value.cuda() for name, value in text_batch(length=64).items() if name != "attention_mask"}
    dims = {"input_ids": 1, "labels": 1}
    reference, network = (build("llama", dtype=torch.float32).cuda() for _ in range(2))
    expected = loss_of(reference, batch)
    expected.backward()
    prepare_network(network, context)
    with context_attention(context, length=64):
        loss = loss_of(network, cut_batch(batch, dims, context))
        loss = combine_loss(loss, loss_share(batch, dims, context), context)
        loss.backward()
    sum_context_gradients(network.parameters(), context)
    found = abs(loss.item() - expected.item()), worst_difference(gradients(reference), gradients(network))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_ranks_equal_one(pool, method, ranks):
    if ranks > 1 and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs: NCCL takes one rank for each")
    if ranks == 1 and method == "ulysses":
        pytest.skip("one rank has nothing to exchange")
    for loss, (gradient, name) in pool.run(parity, ranks, method, init_process_group=False, timeout=120):
        assert loss <= 1e-4
        assert gradient <= 1e-2, name  # flash attention needs 16 bits inside torch's kernels
