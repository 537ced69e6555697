"""Rules on recorded traces: the step, and the action, of every firing."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dist.rules.evaluate import RuleBook
from lightning_dist.rules.syntax import parse_rule

NAN, INF = math.nan, math.inf
STEADY = [1.0] * 12
SPIKE = [1.0] * 12 + [9.0] * 6 + [1.0] * 4
LONE = [1.0] * 12 + [9.0] + [1.0] * 4
POISON = [1.0, 0.9, 0.8, NAN, NAN, 0.7]
RISING = [1.0] * 5 + [1.0 + 0.2 * i for i in range(12)]
FLICKER = [0.4, 0.6, 0.4, 0.6, 0.4, 0.6, 0.6, 0.6]


def steps(name, values, seconds=1.0):
    return [({name: value, "step": i + 1, "time": i * seconds, "devices": 2}, False) for i, value in enumerate(values)]


def evaluations(name, values, every=4):
    """Steps with a loss, and every fourth an evaluation."""
    rows = []
    for i, value in enumerate(values):
        rows += [({"train_loss": 1.0, "step": i * every + j + 1, "time": 0.0}, False) for j in range(every)]
        rows.append(({name: value, "step": (i + 1) * every, "time": 0.0, "evaluations": i + 1}, True))
    return rows


def firings(rules, rows, price=None):
    book = RuleBook([parse_rule(rule) for rule in ([rules] if isinstance(rules, str) else rules)], price)
    return [(firing.step, firing.rule.action) for values, is_eval in rows for firing in book.judge(values, is_eval)]


@pytest.mark.parametrize(
    ("rule", "rows", "wanted"),
    [
        ("x is not finite -> rollback", steps("x", POISON), [(4, "rollback")]),
        ("x is not finite -> rollback", steps("x", STEADY), []),
        ("x is not finite -> stop", steps("x", [1, INF, 1, -INF]), [(2, "stop"), (4, "stop")]),
        ("not x is finite for 2 steps -> stop", steps("x", POISON), [(5, "stop")]),
        ("x > 3 * median(x, 10) for 5 steps -> rollback", steps("x", SPIKE), [(17, "rollback")]),
        ("x > 3 * median(x, 10) for 5 steps -> rollback", steps("x", LONE), []),
        ("x > 3 * median(x, 10) -> warn", steps("x", LONE), [(13, "warn")]),
        ("x > 3 * median(x, 100) -> warn", steps("x", LONE), []),
        ("x > 2 * quantile(x, 0.9, 10) -> warn", steps("x", LONE), [(13, "warn")]),
        ("slope(x, 5) > 0.15 for 3 steps -> fallback", steps("x", RISING), [(12, "fallback")]),
        ("x > ago(x, 3) + 0.5 -> warn", steps("x", RISING), [(9, "warn")]),
        ("x - mean(x, 4) > 2 * std(x, 4) + 1 -> warn", steps("x", LONE), [(13, "warn")]),
        ("x < 0.5 -> warn", steps("x", FLICKER), [(1, "warn"), (3, "warn"), (5, "warn")]),
        ("x < 0.5 -> warn until x > 0.7", steps("x", FLICKER), [(1, "warn")]),
        ("x < 0.5 -> warn again after 3 steps", steps("x", FLICKER), [(1, "warn"), (5, "warn")]),
        ("x < 0.5 -> warn again after 1 minute", steps("x", FLICKER, 15.0), [(1, "warn"), (5, "warn")]),
        ("x < 0.5 -> warn at most 2 times", steps("x", FLICKER), [(1, "warn"), (3, "warn")]),
        ("x > 0 for 5 minutes -> hold", steps("x", STEADY, 60.0), [(6, "hold")]),
        ("x > 0 for 12 steps -> hold", steps("x", STEADY), [(12, "hold")]),
        ("cost > 5 -> stop", steps("x", STEADY, 3600 / 4), [(7, "stop")]),
        ("minutes >= 2 -> stop", steps("x", STEADY, 30.0), [(5, "stop")]),
        ("step >= 7 -> checkpoint", steps("x", STEADY), [(7, "checkpoint")]),
        ("x / y > 0.4 -> fallback", steps("x", STEADY), []),
        ("x / 0 > 0.4 -> fallback", steps("x", STEADY), []),
        ("x > 0.5 or y > 1 -> warn", steps("x", STEADY), [(1, "warn")]),
        ("x > 0.5 and y > 1 -> warn", steps("x", STEADY), []),
        ("v not improved for 3 evaluations -> stop", evaluations("v", [3, 2, 2, 2, 2, 1]), [(20, "stop")]),
        ("v not improved by 0.5 for 2 evaluations -> stop", evaluations("v", [3, 2.8, 2.7, 2.6]), [(12, "stop")]),
        ("-v not improved for 2 evaluations -> stop", evaluations("v", [1, 2, 3, 4, 4, 4]), [(24, "stop")]),
        ("v improved -> checkpoint", evaluations("v", [3, 4, 2]), [(4, "checkpoint"), (12, "checkpoint")]),
        ("v > 2 -> warn", evaluations("v", [1, 3, 1]), [(8, "warn")]),
        ("v > 1.5 * median(v, 3) -> warn", evaluations("v", [1, 1, 1, 4]), [(16, "warn")]),
        ("v is not finite for 2 evaluations -> stop", evaluations("v", [1, NAN, NAN]), [(12, "stop")]),
        ("v not improved for 2 evaluations -> stop", evaluations("v", [1, NAN, NAN]), [(12, "stop")]),
    ],
)
def test_rules_on_traces(rule, rows, wanted):
    assert firings(rule, rows, price=2.0) == wanted


@pytest.mark.parametrize("kill", range(1, 24))
@pytest.mark.parametrize(
    "rule",
    ["v not improved for 3 evaluations -> stop", "train_loss > 0 for 13 steps -> stop", "slope(v, 4) > -1 -> warn"],
)
def test_state_survives_at_every_row(rule, kill):
    """Wherever it is interrupted, through JSON, it fires where the uninterrupted one fires."""
    rows = evaluations("v", [3, 2, 2, 2, 2])
    wanted = firings(rule, rows)
    assert wanted
    first, second = RuleBook([parse_rule(rule)]), RuleBook([parse_rule(rule)])
    found = [(firing.step, firing.rule.action) for row in rows[:kill] for firing in first.judge(*row)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + [(f.step, f.rule.action) for row in rows[kill:] for f in second.judge(*row)] == wanted


def test_what_was_never_logged_is_named():
    book = RuleBook([parse_rule("val_los > 3 -> warn"), parse_rule("step > 3 -> warn")])
    book.judge({"step": 1, "time": 0.0})
    assert book.missing() == {0: {"val_los"}}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=8, max_size=20), st.floats(0, 1))
def test_windows_are_numpys(values, share):
    """A rule fires exactly where NumPy finds it to hold, over the values before the one that is judged."""
    size = 6
    checks = {
        f"median(x, {size})": np.median,
        f"mean(x, {size})": np.mean,
        f"std(x, {size})": lambda w: np.std(w, ddof=1),
        f"quantile(x, {share:.4f}, {size})": lambda w: np.quantile(w, round(share, 4)),
        f"slope(x, {size})": lambda w: np.polyfit(range(len(w)), w, 1)[0],
    }
    for text, function in checks.items():
        for place in range(3, len(values)):
            right = float(function(values[max(0, place - size) : place]))
            slack = 1e-6 * max(1.0, abs(right))
            book = RuleBook([parse_rule(f"{text} > y -> warn"), parse_rule(f"{text} < z -> warn")])
            for row, _ in steps("x", values[:place]):
                book.judge(row)
            found = book.judge({"x": values[place], "y": right - slack, "z": right + slack, "step": 99, "time": 99.0})
            assert {firing.index for firing in found} == {0, 1}, text
