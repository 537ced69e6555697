"""Models of every family under tensor parallelism equal one process: losses, gradients, weights after SGD steps."""

import pytest

from tests.parallel.tensor.compare import tensor_parity

EXACT = 1e-9
# The model computes a part in float32 by itself: the router (mixtral, deepseek) or the embedding's scale (gemma3).
FLOAT32_PART = 1e-6
# Hugging Face computes the loss in float32, so it is compared at that precision.
LOSS = 1e-6


@pytest.mark.parametrize(
    ("kind", "settings", "bound"),
    [
        ("llama", {}, EXACT),
        ("llama", {"tie_word_embeddings": True}, EXACT),
        pytest.param("llama", {"attention_bias": True, "mlp_bias": True}, EXACT, marks=pytest.mark.slow),
        ("llama", {"vocab_size": 129, "intermediate_size": 97}, EXACT),
        pytest.param("llama", {"num_key_value_heads": 1, "attention": "eager"}, EXACT, marks=pytest.mark.slow),
        ("qwen3", {}, EXACT),
        ("mistral", {}, EXACT),
        ("gemma3", {}, FLOAT32_PART),
        pytest.param("gpt_neox", {}, EXACT, marks=pytest.mark.slow),
        ("gpt2", {}, EXACT),
        pytest.param("gpt2", {"vocab_size": 131, "attention": "eager"}, EXACT, marks=pytest.mark.slow),
        ("bert", {}, EXACT),
        ("vit", {}, EXACT),
        ("mixtral", {}, FLOAT32_PART),
        pytest.param("qwen3_moe", {}, EXACT, marks=pytest.mark.slow),
        pytest.param("deepseek_v2", {}, FLOAT32_PART, marks=pytest.mark.slow),
        ("torch_encoder", {}, EXACT),
        ("torch_encoder", {"norm_first": True, "batch_first": False}, EXACT),
        ("hand_written", {}, EXACT),
        pytest.param("hand_written", {"by_hand": True}, EXACT, marks=pytest.mark.slow),
        ("hand_written", {"fused": True}, EXACT),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_two_ranks_equal_one(pool, kind, settings, bound):
    for outcome in pool.run(tensor_parity, 2, kind, settings, accumulation=2):
        assert outcome["loss"] <= LOSS
        assert outcome["gradient"] <= bound, outcome["gradient_of"]
        assert outcome["weight"] <= bound, outcome["weight_of"]
