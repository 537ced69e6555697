"""From a rule's text to its tree; errors point at the column."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

ACTIONS = ("warn", "escalate", "hold", "checkpoint", "skip", "rollback", "fallback", "stop")
"""Mildest first: where one does not succeed, the next stronger of `rollback`, `fallback` and `stop` is taken."""
WINDOWS = {"mean": 2, "median": 2, "min": 2, "max": 2, "std": 2, "slope": 2, "ago": 2, "quantile": 3}
"""Functions over the earlier values of their first argument, and how many arguments they take."""
FUNCTIONS = {"abs": 1, **WINDOWS}
UNITS = ("steps", "evaluations", "seconds", "minutes", "hours")
MOST_VALUES = 100_000
"""The longest window."""

GRAMMAR = r"""
rule: disjunction held? "->" action option*
held: "for" NUMBER unit
unit: UNIT
action: NAME
option: "until" disjunction -> until
      | "again" "after" NUMBER unit -> again
      | "at" "most" NUMBER "times" -> most
?disjunction: conjunction | disjunction "or" conjunction -> or
?conjunction: negation | conjunction "and" negation -> and
?negation: comparison | "not" negation -> not
?comparison: sum
           | sum OPERATOR sum -> compare
           | sum "is" "finite" -> finite
           | sum "is" "not" "finite" -> not_finite
           | sum "improved" margin? -> improved
           | sum "not" "improved" margin? -> not_improved
margin: "by" NUMBER
?sum: product | sum "+" product -> add | sum "-" product -> subtract
?product: signed | product "*" signed -> multiply | product "/" signed -> divide
?signed: atom | "-" signed -> negative
?atom: NUMBER -> number
     | NAME "(" disjunction ("," disjunction)* ")" -> call
     | NAME -> name
     | QUOTED -> name
     | "(" disjunction ")"
