"""Sequences over ranks: the cut, labels at its borders, attention, loss and gradients equal one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_dist import ParallelLayout
from lightning_dist.parallel.context import (
    ContextParallel,
    combine_loss,
    context_attention,
    cut_batch,
    gather_sequence,
    loss_share,
    prepare_network,
    shift_labels,
    sum_context_gradients,
    token_positions,
    ulysses_attention,
)
from lightning_dist.parallel.data import equalise_weights, shard_module
from lightning_dist.parallel.tensor import apply_tensor_parallel, sum_replicated_gradients
from lightning_dist.plan.huggingface import find_tensor_plan
from lightning_dist.testing import WorkerError
from tests.parallel.tensor.compare import gradients, worst_difference
from tests.parallel.tensor.models import VOCABULARY, HandWrittenNetwork, build, loss_of, text_batch

TEXT = {"input_ids": 1, "attention_mask": 1, "labels": 1}


def layout_mesh(layout):
    resolved = ParallelLayout.parse(layout).resolve(dist.get_world_size())
    return resolved, resolved.build_mesh("cpu")


def context_of(layout="cp=2"):
    return ContextParallel(layout_mesh(layout)[1])


class HeadTail(ContextParallel):
    """The order of torch's own context parallelism, whose attention needs CUDA."""

    head_tail = True


# The cut


@pytest.mark.parametrize("head_tail", [False, True])
def test_every_token_is_held_once(head_tail):
    parts = [token_positions(24, 4, rank, head_tail=head_tail).tolist() for rank in range(4)]
    assert sorted(place for part in parts for place in part) == list(range(24))
    assert parts[0] == ([0, 1, 2, 21, 22, 23] if head_tail else [0, 1, 2, 3, 4, 5])
    if head_tail:  # each rank sees as many earlier tokens as any other
        assert len({sum(part) for part in parts}) == 1


def torch_order():
    """What torch's context_parallel makes of a buffer of places; its cutting runs on CPU, its attention does not."""
    from torch.distributed.tensor.experimental import context_parallel

    places = torch.arange(16)
    mesh = layout_mesh("cp=2")[1]
    with context_parallel(mesh, buffers=[places], buffer_seq_dims=[0]):
        theirs = places.tolist()
    return theirs, HeadTail(mesh).positions(16).tolist()


def test_the_head_tail_order_is_that_of_torch(pool):
    for theirs, ours in pool.run(torch_order, 2):
        assert theirs == ours


def cut_and_gather(kind):
    context = kind(layout_mesh("cp=2")[1])
    batch = {"input_ids": torch.arange(32).view(2, 16), "mask": torch.arange(32).view(16, 2), "names": ["a", "b"]}
    dims = {"input_ids": 1, "mask": 0, "position_ids": 1}
    part = cut_batch(batch, dims, context)
    assert part["names"] == ["a", "b"] and batch["input_ids"].shape == (2, 16)
    assert torch.equal(part["input_ids"][1] - 16, part["position_ids"][1])
    for name in ("input_ids", "mask"):
        assert torch.equal(gather_sequence(part[name], dims[name], context), batch[name])
    pair = cut_batch((batch["input_ids"], batch["mask"]), {"1": 0}, context)
    assert isinstance(pair, tuple) and pair[0].shape == (2, 16) and pair[1].shape == (8, 2)
    return part["input_ids"][0].tolist()


def test_batches_are_cut_and_gathered_in_order(pool):
    assert pool.run(cut_and_gather, 2, ContextParallel) == [list(range(8)), list(range(8, 16))]
    assert pool.run(cut_and_gather, 2, HeadTail)[1] == list(range(4, 12))


def wrong_batches():
    context = context_of()
    messages = []
    for batch, dims in [
        ({"input_ids": torch.zeros(2, 7)}, {"input_ids": 1}),
        ({"input_ids": torch.zeros(2, 8)}, {"labels": 1}),
        ({"input_ids": torch.zeros(2)}, {"input_ids": 1}),
        (torch.zeros(2, 8), {"input_ids": 1}),
    ]:
        with pytest.raises(ValueError) as error:
            cut_batch(batch, dims, context)
        messages.append(str(error.value))
    return messages


def test_batches_that_cannot_be_cut_are_refused(pool):
    first, second, third, fourth = pool.run(wrong_batches, 2)[0]
    assert "'input_ids' has 7 tokens along dimension 1, which do not divide by 2" in first and "multiple of 2" in first
    assert "names 'labels', which is no tensor of the batch; it has input_ids" in second
    assert "has the shape (2,), so it has no dimension 1" in third
    assert "the batch is a Tensor" in fourth


