"""Tiny networks of every kind that the tests of tensor and context parallelism train, and their batches."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 128
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}


def hugging_face(family, dtype=torch.float64, attention="sdpa", **settings):
    """A real class of transformers with a tiny configuration, the same weights in every process."""
    import transformers as t

    torch.manual_seed(0)
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    undropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    build = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**_LLAMA | settings)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**_LLAMA | {"sliding_window": 5} | settings)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**_LLAMA | {"head_dim": 16} | settings)),
        "gemma3": lambda: t.Gemma3ForCausalLM(
            t.Gemma3TextConfig(**_LLAMA | {"head_dim": 16, "sliding_window": 5} | settings)
        ),
        "mixtral": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(**_LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2} | settings)
        ),
        "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(
                **_LLAMA
                | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
                | settings
            )
        ),
        "gpt_neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**small | {"vocab_size": VOCABULARY} | settings)),
        "deepseek_v2": lambda: t.DeepseekV2ForCausalLM(
            t.DeepseekV2Config(
                **_LLAMA
                | {
                    "num_key_value_heads": 4,
                    "n_routed_experts": 4,
                    "n_group": 1,
                    "topk_group": 1,
                    "num_experts_per_tok": 2,
                    "moe_intermediate_size": 48,
                    "n_shared_experts": 1,
                    "first_k_dense_replace": 1,
                    "q_lora_rank": 32,
                    "kv_lora_rank": 32,
                    "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 16,
                    "v_head_dim": 16,
                }
                | settings
            )
        ),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                **{
                    "vocab_size": VOCABULARY,
                    "n_embd": 64,
                    "n_layer": 2,
                    "n_head": 4,
                    "n_positions": 128,
                    "resid_pdrop": 0.0,
                    "embd_pdrop": 0.0,
                    "attn_pdrop": 0.0,
                    "bos_token_id": 1,
                    "eos_token_id": 2,
                }
                | settings
            )
        ),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**small | undropped | {"vocab_size": VOCABULARY} | settings)),
        "vit": lambda: t.ViTForImageClassification(
            t.ViTConfig(**small | undropped | {"image_size": 32, "patch_size": 8, "num_labels": 5} | settings)
        ),
    }
    network = build[family]()
    network.config._attn_implementation = attention
    if family in ("mixtral", "qwen3_moe", "deepseek_v2"):
        network.config._experts_implementation = "eager"  # the grouped matrix product refuses float64 on CPU
    with torch.no_grad():  # away from zeros and ones, so that no gradient is right by accident
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return network.to(dtype)


def text_batch(rows=4, length=12, vocabulary=VOCABULARY):
    """Token ids, a padding mask and labels; rows have different numbers of labels, one row is padded."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, vocabulary, (rows, length), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 2 * row] = -100
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    ids[1, -3:] = 0  # the padding token, whose embedding gets no gradient
    labels[1, -3:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def image_batch(rows=4):
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn(rows, 3, 32, 32, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.arange(rows) % 5}


class HandWrittenAttention(nn.Module):
    """Attention as people write it: sizes from the constructor, rotary tables and a mask made on the spot."""

    def __init__(self, width, heads, *, fused=False, by_hand=False):
        super().__init__()
        self.heads, self.width = heads, width
        self.fused, self.by_hand = fused, by_hand
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.q_norm = nn.LayerNorm(width // heads)
        self.o = nn.Linear(width, width)
        self.register_buffer("angles", torch.arange(64)[:, None] / 10 ** torch.linspace(0, 2, width // heads // 2))

    def rotate(self, x):
        angles = self.angles[: x.shape[-2]].to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], -1)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(self.width, dim=2) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        q, k = self.rotate(self.q_norm(q)), self.rotate(k)
        if self.by_hand:
            scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            output = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v
        else:
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(output.transpose(1, 2).contiguous().view(batch, length, width))


class HandWrittenBlock(nn.Module):
    def __init__(self, width, heads, **settings):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = HandWrittenAttention(width, heads, **settings)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class HandWrittenNetwork(nn.Module):
    """A small language model without a plan."""

    def __init__(self, width=32, heads=4, blocks=2, **settings):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(HandWrittenBlock(width, heads, **settings) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids, labels, attention_mask=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)


HAND_WRITTEN_PLAN = {
    "embed": "embedding_rowwise",
    "blocks.*.attention.q": "colwise",
    "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise",
    "blocks.*.attention.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise",
}


class TorchEncoder(nn.Module):
    """torch's own transformer layers, a classifier on top."""

    def __init__(self, width=32, heads=4, norm_first=False, batch_first=True, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout, batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        self.batch_first = batch_first

    def forward(self, input_ids, attention_mask, labels):
        x = self.embed(input_ids)
        if not self.batch_first:
            x = x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        if not self.batch_first:
            x = x.transpose(0, 1)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def loss_of(network, batch):
    output = network(**batch)
    return output if isinstance(output, torch.Tensor) else output.loss


def build(kind, **settings):
    """A network by name, in float64, the same weights in every process."""
    if kind in ("hand_written", "torch_encoder"):
        torch.manual_seed(0)
        network = (HandWrittenNetwork if kind == "hand_written" else TorchEncoder)(**settings)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        return network.double()
    return hugging_face(kind, **settings)


def batch_for(kind, **settings):
    return image_batch() if kind == "vit" else text_batch(**settings)
