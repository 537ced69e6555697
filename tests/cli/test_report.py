"""``lightning-dist report``: what it shows of a run, and what other rules would have done."""

import json
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from lightning_dist.callbacks import StopRules
from lightning_dist.cli import app
from lightning_dist.record.page import plot
from lightning_dist.record.summary import Series
from tests.callbacks.test_run_record import fit
from tests.cli.recorded_runs import losses, write_run


def run(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    """Falling, a spike of three steps, a step that is not finite, and an evaluation."""
    rows = [*losses(4.0, 3.0, 2.0, 9.0, 9.0, 9.0, 1.0, None), ({"val_loss": 1.5}, True)]
    events = [(5, "restore", {"path": "step=2"}), (8, "rule", {"text": "<b>train_loss</b>"})]
    return write_run(tmp_path / "run", rows, events)


def test_it_shows_values_and_events(folder):
    shown = run(folder, "--json")
    content = json.loads(shown.stdout)
    loss = content["values"]["train_loss"]
    assert shown.exit_code == 0
    assert (loss["values"], loss["not_finite"], loss["last"], loss["min"], loss["max"]) == (8, 1, "nan", 1.0, 9.0)
    assert loss["median"] == 4.0  # of 1 2 3 4 9 9 9
    assert [event["kind"] for event in content["events"]] == ["restore", "rule"]
    text = run(folder).stdout
    assert "finished" in text and "shard=2" in text and "restore" in text and "val_loss" in text


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        (["train_loss > 8 for 3 steps -> rollback"], [(6, "rollback")]),
        (["train_loss > 8 for 4 steps -> rollback"], []),
        (["train_loss is not finite -> stop", "val_loss > 1 -> warn"], [(8, "stop"), (8, "warn")]),
        ({"rules": ["cost > 0.3 -> stop"], "price_per_device_hour": 3}, [(4, "stop")]),  # a step costs 0.10
    ],
)
def test_replay_names_the_step_and_the_action(folder, tmp_path, rules, wanted):
    (tmp_path / "rules.yaml").write_text(json.dumps(rules))
    content = json.loads(run(folder, "--replay", tmp_path / "rules.yaml", "--json").stdout)
    assert [(row["step"], row["action"]) for row in content["replay"]] == wanted
    ended = any("would have ended" in note for note in content["notes"])
    assert ended == any(action == "stop" for _, action in wanted)


def test_a_restart_begins_what_has_held_anew(tmp_path):
    """Three steps over 8 in all, with a restart from step 1 in between."""
    write_run(tmp_path / "run", losses(1.0, 9.0, 9.0))
    rows = [{"step": 2, "time": 200, "train_loss": 9, "evaluation": 0}]
    with (tmp_path / "run" / "run_values.jsonl").open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    for length, fired in ((2, [3]), (3, [])):
        (tmp_path / "rules.yaml").write_text(f"- train_loss > 8 for {length} steps -> warn\n")
        content = json.loads(run(tmp_path / "run", "--replay", tmp_path / "rules.yaml", "--json").stdout)
        assert [row["step"] for row in content["replay"]] == fired


def test_a_name_without_values_is_said(folder, tmp_path):
    (tmp_path / "rules.yaml").write_text("- tran_loss > 1 -> warn\n")
    shown = run(folder, "--replay", tmp_path / "rules.yaml").stdout
    assert "tran_loss has no value in this run; did you mean train_loss" in shown


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_the_page_is_whole_and_needs_nothing_else(folder, tmp_path):
    (tmp_path / "rules.yaml").write_text("- train_loss > 8 -> warn\n")
    page = tmp_path / "page.html"
    assert run(folder, "--html", page, "--replay", tmp_path / "rules.yaml").exit_code == 0
    text, reader = page.read_text(), Tags()
    reader.feed(text)
    assert not any({"src", "href"} & set(attributes) for _, attributes in reader.tags)
    assert [tag for tag, _ in reader.tags].count("svg") == 2
    assert "<b>train_loss" not in text and "&lt;b&gt;train_loss" in text
    assert "What the rules would have done" in text and "Stage 5: recover" in text


def test_a_plot_has_its_points_in_place():
    picture = plot(Series("x", (1, 2, 3), (0.0, 10.0, float("nan"))), [(2, "rule")])
    (points,) = re.findall(r'points="([^"]*)"', picture)
    assert points == "60.0,128.0 255.0,12.0"  # the lowest at the left, the highest in the middle
    assert picture.count("&#215;") == 1 and "rule at step 2" in picture


def test_a_plot_of_a_long_series_keeps_its_spike():
    values = [1.0] * 5000
    values[3210] = 7.0
    (points,) = re.findall(r'points="([^"]*)"', plot(Series("x", tuple(range(5000)), tuple(values))))
    assert len(points.split()) <= 600 and any(point.endswith(",12.0") for point in points.split())


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("- train_loss >> 1 -> stop", "at column 13"),
        ("rule: [a]", "rule does not fit"),
        ("7", "give a list of rules"),
        ("{rules: ['x > 1 -> stop'], price_per_device_hour: -1}", "price_per_device_hour=-1"),
    ],
)
def test_wrong_use_is_refused(folder, tmp_path, rules, said):
    (tmp_path / "rules.yaml").write_text(rules)
    done = run(folder, "--replay", tmp_path / "rules.yaml")
    assert done.exit_code == 2 and said in done.stderr


def test_a_folder_without_a_record_is_refused(tmp_path):
    done = run(tmp_path)
    assert done.exit_code == 2 and "has no run_record.json" in done.stderr


def test_a_run_that_was_trained_is_shown_and_equals_itself(tmp_path):
    """The folder as RunRecord leaves it, not one made here."""
    thresholds = tmp_path / "acceptance.yaml"
    thresholds.write_text("thresholds: [{value: val_loss, worse_by_at_most: 0, better: lower}]")
    fit(tmp_path / "run", acceptance=thresholds)
    (tmp_path / "rules.yaml").write_text("- step == 3 -> stop\n")
    page = tmp_path / "page.html"
    content = json.loads(run(tmp_path / "run", "--json", "--html", page, "--replay", tmp_path / "rules.yaml").stdout)
    assert content["run"]["state"] == "finished" and content["values"]["val_loss"]["values"] == 2
    assert [row["step"] for row in content["replay"]] == [3]
    assert "val_loss" in page.read_text()
    both = [str(tmp_path / "run")] * 2
    assert CliRunner().invoke(app, ["compare", *both, "--accept", str(thresholds)]).exit_code == 0


def test_replay_says_what_the_rules_did_when_they_were_live(tmp_path):
    rules = [
        "train_loss > mean(train_loss, 2) -> warn",
        "val_loss not improved -> warn",
        "step > 2 for 3 steps -> warn again after 2 steps",
    ]
    with pytest.warns(UserWarning, match="by the rule"):
        fit(tmp_path / "run", more=[StopRules(rules)])
    (tmp_path / "rules.yaml").write_text(json.dumps(rules))
    content = json.loads(run(tmp_path / "run", "--json", "--replay", tmp_path / "rules.yaml").stdout)
    decided = [event for event in content["events"] if "rule" in event["evidence"]]
    live = [(event["step"], event["evidence"]["rule"]) for event in decided]
    replayed = [(row["step"], row["rule"]) for row in content["replay"]]
    assert sorted(live) == sorted(replayed) and (5, rules[2]) in live
