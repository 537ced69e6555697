"""Tiny Hugging Face models and their steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parallel.pipeline.networks import Wrapper

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model(family: str) -> nn.Module:
    import transformers as hf

    causal = {**SIZES, "num_key_value_heads": 2, "use_cache": False}
    if family in ("llama", "llama_tied"):
        return hf.LlamaForCausalLM(hf.LlamaConfig(**causal, tie_word_embeddings=family.endswith("tied")))
    if family == "llama_classifier":
        return hf.LlamaForSequenceClassification(hf.LlamaConfig(**causal, num_labels=3))
    if family == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**causal, head_dim=4))
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 2
        return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**causal, head_dim=4, sliding_window=3, layer_types=kinds))
    if family == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=32,
                n_positions=32,
                n_embd=16,
                n_layer=4,
                n_head=4,
                bos_token_id=1,
                eos_token_id=2,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
            )
        )
    if family == "bert":
        return hf.BertForSequenceClassification(
            hf.BertConfig(**SIZES, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        )
    raise ValueError(family)


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    return Wrapper(model(family)).double().train()


def step(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return module.model(**batch).loss


def batches(family: str, sizes: list[int], length: int = 6) -> list[dict[str, Tensor]]:
    """Token batches, with padding for the classifiers; every token of the others has a label, so means are exact."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for size in sizes:
        ids = torch.randint(3, 32, (size, length), generator=generator)
        if family in ("bert", "llama_classifier"):
            mask = torch.ones_like(ids)
            mask[::2, length - 2 :] = 0
            ids = ids * mask
            made.append(
                {
                    "input_ids": ids,
                    "attention_mask": mask,
                    "labels": torch.randint(0, 3, (size,), generator=generator),
                }
            )
        else:
            made.append({"input_ids": ids, "labels": ids.clone()})
    return made


def exact_step(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss from the logits, in their own precision."""
    logits = module.model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
