"""Sequence parallelism equals one process, and holds less between the sharded parts."""

import pytest
import torch

from lightning_dist import ParallelLayout
from lightning_dist.parallel.tensor import apply_tensor_parallel
from lightning_dist.plan.huggingface import find_tensor_plan
from lightning_dist.testing import WorkerError
from tests.parallel.tensor.compare import tensor_parity
from tests.parallel.tensor.models import build, loss_of, text_batch


@pytest.mark.parametrize(
    ("kind", "settings", "bound"),
    [
        ("llama", {"attention_bias": True}, 1e-9),
        ("qwen3", {}, 1e-9),
        ("gemma3", {}, 1e-6),  # its embedding's scale is a float32 number
        ("gpt2", {}, 1e-9),
        ("mixtral", {}, 1e-6),  # its router computes in float32
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_two_ranks_equal_one(pool, kind, settings, bound):
    for outcome in pool.run(tensor_parity, 2, kind, settings, accumulation=2, sequence_parallel=True):
        assert outcome["gradient"] <= bound, outcome["gradient_of"]
        assert outcome["weight"] <= bound, outcome["weight_of"]


def parallel(kind):
    mesh = ParallelLayout.parse("tp=2").resolve(2).build_mesh("cpu")
    network = build(kind)
    apply_tensor_parallel(network, mesh, find_tensor_plan(network, sequence_parallel=True))
    return network


def odd_length():
    loss_of(parallel("llama"), text_batch(length=11))


def test_odd_lengths_are_refused(pool):
    with pytest.raises(WorkerError) as error:
        pool.run(odd_length, 2)
    assert len(error.value.failures) == 2
    assert "over 2 ranks does not fit a sequence of 11 tokens: pad batches to a multiple of 2" in str(error.value)


def shapes():
    network = parallel("llama")
    seen = {}
    for name in ("model.layers.0.input_layernorm", "model.layers.1.mlp.down_proj", "model.norm"):
        network.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: seen.__setitem__(name, (args[0].shape[1], output.shape[1]))
        )
    loss_of(network, text_batch())
    return seen


def test_tokens_are_cut_between_the_sharded_parts(pool):
    for seen in pool.run(shapes, 2):
        assert seen["model.layers.0.input_layernorm"] == (6, 6)
        assert seen["model.layers.1.mlp.down_proj"] == (12, 6)
        assert seen["model.norm"] == (12, 12)


def checkpointed():
    """Activation checkpointing runs blocks again in backward; the result must not change."""
    batch = text_batch()
    gradients = []
    for again in (False, True):
        network = parallel("llama")
        if again:
            network.activation_checkpointing_enable({"use_reentrant": False})
            network.train()
        loss_of(network, batch).backward()
        gradients.append([p.grad.to_local() for p in network.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_activation_checkpointing_changes_nothing(pool):
    assert pool.run(checkpointed, 2) == [True, True]
