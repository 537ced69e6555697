"""Hugging Face folders: read into shards, each rank its part; written back so that `from_pretrained` opens them."""

import json
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lightning_dist import ParallelLayout
from lightning_dist.checkpoint.huggingface import awaits_weights, export_huggingface, load_huggingface
from lightning_dist.parallel.data import shard_module
from lightning_dist.parallel.tensor import apply_tensor_parallel
from lightning_dist.plan.huggingface import find_tensor_plan
from tests.parallel.tensor.compare import weights
from tests.parallel.tensor.models import build, loss_of, text_batch


def parallel(kind, layout, **settings):
    """A network with weights other than those of `build`, spread over the ranks."""
    network = build(kind, **settings)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(0.5)
    mesh = ParallelLayout.parse(layout).resolve(dist.get_world_size()).build_mesh("cpu")
    if "tensor" in mesh.mesh_dim_names:
        apply_tensor_parallel(network, mesh, find_tensor_plan(network))
    if "shard" in mesh.mesh_dim_names:
        for block in network.transformer.h if kind == "gpt2" else network.base_model.layers:
            shard_module(block, mesh)
        shard_module(network, mesh, root=True)
    return network


def load(kind, layout, folder, settings):
    network = parallel(kind, layout, **settings)
    loaded = load_huggingface(network, folder)
    expected = weights(build(kind, **settings))
    differing = [name for name, value in weights(network).items() if not torch.equal(value, expected[name])]
    return differing, loaded


def save(kind, folder, shard_size="40KB", **settings):
    network = build(kind, **settings)
    network.save_pretrained(folder, max_shard_size=shard_size)
    return network


@pytest.mark.parametrize(
    ("kind", "layout", "settings"),
    [
        ("llama", "tp=2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", "shard=2,tp=2", {"vocab_size": 131, "intermediate_size": 98}),
        ("gpt2", "shard=2,tp=2", {}),
        ("mixtral", "shard=2,tp=2", {}),
        ("qwen3_moe", "tp=2", {}),
        ("llama", "shard=4", {}),
    ],
    ids=["tied-shared-heads", "uneven", "gpt2", "mixtral", "qwen3-moe", "fsdp"],
)
def test_every_layout_reads_the_same_weights(pool, tmp_path, kind, layout, settings):
    save(kind, tmp_path, **settings)
    assert (tmp_path / "model.safetensors.index.json").exists()
    ranks = 4 if "shard" in layout else 2
    for differing, loaded in pool.run(load, ranks, kind, layout, tmp_path, settings):
        assert not differing
        assert not loaded.unexpected
        assert loaded.bytes_read < loaded.bytes_in_files


def test_the_base_models_prefix_may_be_missing_or_extra(tmp_path):
    whole = save("llama", tmp_path / "whole")
    base = build("llama").model
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.zero_()
    loaded = load_huggingface(base, tmp_path / "whole")
    assert loaded.unexpected == ("lm_head.weight",)
    assert all(torch.equal(p, q) for p, q in zip(base.parameters(), whole.model.parameters(), strict=True))
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"lacks 1 tensors of LlamaForCausalLM: lm_head.weight"):
        load_huggingface(build("llama"), tmp_path / "base")
    tied = build("llama", tie_word_embeddings=True)
    load_huggingface(tied, tmp_path / "base")
    assert torch.equal(tied.lm_head.weight, whole.model.embed_tokens.weight)


def test_what_does_not_fit_is_said_before_anything_changes(tmp_path):
    save("llama", tmp_path)
    other = build("llama", intermediate_size=80)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"gate_proj.weight \(96, 64\) in the file, \(80, 64\) in the network"):
        load_huggingface(other, tmp_path)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    with pytest.raises(FileNotFoundError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load_huggingface(other, tmp_path / "nowhere")
    with torch.device("meta"):
        nothing = build("llama")
        wrong = build("llama", intermediate_size=80)
    assert load_huggingface(nothing, tmp_path).bytes_read == 0
    assert awaits_weights(nothing) and all(parameter.is_meta for parameter in nothing.parameters())
    with pytest.raises(ValueError, match=r"gate_proj.weight \(96, 64\) in the file, \(80, 64\) in the network"):
        load_huggingface(wrong, tmp_path)
    assert not awaits_weights(wrong)


def export(kind, layout, source, folder, limit, settings):
    network = parallel(kind, layout, **settings)
    load_huggingface(network, source)
    export_huggingface(network, folder, max_file_size=limit)


@pytest.mark.parametrize(
    ("kind", "layout", "settings", "limit"),
    [
        ("llama", "tp=2", {"tie_word_embeddings": True, "num_key_value_heads": 1}, 2**30),
        ("gpt2", "shard=2,tp=2", {}, 100_000),
        ("mixtral", "shard=2,tp=2", {}, 100_000),
    ],
    ids=["llama", "gpt2", "mixtral"],
)
def test_an_export_opens_with_from_pretrained(pool, tmp_path, kind, layout, settings, limit):
    import transformers

    original = save(kind, tmp_path / "source", **settings)
    pool.run(
        export, 4 if "shard" in layout else 2, kind, layout, tmp_path / "source", tmp_path / "out", limit, settings
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(original)
    expected = original.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
    again.config._attn_implementation = original.config._attn_implementation
    if kind == "mixtral":
        again.config._experts_implementation = "eager"
    assert torch.equal(loss_of(again, text_batch()), loss_of(original, text_batch()))
    files = sorted(path.name for path in (tmp_path / "out").glob("*"))
    assert not any(name.startswith(".unfinished") for name in files)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [type(original).__name__] and config["dtype"] == "float64"
    if limit < 2**30:
        assert "model.safetensors.index.json" in files
        sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
        largest = max(value.numel() * 8 for value in expected.values())
        assert max(sizes) < max(limit, largest) + 20_000
    else:
        assert "model.safetensors" in files


def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


BIG = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
BIG |= {"num_hidden_layers": 3, "vocab_size": 4000, "dtype": torch.float32}


def load_big(folder, layout):
    """Bytes read, and by how much anonymous memory rises above what the shards take (C38)."""
    import gc

    network = parallel("llama", layout, **BIG)
    gc.collect()
    local = sum(p.to_local().numel() * p.element_size() for p in network.parameters())
    peak, running = [resident()], [True]
    before = peak[0]

    def sample():
        while running[0]:
            peak[0] = max(peak[0], resident())
            time.sleep(0.0005)

    thread = threading.Thread(target=sample)
    thread.start()
    loaded = load_huggingface(network, folder)
    running[0] = False
    thread.join()
    return loaded.bytes_read, local, loaded.bytes_in_files, peak[0] - before


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=4", "shard=2,tp=2"])
def test_each_rank_reads_and_holds_its_part(pool, tmp_path, layout):
    save("llama", tmp_path, shard_size="20MB", **BIG)
    for read, local, total, rise in pool.run(load_big, 4, tmp_path, layout):
        print(f"{layout}: {read / 2**20:.1f} of {total / 2**20:.1f} MB read, memory rose by {rise / 2**20:.1f} MB")
        assert total > 60 * 2**20
        assert read == local < 1.02 * total / 4
        assert rise < 0.1 * total
