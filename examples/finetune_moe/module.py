"""The module that is trained: a small causal language model whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

import math

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from lightning_dist import ModelPlan
from lightning_dist.parallel.expert import MixtureOfExperts

HEAD_SIZE = 32


class Attention(nn.Module):
    """Causal attention, heads of 32."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(hidden_size, hidden_size) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            project(hidden).view(batch, length, -1, HEAD_SIZE).transpose(1, 2)  # [batch, heads, length, 32]
            for project in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, hidden_size: int, experts: int) -> None:
        super().__init__()
        self.attention_norm, self.expert_norm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size)
        # Balanced by biases (which the strategy moves), not by a loss, whose value would depend on the microbatches.
        self.moe = MixtureOfExperts(hidden_size, hidden_size, experts, top_k=2, bias_update_rate=2e-3)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.moe(self.expert_norm(hidden))


class Network(nn.Module):
    """Token and position embeddings, blocks, and a head."""

    def __init__(self, vocabulary_size: int, context_length: int, hidden_size: int, layers: int, experts: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, hidden_size)
        self.positions = nn.Embedding(context_length, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, experts) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocabulary_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits ``[batch, length, vocabulary]`` for tokens ``[batch, length]``."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.tokens(input_ids) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class ExpertLanguageModel(L.LightningModule):
    """Predicts the next token; reports how many bits a byte of text costs under its predictions.

    Args:
        vocabulary_size: Number of tokens.
        context_length: Tokens in a window.
        hidden_size: A multiple of 32.
        layers: Number of blocks.
        experts: Number of experts in each.
        learning_rate: AdamW's learning rate after warm-up.
        warmup_steps: Optimizer steps over which it rises from zero.
    """

    def __init__(
        self,
        vocabulary_size: int,
        context_length: int = 256,
        hidden_size: int = 128,
        layers: int = 2,
        experts: int = 8,
        learning_rate: float = 2e-3,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = Network(vocabulary_size, context_length, hidden_size, layers, experts)

    def parallel_plan(self) -> ModelPlan:
        """Only tensor parallelism needs a word here; stages and experts are found."""
        heads = {f"blocks.*.attention.{name}": "colwise" for name in ("query", "key", "value")}
        return ModelPlan(network="model", tensor={**heads, "blocks.*.attention.output": "rowwise"})

    def next_token_loss(self, batch: dict[str, Tensor], reduction: str) -> Tensor:
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction=reduction)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.next_token_loss(batch, "mean")
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        bits = self.next_token_loss(batch, "sum") / math.log(2)
        num_bytes = int(batch["num_bytes"].sum())
        self.log("val/bits_per_byte", bits / num_bytes, batch_size=num_bytes, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
        warmup_steps = self.hparams["warmup_steps"]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
