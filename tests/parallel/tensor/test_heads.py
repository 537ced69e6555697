"""Heads over ranks: shared key/value heads, head counts that do not divide."""

import pytest
import torch
from torch import nn

from lightning_dist.parallel.tensor.heads import plan_heads
from tests.parallel.tensor.compare import tensor_parity


class Attention(nn.Module):
    def __init__(self, queries, keys, head_dim=4):
        super().__init__()
        self.head_dim, self.num_key_value_groups = head_dim, queries // keys
        self.q_proj = nn.Linear(8, queries * head_dim)
        self.k_proj = nn.Linear(8, keys * head_dim)

    def plan(self, size):
        return plan_heads("layer.attention", self, {"q_proj": self.q_proj, "k_proj": self.k_proj}, {}, size)


def heads_of(rows, head_dim=4):
    return [sorted({int(row) // head_dim for row in rank}) for rank in rows]


def test_equal_parts_need_no_rows():
    plan = Attention(8, 4).plan(4)
    assert not plan.rows and not plan.attributes


def test_ranks_share_a_key_head():
    plan = Attention(8, 2).plan(4)
    assert heads_of(plan.rows["k_proj"]) == [[0], [0], [1], [1]]
    assert plan.attributes == {"num_key_value_groups": 2}


def test_uneven_groups_get_one_copy_for_each_query_head():
    plan = Attention(12, 3).plan(2)  # ranks ask for heads 000011 and 112222
    assert [len(rows) // 4 for rows in plan.rows["k_proj"]] == [6, 6]
    assert heads_of(plan.rows["k_proj"]) == [[0, 1], [1, 2]]
    assert plan.attributes == {"num_key_value_groups": 1}


def test_query_heads_that_do_not_divide_are_refused_by_name():
    with pytest.raises(ValueError, match=r"size=4 does not fit layer.attention.q_proj: its 6 heads .* 1, 2, 3, 6"):
        Attention(6, 3).plan(4)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (3, {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "attention": "sdpa"}),
        (2, {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96}),
        (4, {"num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True, "attention": "eager"}),
    ],
    ids=["nine-over-three", "three-key-heads-over-two", "two-key-heads-over-four"],
)
def test_shared_heads_equal_one_process(pool, ranks, settings):
    for outcome in pool.run(tensor_parity, ranks, "llama", settings, accumulation=2):
        assert outcome["gradient"] <= 1e-9, outcome["gradient_of"]
        assert outcome["weight"] <= 1e-9, outcome["weight_of"]


def test_cut_parameters_keep_ordinary_layouts(pool):
    """Whatever rows a rank computes with, checkpoints and FSDP2 see an equal cut of the whole."""
    (first, *_) = pool.run(layouts, 2)
    assert first == {"q": "(S(0),)", "k": "(S(0),)", "o": "(S(1),)", "norm": "(R,)", "fused": "(S(1),)"}


def layouts():
    from lightning_dist import ParallelLayout
    from lightning_dist.parallel.tensor import apply_tensor_parallel
    from lightning_dist.plan.huggingface import find_tensor_plan
    from tests.parallel.tensor.models import build

    mesh = ParallelLayout.parse("tp=2").resolve(2).build_mesh("cpu")
    llama, gpt2 = build("llama", num_key_value_heads=1), build("gpt2")
    for network in (llama, gpt2):
        apply_tensor_parallel(network, mesh, find_tensor_plan(network))
    attention = llama.model.layers[0].self_attn
    parameters = {
        "q": attention.q_proj.weight,
        "k": attention.k_proj.weight,
        "o": attention.o_proj.weight,
        "norm": llama.model.norm.weight,
        "fused": gpt2.transformer.h[0].attn.c_attn.weight,
    }
    assert all(p.to_local().untyped_storage().nbytes() == p.to_local().nbytes for p in parameters.values())
    assert torch.is_tensor(attention.k_proj.weight)
    return {name: "(" + ", ".join(map(str, p.placements)) + ",)" for name, p in parameters.items()}
