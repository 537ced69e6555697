"""Tiny models of Hugging Face with experts, and how they are compared with one process."""

import torch
import torch.distributed as dist
import transformers as t

from lightning_dist import ParallelLayout
from lightning_dist.parallel import gradients
from tests.parallel.expert.compare import gradients_of, mean_over, own_part, spread, weights_of, worst

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "num_experts_per_tok": 2,
}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
CONFIGS = {
    "mixtral": (t.MixtralConfig, t.MixtralForCausalLM, {"num_local_experts": 4} | BALANCED),
    "qwen3_moe": (
        t.Qwen3MoeConfig,
        t.Qwen3MoeForCausalLM,
        {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8} | BALANCED,
    ),
    "deepseek_v3": (
        t.DeepseekV3Config,
        t.DeepseekV3ForCausalLM,
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": (t.GptOssConfig, t.GptOssForCausalLM, {"num_local_experts": 4, "head_dim": 8}),
}


def build(kind, dtype=torch.float64):
    torch.manual_seed(0)
    config_class, model_class, settings = CONFIGS[kind]
    model = model_class(config_class(**COMMON | settings))
    model.config._experts_implementation = "eager"  # the grouped matrix product refuses float64 on CPU
    model.config._attn_implementation = "eager" if kind == "gpt_oss" else "sdpa"
    with torch.no_grad():  # away from zeros and ones, so that no gradient is right by accident
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype).train()


def batch_for(step, data_size, rows=4, length=10):
    """Token ids, a padding mask that leaves each data rank as many tokens, and labels of unequal number."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, COMMON["vocab_size"], (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[:: rows // data_size, -3:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    for row in range(rows):
        labels[row, : 1 + row] = -100
    return ids, mask, labels


def loss_of(model, batch, items):
    ids, mask, labels = batch
    return model(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=items).loss


def huggingface_parity(kind, text, *, steps=2, checkpointing=False):
    layout = ParallelLayout.parse(text).resolve(dist.get_world_size())
    reference, model = build(kind), build(kind)
    report, group = spread(model, layout, blocks=model.model.layers)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizers = [torch.optim.SGD(each.parameters(), 0.2) for each in (reference, model)]
    outcome = {"loss": 0.0, "gradient": (0.0, ""), "report": (report.experts, report.cut_inside)}
    for step in range(steps):
        batch = batch_for(step, layout.data_size)
        items = (batch[2][:, 1:] != -100).sum()
        expected = loss_of(reference, batch, items)
        found = loss_of(model, own_part(batch, layout), items / layout.data_size)
        expected.backward()
        found.backward()
        outcome["loss"] = max(outcome["loss"], (mean_over(found, group) - expected).abs().item())
        outcome["gradient"] = max(outcome["gradient"], worst(gradients_of(reference), gradients_of(model)))
        norms = [gradients.clip_grad_norm_(each.parameters(), 0.5) for each in (reference, model)]
        outcome["norm"] = (norms[1] / norms[0] - 1).abs().item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    outcome["weight"] = worst(weights_of(reference), weights_of(model))
    return outcome
