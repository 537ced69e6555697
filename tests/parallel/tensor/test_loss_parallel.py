"""Logits that stay cut along the classes: the stock loss gives the same numbers and holds a part of the memory."""

import contextlib
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_dist import ParallelLayout
from lightning_dist.parallel.tensor import apply_tensor_parallel, sharded_loss, sum_replicated_gradients
from lightning_dist.plan.huggingface import find_tensor_plan
from lightning_dist.testing import WorkerError
from tests.parallel.tensor.compare import gradients, worst_difference
from tests.parallel.tensor.models import build, loss_of, text_batch


def parallel(kind, style, **settings):
    mesh = ParallelLayout.parse("tp=2").resolve(2).build_mesh("cpu")
    network = build(kind, **settings)
    report = apply_tensor_parallel(network, mesh, find_tensor_plan(network) | {"lm_head": style})
    assert report.sharded_logits == (style == "loss_parallel")
    return network


def parity(kind, settings):
    batch = text_batch()
    reference = build(kind, **settings)
    expected = loss_of(reference, batch)
    expected.backward()
    network = parallel(kind, "loss_parallel", **settings)
    output = network(**batch)
    output.loss.backward()
    sum_replicated_gradients(network.parameters())
    assert isinstance(output.logits, DTensor) and output.logits.to_local().shape[-1] <= 65
    assert not isinstance(output.loss, DTensor)
    return abs(output.loss.item() - expected.item()), worst_difference(gradients(reference), gradients(network))


@pytest.mark.parametrize(
    ("kind", "settings"), [("llama", {}), ("llama", {"vocab_size": 129, "tie_word_embeddings": True}), ("gpt2", {})]
)
def test_the_stock_loss_equals_one_process(pool, kind, settings):
    for loss, (gradient, name) in pool.run(parity, 2, kind, settings):
        assert loss <= 1e-6
        assert gradient <= 2e-6, name  # the loss, and so the first gradient, is computed in float32


def functional(shape, class_dim, options):
    """The loss and its gradient in float64, on logits cut along the classes and on whole ones."""
    mesh = ParallelLayout.parse("tp=3").resolve(3).build_mesh("cpu")
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, dtype=torch.float64, generator=generator).mul(30).requires_grad_()
    target = torch.randint(0, shape[class_dim], shape[:class_dim] + shape[class_dim + 1 :], generator=generator)
    if target.dim():
        target[0] = options.get("ignore_index", -100)
    expected = F.cross_entropy(whole, target, **options)
    scale = torch.linspace(1, 2, expected.numel(), dtype=torch.float64).view(expected.shape)
    (expected * scale).sum().backward()
    logits = distribute_tensor(whole.detach(), mesh, [Shard(class_dim)], src_data_rank=None).requires_grad_()
    with sharded_loss():
        loss = F.cross_entropy(logits, target, **options)
    (loss * scale).sum().backward()
    return (loss - expected).abs().max().item(), (logits.grad.full_tensor() - whole.grad).abs().max().item()


@pytest.mark.parametrize(
    ("shape", "class_dim", "options"),
    [
        ((6, 10), 1, {}),
        ((6, 10), 1, {"reduction": "sum", "label_smoothing": 0.1}),
        ((6, 10), 1, {"reduction": "none", "ignore_index": 3}),
        ((4, 7, 5), 1, {"label_smoothing": 0.2}),
        ((7,), 0, {}),
        ((5, 4), 1, {"reduction": "sum"}),  # the last of three ranks has no classes
    ],
)
def test_the_loss_and_its_gradient(pool, shape, class_dim, options):
    for loss, gradient in pool.run(functional, 3, shape, class_dim, options):
        assert loss <= 1e-12 and gradient <= 1e-12


def outside_of_the_context():
    network = parallel("llama", "loss_parallel")
    batch = text_batch()
    logits = network(batch["input_ids"]).logits
    F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def test_a_loss_of_ones_own_needs_the_context(pool):
    with pytest.raises(WorkerError, match=r"mixed torch.Tensor and DTensor"):
        pool.run(outside_of_the_context, 2)


def peak_memory(style, context=contextlib.nullcontext):
    """The most anonymous memory that a forward and backward add, in MB; nearly all of it is for the logits."""
    settings = {"vocab_size": 32000, "hidden_size": 16, "num_hidden_layers": 1, "dtype": torch.float32}
    network = parallel("llama", style, **settings)
    batch = text_batch(rows=4, length=128, vocabulary=32000)
    with context():
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        before = resident()
        with Sampler() as sampler:
            loss_of(network, batch).backward()
    return (sampler.peak - before) / 2**20


def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


class Sampler:
    def __enter__(self):
        self.peak, self._running = 0, True
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self):
        while self._running:
            self.peak = max(self.peak, resident())
            time.sleep(0.0005)

    def __exit__(self, *_):
        self._running = False
        self._thread.join()


@pytest.mark.slow
def test_memory_for_logits_is_shared(pool):
    gathered = max(pool.run(peak_memory, 2, "colwise_gather_output"))
    shared = max(pool.run(peak_memory, 2, "loss_parallel"))
    one_copy = 4 * 128 * 32000 * 4 / 2**20  # 62.5 MB
    print(f"peak of forward and backward: gathered {gathered:.0f} MB, cut {shared:.0f} MB; one copy {one_copy:.1f} MB")
    assert gathered > 2.5 * one_copy
    assert shared < 1.6 * one_copy
