"""Plans that are found: the library's own, ours for families without one, torch's layers; and what is said if not."""

import pytest
from torch import nn

from lightning_dist.plan.huggingface import complete_tensor_plan, find_tensor_plan
from tests.parallel.tensor.models import HandWrittenNetwork, TorchEncoder, hugging_face


def test_the_models_own_plan_is_read_with_prefix_embedding_and_head():
    plan = find_tensor_plan(hugging_face("qwen3"))
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.layers.*.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    assert plan["model.embed_tokens"] == "embedding_rowwise"
    assert plan["lm_head"] == "colwise_gather_output"


def test_rules_for_modules_that_a_model_does_not_have_are_left_out():
    moe = hugging_face("qwen3_moe")
    assert "model.layers.*.mlp.gate_proj" in moe.tp_plan  # dense layers of the family, which this model lacks
    plan = find_tensor_plan(moe)
    assert "model.layers.*.mlp.gate_proj" not in plan
    assert plan["model.layers.*.mlp.experts"] == "moe_tp_experts"


@pytest.mark.parametrize(
    ("kind", "module", "head"),
    [
        ("gpt2", "transformer.h.*.attn.c_attn", "lm_head"),
        ("bert", "bert.encoder.layer.*.output.dense", "cls.predictions.decoder"),
        ("vit", "vit.layers.*.mlp.fc1", None),
    ],
)
def test_families_without_a_plan_get_ours(kind, module, head):
    network = hugging_face(kind)
    assert not network.tp_plan
    plan = find_tensor_plan(network)
    assert module in plan
    assert head is None or plan[head] == "colwise_gather_output"
    base = find_tensor_plan(network.base_model)
    assert module.partition(".")[2] in base and head not in base


def test_a_model_inside_a_module_is_found_with_its_name():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = hugging_face("llama").model
            self.encoder = TorchEncoder().encoder
            self.head = nn.Linear(64, 3)

    plan = find_tensor_plan(Classifier())
    assert plan["backbone.layers.*.mlp.down_proj"] == "rowwise"
    assert plan["encoder.layers.0.self_attn"] == "attention"
    assert not any(name.startswith("head") for name in plan)


@pytest.mark.parametrize(
    ("kind", "blocks"), [("llama", "model.layers"), ("gpt2", "transformer.h"), ("mixtral", "model.layers")]
)
def test_sequence_parallelism_names_the_list_of_blocks(kind, blocks):
    found = find_tensor_plan(hugging_face(kind), sequence_parallel=True)
    assert [name for name, style in found.items() if style == "sequence_parallel"] == [blocks]


def test_a_network_without_a_plan_is_told_its_layers_and_where_to_start():
    with pytest.raises(ValueError) as error:
        find_tensor_plan(HandWrittenNetwork())
    message = str(error.value)
    assert "HandWrittenNetwork has no tensor-parallel plan" in message
    assert "blocks.*.attention.q: 32 -> 32" in message and "head: 32 -> 128" in message
    start = eval(message[message.index("{") : message.rindex("}") + 1])
    assert start == {
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "blocks.*.attention.q": "colwise",
        "blocks.*.attention.k": "colwise",
        "blocks.*.attention.v": "colwise",
        "blocks.*.attention.o": "rowwise",
    }


def test_the_plan_to_start_from_is_right(pool):
    """What the message proposes trains like one process."""
    from tests.parallel.tensor.compare import tensor_parity

    outcome = pool.run(tensor_parity, 2, "hand_written", changes={"embed": "replicate", "head": "replicate"})[0]
    assert outcome["gradient"] <= 1e-9, outcome["gradient_of"]


def test_a_network_without_linear_layers_says_so():
    with pytest.raises(ValueError, match=r"has no tensor-parallel plan and no nn.Linear to cut"):
        find_tensor_plan(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))


def test_what_only_says_how_is_added_to_what_is_found():
    network = hugging_face("llama")
    plan = complete_tensor_plan(network, {"model.layers": "sequence_parallel", "lm_head": "loss_parallel"})
    assert plan == find_tensor_plan(network) | {"model.layers": "sequence_parallel", "lm_head": "loss_parallel"}
    assert complete_tensor_plan(network, None) == find_tensor_plan(network)
    whole = {"lm_head": "colwise_gather_output"}
    assert complete_tensor_plan(network, whole) == whole
