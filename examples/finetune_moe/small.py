"""The module in small, with batches of this folder's own source, to check that a layout keeps its numbers:

``lightning-dist verify small:factory --layout ep=2``
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from torch.utils.data import DataLoader

from data import ByteTokenizer, WindowDataset
from module import ExpertLanguageModel


def factory() -> tuple[ExpertLanguageModel, list[dict[str, Tensor]]]:
    """A module of 240 thousand parameters, and 8 batches of 8 windows."""
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    windows = WindowDataset(texts, ByteTokenizer(), context_length=32, limit=64)
    module = ExpertLanguageModel(ByteTokenizer.vocabulary_size, context_length=32, hidden_size=64, experts=8)
    return module, list(DataLoader(windows, batch_size=8))
