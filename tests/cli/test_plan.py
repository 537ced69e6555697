"""``lightning-dist plan``: exit codes, the table, JSON, and one sentence for each wrong use."""

import json

import pytest
from typer.testing import CliRunner

from lightning_dist.cli import app

MODELS = "tests.advisor.models"
LINKS = ("--memory", "80GB", "--intra", "450GB/s", "--inter", "50GB/s", "--flops", "400TFLOPS")


def plan(factory, *arguments):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", f"{MODELS}:{factory}", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_table_has_the_baselines_the_rejections_and_what_to_pass():
    result = plan("llama_8b", "--devices", "16", "--devices-per-node", "8", "--precision", "bf16-gathered", *LINKS)
    assert result.exit_code == 0, result.output
    for words in ("recommended", "one device", "plain DDP", "does not fit", "GB too much", "HybridParallelStrategy("):
        assert words in result.stdout
    assert "The range comes mostly from the floating-point rate of a device." in result.stdout
    assert "tensor sizes from 16 would cross nodes of 8 devices" in result.stdout


def test_json_holds_recommended_alternatives_and_rejected():
    result = plan("llama_8b", "--devices", "8", "--precision", "bf16-gathered", "--json", "--alternatives", "2", *LINKS)
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["recommended"]["fits"] and report["recommended"]["memory"]["total"] < 0.92 * 80e9
    assert report["recommended"]["strategy_arguments"]["layout"] == report["recommended"]["layout"]
    assert len(report["alternatives"]) == 2
    assert {entry["reason"] for entry in report["rejected"]} >= {"memory", "expert"}
    assert all(entry["sentence"] for entry in report["rejected"])
    assert set(report["baselines"]) >= {"one device", "plain DDP"}
    parts = report["recommended"]["parts"]
    assert sum(parts.values()) == pytest.approx(report["recommended"]["step_seconds"])
    low, high = report["recommended"]["range"]
    assert low < report["recommended"]["step_seconds"] < high


def test_a_tiny_model_is_told_to_stay():
    result = plan("mlp", "--devices", "8", *LINKS)
    assert result.exit_code == 0
    assert "Stay on one device" in result.stdout


def test_a_missing_link_exits_2_and_says_what_to_measure():
    result = plan("mlp", "--devices", "8", "--memory", "80GB", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 2
    assert report["recommended"] is None
    assert report["missing"] == [
        {
            "what": "the link inside a node",
            "how": "measure it with `lightning-dist doctor` under torchrun, or give intra (--intra 450GB/s).",
        }
    ]


def test_a_model_without_batches_exits_2_and_says_what_is_missing():
    result = plan("Mlp", "--devices", "8", *LINKS)
    assert result.exit_code == 2
    assert "No layout is recommended, for the size of activations is not known" in result.stdout
    assert "Let the factory return the module and an iterable of batches" in result.stdout


def test_a_dry_run_shows_what_a_rank_holds():
    result = plan(
        "llama_8b", "--devices", "8", "--precision", "bf16-gathered", "--json", "--dry-run", "--rank", "3", *LINKS
    )
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["dry_run"]["rank"] == 3
    held = report["dry_run"]["parameters"]
    assert held == pytest.approx(report["recommended"]["memory"]["parameters"], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["mlp", "--devices", "8", "--memory", "much"], "memory='much' does not fit: write a number and a unit"),
        (["mlp", "--devices", "12", "--devices-per-node", "8"], "devices=12 does not fit devices_per_node=8"),
        (["llama_9b", "--devices", "8"], f"{MODELS!r} has no 'llama_9b'; did you mean 'llama_8b'?"),
        (["mlp", "--devices", "8", "--links", "nowhere.json"], "links='nowhere.json' can't be read"),
    ],
)
def test_wrong_use_exits_2_with_one_sentence(arguments, sentence):
    result = plan(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr and len(result.stderr.splitlines()) == 1