def test_labels_are_shifted_with_nothing_at_the_end():
    assert shift_labels(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [[2, 3, -100], [5, 6, -100]]


def border(kind):
    """C12: eight distinct tokens over two ranks have seven targets, and the one at the border is not lost."""
    context = kind(layout_mesh("cp=2")[1])
    ids = torch.arange(10, 18)[None]
    whole = shift_labels(gather_sequence(cut_batch({"labels": ids}, {"labels": 1}, context)["labels"], 1, context))
    part = cut_batch({"labels": whole}, {"labels": 1}, context)["labels"]
    count = (part != -100).sum()
    dist.all_reduce(count)
    return count.item(), part[0].tolist()


def test_the_target_at_the_border_is_not_lost(pool):
    assert pool.run(border, 2, ContextParallel) == [(7, [11, 12, 13, 14]), (7, [15, 16, 17, -100])]
    assert pool.run(border, 2, HeadTail) == [(7, [11, 12, 17, -100]), (7, [13, 14, 15, 16])]


def test_cuda_methods_say_so_on_cpu(pool):
    with pytest.raises(WorkerError, match="method='ring' is torch's context_parallel, which runs on CUDA only"):
        pool.run(ring_on_cpu, 2)


def ring_on_cpu():
    ContextParallel(layout_mesh("cp=2")[1], "ring")


# Attention

ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "other value size": {"value": 6},
    "grouped": {"keys": 2, "enable_gqa": True},
    "one key head": {"keys": 1, "enable_gqa": True, "is_causal": True},
    "padding over all keys": {"mask": (3, 1, 1, 8)},
    "padding over own keys": {"mask": (3, 1, 1, 8), "cut": 3},
    "mask of own queries": {"mask": (8, 8), "cut": 0},
    "whole mask of each head": {"mask": (3, 4, 8, 8)},
    "scale": {"scale": 0.3},
}


def attention_parity(name):
    case = dict(ATTENTION[name])
    context = context_of()
    torch.manual_seed(0)
    sizes = [(4, 5), (case.pop("keys", 4), 5), (0, case.pop("value", 5))]
    sizes[2] = (sizes[1][0], sizes[2][1])
    whole = [torch.randn(3, heads, 8, size, dtype=torch.float64, requires_grad=True) for heads, size in sizes]
    mask, dim = None, case.pop("cut", None)
    if "mask" in case:
        mask = torch.rand(case.pop("mask")) > 0.3
        mask[..., 0] = True
    expected = F.scaled_dot_product_attention(*whole, attn_mask=mask, **case)
    scale = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
    (expected * scale).sum().backward()
    own = slice(context.rank * 4, context.rank * 4 + 4)
    parts = [x.detach()[:, :, own].clone().requires_grad_() for x in whole]
    if dim is not None:
        mask = mask.narrow(dim, context.rank * 4, 4)
    output = ulysses_attention(*parts, mask, context=context, **case)
    (output * scale[:, :, own]).sum().backward()
    forward = (output - expected[:, :, own]).abs().max().item()
    return max(forward, *((p.grad - w.grad[:, :, own]).abs().max().item() for p, w in zip(parts, whole, strict=True)))


def all_attention(names):
    return {name: attention_parity(name) for name in names}


def test_attention_over_tokens_of_two_ranks(pool):
    for results in pool.run(all_attention, 2, list(ATTENTION)):
        for name, difference in results.items():
            assert difference <= 1e-12, name


def wrong_attention(case):
    context = context_of()
    q = torch.randn(1, 3 if case == "heads" else 4, 4, 2)
    mask = torch.ones(4, 4, dtype=torch.bool) if case == "mask" else None
    with context_attention(context):
        if case == "by hand":
            torch.softmax(q @ q.mT, -1) @ q
        elif case == "weights":
            nn.MultiheadAttention(4, 2, batch_first=True)(*[torch.randn(1, 4, 4)] * 3)
        else:
            F.scaled_dot_product_attention(q, q, q, mask)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("heads", "attention with 3 heads on each rank: they do not divide by 2"),
        ("mask", "over 4 queries and 4 keys does not fit context ranks that hold 4 of 8 tokens"),
        ("by hand", "the step called no F.scaled_dot_product_attention"),
        ("weights", "need_weights=True does not work over context ranks"),
    ],
)
def test_attention_that_would_be_wrong_is_refused(pool, case, message):
    with pytest.raises(WorkerError) as error:
        pool.run(wrong_attention, 2, case)
    assert len(error.value.failures) == 2 and all(message in failure.message for failure in error.value.failures)


