"""The chain is found in the networks people have, or the error says what to write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dist.plan import ModelPlan
from lightning_dist.plan.chain import Chain, find_chain
from tests.parallel.pipeline import huggingface, networks


def test_plain_language_model_is_found_behind_its_wrapper() -> None:
    assert find_chain(networks.language_model()).names == tuple(networks.CHAIN)


def test_names_wildcards_and_stages_by_hand() -> None:
    module = networks.language_model()
    plan = ModelPlan(pipeline=["embed", "blocks.*", "head"])
    assert find_chain(module, plan) == Chain(tuple(networks.CHAIN))
    by_stage = ModelPlan(pipeline=[["embed", "blocks.0"], ["blocks.1", "blocks.2"], ["blocks.[345]", "head"]])
    assert find_chain(module, by_stage) == Chain(tuple(networks.CHAIN), (2, 2, 4))
    assert find_chain(module, ModelPlan(pipeline=[1, 7])) == Chain(tuple(networks.CHAIN), (1, 7))


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        ([], "empty"),
        (["embed", ["head"]], "mixes"),
        (["embed", "blocks.0", "blocks.0.up"], "inside it, blocks.0.up"),
        ([["embed", "blocks.*"], ["blocks.5", "head"]], "blocks.5 twice"),
        (["embed", "layers.*"], "matches no module"),
        ([3, 3], "add up"),
        ([0, 8], "every stage needs one"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(pipeline: list, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        find_chain(networks.language_model(), ModelPlan(pipeline=pipeline))


def test_nothing_to_find_lists_modules_and_a_plan() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(2, 2), nn.Linear(2, 2)

    with pytest.raises(ValueError, match=r"encode, decode.*ModelPlan\(pipeline=\['encode', \.\.\.\]\)"):
        find_chain(Two())


def test_sequential_is_its_children_with_something_to_own() -> None:
    module = networks.Wrapper(
        nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2))
    )
    assert find_chain(module).names == ("model.0", "model.2", "model.3")


def test_residual_network_is_its_blocks_between_stem_and_head() -> None:
    names = find_chain(networks.residual_network()).names
    assert names == (
        "model.conv1", "model.bn1", "model.layer1.0", "model.layer1.1", "model.layer2.0", "model.layer2.1", "model.fc",
    )  # fmt: skip


def test_transformer_encoder_with_head() -> None:
    assert find_chain(networks.encoder_classifier()).names == (
        "model.embed", *(f"model.encoder.layers.{i}" for i in range(4)), "model.head",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "before", "layers", "behind"),
    [
        ("llama", ["model.embed_tokens"], "model.layers", ["model.norm", "lm_head"]),
        ("qwen3", ["model.embed_tokens"], "model.layers", ["model.norm", "lm_head"]),
        ("gemma3", ["model.embed_tokens"], "model.layers", ["model.norm", "lm_head"]),
        ("gpt2", ["transformer.wte"], "transformer.h", ["transformer.ln_f", "lm_head"]),
        ("bert", ["bert.embeddings"], "bert.encoder.layer", ["bert.pooler", "classifier"]),
        ("llama_classifier", ["model.embed_tokens"], "model.layers", ["model.norm", "score"]),
    ],
)
def test_hugging_face_models(family: str, before: list[str], layers: str, behind: list[str]) -> None:
    with torch.device("meta"):
        module = networks.Wrapper(huggingface.model(family))
    wanted = [*before, *(f"{layers}.{index}" for index in range(4)), *behind]
    assert find_chain(module).names == tuple(f"model.{name}" for name in wanted)
