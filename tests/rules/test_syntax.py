"""What a rule says is understood, and what it can't mean is refused at its column."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dist.rules.syntax import ACTIONS, RuleError, parse_rule


@pytest.mark.parametrize(
    ("text", "column", "sentence"),
    [
        ("", 1, "A rule is a text"),
        ("loss > 3", 9, "The rule ends too early"),
        ("loss > 3 -> rolback", 13, "'rolback' is no action; did you mean rollback"),
        ("loss > 3 -> explode", 13, "no action; warn, escalate"),
        ("medain(loss, 5) > 3 -> warn", 1, "'medain' is no function; did you mean median"),
        ("median(loss) > 3 -> warn", 1, "takes 2 arguments, not 1"),
        ("median(loss, n) > 3 -> warn", 14, "whole number"),
        ("median(3, 5) > 3 -> warn", 8, "no name in it"),
        ("quantile(loss, 2, 5) > 3 -> warn", 16, "from 0 to 1"),
        ("mean(median(loss, 3), 3) > 1 -> warn", 6, "window over a window"),
        ("loss -> warn", 1, "must be a comparison"),
        ("(loss > 3) > 2 -> warn", 2, "must be a number"),
        ("loss and loss > 2 -> warn", 1, "must be a comparison"),
        ("loss > 3 for 2.5 steps -> warn", 14, "whole number"),
        ("loss > 3 for 0 minutes -> warn", 14, "no time"),
        ("loss > 3 for 5 sheep -> warn", 16, "does not belong here"),
        ("loss $ 3 -> warn", 6, "'$' does not belong here"),
        ("loss > 3 -> skip", 1, "'skip' is decided before the step"),
        ("loss is not finite for 3 steps -> skip", 1, "no 'for'"),
        ("loss > 3 -> warn until loss < 2 until loss < 1", 33, "twice"),
        ("loss > 1e999 -> warn", 8, "too large"),
    ],
)
def test_errors_point_at_the_column(text, column, sentence):
    with pytest.raises(RuleError) as caught:
        parse_rule(text)
    assert sentence in str(caught.value)
    assert caught.value.column == column, str(caught.value)
    assert str(caught.value).splitlines()[-1] == "  " + " " * (column - 1) + "^"


def test_a_rule_with_everything():
    rule = parse_rule(
        "train_loss > 3 * median(train_loss, 100) and not `val/loss` is finite for 5 steps"
        " -> rollback until train_loss < 1 again after 10 minutes at most 3 times"
    )
    assert rule.names == {"train_loss", "val/loss"}
    assert (rule.count, rule.unit, rule.action) == (5, "steps", "rollback")
    assert rule.again_after == (10.0, "minutes") and rule.most == 3 and rule.until.kind == "compare"


def test_precedence_is_that_of_arithmetic():
    condition = parse_rule("a + b * 2 - -c / 4 > 1 or x < 1 and y < 2 -> warn").condition
    assert condition.kind == "or" and condition.children[1].kind == "and"
    left = condition.children[0].children[0]
    assert left.kind == "subtract" and [child.kind for child in left.children] == ["add", "divide"]


NAMES = st.sampled_from(
    ["loss", "forward", "order", "is_ok", "android", "notes", "until_x", "stepsize", "finite_share"]
)
NUMBERS = st.floats(0, 1e6).map(lambda number: f"{number:.6g}")


def arithmetic(children):
    return st.one_of(
        st.tuples(children, st.sampled_from("+-*/"), children).map(lambda parts: f"({' '.join(parts)})"),
        children.map(lambda part: f"-({part})"),
        children.map(lambda part: f"abs({part})"),
    )


SUMS = st.recursive(NAMES | NUMBERS, arithmetic, max_leaves=6)
COMPARISONS = st.tuples(SUMS, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), SUMS).map(" ".join)
TRUTHS = st.recursive(
    COMPARISONS
    | NAMES.map(lambda name: f"{name} is not finite")
    | NAMES.map(lambda name: f"{name} not improved by 0.1"),
    lambda children: st.one_of(
        st.tuples(children, st.sampled_from(["and", "or"]), children).map(lambda parts: f"({' '.join(parts)})"),
        children.map(lambda part: f"not ({part})"),
    ),
    max_leaves=5,
)
DURATIONS = st.sampled_from(["", " for 5 steps", " for 1 step", " for 2 evaluations", " for 1.5 minutes"])
RULES = st.tuples(TRUTHS, DURATIONS, st.sampled_from([action for action in ACTIONS if action != "skip"]))


@settings(max_examples=200, deadline=None)
@given(RULES)
def test_what_the_grammar_allows_is_read_whatever_the_spaces(parts):
    text = f"{parts[0]}{parts[1]} -> {parts[2]}"
    rule, spread = parse_rule(text), parse_rule(text.replace(" ", " \n "))
    assert rule.action == parts[2]

    def shape(node):
        return node.kind, node.value, tuple(map(shape, node.children))

    assert shape(rule.condition) == shape(spread.condition)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="loss medianfor5steps->()<>+-*/=!.,`e \n$", max_size=60) | st.text(max_size=30))
def test_any_text_is_a_rule_or_an_error_with_a_column_in_it(text):
    try:
        parse_rule(text)
    except RuleError as error:
        assert 1 <= error.column <= len(text) + 1


@settings(max_examples=100, deadline=None)
@given(RULES, st.data())
def test_a_damaged_rule_never_escapes_as_another_error(parts, drawn):
    text = f"{parts[0]}{parts[1]} -> {parts[2]}"
    place = drawn.draw(st.integers(0, len(text) - 1))
    try:
        parse_rule(text[:place] + drawn.draw(st.sampled_from(["", "$", ")", " for ", "->", "1"])) + text[place + 1 :])
    except RuleError as error:
        assert error.column >= 1