# Hugging Face networks


def causal_batch(empty=False):
    batch = text_batch(length=12)
    if empty:  # the second half holds padding only: a rank without a target
        batch["attention_mask"][:, 6:] = 0
        batch["labels"][:, 6:] = -100
        batch["labels"][:, 5] = -100
    return batch


def hugging_face_parity(kind, settings, layout="cp=2", entries=None, empty=False, accumulation=1, sequence=False):
    batch = causal_batch(empty)
    batch = {name: batch[name] for name in entries or TEXT}
    reference, network = build(kind, **settings), build(kind, **settings)
    mesh = layout_mesh(layout)[1]
    context = ContextParallel(mesh)
    if "tensor" in mesh.mesh_dim_names:
        apply_tensor_parallel(network, mesh, find_tensor_plan(network, sequence_parallel=sequence))
    assert prepare_network(network, context, tensor_parallel_size=4 // context.size if "tp" in layout else 1)
    dims = {name: TEXT[name] for name in batch}
    losses = []
    for _ in range(accumulation):
        expected = loss_of(reference, batch) / accumulation
        expected.backward()
        with context_attention(context):
            part = cut_batch(batch, dims, context)
            loss = loss_of(network, part)
            loss = combine_loss(loss, loss_share(batch, dims, context), context) / accumulation
            loss.backward()
        losses.append(abs(loss.item() - expected.item()))
    sum_replicated_gradients(network.parameters())
    sum_context_gradients(network.parameters(), context)
    return max(losses), worst_difference(gradients(reference), gradients(network)), context.attentions


# The model computes its loss in float32, here as a sum over a part of the rows, so gradients round differently.
FLOAT32_LOSS = 1e-6


@pytest.mark.parametrize(
    ("kind", "settings", "bound"),
    [
        ("llama", {}, FLOAT32_LOSS),
        ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}, FLOAT32_LOSS),
        ("qwen3", {}, FLOAT32_LOSS),
        ("mistral", {}, FLOAT32_LOSS),  # a sliding window of 5 tokens crosses the border
        ("gemma3", {}, FLOAT32_LOSS),
        ("gpt2", {}, FLOAT32_LOSS),
        ("bert", {}, FLOAT32_LOSS),  # attends in both directions, does not shift its labels
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_hugging_face_over_two_ranks_equals_one(pool, kind, settings, bound):
    for loss, (gradient, name), attentions in pool.run(hugging_face_parity, 2, kind, settings, accumulation=2):
        assert loss <= 1e-6
        assert gradient <= bound, name
        assert attentions == 2 * 2 // 2  # two layers in the last step


def float64_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_):
    """Hugging Face's causal loss without its conversion to float32."""
    from lightning_dist.parallel.context import shift_labels as shift

    targets = shift(labels) if shift_labels is None else shift_labels
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="sum")
    return total / ((targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)


def exact_parity(entries, empty, layout, sequence=False):
    """The same in float64 throughout: the library's loss function is replaced in both networks."""
    from transformers.loss import loss_utils

    original = loss_utils.ForCausalLMLoss
    loss_utils.ForCausalLMLoss = loss_utils.LOSS_MAPPING["ForCausalLM"] = float64_loss
    try:
        return hugging_face_parity("llama", {}, layout=layout, entries=entries, empty=empty, sequence=sequence)
    finally:
        loss_utils.ForCausalLMLoss = loss_utils.LOSS_MAPPING["ForCausalLM"] = original


@pytest.mark.parametrize("empty", [False, True], ids=["uneven", "a rank without targets"])
@pytest.mark.parametrize("entries", [list(TEXT), ["input_ids", "labels"]], ids=["padding", "no mask"])
def test_float64_is_exact(pool, entries, empty):
    for loss, (gradient, name), _ in pool.run(exact_parity, 2, entries, empty, "cp=2"):
        assert loss <= 1e-12
        assert gradient <= 1e-9, name


@pytest.mark.parametrize(("layout", "sequence"), [("cp=2,tp=2", False), ("cp=2,tp=2", True), ("cp=4", False)])
def test_four_ranks_equal_one(pool, layout, sequence):
    for loss, (gradient, name), _ in pool.run(exact_parity, 4, None, True, layout, sequence):
        assert loss <= 1e-12
        assert gradient <= 1e-9, name


def whole_mask_and_own_labels():
    """A mask that is not cut, and labels that are the (cut) inputs themselves, as many training steps write."""
    batch = causal_batch()
    reference, network = build("llama"), build("llama")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    expected = reference(input_ids=ids, attention_mask=mask, labels=ids).loss
    expected.backward()
    context = context_of()
    prepare_network(network, context)
    with context_attention(context):
        part = cut_batch({"input_ids": ids}, {"input_ids": 1}, context)["input_ids"]
        loss = network(part, attention_mask=mask, labels=part).loss
        loss.backward()
    sum_context_gradients(network.parameters(), context)
    return abs(loss.item() - expected.item()), worst_difference(gradients(reference), gradients(network))


def test_a_whole_mask_and_inputs_as_labels(pool):
    for loss, (gradient, name) in pool.run(whole_mask_and_own_labels, 2):
        assert loss <= 1e-6
        assert gradient <= FLOAT32_LOSS, name


def checkpointed():
    batch, results = causal_batch(), []
    for again in (False, True):
        network, context = build("qwen3"), context_of()
        prepare_network(network, context)
        if again:
            network.activation_checkpointing_enable({"use_reentrant": False})
        network.train()
        with context_attention(context):
            loss_of(network, cut_batch(batch, TEXT, context)).backward()
        results.append(([p.grad for p in network.parameters()], context.attentions))
    (first, calls), (second, calls_again) = results
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), calls, calls_again