OPERATOR: "<=" | ">=" | "==" | "!=" | "<" | ">"
UNIT.2: /(steps?|evaluations?|seconds?|minutes?|hours?)(?!\w)/
NUMBER: /(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?/
NAME: /[A-Za-z_][A-Za-z0-9_]*/
QUOTED: /`[^`\n]+`/
%ignore /[ \t\n]+/
"""


class RuleError(ValueError):
    """A rule that can't be understood; the message shows the text with a mark under the column."""

    def __init__(self, text: str, column: int, what: str) -> None:
        self.text, self.column, self.what = text, column, what
        line = " ".join(text.split("\n"))
        super().__init__(f"{what}, at column {column}:\n  {line}\n  {' ' * (column - 1)}^")


@dataclass(frozen=True)
class Node:
    """A part of a condition.

    Args:
        kind: ``number``, ``name``, ``call``, ``negative``, ``add`` …, ``compare``, ``finite``, ``improved``, ``not`` ….
        value: A number, a name, a function's name, or the operator of a comparison.
        children: Its parts.
        column: Where it stands in the text, from 1.
    """

    kind: str
    value: Any
    children: tuple[Node, ...]
    column: int

    def walk(self) -> Iterator[Node]:
        """This and all parts below."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def names(self) -> set[str]:
        """All names of values in it."""
        return {node.value for node in self.walk() if node.kind == "name"}


@dataclass(frozen=True)
class Rule:
    """A rule as it was written.

    Args:
        text: The text.
        condition: When it fires.
        count, unit: It must have held for so long: 1 ``steps`` by default.
        action: One of :data:`ACTIONS`.
        until: What re-arms it after it has fired; None is that the condition does not hold.
        again_after: Count and unit in which it does not fire again.
        most: How often it may fire; None is without limit.
    """

    text: str
    condition: Node
    action: str
    count: float = 1
    unit: str = "steps"
    until: Node | None = None
    again_after: tuple[float, str] | None = None
    most: int | None = None

    @property
    def names(self) -> set[str]:
        return self.condition.names | (self.until.names if self.until is not None else set())


@cache
def _parser() -> Any:
    from lark import Lark

    return Lark(GRAMMAR, start="rule", parser="lalr", propagate_positions=True, maybe_placeholders=False)


def parse_rule(text: str) -> Rule:
    """Reads one rule.

    Raises:
        RuleError: With the column, and near names where one is not known.
    """
    from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedInput, UnexpectedToken

    if not isinstance(text, str) or not text.strip():
        raise RuleError(str(text), 1, "A rule is a text such as 'train_loss is not finite -> rollback'")
    try:
        tree = _parser().parse(text)
    except UnexpectedCharacters as error:
        place = int(error.pos_in_stream or 0)
        raise RuleError(text, place + 1, f"{text[place]!r} does not belong here") from None
    except UnexpectedToken as error:
        at_end = error.token.type == "$END"
        place = len(text.rstrip()) if at_end else int(error.token.start_pos or 0)
        what = "The rule ends too early" if at_end else f"{str(error.token)!r} does not belong here"
        raise RuleError(text, place + 1, f"{what}; {_expected(error)} fits") from None
    except (UnexpectedEOF, UnexpectedInput):
        raise RuleError(text, len(text.rstrip()) + 1, "The rule ends too early") from None
    return _as_rule(text, tree)


def near(name: str, known: Collection[str]) -> str:
    """A half-sentence with the names that look like a name, or nothing."""
    names = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _expected(error: Any) -> str:
    words = {
        "NAME": "a name",
        "NUMBER": "a number",
        "OPERATOR": "a comparison",
        "UNIT": " or ".join(UNITS[:2]) + " …",
        "__ANON_0": "'->'",
        "LPAR": "'('",
        "RPAR": "')'",
        "COMMA": "','",
        "QUOTED": "a `quoted` name",
        "PLUS": "'+'",
        "MINUS": "'-'",
        "STAR": "'*'",
        "SLASH": "'/'",
        "$END": "the end",
    }
    return ", ".join(sorted(words.get(name, f"{name.lower()!r}") for name in error.expected))


def _as_rule(text: str, tree: Any) -> Rule:
    condition = _as_node(text, tree.children[0])
    _require(text, condition, "truth", "A rule's condition")
    rest = list(tree.children[1:])
    settings: dict[str, Any] = {}
    if rest[0].data == "held":
        settings["count"], settings["unit"] = _duration(text, rest.pop(0))
    token = rest.pop(0).children[0]
    action = str(token)
    if action not in ACTIONS:
        fits = near(action, ACTIONS) or f"; {', '.join(ACTIONS)} fit"
        raise RuleError(text, token.start_pos + 1, f"{action!r} is no action{fits}")
    for option in rest:
        key = {"until": "until", "again": "again_after", "most": "most"}[option.data]
        if key in settings:
            raise RuleError(text, option.meta.start_pos + 1, f"The rule says {option.data!r} twice")
        if key == "until":
            settings[key] = _as_node(text, option.children[0])
            _require(text, settings[key], "truth", "What stands after 'until'")
        elif key == "again_after":
            settings[key] = _duration(text, option)
        else:
            settings[key] = _whole(text, option.children[0], "A number of times")
    if action == "skip":
        _check_veto(text, condition, settings)
    return Rule(text, condition, action, **settings)


def _check_veto(text: str, condition: Node, settings: dict[str, Any]) -> None:
    """`skip` is decided before the step, on the device, where only this can be known."""
    for node in condition.walk():
        fits = node.kind in ("or", "not_finite") or (node.kind == "name" and node.value in ("loss", "gradient"))
        if not fits:
            what = "'skip' is decided before the step: 'loss is not finite' or 'gradient is not finite' fits"
            raise RuleError(text, node.column, what)
    if settings.keys() - {"most"}:
        raise RuleError(text, 1, "'skip' is decided for each step by itself: no 'for', 'until' or 'again after' fits")


def _duration(text: str, tree: Any) -> tuple[float, str]:
    number, unit = tree.children
    name = str(unit.children[0]).rstrip("s") + "s"
    if name in ("steps", "evaluations"):
        return _whole(text, number, f"A number of {name}"), name
    if float(number) <= 0:
        raise RuleError(text, number.start_pos + 1, f"{number} {name} is no time")
    return float(number), name


def _whole(text: str, token: Any, what: str) -> int:
    if not float(token).is_integer() or not 1 <= float(token) <= MOST_VALUES:
        raise RuleError(text, token.start_pos + 1, f"{what} is a whole number from 1 to {MOST_VALUES}, not {token}")
    return int(float(token))


_TRUTHS = {"or", "and", "not", "compare", "finite", "not_finite", "improved", "not_improved"}


def _require(text: str, node: Node, wanted: str, where: str) -> None:
    is_truth = node.kind in _TRUTHS
    if (wanted == "truth") != is_truth:
        has = "is true or false" if is_truth else "is a number"
        raise RuleError(
            text, node.column, f"{where} must be {'a comparison' if wanted == 'truth' else 'a number'}; this {has}"
        )


def _as_node(text: str, tree: Any) -> Node:
    column = tree.meta.start_pos + 1
    if tree.data == "number":
        number = float(tree.children[0])
        if number == float("inf"):
            raise RuleError(text, column, "The number is too large")
        return Node("number", number, (), column)
    if tree.data == "name":
        return Node("name", str(tree.children[0]).strip("`"), (), column)
    if tree.data == "call":
        return _call(text, tree, column)
    value: Any = None
    kind, parts = str(tree.data), list(tree.children)
    if kind == "compare":
        value = str(parts.pop(1))
    if kind in ("improved", "not_improved"):
        value = float(parts.pop(1).children[0]) if len(parts) == 2 else 0.0
    children = tuple(_as_node(text, part) for part in parts)
    wanted = "truth" if kind in ("or", "and", "not") else "number"
    for child in children:
        _require(text, child, wanted, f"What {kind.replace('_', ' ')!r} is about")
    if kind in ("improved", "not_improved", "finite", "not_finite") and not children[0].names:
        raise RuleError(text, children[0].column, "There is no name in it, so it never changes")
    return Node(kind, value, children, column)


def _call(text: str, tree: Any, column: int) -> Node:
    token, *arguments = tree.children
    name = str(token)
    if name not in FUNCTIONS:
        fits = near(name, FUNCTIONS) or f"; {', '.join(FUNCTIONS)} fit"
        raise RuleError(text, column, f"{name!r} is no function{fits}")
    if len(arguments) != FUNCTIONS[name]:
        raise RuleError(text, column, f"{name!r} takes {FUNCTIONS[name]} arguments, not {len(arguments)}")
    children = tuple(_as_node(text, argument) for argument in arguments)
    for child in children:
        _require(text, child, "number", f"An argument of {name!r}")
    if name in WINDOWS:
        length = children[-1]
        if length.kind != "number" or not length.value.is_integer() or not 1 <= length.value <= MOST_VALUES:
            raise RuleError(text, length.column, f"A window's length is a whole number from 1 to {MOST_VALUES}")
        if not children[0].names:
            raise RuleError(text, children[0].column, "There is no name in it, so it never changes")
        if any(node.value in WINDOWS for node in children[0].walk() if node.kind == "call"):
            raise RuleError(text, children[0].column, "A window over a window is not supported")
    if name == "quantile" and not (children[1].kind == "number" and 0 <= children[1].value <= 1):
        raise RuleError(text, children[1].column, "A quantile's share is a number from 0 to 1")
    return Node("call", name, children, column)
