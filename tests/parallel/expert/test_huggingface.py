"""Hugging Face's models with experts train spread over ranks, unchanged, to the numbers of one process."""

import pytest

from lightning_dist.parallel.expert import find_experts
from tests.parallel.expert import huggingface

EXACT = 1e-9
# These models compute router scores, or the balancing loss, in float32 by themselves.
FLOAT32_PART = 1e-6


@pytest.mark.parametrize("kind", huggingface.CONFIGS)
def test_experts_are_found(kind):
    model = huggingface.build(kind)
    layers = [1] if kind == "deepseek_v3" else [0, 1]
    assert find_experts(model) == [f"model.layers.{layer}.mlp.experts" for layer in layers]


@pytest.mark.parametrize(
    ("kind", "bound"),
    [("mixtral", FLOAT32_PART), ("qwen3_moe", FLOAT32_PART), ("deepseek_v3", FLOAT32_PART), ("gpt_oss", EXACT)],
)
def test_two_ranks_equal_one(pool, kind, bound):
    for outcome in pool.run(huggingface.huggingface_parity, 2, kind, "shard=2,ep=2"):
        assert outcome["loss"] <= FLOAT32_PART  # Hugging Face computes the loss in float32
        assert outcome["gradient"][0] <= bound, outcome["gradient"]
        assert outcome["weight"][0] <= bound, outcome["weight"]
        assert outcome["norm"] <= bound


@pytest.mark.parametrize(
    ("kind", "layout", "checkpointing"),
    [("mixtral", "shard=2,tp=2,ep=2", False), ("qwen3_moe", "shard=4,ep=2", True)],
)
def test_four_ranks_equal_one(pool, kind, layout, checkpointing):
    for outcome in pool.run(huggingface.huggingface_parity, 4, kind, layout, checkpointing=checkpointing):
        assert outcome["gradient"][0] <= FLOAT32_PART, outcome["gradient"]
        assert outcome["weight"][0] <= FLOAT32_PART, outcome["weight"]
        experts, cut_inside = outcome["report"]
        assert all(len(held) == 2 for held in experts.values())
        assert cut_inside == (list(experts) if "tp" in layout else [])
