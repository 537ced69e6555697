"""What can be seen of a module before anything runs is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_dist.parallel.pipeline.checks import find_refusal
from lightning_dist.parallel.pipeline.placement import plan_pipeline
from tests.parallel.pipeline.networks import CHAIN, Network, language_model

PLAN = plan_pipeline(CHAIN, 2)


def refusal(module: nn.Module) -> str:
    sentence = find_refusal(module, PLAN)
    assert sentence is not None
    return sentence


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Network()


class OwnBackward(Lit):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class ByHand(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_an_ordinary_module_is_not_refused() -> None:
    assert find_refusal(language_model(), PLAN) is None
    assert find_refusal(Lit(), PLAN) is None


def test_own_backward_and_manual_optimization() -> None:
    assert "OwnBackward overrides backward" in refusal(OwnBackward())
    assert "ByHand uses manual optimization" in refusal(ByHand())


def test_running_statistics_outside_the_chain() -> None:
    module: Any = language_model()
    module.model.norm = nn.BatchNorm1d(3)
    assert "model.norm keeps running statistics" in refusal(module)


def test_hooks_on_another_stage_than_the_last() -> None:
    module: Any = language_model()
    module.model.head.register_forward_hook(print)
    module.model.blocks[5].up.register_full_backward_hook(print)
    assert find_refusal(module, PLAN) is None
    module.model.blocks[1].up.register_forward_hook(print)
    assert "model.blocks.1.up has a hook (print), but it is on stage 0" in refusal(module)


def test_torchs_own_hooks_are_not_the_users() -> None:
    module: Any = language_model()
    nn.utils.parametrizations.weight_norm(module.model.blocks[1].up)
    nn.utils.spectral_norm(module.model.blocks[0].up)
    assert find_refusal(module, PLAN) is None


@pytest.mark.parametrize("how", ["compiled", "checkpointed", "scripted"])
def test_a_unit_across_a_cut(how: str) -> None:
    module: Any = language_model()
    if how == "compiled":
        module.model.compile()
    elif how == "checkpointed":
        chain = [name.replace("model.", "model._checkpoint_wrapped_module.", 1) for name in CHAIN]
        module.model = checkpoint_wrapper(module.model)
        assert "model is checkpointed as one unit" in (find_refusal(module, plan_pipeline(chain, 2)) or "")
        return
    else:
        module.model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        module.model = torch.jit.script(module.model)
        chain = [f"model.{index}" for index in range(4)]
        assert "model is scripted as one unit" in (find_refusal(module, plan_pipeline(chain, 2)) or "")
        return
    assert "model is compiled as one unit" in refusal(module)
