"""What a pipeline can't do exactly, refused where it happens or, better, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_dist.parallel.pipeline.foreign import PipelineError


@contextmanager
def no_gradients_by_hand(inside_chain_module: Callable[[], bool]) -> Iterator[None]:
    """Refuses ``torch.autograd.grad`` and ``backward`` in the user's step, but for what a chain module does inside.

    A stage has only its part of the graph, so they would give a part of the gradient, or none, without a word.
    """
    originals = torch.autograd.grad, torch.autograd.backward

    def refuse(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if inside_chain_module():
                return original(*args, **kwargs)
            raise PipelineError(
                f"The step calls {name}, which under a pipeline sees one stage's part of the graph only; move it inside"
                " a module of the pipeline's chain, or train this module without pipeline parallelism."
            )

        return guarded

    torch.autograd.grad = refuse(originals[0], "torch.autograd.grad")
    torch.autograd.backward = refuse(originals[1], "backward")
    try:
        yield
    finally:
        torch.autograd.grad, torch.autograd.backward = originals
