"""Text files → tokens → windows of equal length, with whole files held out for validation."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler
from transformers import PreTrainedTokenizerBase

VALIDATION_SHARE = 0.05
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class Tokenizer(Protocol):
    vocabulary_size: int
    end_of_text: int

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of ``text`` (int32) and how many of its bytes each of them stands for (int32)."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Every byte is a token, and one more token ends a text: nothing to train, nothing to download."""

    end_of_text = 256
    vocabulary_size = 264  # 257 rounded up to a multiple of 8, so that tensor parallel ranks get equal parts

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
        return tokens, np.ones_like(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class PretrainedTokenizer:
    """The tokenizer that comes with a pretrained model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.vocabulary_size = len(tokenizer)
        self.end_of_text = tokenizer.eos_token_id

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens = np.array(encoded["input_ids"], dtype=np.int32)
        # A token reaches from its first character to the first one of the next token, so that the parts add up.
        first_characters = [start for start, _ in encoded["offset_mapping"]] + [len(text)]
        bytes_before = np.cumsum([0] + [len(character.encode()) for character in text])
        return tokens, np.diff(bytes_before[first_characters]).astype(np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def find_files(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """The files under ``paths`` with their names, in the same order on every machine; without paths, Python's own.

    Raises:
        ValueError: If a path does not exist.
    """
    if paths:
        roots, pattern = list(paths), "*"
    else:
        roots, pattern = [Path(sysconfig.get_paths()["stdlib"])], "*.py"
    files = {}
    for root in roots:
        if not root.exists():
            raise ValueError(f"--data {root}: there is no such file or folder.")
        for path in [root] if root.is_file() else root.rglob(pattern):
            name = path.relative_to(root.parent)
            hidden = any(part.startswith(".") for part in name.parts)
            if path.is_file() and not hidden and not SKIPPED_FOLDERS & set(name.parts):
                files[name.as_posix()] = path
    return sorted(files.items())


def read_texts(files: Sequence[tuple[str, Path]]) -> dict[str, str]:
    """The text of each file by name; files that are no UTF-8 text, or empty, are left out."""
    texts = {}
    for name, path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text:
            texts[name] = text
    return texts


def split_by_file(texts: dict[str, str]) -> tuple[list[str], list[str]]:
    """Training and validation texts: a file is in one of them, chosen by a checksum of its name.

    A single file is cut instead, and its end is the validation text.

    Raises:
        ValueError: If there is no text at all.
    """
    if not texts:
        raise ValueError("--data: none of the files is UTF-8 text.")
    if len(texts) == 1:
        (text,) = texts.values()
        cut = len(text) - max(1, round(len(text) * VALIDATION_SHARE))
        return [text[:cut]], [text[cut:]]
    shuffled = sorted(texts, key=lambda name: zlib.crc32(name.encode()))
    held_out = max(1, round(len(shuffled) * VALIDATION_SHARE))
    return [texts[name] for name in shuffled[held_out:]], [texts[name] for name in shuffled[:held_out]]


class WindowDataset(Dataset[dict[str, Tensor]]):
    """Windows of ``context_length`` tokens from texts laid end to end.

    A window begins with the last token of the one before, because its first token is only seen, never predicted:
    so every token of the texts but the very first is predicted once.

    Args:
        texts: The texts; each is followed by the tokenizer's end-of-text token, which stands for no bytes.
        tokenizer: What turns text into tokens.
        context_length: Tokens in a window.
        limit: Keep at most this many windows, spread evenly over the texts.
    """

    def __init__(self, texts: list[str], tokenizer: Tokenizer, context_length: int, limit: int | None = None) -> None:
        tokens, sizes = [], []
        for text in texts:
            text_tokens, text_sizes = tokenizer.encode(text)
            tokens += [text_tokens, np.array([tokenizer.end_of_text], dtype=np.int32)]
            sizes += [text_sizes, np.array([0], dtype=np.int32)]
        self.tokens = torch.from_numpy(np.concatenate(tokens))
        self.sizes = torch.from_numpy(np.concatenate(sizes))
        self.context_length = context_length
        count = (len(self.tokens) - 1) // (context_length - 1)
        kept = count if limit is None else min(count, limit)
        self.windows = [position * count // kept for position in range(kept)]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = self.windows[index] * (self.context_length - 1)
        window = self.tokens[start : start + self.context_length].long()  # [context_length]
        # num_bytes counts what is predicted: all but the first token
        num_bytes = self.sizes[start + 1 : start + self.context_length].sum()
        return {"input_ids": window, "labels": window, "num_bytes": num_bytes}


class CodeData(L.LightningDataModule):
    """The training and validation windows of text files.

    Args:
        paths: Files and folders; none means the source files of Python's standard library.
        tokenizer: What turns text into tokens.
        context_length: Tokens in a window.
        batch_size: Windows in the batch of one rank.
        validation_windows: At most so many windows are validated on.
        seed: Decides the order of the training windows.

    Raises:
        ValueError: If the texts are too short for one training batch or one validation window.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        tokenizer: Tokenizer,
        *,
        context_length: int,
        batch_size: int,
        validation_windows: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed
        training, validation = split_by_file(read_texts(find_files(paths)))
        self.training_windows = WindowDataset(training, tokenizer, context_length)
        self.validation_windows = WindowDataset(validation, tokenizer, context_length, validation_windows)
        self.description = (
            f"{len(training)} files to train on ({sum(map(len, training)) / 1e6:.1f} MB),"
            f" {len(validation)} to validate on ({sum(map(len, validation)) / 1e6:.1f} MB)"
        )
        if len(self.training_windows) < batch_size or not len(self.validation_windows):
            raise ValueError(
                f"--data: {self.description} give {len(self.training_windows)} and {len(self.validation_windows)}"
                f" windows of {context_length} tokens; at least {batch_size} and 1 are needed."
            )

    def train_dataloader(self) -> DataLoader:
        # Lightning shares the windows out over the data ranks by a sampler of its own; on one device this one stands
        # in for it, so that the same windows come in the same step however many devices there are.
        alone = self.trainer is not None and self.trainer.world_size == 1
        sampler: Sampler[int] | None = (
            DistributedSampler(self.training_windows, 1, 0, seed=self.seed) if alone else None
        )
        return DataLoader(
            self.training_windows, self.batch_size, shuffle=None if alone else True, sampler=sampler, drop_last=True
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation_windows, self.batch_size)
