"""Modules that the advisor is asked about, built as a user would."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_dist import ModelPlan


class LanguageModel(pl.LightningModule):
    """A Hugging Face language model in a LightningModule."""

    def __init__(self, model: nn.Module, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss
        self.log("train_loss", loss)
        assert loss.item() == loss.item()
        return loss

    def parallel_plan(self) -> ModelPlan:
        return ModelPlan(sequence_dims={"input_ids": 1})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=1e-4)


def tokens(samples: int, length: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.zeros(samples, length, dtype=torch.long)}]


def llama(length: int = 8192, samples: int = 1, **sizes: int) -> tuple[LanguageModel, list[dict[str, Tensor]]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LanguageModel(LlamaForCausalLM(LlamaConfig(max_position_embeddings=131072, **sizes))), tokens(
        samples, length
    )


def llama_405b(length: int = 8192) -> tuple[LanguageModel, list[dict[str, Tensor]]]:
    return llama(
        length,
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
    )


def llama_8b(length: int = 8192) -> tuple[LanguageModel, list[dict[str, Tensor]]]:
    return llama(
        length,
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )


def mixtral(length: int = 4096) -> tuple[LanguageModel, list[dict[str, Tensor]]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    return LanguageModel(MixtralForCausalLM(MixtralConfig())), tokens(1, length)


def gpt2(length: int = 1024) -> tuple[LanguageModel, list[dict[str, Tensor]]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return LanguageModel(GPT2LMHeadModel(GPT2Config(n_layer=4))), tokens(2, length)


class Mlp(pl.LightningModule):
    """Plain matrices, whose numbers can be written out by hand."""

    def __init__(self, width: int = 64, depth: int = 4, momentum: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))
        self.momentum = momentum

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)


def mlp() -> tuple[Mlp, list[Tensor]]:
    return Mlp(), [torch.zeros(8, 64)]