def test_recomputed_attention_reaches_the_whole_sequence(pool):
    assert pool.run(checkpointed, 2) == [(True, 2, 4)] * 2


def refusals():
    context = context_of()
    messages = []
    network = build("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    with pytest.raises(ValueError) as error:
        prepare_network(network, context)
    messages.append(str(error.value))
    network = build("llama")
    prepare_network(network, context)
    with pytest.raises(ValueError) as error:
        network(input_ids=torch.ones(2, 4, dtype=torch.long), labels=torch.ones(2, dtype=torch.long))
    messages.append(str(error.value))
    packed = torch.tensor([[0, 1, 2, 0]])
    with pytest.raises(NotImplementedError) as error:
        network(input_ids=torch.ones(1, 4, dtype=torch.long), position_ids=packed)
    messages.append(str(error.value))
    return messages


def test_networks_and_batches_that_cannot_be_cut_are_refused(pool):
    heads, labels, packed = pool.run(refusals, 2)[0]
    assert "does not fit LlamaForCausalLM: its 3 heads do not divide by 2; context sizes that fit: 1, 3" in heads
    assert "labels of shape (2,) for tokens of shape (2, 4)" in labels
    assert "packed sequences" in packed


# Data ranks and context ranks together (C09)


def data_and_context(layout):
    """Uneven masks; on one data rank, one context rank sees padding only. Losses are means by counted targets."""
    batch = text_batch(rows=4, length=12)
    batch["attention_mask"][:2, 6:] = 0
    batch["labels"][:2, 6:] = -100
    batch["labels"][2, :9] = -100
    reference, network = build("llama"), build("llama")
    expected = loss_of(reference, batch)
    expected.backward()
    resolved, mesh = layout_mesh(layout)
    context = ContextParallel(mesh)
    prepare_network(network, context)
    for layer in network.model.layers:
        shard_module(layer, mesh)
    shard_module(network, mesh, root=True)
    rows = slice(2 * (data := resolved.data_coordinate(dist.get_rank())), 2 * data + 2)
    own = {name: tensor[rows] for name, tensor in batch.items()}
    count, total = ((each["labels"][:, 1:] != -100).sum() for each in (own, batch))
    with context_attention(context):
        loss = loss_of(network, cut_batch(own, TEXT, context))
        loss = combine_loss(loss, loss_share(own, TEXT, context), context)
        weighted = loss * count / total  # the strategy's business: weights over data ranks
        (weighted * resolved.data_size).backward()  # FSDP2 takes the mean over data ranks
    sum_context_gradients(network.parameters(), context)
    found = weighted.detach().clone()
    dist.all_reduce(found, group=mesh["shard"].get_group())
    return abs(found.item() - expected.item()), worst_difference(gradients(reference), gradients(network))


def test_two_data_and_two_context_ranks_equal_one(pool):
    for loss, (gradient, name) in pool.run(data_and_context, 4, "shard=2,cp=2"):
        assert loss <= 1e-6
        assert gradient <= FLOAT32_LOSS, name


# Plain modules


class PlainNetwork(HandWrittenNetwork):
    """Takes places from the batch and targets as the dataset shifted them."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.places = nn.Embedding(64, 32)
        for block in self.blocks:
            block.attention.rotate = lambda x: x  # it counts places from 0 on each rank

    def forward(self, input_ids, position_ids, labels):
        x = self.embed(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=-100)


def plain_parity(layout, empty, checkpoint=False):
    from torch.utils.checkpoint import checkpoint as run_again

    resolved, mesh = layout_mesh(layout)
    batch = text_batch(length=8)
    batch = {"input_ids": batch["input_ids"], "labels": shift_labels(batch["labels"])}
    if empty:
        batch["labels"][:, 4:] = -100
    networks = []
    for _ in range(2):
        torch.manual_seed(0)
        networks.append(PlainNetwork().double())
    reference, network = networks
    places = torch.arange(8).expand(4, -1)
    expected = reference(batch["input_ids"], places, batch["labels"])
    expected.backward()
    context = ContextParallel(mesh)
    if resolved.tensor > 1:
        names = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
        plan = {f"blocks.*.attention.{name}": style for name, style in names.items()}
        apply_tensor_parallel(network, mesh, plan | {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    assert not prepare_network(network, context)
    if checkpoint:
        for block in network.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: run_again(forward, x, use_reentrant=False)
    dims = {"input_ids": 1, "labels": 1, "position_ids": 1}
    with context_attention(context):
        loss = network(**cut_batch(batch, dims, context))
        own_mean = loss.item()
        loss = combine_loss(loss, loss_share(batch, dims, context), context)
        loss.backward()
    sum_replicated_gradients(network.parameters())
    sum_context_gradients(network.parameters(), context)
    return abs(loss.item() - expected.item()), worst_difference(gradients(reference), gradients(network)), own_mean


@pytest.mark.parametrize(
    ("layout", "empty", "checkpoint"), [("cp=2", False, False), ("cp=2", True, True), ("cp=2,tp=2", False, False)]
)
def test_a_plain_network_equals_one_process(pool, layout, empty, checkpoint):
    ranks = 4 if "tp" in layout else 2
    results = pool.run(plain_parity, ranks, layout, empty, checkpoint)
    for loss, (gradient, name), _ in results:
        assert loss <= 1e-12
        assert gradient <= 1e-9, name
    if empty:  # the mean over no targets is 0/0, which must not spread
        assert results[1][2] != results[1][2]


def encoder_parity(tensor):
    """torch's encoder: attention in both directions with a padding mask of this rank's keys."""
    mesh = layout_mesh("cp=2,tp=2" if tensor else "cp=2")[1]
    batch = text_batch(length=8)
    reference, network = build("torch_encoder"), build("torch_encoder")
    expected = loss_of(reference, batch)
    expected.backward()
    context = ContextParallel(mesh)
    if tensor:
        apply_tensor_parallel(network, mesh, find_tensor_plan(network))
    prepare_network(network, context)
    with context_attention(context):
        loss = combine_loss(
            loss_of(network, cut_batch(batch, TEXT, context)), loss_share(batch, TEXT, context), context
        )
        loss.backward()
    sum_context_gradients(network.parameters(), context)
    with context_attention(context), torch.no_grad():
        network.eval()
        again = loss_of(network, cut_batch(batch, TEXT, context))
        again = combine_loss(again, loss_share(batch, TEXT, context), context)
    return max(abs(x.item() - expected.item()) for x in (loss, again)), worst_difference(
        gradients(reference), gradients(network)
    )


@pytest.mark.parametrize("tensor", [False, True])
def test_torch_encoders_equal_one_process(pool, tensor):
    for loss, (gradient, name) in pool.run(encoder_parity, 4 if tensor else 2, tensor):
        assert loss <= 1e-12
        assert gradient <= 1e-9, name


def unequal_start():
    """Weights made equal over context ranks, unseeded; gradients summed in more than one bucket."""
    from lightning_dist.parallel.context import sequence

    context = context_of()
    torch.manual_seed(dist.get_rank())
    network = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    equalise_weights(network)
    for index, parameter in enumerate(network.parameters()):
        parameter.grad = torch.full_like(parameter, float(index + context.rank))
    sequence._BUCKET = 600
    sum_context_gradients(network.parameters(), context)
    return [p.grad.unique().tolist() for p in network.parameters()], network[0].weight.tolist()


def test_gradients_are_summed_in_buckets(pool):
    (first, weight), (second, other) = pool.run(unequal_start, 2)
    assert first == second == [[1.0], [3.0], [5.0], [7.0]] and weight == other


def test_the_vocabulary_of_the_plain_network_is_that_of_the_batches():
    assert text_batch()["input_ids"].max() < VOCABULARY
