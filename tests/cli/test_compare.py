"""``lightning-dist compare``: verdicts on runs whose numbers are known."""

import json
import math

import numpy as np
import pytest
import xxhash
from typer.testing import CliRunner

from lightning_dist.cli import app
from lightning_dist.record.acceptance import Threshold, read_acceptance
from lightning_dist.record.comparison import RecordedRun, judge
from tests.cli.recorded_runs import losses, write_run

ACCEPT, REJECT, OPEN = "accept", "reject", "not enough evidence"
CODES = {ACCEPT: 0, REJECT: 1, OPEN: 3}


def run(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


@pytest.fixture
def judged(tmp_path):
    """Writes a baseline, a run and its thresholds, and judges; a second call judges the same folders again."""

    def judge_run(acceptance, rows, baseline=(), events=(), *options, stated=True, **about):
        file = tmp_path / "acceptance.yaml"
        file.write_text(json.dumps(acceptance))
        digest = xxhash.xxh3_128_hexdigest(file.read_bytes()) if stated else "another"
        if not (tmp_path / "run").exists():
            write_run(tmp_path / "baseline", baseline or losses(1.0))
            write_run(tmp_path / "run", rows, events, {"acceptance": [{"xxh3_128": digest}]}, **about)
        done = run(tmp_path / "baseline", tmp_path / "run", "--accept", file, "--json", *options)
        assert done.exit_code != 2, done.stderr
        content = json.loads(done.stdout)
        assert done.exit_code == CODES.get(content["verdict"], done.exit_code)
        return content

    return judge_run


def thresholds(*items, **others):
    return {"thresholds": list(items), **others}


LOSS = {"value": "train_loss"}
FALLING, HIGHER = losses(3.0, 2.0, 1.0), losses(3.0, 2.0, 1.2)
RESTARTED = [(2, "failure", {}), (2, "failure", {}), (3, "hang", {}), (3, "rule", {})]


@pytest.mark.parametrize(
    ("demand", "rows", "baseline", "verdict"),
    [
        ({**LOSS, "at_most": 1.0}, FALLING, (), ACCEPT),
        ({**LOSS, "at_most": 0.99}, FALLING, (), REJECT),
        ({**LOSS, "at_least": 1.0}, FALLING, (), ACCEPT),
        ({**LOSS, "at_least": 1.01}, FALLING, (), REJECT),
        ({**LOSS, "statistic": "max", "at_most": 2.5, "from_step": 2}, FALLING, (), ACCEPT),
        ({**LOSS, "statistic": "max", "at_most": 2.5}, FALLING, (), REJECT),
        ({**LOSS, "worse_by_at_most": 0.1, "better": "lower"}, HIGHER, FALLING, REJECT),
        ({**LOSS, "worse_by_at_most": 0.3, "better": "lower"}, HIGHER, FALLING, ACCEPT),
        ({**LOSS, "worse_by_at_most": "19%", "better": "lower"}, HIGHER, FALLING, REJECT),
        ({**LOSS, "worse_by_at_most": "21%", "better": "lower"}, HIGHER, FALLING, ACCEPT),
        ({**LOSS, "worse_by_at_most": 0, "better": "higher"}, HIGHER, FALLING, ACCEPT),
        ({**LOSS, "worse_by_at_most": "10%", "better": "higher"}, FALLING, HIGHER, REJECT),  # 1.0 < 1.2 - 0.12
        ({**LOSS, "at_most": 9}, losses(1.0, None), (), REJECT),
        ({**LOSS, "worse_by_at_most": "5%", "better": "lower"}, FALLING, losses(1.0, None), OPEN),
        ({**LOSS, "statistic": "median", "at_most": 9}, FALLING, (), OPEN),  # three values are no distribution
        ({"value": "absent", "at_most": 9}, FALLING, (), OPEN),
    ],
)
def test_verdicts(judged, demand, rows, baseline, verdict):
    assert judged(thresholds(demand), rows, baseline)["verdict"] == verdict


@pytest.mark.parametrize(
    ("demand", "verdict", "number"),
    [
        ({"value": "failures", "at_most": 2}, ACCEPT, 2),  # a failure that two ranks report is one, and a hang
        ({"value": "failures", "at_most": 1}, REJECT, 2),
        ({"value": "restarts", "at_most": 0}, REJECT, 1),
        ({"value": "steps", "at_least": 3}, ACCEPT, 3),
        ({"value": "device_hours", "at_most": 0.1}, ACCEPT, 0.1),  # 3 minutes of 2 devices
        ({"value": "cost", "at_most": 0.29}, REJECT, 0.3),
        ({"value": "cost", "per": "step", "at_most": 0.11}, ACCEPT, 0.1),
        ({"value": "energy", "per": "step", "at_most": 100}, ACCEPT, 100),
        ({"value": "energy", "per": "step", "at_most": 99}, REJECT, 100),
    ],
)
def test_failures_cost_and_energy(judged, demand, verdict, number):
    rows = [{"train_loss": 1.0, "energy": 100.0 * step} for step in (1, 2, 3)]
    content = judged(thresholds(demand, price_per_device_hour=3), rows, (), RESTARTED, attempts=2)
    assert content["verdict"] == verdict and content["findings"][0]["run"] == pytest.approx(number)


def test_each_subgroup_has_to_reach_it(judged):
    rows = [({"loss/a": 1.0, "loss/b": 2.0}, True)]
    content = judged(thresholds({"value": "loss/*", "at_most": 1.5}), rows)
    assert {own["value"]: own["verdict"] for own in content["findings"]} == {
        "last of loss/a": ACCEPT,
        "last of loss/b": REJECT,
    }


def test_a_subgroup_that_only_the_baseline_has_is_missed(judged):
    baseline = [({"loss/a": 1.0, "loss/c": 1.0}, True)]
    content = judged(
        thresholds({"value": "loss/*", "worse_by_at_most": 0, "better": "lower"}), [({"loss/a": 1.0}, True)], baseline
    )
    assert content["verdict"] == OPEN and content["findings"][1]["why"] == "the run has 0 values, 1 are needed"


def noisy(seed, mean, count=200):
    return list(np.random.default_rng(seed).normal(mean, 1.0, count))


@pytest.mark.parametrize(
    ("statistic", "mean", "verdict"),
    [("mean", 9.0, ACCEPT), ("mean", 10.02, OPEN), ("mean", 11.0, REJECT), ("p90", 8.0, ACCEPT), ("p90", 10.0, REJECT)],
)
def test_distributions_are_judged_with_their_spread(statistic, mean, verdict):
    """The mean of 200 is known to 0.14 (two standard errors); the p90 lies 1.28 above the mean."""
    assert judge(Threshold("x", statistic, at_most=10), noisy(0, mean), None, 20).verdict == verdict


@pytest.mark.parametrize(("shift", "least_right"), [(0.0, 0.9), (0.5, 0.9)])
def test_two_distributions_are_told_apart_as_often_as_the_interval_says(shift, least_right):
    """A run that is as good is not rejected, and one that is half a deviation worse is not accepted."""
    threshold = Threshold("x", "mean", worse_by_at_most=0.0, better="lower")
    wrong = {0.0: REJECT, 0.5: ACCEPT}[shift]
    verdicts = [judge(threshold, noisy(i, shift), noisy(1000 + i, 0.0), 20).verdict for i in range(40)]
    assert sum(verdict != wrong for verdict in verdicts) >= least_right * 40


def test_a_tail_is_that_of_the_worse_values():
    values = ([1.0] * 19 + [0.0]) * 50
    for at_least, verdict in ((0.5, REJECT), (0.0, ACCEPT)):
        assert judge(Threshold("x", "p99", at_least=at_least), values, None, 20).verdict == verdict
    assert judge(Threshold("x", "median", at_least=0.5), values, None, 20).verdict == ACCEPT


def test_a_tail_needs_values_enough_to_have_one():
    assert judge(Threshold("x", "p99", at_most=2), [1.0] * 99, None, 20).verdict == OPEN
    assert judge(Threshold("x", "p99", at_most=2), [1.0] * 100, None, 20).verdict == ACCEPT


def test_what_is_not_finite_is_the_worst():
    spoilt = [1.0] * 50 + [math.inf] * 50
    assert judge(Threshold("x", "mean", at_most=2), spoilt, None, 20).verdict == REJECT
    assert judge(Threshold("x", "p90", at_most=2), spoilt, None, 20).verdict == REJECT


def test_thresholds_must_be_those_from_before(judged):
    content = judged(thresholds({**LOSS, "at_most": 9}), FALLING, stated=False)
    assert content["verdict"] == OPEN and "not those that the run began with" in content["reasons"][0]


def test_a_run_that_is_not_finished_is_not_accepted(judged):
    content = judged(thresholds({**LOSS, "at_most": 9}), FALLING, state="failed")
    assert content["verdict"] == OPEN and content["reasons"] == ["the run is not finished: failed"]


def test_steps_that_a_restart_repeated_count_once(tmp_path):
    write_run(tmp_path / "run", losses(1.0, 9.0, 3.0))
    again = {"step": 2, "time": 200, "devices": 2, "train_loss": 2.0, "evaluation": 0}
    with (tmp_path / "run" / "run_values.jsonl").open("a") as stream:
        stream.write(json.dumps(again) + "\n")
    own = RecordedRun(tmp_path / "run")
    assert own.points["train_loss"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert own.counts["device_hours"] == pytest.approx(200 * 2 / 3600)


def confirmed(at_least=0.8):
    own = {"file": "untouched.json", "thresholds": [{"value": "accuracy", "at_least": at_least}]}
    return thresholds({**LOSS, "at_most": 1.1}, confirmation=own)


def test_the_untouched_set_is_read_once(judged, tmp_path):
    (tmp_path / "untouched.json").write_text('{"accuracy": 0.75}')
    assert judged(confirmed(), FALLING)["verdict"] == REJECT
    (tmp_path / "untouched.json").write_text('{"accuracy": 0.99}')
    again = judged(confirmed(), FALLING)
    assert again["verdict"] == REJECT and again["confirmation"][0]["run"] == 0.75
    record = tmp_path / "run" / "run_record.json"
    content = json.loads(record.read_text())
    (tmp_path / "acceptance.yaml").write_text(json.dumps(confirmed(0.7)))
    digest = xxhash.xxh3_128_hexdigest((tmp_path / "acceptance.yaml").read_bytes())
    content["versions"]["acceptance"] = [{"xxh3_128": digest}]
    record.write_text(json.dumps(content))
    other = judged(confirmed(0.7), FALLING)
    assert other["verdict"] == OPEN and "read before, for other thresholds" in other["reasons"][0]


def test_the_untouched_set_is_not_read_for_a_run_that_is_rejected_anyway(judged, tmp_path):
    (tmp_path / "untouched.json").write_text('{"accuracy": 0.9}')
    assert judged(confirmed(), HIGHER)["verdict"] == REJECT
    assert not (tmp_path / "run" / "confirmation_read.json").exists()


@pytest.mark.parametrize(
    ("demand", "certain"),
    [
        ({"value": "failures", "at_most": 1}, True),
        ({"value": "cost", "at_most": 0.1}, True),
        ({**LOSS, "statistic": "max", "at_most": 2.5}, True),
        ({**LOSS, "statistic": "min", "at_least": 1.5}, True),
        ({**LOSS, "at_most": 0.5}, False),  # the last value is still to come
        ({"value": "cost", "per": "step", "at_most": 0.01}, False),
        ({"value": "steps", "at_least": 100}, False),
    ],
)
def test_a_canary_is_stopped_only_when_nothing_can_save_it(judged, demand, certain):
    content = judged(thresholds(demand, price_per_device_hour=3), FALLING, (), RESTARTED, "--canary", state="running")
    assert content["verdict"] == ("certain to be rejected" if certain else "may still be accepted")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "give a mapping with"),
        ("thresholds: []", "give a list of at least one"),
        ("thresholds: [{value: x}]", "needs one of at_most, at_least, worse_by_at_most; it has 0"),
        ("thresholds: [{value: x, at_most: 1, at_least: 0}]", "it has 2"),
        ("thresholds: [{value: x, at_most: a lot}]", "at_most='a lot' does not fit"),
        ("thresholds: [{value: x, worse_by_at_most: 5%}]", "better=None does not fit"),
        ("thresholds: [{value: x, worse_by_at_most: -1, better: lower}]", "give a number of at least 0"),
        ("thresholds: [{value: x, at_most: 1, statistic: p50}]", "statistic='p50' does not fit"),
        ("thresholds: [{value: cost, at_most: 1}]", "cost needs price_per_device_hour"),
        ("thresholds: [{value: steps, at_least: 1, statistic: max}]", "no statistic fits"),
        ("thresholds: [{value: x, at_most: 1, from: 3}]", "from does not fit"),
        ("{thresholds: [{value: x, at_most: 1}], confirmation: {}}", "confirmation needs a file"),
        ("thresholds: [", "is no YAML"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, text, said):
    (tmp_path / "acceptance.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"acceptance\.yaml") as refused:
        read_acceptance(tmp_path / "acceptance.yaml")
    assert said in str(refused.value)
    done = run(tmp_path, tmp_path, "--accept", tmp_path / "acceptance.yaml")
    assert done.exit_code == 2 and "Error: " in done.stderr


def test_the_table_is_shown(judged, tmp_path):
    judged(thresholds({**LOSS, "at_most": 1.0}), FALLING)
    done = run(tmp_path / "baseline", tmp_path / "run", "--accept", tmp_path / "acceptance.yaml")
    assert done.exit_code == 0 and "at most 1" in done.stdout and done.stdout.rstrip().endswith("accept")
