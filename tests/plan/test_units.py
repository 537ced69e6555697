"""The modules that are gathered one at a time are found in unmodified networks, and plans name them in order."""

import pytest
import torch
import transformers as T
from torch import nn

from lightning_dist import ModelPlan
from lightning_dist.plan import expand_names
from lightning_dist.plan.units import find_network, find_units


class Holder(nn.Module):
    """As a LightningModule holds a network, beside something small."""

    def __init__(self, network):
        super().__init__()
        self.network = network


def residual_network():
    def block(channels):
        return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3)
            self.layer1 = nn.Sequential(block(8), block(8))
            self.layer2 = nn.Sequential(block(8), block(8))
            self.fc = nn.Linear(8, 2)

    return Residual()


small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 40}
gqa = {**small, "num_key_value_heads": 2, "head_dim": 8}

NETWORKS = {
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 3),
        [f"layers.{i}" for i in range(3)],
    ),
    "transformer": (
        lambda: nn.Transformer(16, 2, 2, 2, 32),
        [f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(2)],
    ),
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), ["0", "2"]),
    "residual": (residual_network, ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]),
    "lstm": (lambda: nn.LSTM(4, 8, 2), []),
    "linear": (lambda: nn.Linear(4, 4), []),
    "llama": (lambda: T.LlamaForCausalLM(T.LlamaConfig(**gqa)), [f"model.layers.{i}" for i in range(3)]),
    "tied llama": (
        lambda: T.LlamaForCausalLM(T.LlamaConfig(**gqa, tie_word_embeddings=True)),
        [f"model.layers.{i}" for i in range(3)],
    ),
    "qwen3": (lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**gqa)), [f"model.layers.{i}" for i in range(3)]),
    "mixtral": (
        lambda: T.MixtralForCausalLM(T.MixtralConfig(**gqa, num_local_experts=2)),
        [f"model.layers.{i}" for i in range(3)],
    ),
    "gpt2": (
        lambda: T.GPT2LMHeadModel(T.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=40)),
        [f"transformer.h.{i}" for i in range(3)],
    ),
    "bert": (
        lambda: T.BertForSequenceClassification(T.BertConfig(**small)),
        ["bert.embeddings", *(f"bert.encoder.layer.{i}" for i in range(3))],
    ),
    "vit": (
        lambda: T.ViTForImageClassification(
            T.ViTConfig(image_size=8, patch_size=4, **{k: v for k, v in small.items() if k != "vocab_size"})
        ),
        ["vit.embeddings", *(f"vit.layers.{i}" for i in range(3))],
    ),
    "t5": (
        lambda: T.T5ForConditionalGeneration(
            T.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=40)
        ),
        [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)],
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_of_unmodified_networks_are_found(name):
    build, wanted = NETWORKS[name]
    with torch.device("meta"):
        found = find_units(Holder(build()))
    assert found == [f"network.{unit}" for unit in wanted]


def test_units_that_share_a_parameter_are_left_to_the_root_or_refused():
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    network[2].weight = network[0].weight
    assert find_units(Holder(network)) == ["network.1"]
    with pytest.raises(ValueError, match=r"network\.0, network\.2, which share a parameter"):
        find_units(Holder(network), ModelPlan(network="network", shard=["*"]))


def test_wildcards_expand_in_the_order_of_the_modules_and_only_one_part():
    network = nn.ModuleDict({"b": nn.ModuleList(nn.Linear(2, 2) for _ in range(11)), "a": nn.Linear(2, 2)})
    assert expand_names(network, ["b.*"], "shard") == [f"b.{i}" for i in range(11)]
    assert expand_names(network, ["*"], "shard") == ["b", "a"]


def test_a_pattern_that_matches_nothing_names_near_ones():
    with pytest.raises(ValueError, match=r"shard names 'block\.\*'.*near names: .*blocks"):
        expand_names(nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2)])}), ["block.*"], "shard")


def test_the_network_is_the_part_with_the_parameters():
    holder = Holder(nn.Linear(64, 64))
    holder.metric = nn.Linear(2, 2)
    assert find_network(holder, None)[0] == "network"
    with pytest.raises(ValueError, match=r"network='net' is no module of Holder; its children: network, metric"):
        find_network(holder, ModelPlan(network="net"))
