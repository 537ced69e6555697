"""``lightning-dist verify``: exit codes, what is printed, and one sentence for each wrong use."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_dist import __version__
from lightning_dist.cli import app

MODULES = "tests.testing.parity_modules"


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def verify(factory, *arguments, layout="shard=2"):
    return invoke("verify", f"{MODULES}:{factory}", "--layout", layout, *arguments)


@pytest.fixture
def use_shared_pool(pool, monkeypatch):
    """The command starts its own workers; most tests spare that and lend it the session's."""
    from lightning_dist import testing

    own = testing.compare_with_one_process
    monkeypatch.setattr(testing, "compare_with_one_process", lambda *a, **k: own(*a, **k, pool=pool))


def test_version_and_help():
    assert invoke("--version").output.strip() == __version__
    assert "verify" in invoke("--help").output
    assert "MODULE:FACTORY" in invoke("verify", "--help").output


@pytest.mark.parametrize("layout", ["shard=2", "replicate=2", "replicate=2,shard=2"])
def test_an_equal_module_exits_0(use_shared_pool, layout):
    result = verify("Regression", layout=layout)
    assert result.exit_code == 0, result.output
    assert f"SAME: layout {layout} (" in result.stdout
    for row in ("loss, step 5", "|model.0.weight|", "gradients of the first step", "SGD, 64-true, 5 optimizer steps"):
        assert row in result.stdout
    assert "training 5 steps on one process ..." in result.stderr


@pytest.mark.parametrize("factory", ["SumLoss", "UsesTheRank"])
def test_a_module_made_to_differ_exits_1(use_shared_pool, factory):
    result = verify(factory, "--steps", "2")
    assert result.exit_code == 1
    assert "DIFFERENT: layout shard=2 (2 ranks) does not train like one process" in result.stdout


def test_json_holds_the_whole_comparison_and_nothing_else(use_shared_pool):
    result = verify("with_batches", "--json", "--steps", "3", "--accumulate", "2", "--clip", "0.1")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["same"] is True and report["steps"] == 3 and len(report["losses"]) == 3
    assert set(report["weights"]) >= {"model.0.weight", "model.4.bias"}
    assert max(report["weights"].values()) == report["differences"]["weights"]["largest"] <= 1e-9


def test_the_tolerance_fits_the_precision_unless_it_is_given(use_shared_pool):
    assert verify("Regression", "--precision", "32-true").exit_code == 0
    assert verify("Regression", "--precision", "32-true", "--tolerance", "1e-12").exit_code == 1


def test_dropout_is_noted(use_shared_pool):
    result = verify("with_dropout", "--steps", "1")
    assert result.exit_code == 1
    assert "Note: model.3 drops values at random (p=0.5)" in result.stdout


def test_a_run_that_fails_exits_1_and_shows_the_error_once(use_shared_pool):
    result = verify("FailsUnderLayout", "--steps", "1")
    assert result.exit_code == 1
    assert "Rank 1: RuntimeError: no luck on rank one" in result.stderr
    assert "FAILED: Training 1 step under shard=2 on 2 processes failed." in result.stderr
    assert result.stderr.count("Traceback") == 1 and "in training_step" in result.stderr
    everywhere = verify("FailsEverywhere", "--steps", "1", "--json")
    assert everywhere.exit_code == 1
    assert "Rank 0: RuntimeError: no luck anywhere" in json.loads(everywhere.stdout)["error"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["Regression", "--layout", "sharded=2"], "layout='sharded=2': 'sharded=2' does not fit; write NAME=SIZE"),
        (["Regression", "--layout", "shard=0"], "layout='shard=0': 'shard=0' does not fit; a size is a whole number"),
        (["Regresion", "--layout", "shard=2"], f"{MODULES!r} has no 'Regresion'; did you mean 'Regression'?"),
        (["LAYERS", "--layout", "shard=2"], f"'{MODULES}:LAYERS' does not fit: it is of type int; name a function"),
        (["needs_arguments", "--layout", "shard=2"], "it needs the arguments width, depth; name a function without"),
    ],
)
def test_wrong_use_exits_2_with_one_sentence(arguments, sentence):
    result = invoke("verify", f"{MODULES}:{arguments[0]}", *arguments[1:])
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("train", "'train' does not fit: write MODULE:FACTORY, such as train:build."),
        ("no_such_module:build", "there is no module 'no_such_module' in the current folder"),
        ("broken:build", "'broken:build' cannot be imported: ZeroDivisionError"),
        ("lacking:build", "'lacking:build' cannot be imported: No module named 'not_installed_here'"),
    ],
)
def test_a_target_that_cannot_be_imported_exits_2(target, sentence, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "lacking.py").write_text("import not_installed_here\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = invoke("verify", target, "--layout", "shard=2")
    assert result.exit_code == 2
    assert sentence in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("not_a_module", "The module factory returned a torch.nn.modules.linear.Linear; it must return"),
        ("NoData", "NoData has no train_dataloader() to take batches from"),
        ("with_single_samples", "A global batch of 1 sample cannot be cut for 2 data ranks"),
    ],
)
def test_a_factory_that_returns_the_wrong_thing_exits_2(use_shared_pool, factory, sentence):
    result = verify(factory)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Error: {sentence}" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.slow
def test_the_console_script_checks_a_module_in_the_current_folder(tmp_path):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        import lightning.pytorch as pl, torch
        print("a module may print")

        class Model(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3, 1)

            def training_step(self, batch, batch_idx):
                return self.layer(batch["x"]).square().mean()

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters())

        def build():
            return Model(), [{"x": torch.randn(4, 3)} for _ in range(2)]
        """)
    )
    script = Path(sys.executable).with_name("lightning-dist")
    command = [script, "verify", "mine:build", "--layout", "replicate=2", "--json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["same"] and report["world_size"] == 2 and report["optimizers"] == ["AdamW"]
    assert "a module may print" in result.stderr
