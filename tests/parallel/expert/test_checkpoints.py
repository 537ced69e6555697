"""Spread experts are saved under full names and read by any expert size, by one device and by Hugging Face."""

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from lightning_dist import ParallelLayout, checkpoint
from lightning_dist.parallel.expert import save_pretrained
from tests.parallel.expert import huggingface
from tests.parallel.expert.compare import own_part, spread, weights_of, worst
from tests.parallel.expert.networks import batch_for, build


def trained(text, path=None, seed=None, steps=2):
    """A spread network and its optimizer after some steps, read from ``path`` first if that is given."""
    layout = ParallelLayout.parse(text).resolve(dist.get_world_size())
    network = build()
    if seed is not None:
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.fill_(seed)
    spread(network, layout, blocks=network.blocks)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01, foreach=False)
    if path is not None:
        names = {parameter: name for name, parameter in network.named_parameters()}
        filled = checkpoint.optimizer_state_to_fill(path, "optimizer_0", optimizer, names)
        checkpoint.load_into(path, {"state_dict": network.state_dict(), "optimizer_0": filled})
        checkpoint.restore_optimizer(optimizer, names, filled)
    for step in range(steps):
        network(*own_part(batch_for(step), layout)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return network, optimizer


def save_trained(path, text):
    network, optimizer = trained(text)
    names = {parameter: name for name, parameter in network.named_parameters()}
    tensors = {
        "state_dict": network.state_dict(),
        "optimizer_0": checkpoint.optimizer_state_by_name(optimizer, names),
    }
    checkpoint.save(path, tensors, {})
    return weights_of(network)


def continued(path, text):
    network, _ = trained(text, path, seed=3.0)
    return weights_of(network)


@pytest.mark.parametrize(("world", "saved_as"), [(4, "shard=4,ep=2"), (2, "shard=2,ep=2")])
def test_any_expert_size_continues_alike(pool, tmp_path, world, saved_as):
    path = tmp_path / "checkpoint"
    saved = pool.run(save_trained, world, path, saved_as)[0]
    on_one_device = checkpoint.read_tensors(path, ["state_dict"])["state_dict"]
    assert on_one_device.keys() == build().state_dict().keys()
    assert all(torch.equal(on_one_device[name], value) for name, value in saved.items())
    continuations = [
        pool.run(continued, ranks, path, text)[0]
        for ranks, text in ((4, "shard=4,ep=4"), (4, "replicate=2,shard=2,ep=2"), (2, "shard=2,ep=2"))
    ]
    for found in continuations[1:]:
        assert worst(continuations[0], found)[0] <= 1e-9
    assert worst(saved, continuations[0])[0] > 1e-3  # they did go on


def save_model(folder, kind):
    layout = ParallelLayout.parse("shard=2,ep=2").resolve(2)
    model = huggingface.build(kind, torch.float32)
    spread(model, layout, blocks=model.model.layers)
    save_pretrained(model, folder)
    return type(model).__name__


@pytest.mark.parametrize(
    ("kind", "own_name"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w1.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.2.gate_proj.weight"),
    ],
)
def test_hugging_face_reads_what_was_spread(pool, tmp_path, kind, own_name):
    assert pool.run(save_model, 2, tmp_path, kind)[0].startswith("FSDP")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert own_name in set(file.keys())
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    reference = huggingface.build(kind, torch.float32)
    assert type(model) is type(reference)
    assert worst(reference.state_dict(), model.state_dict()) == (0.0, next(iter(reference.state_dict())))
