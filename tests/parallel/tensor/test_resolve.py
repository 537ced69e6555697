"""A plan that does not fit raises before anything is changed, and says what would."""

import pytest
import torch
from torch import nn

from lightning_dist.parallel.tensor.resolve import ResolvedPlan
from lightning_dist.plan.huggingface import find_tensor_plan
from tests.parallel.tensor.models import HAND_WRITTEN_PLAN, HandWrittenNetwork, TorchEncoder, hugging_face


def resolve(network, plan, size=2):
    return ResolvedPlan(network, plan, size)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"blocks.*.attention.query": "colwise"},
            r"'blocks.\*.attention.query', which matches no module .* near names",
        ),
        ({"blocks.*.up": "colwize"}, r"blocks.0.up the style 'colwize', .*did you mean 'colwise'"),
        ({"blocks.*.norm1": "colwise"}, r"blocks.0.norm1, a LayerNorm, the style 'colwise', which takes nn.Linear"),
        ({"head": "embedding_rowwise"}, r"head, a Linear, the style 'embedding_rowwise', which takes nn.Embedding"),
        ({"blocks.*.attention": "attention"}, r"takes nn.MultiheadAttention"),
        ({"blocks.*.up.weight": "colwise"}, r"cuts parameters of blocks.0.up one by one"),
        ({"blocks.*.up.weight": "attention"}, r"parameter blocks.0.up.weight the style 'attention'"),
        ({"blocks": "sequence_parallel", **HAND_WRITTEN_PLAN}, r"Sequence parallelism does not fit blocks.0, whose"),
    ],
)
def test_a_wrong_entry_is_named(plan, message):
    network = HandWrittenNetwork()
    before = {name: (type(module), set(vars(module))) for name, module in network.named_modules()}
    with pytest.raises(ValueError, match=message):
        resolve(network, plan)
    assert {name: (type(module), set(vars(module))) for name, module in network.named_modules()} == before


def test_heads_that_do_not_divide_are_refused():
    llama = hugging_face("llama")
    with pytest.raises(
        ValueError, match=r"size=3 does not fit model.layers.0.self_attn.q_proj: its 4 heads .* 1, 2, 4"
    ):
        resolve(llama, find_tensor_plan(llama), 3)
    gpt2 = hugging_face("gpt2")
    with pytest.raises(ValueError, match=r"size=8 does not fit transformer.h.0.attn.c_attn: its 4 heads"):
        resolve(gpt2, find_tensor_plan(gpt2), 8)
    encoder = TorchEncoder()
    with pytest.raises(ValueError, match=r"size=3 does not fit encoder.layers.0.self_attn: its 4 heads"):
        resolve(encoder, find_tensor_plan(encoder), 3)


def test_expert_widths_that_do_not_divide_are_refused():
    mixtral = hugging_face("mixtral", intermediate_size=97)
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.experts.gate_up_proj: its hidden width 97 does not"):
        resolve(mixtral, find_tensor_plan(mixtral))


def test_tied_parameters_must_be_cut_alike():
    llama = hugging_face("llama", tie_word_embeddings=True)
    plan = {name: style for name, style in find_tensor_plan(llama).items() if name != "lm_head"}
    with pytest.raises(ValueError, match=r"tied parameters differently \(.*lm_head.weight: whole"):
        resolve(llama, plan)


def test_blocks_of_hand_written_code_run_on_dtensors_and_those_of_transformers_do_not():
    assert resolve(HandWrittenNetwork(), HAND_WRITTEN_PLAN).on_dtensors == [
        "blocks.0",
        "blocks.1",
    ]
    alone = {name: style for name, style in HAND_WRITTEN_PLAN.items() if ".attention." in name}
    assert resolve(HandWrittenNetwork(), alone).on_dtensors == ["blocks.0.attention", "blocks.1.attention"]
    local = {**HAND_WRITTEN_PLAN, "blocks.*": "local_shapes"}
    assert resolve(HandWrittenNetwork(), local).on_dtensors == []
    llama = hugging_face("llama")
    assert resolve(llama, find_tensor_plan(llama)).on_dtensors == []


def test_a_later_entry_wins():
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert resolve(network, {"*": "replicate", "1": "colwise"}).rules == {"0": "replicate", "1": "colwise"}


def test_embeddings_that_need_all_rows_are_refused():
    network = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0))
    with pytest.raises(ValueError, match="0 uses max_norm, scale_grad_by_freq or sparse"):
        resolve(network, {"0": "embedding_rowwise"})


def test_attention_with_extra_rows_is_refused():
    network = nn.Sequential(nn.MultiheadAttention(8, 2, add_zero_attn=True))
    with pytest.raises(ValueError, match="0 uses add_bias_kv or add_zero_attn"):
        resolve(network, {"0": "attention"})
    assert isinstance(network[0].in_proj_weight, torch.Tensor)
