"""Where a network holds experts, and which ranks see the rest of its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from lightning_dist.parallel.expert.experts import Experts
from lightning_dist.parallel.expert.huggingface import share_balancing_loss
from lightning_dist.parallel.expert.layer import MixtureOfExperts
from lightning_dist.parallel.expert.router import TopKRouter
from lightning_dist.parallel.expert.token_ranks import TokenRanks

HUGGING_FACE_STYLE = "ep_dispatch_experts"
"""What Hugging Face's expert plans call a module that holds stacked experts (transformers 5)."""


def find_experts(network: nn.Module) -> list[str]:
    """Names of the modules that hold stacked experts: those of our layer, and those of Hugging Face's own plans."""
    found: dict[str, None] = {}
    for name, module in network.named_modules():
        if isinstance(module, Experts):
            found[name] = None
        plan = getattr(module, "ep_plan", None) if hasattr(module, "base_model_prefix") else None
        for pattern, style in (plan or {}).items():
            if style == HUGGING_FACE_STYLE:
                wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
                matches = (inner for inner, _ in module.named_modules() if wanted.fullmatch(inner))
                found |= dict.fromkeys(f"{name}.{inner}".lstrip(".") for inner in matches)
    return list(found)


def experts_within(network: nn.Module, names: Iterable[str]) -> list[str]:
    """For each named module itself, or the ``experts`` in it where it is the layer around them."""
    inner = {name: isinstance(getattr(network.get_submodule(name), "experts", None), nn.Module) for name in names}
    return [f"{name}.experts".lstrip(".") if has_experts else name for name, has_experts in inner.items()]


def share_tokens(network: nn.Module, group: dist.ProcessGroup) -> None:
    """Lets routers count the tokens of all ranks of ``group``, as one process with the joined batch would.

    Concerns load-balancing losses (of our layer and of Hugging Face's models), balancing biases and capacity. To be
    called wherever ranks see different tokens, with or without expert parallelism. No collectives.
    """
    ranks = TokenRanks(group)
    for module in network.modules():
        if isinstance(module, MixtureOfExperts | TopKRouter):
            module.token_ranks = ranks
    share_balancing_loss(network, group)
