"""Rules judged on rows of numbers: conditions with memory, and when each fires."""

from __future__ import annotations

import math
import operator
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dist.rules.syntax import WINDOWS, Node, Rule

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}


class Condition:
    """A condition with its windows and best values, told of one row after the other.

    Truth has three values: None where a name has no value yet, or a window holds less than half of what it may.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        nodes = list(node.walk())
        self._windows: dict[int, deque[float]] = {
            index: deque(maxlen=int(part.children[-1].value))
            for index, part in enumerate(nodes)
            if part.kind == "call" and part.value in WINDOWS
        }
        self._best: dict[int, float | None] = {
            index: None for index, part in enumerate(nodes) if part.kind in ("improved", "not_improved")
        }
        self._improved: dict[int, bool] = {}
        self._index = {id(part): index for index, part in enumerate(nodes)}
        self._nodes = nodes

    def judge(self, known: Mapping[str, float], new: set[str]) -> bool | None:
        """Whether it holds; then its windows take in the row, so a value is never compared with itself.

        Args:
            known: The newest value of every name.
            new: The names that this row has a value for.
        """
        for index in self._best:
            part = self._nodes[index]
            if part.children[0].names & new:
                self._note_best(index, self._number(part.children[0], known), part.value)
        truth = self._truth(self._node, known)
        for index, window in self._windows.items():
            part = self._nodes[index].children[0]
            value = self._number(part, known) if part.names & new else None
            if value is not None and math.isfinite(value):
                window.append(value)
        return truth

    def _note_best(self, index: int, value: float | None, margin: float) -> None:
        if value is None:
            return
        best = self._best[index]
        self._improved[index] = better = math.isfinite(value) and (best is None or value < best - margin)
        if better:
            self._best[index] = value

    def _truth(self, node: Node, known: Mapping[str, float]) -> bool | None:
        if node.kind in ("or", "and"):
            decisive = node.kind == "or"
            truths = [self._truth(child, known) for child in node.children]
            if decisive in truths:
                return decisive
            return None if None in truths else not decisive
        if node.kind == "not":
            truth = self._truth(node.children[0], known)
            return None if truth is None else not truth
        if node.kind in ("improved", "not_improved"):
            improved = self._improved.get(self._index[id(node)])
            return None if improved is None else improved == (node.kind == "improved")
        values = [self._number(child, known) for child in node.children]
        if any(value is None for value in values):
            return None
        if node.kind == "compare":
            return _COMPARE[node.value](values[0], values[1])  # type: ignore[arg-type]
        return math.isfinite(values[0]) == (node.kind == "finite")  # type: ignore[arg-type]

    def _number(self, node: Node, known: Mapping[str, float]) -> float | None:
        if node.kind == "number":
            return node.value
        if node.kind == "name":
            return known.get(node.value)
        if node.kind == "call" and node.value in WINDOWS:
            return _over_window(node, self._windows[self._index[id(node)]])
        values = [self._number(child, known) for child in node.children]
        if any(value is None for value in values):
            return None
        first: float = values[0]  # type: ignore[assignment]
        if node.kind == "call":
            return abs(first)
        if node.kind == "negative":
            return -first
        second: float = values[1]  # type: ignore[assignment]
        if node.kind == "divide":
            return first / second if second != 0 else None
        try:
            return {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}[node.kind](first, second)
        except OverflowError:
            return math.inf

    def state_dict(self) -> dict[str, Any]:
        return {
            "windows": {index: list(window) for index, window in self._windows.items()},
            "best": dict(self._best),
            "improved": dict(self._improved),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for index, values in state["windows"].items():
            self._windows[int(index)].extend(values)
        self._best |= {int(index): value for index, value in state["best"].items()}
        self._improved = {int(index): value for index, value in state["improved"].items()}


def _over_window(node: Node, window: Sequence[float]) -> float | None:
    name, size = node.value, int(node.children[-1].value)
    if name == "ago":
        return window[-size] if len(window) >= size else None
    if len(window) < max(1, size / 2, 2 if name in ("slope", "std") else 1):
        return None
    if name == "quantile":
        return _quantile(sorted(window), node.children[1].value)
    if name == "slope":
        return statistics.linear_regression(range(len(window)), window).slope
    functions: dict[str, Callable[[Sequence[float]], float]] = {
        "mean": statistics.fmean,
        "median": statistics.median,
        "min": min,
        "max": max,
        "std": statistics.stdev,
    }
    return functions[name](window)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Between the two values that surround the place, in proportion."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Firing:
    """A rule that has fired.

    Args:
        index: The rule's place in the list.
        rule: The rule.
        step: The optimizer step.
        first_step: The step from which on its condition has held without a break.
        evidence: The values of its names.
    """

    index: int
    rule: Rule
    step: int
    first_step: int
    evidence: dict[str, float]


class RuleState:
    """One rule with its memory: how long its condition has held, whether it is armed, how often it has fired."""

    def __init__(self, index: int, rule: Rule) -> None:
        self.index, self.rule = index, rule
        self._condition = Condition(rule.condition)
        self._until = Condition(rule.until) if rule.until is not None else None
        self._armed = True
        self._held: dict[str, float] | None = None
        self._fired_at: dict[str, float] | None = None
        self.fired = 0

    def judge(self, known: Mapping[str, float], new: set[str], evaluation: bool) -> Firing | None:
        """Takes in a row; gives a firing where the rule fires on it."""
        truth = self._condition.judge(known, new)
        until = self._until.judge(known, new) if self._until is not None else None
        if not self._armed and (until if self._until is not None else truth is False):
            self._armed, self._held = True, None
        if truth is not True:
            if truth is False:
                self._held = None
            return None
        if self._held is None:
            self._held = {"steps": 0, "evaluations": 0, "time": known["time"], "step": known["step"]}
        self._held["evaluations" if evaluation else "steps"] += 1
        if not self._armed or not self._long_enough(known) or not self._rested(known):
            return None
        if self.rule.most is not None and self.fired >= self.rule.most:
            return None
        self.note_fired(known)
        evidence = {name: known[name] for name in sorted(self.rule.condition.names) if name in known}
        return Firing(self.index, self.rule, int(known["step"]), int(self._held["step"]), evidence)

    def note_fired(self, known: Mapping[str, float]) -> None:
        """Counts a firing, here or on another rank."""
        self.fired += 1
        self._armed = False
        self._fired_at = {name: known[name] for name in ("step", "evaluations", "time")}

    def _long_enough(self, known: Mapping[str, float]) -> bool:
        assert self._held is not None
        if self.rule.unit in _SECONDS:
            return known["time"] - self._held["time"] >= self.rule.count * _SECONDS[self.rule.unit]
        # A rule about values of evaluations alone is judged there: "1 step" is no wait for it.
        count = self._held[self.rule.unit]
        return count >= self.rule.count or (self.rule.count == 1 and self._held["evaluations"] > 0)

    def _rested(self, known: Mapping[str, float]) -> bool:
        if self.rule.again_after is None or self._fired_at is None:
            return True
        count, unit = self.rule.again_after
        if unit in _SECONDS:
            return known["time"] - self._fired_at["time"] >= count * _SECONDS[unit]
        name = "step" if unit == "steps" else unit
        return known[name] - self._fired_at[name] >= count

    def forget_running(self) -> None:
        """After a rollback: what held under weights that are gone holds no more."""
        self._held, self._armed = None, True

    def state_dict(self) -> dict[str, Any]:
        return {
            "text": self.rule.text,
            "condition": self._condition.state_dict(),
            "until": self._until.state_dict() if self._until is not None else None,
            "armed": self._armed,
            "held": self._held,
            "fired_at": self._fired_at,
            "fired": self.fired,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._condition.load_state_dict(state["condition"])
        if self._until is not None and state["until"] is not None:
            self._until.load_state_dict(state["until"])
        self._armed, self._held = state["armed"], state["held"]
        self._fired_at, self.fired = state["fired_at"], state["fired"]


class RuleBook:
    """All rules of a run.

    Args:
        rules: In the order in which they are written.
        price_per_device_hour: What ``cost`` is counted by.
    """

    def __init__(self, rules: Sequence[Rule], price_per_device_hour: float | None = None) -> None:
        self.states = [RuleState(index, rule) for index, rule in enumerate(rules)]
        self._price = price_per_device_hour
        self.known: dict[str, float] = {}

    def judge(self, values: Mapping[str, float], evaluation: bool = False) -> list[Firing]:
        """Takes in a row and gives what fires, in the order of the rules.

        Args:
            values: The row's new values; ``step`` and ``time`` (seconds) at least.
            evaluation: Whether an evaluation gave them.
        """
        values = {"evaluations": 0.0, "devices": 1.0, "minutes": values["time"] / 60, **values}
        if self._price is not None:
            values["cost"] = self._price * values["devices"] * values["time"] / 3600
        self.known |= values
        firings = [state.judge(self.known, set(values), evaluation) for state in self.states]
        return [firing for firing in firings if firing is not None]

    def missing(self) -> dict[int, set[str]]:
        """For each rule's place, the names that have had no value yet."""
        absent = {state.index: state.rule.names - self.known.keys() for state in self.states}
        return {index: names for index, names in absent.items() if names}

    def forget_running(self) -> None:
        for state in self.states:
            state.forget_running()

    def state_dict(self) -> dict[str, Any]:
        return {"known": dict(self.known), "rules": [state.state_dict() for state in self.states]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Rules that are written as they were go on as they were; others begin anew."""
        self.known = dict(state["known"])
        saved = {own["text"]: own for own in state["rules"]}
        for own in self.states:
            if own.rule.text in saved:
                own.load_state_dict(saved[own.rule.text])
