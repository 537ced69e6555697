"""``lightning-dist verify`` for layouts that share layers, sequences or experts among ranks."""

import pytest
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from lightning_dist import ModelPlan, testing
from lightning_dist.cli import app
from tests.parallel.expert.networks import Network
from tests.strategies.test_context_axis import Masked, Sequences
from tests.strategies.test_expert_axis import Experts, vectors
from tests.strategies.test_tensor_axis import LanguageModel, tokens


class SequenceParallel(LanguageModel):
    """Norms on activations that are cut by tokens."""

    def parallel_plan(self):
        return ModelPlan(network="model", tensor={"model.layers": "sequence_parallel"})


class Balanced(Experts):
    """Biases are part of the weights that are compared."""

    def __init__(self):
        super().__init__()
        self.model = Network(depth=2, bias_update_rate=0.01)


class Unbalanced(Balanced):
    """Made to differ: a loss of each rank's own load."""

    def loss(self, batch):
        loads = []
        router = self.model.blocks[0].moe.router
        hook = router.register_forward_hook(lambda _, args, routing: loads.append(routing.scores.mean(0)))
        loss = super().loss(batch)
        hook.remove()
        return loss + loads[0].square().sum()


def llama():
    return LanguageModel(), DataLoader(tokens(24), 8)


def sequence_parallel():
    return SequenceParallel(), [(ids[:, :8], weights) for ids, weights in DataLoader(tokens(24), 8)]


def masked():
    return Masked(), DataLoader(Sequences(24), 8)


def balanced():
    return Balanced(), DataLoader(vectors(24), 8)


def unbalanced():
    return Unbalanced(), DataLoader(vectors(24), 8)


def verify(pool, monkeypatch, factory, layout, *arguments):
    own = testing.compare_with_one_process
    monkeypatch.setattr(testing, "compare_with_one_process", lambda *a, **k: own(*a, **k, pool=pool))
    return CliRunner().invoke(
        app, ["verify", f"{__name__}:{factory}", "--layout", layout, "--steps", "3", "--clip", "0.1", *arguments]
    )


@pytest.mark.parametrize(
    ("factory", "layout", "tolerance"),
    [
        ("llama", "tp=2", "1e-9"),
        ("sequence_parallel", "tp=2", "1e-9"),
        ("masked", "cp=2", "1e-6"),  # the model takes its loss in float32
        ("balanced", "shard=2,ep=2", "1e-9"),
        ("balanced", "pp=2", "1e-9"),
        pytest.param("masked", "cp=2,tp=2", "1e-6", marks=pytest.mark.cluster),
        pytest.param("balanced", "pp=2,shard=2,ep=2", "1e-9", marks=pytest.mark.cluster),
    ],
)
def test_a_layout_is_verified_from_the_command_line(pool, monkeypatch, factory, layout, tolerance):
    result = verify(pool, monkeypatch, factory, layout, "--tolerance", tolerance)
    assert result.exit_code == 0, result.output
    assert f"SAME: layout {layout} (" in result.stdout


def test_experts_made_to_differ_exit_1(pool, monkeypatch):
    result = verify(pool, monkeypatch, "unbalanced", "shard=2,ep=2")
    assert result.exit_code == 1
    assert "DIFFERENT: layout shard=2,ep=2 (2 ranks) does not train like one process" in result.stdout


def test_heads_that_do_not_divide_are_told_once(pool, monkeypatch):
    result = verify(pool, monkeypatch, "llama", "tp=3")
    assert result.exit_code == 1
    assert "Ranks 0, 1, 2: ValueError: tensor_parallel_size=3 does not fit model.model.layers.0" in result.stderr
    assert "its 4 heads do not divide by 3; sizes that fit: 1, 2, 4." in result.stderr
    assert "Traceback" not in result.stderr
