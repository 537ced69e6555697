"""The module in small, with batches of this folder's own source, to check that a layout keeps its numbers:

``lightning-dist verify small:factory --layout shard=2``
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from torch.utils.data import DataLoader

from data import ByteTokenizer, WindowDataset
from module import CodeLanguageModel, small_llama


def factory() -> tuple[CodeLanguageModel, list[dict[str, Tensor]]]:
    """A module of 120 thousand parameters, and 8 batches of 8 windows."""
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    windows = WindowDataset(texts, ByteTokenizer(), context_length=64, limit=64)
    network = small_llama(ByteTokenizer.vocabulary_size, context_length=64, hidden_size=64, layers=2)
    return CodeLanguageModel(network), list(DataLoader(windows, batch_size=8))
