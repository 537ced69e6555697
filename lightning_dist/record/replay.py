"""What rules would have done on a run that is over, by its recorded rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from lightning_dist.rules.evaluate import Firing, RuleBook
from lightning_dist.rules.syntax import RuleError, near, parse_rule

ENDING = ("stop", "fallback")
"""Actions after which there would have been no further step."""


def read_rules(path: str | PathLike[str]) -> tuple[list[str], float | None]:
    """The rules of a YAML file, and the price of a device hour: a list, or a mapping with both.

    Raises:
        ValueError: If the file holds neither; with the column where a rule can't be understood.
    """
    content: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    price = None
    if isinstance(content, Mapping):
        if unknown := sorted(map(str, content.keys() - {"rules", "price_per_device_hour"})):
            raise ValueError(f"{path}: {', '.join(unknown)} does not fit: rules and price_per_device_hour do.")
        price, content = content.get("price_per_device_hour"), content.get("rules")
    if not isinstance(content, list) or not content or not all(isinstance(rule, str) for rule in content):
        raise ValueError(f"{path} does not fit: give a list of rules, or a mapping with `rules: [...]`.")
    if price is not None and (isinstance(price, bool) or not isinstance(price, int | float) or price < 0):
        raise ValueError(f"{path}: price_per_device_hour={price!r} does not fit: give a number of at least 0.")
    for rule in content:
        try:
            parse_rule(rule)
        except RuleError as error:
            raise ValueError(f"{path}: {error}") from None
    return content, price


def replay(
    rows: Iterable[Mapping[str, float]], rules: Sequence[str], price_per_device_hour: float | None = None
) -> tuple[list[Firing], list[str]]:
    """Judges a run's rows as the run itself would have.

    The past does not change: rows that come after a stop or a rollback are judged too, as they were recorded. Where a
    restart has gone back to an earlier step, what held until then holds no more.

    Args:
        rows: As :func:`~lightning_dist.record.files.read_values` gives them.
        rules: Their texts.
        price_per_device_hour: What ``cost`` is counted by.

    Returns:
        What would have fired, in order, and a sentence for each rule with names that no row has a value for.
    """
    parsed = [parse_rule(rule) for rule in rules]
    book = RuleBook(parsed, price_per_device_hour)
    firings: list[Firing] = []
    step = float("-inf")
    for row in rows:
        if row["step"] < step:
            book.forget_running()
        step = row["step"]
        values = {name: value for name, value in row.items() if name != "evaluation"}
        firings += book.judge(values, bool(row.get("evaluation")))
    sentences = []
    for index, names in sorted(book.missing().items()):
        for name in sorted(names):
            sentences.append(f"{parsed[index].text!r}: {name} has no value in this run{near(name, book.known)}")
    return firings, sentences
