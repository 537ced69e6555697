"""What a run has to reach, written down before it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import xxhash
import yaml

POINTS = ("last", "min", "max")
"""Statistics that are one of the values, compared as they are."""
SHARES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
STATISTICS = (*POINTS, "mean", *SHARES)
COUNTS = ("failures", "restarts", "device_hours", "cost", "steps")
"""Numbers of a run as a whole, beside the names that it recorded."""


@dataclass(frozen=True)
class Threshold:
    """One demand.

    Args:
        value: A name that the run recorded, a pattern such as ``"val_loss/*"`` (each name that fits it, a subgroup
            each), or one of :data:`COUNTS`.
        statistic: One of :data:`STATISTICS`.
        at_most: The largest number that is accepted.
        at_least: The smallest.
        worse_by_at_most: How much worse than the baseline is accepted.
        share: Whether that is a share of the baseline's number.
        better: ``"lower"`` or ``"higher"``.
        from_step: Values of earlier steps do not count.
        per_step: Whether the number is divided by the run's steps.
    """

    value: str
    statistic: str = "last"
    at_most: float | None = None
    at_least: float | None = None
    worse_by_at_most: float | None = None
    share: bool = False
    better: str = "lower"
    from_step: int = 0
    per_step: bool = False

    @property
    def lower(self) -> bool:
        """Whether lower numbers are better."""
        return self.at_least is None and self.better == "lower"

    @property
    def demand(self) -> str:
        """In words."""
        if self.at_most is not None:
            return f"at most {self.at_most:.6g}"
        if self.at_least is not None:
            return f"at least {self.at_least:.6g}"
        assert self.worse_by_at_most is not None
        much = f"{self.worse_by_at_most:.4g}" if not self.share else f"{100 * self.worse_by_at_most:.4g} %"
        return f"at most {much} {'above' if self.lower else 'below'} the baseline"


@dataclass(frozen=True)
class Acceptance:
    """A file of demands.

    Args:
        thresholds: The demands.
        least_values: A distribution of fewer values is not enough evidence.
        price_per_device_hour: What ``cost`` is counted by.
        confirmation: The file of the untouched set's results.
        confirming: What these have to reach.
        digest: The file's xxh3-128, as the run's record has it.
    """

    thresholds: tuple[Threshold, ...]
    least_values: int
    price_per_device_hour: float | None
    confirmation: Path | None
    confirming: tuple[Threshold, ...]
    digest: str


def read_acceptance(path: str | PathLike[str]) -> Acceptance:
    """Reads the file.

    Raises:
        ValueError: If something in it does not fit; the message names it.
    """
    raw = Path(path).read_bytes()
    try:
        content = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from None
    keys = {"thresholds", "least_values", "price_per_device_hour", "confirmation"}
    content = _mapping(content, keys, str(path))
    price = content.get("price_per_device_hour")
    if price is not None:
        price = _number(price, f"{path}: price_per_device_hour")
    least = content.get("least_values", 20)
    if isinstance(least, bool) or not isinstance(least, int) or least < 2:
        raise ValueError(f"{path}: least_values={least!r} does not fit: give a whole number of at least 2.")
    confirmation = None
    confirming: tuple[Threshold, ...] = ()
    if "confirmation" in content:
        own = _mapping(content["confirmation"], {"file", "thresholds"}, f"{path}: confirmation")
        if not isinstance(own.get("file"), str):
            raise ValueError(f"{path}: confirmation needs a file with the untouched set's results.")
        confirmation = Path(path).parent / own["file"]
        confirming = _thresholds(own.get("thresholds"), f"{path}: confirmation")
        if any(threshold.worse_by_at_most is not None or threshold.per_step for threshold in confirming):
            raise ValueError(f"{path}: confirmation: only at_most and at_least fit, without per.")
    thresholds = _thresholds(content.get("thresholds"), str(path))
    if price is None and any(threshold.value == "cost" for threshold in thresholds):
        raise ValueError(f"{path}: cost needs price_per_device_hour.")
    return Acceptance(thresholds, least, price, confirmation, confirming, xxhash.xxh3_128_hexdigest(raw))


def _thresholds(content: Any, where: str) -> tuple[Threshold, ...]:
    if not isinstance(content, list) or not content:
        raise ValueError(f"{where}: thresholds={content!r} does not fit: give a list of at least one.")
    return tuple(_threshold(item, f"{where}: threshold {number}") for number, item in enumerate(content, 1))


def _threshold(content: Any, where: str) -> Threshold:
    limits = ("at_most", "at_least", "worse_by_at_most")
    own = _mapping(content, {"value", "statistic", *limits, "better", "from_step", "per"}, where)
    if not isinstance(own.get("value"), str):
        raise ValueError(f"{where} needs value, the name of what it is about.")
    given = [name for name in limits if name in own]
    if len(given) != 1:
        raise ValueError(f"{where} ({own['value']}) needs one of {', '.join(limits)}; it has {len(given)}.")
    limit, share = own[given[0]], False
    if given[0] == "worse_by_at_most":
        if own.get("better") not in ("lower", "higher"):
            raise ValueError(f"{where} ({own['value']}): better={own.get('better')!r} does not fit: lower or higher.")
        if isinstance(limit, str) and limit.strip().endswith("%"):
            limit, share = _as_number(limit.strip()[:-1]), True
            limit = limit / 100 if limit is not None else own[given[0]]
    elif "better" in own:
        raise ValueError(f"{where} ({own['value']}): better goes with worse_by_at_most only.")
    limit = _number(limit, f"{where} ({own['value']}): {given[0]}", negative=given[0] != "worse_by_at_most")
    statistic = own.get("statistic", "last")
    if statistic not in STATISTICS:
        raise ValueError(f"{where}: statistic={statistic!r} does not fit: {', '.join(STATISTICS)} do.")
    if own["value"] in COUNTS and "statistic" in own:
        raise ValueError(f"{where}: {own['value']} is one number of the run; no statistic fits.")
    if own.get("per", "step") != "step":
        raise ValueError(f"{where}: per={own['per']!r} does not fit: step does.")
    from_step = own.get("from_step", 0)
    if isinstance(from_step, bool) or not isinstance(from_step, int) or from_step < 0:
        raise ValueError(f"{where}: from_step={from_step!r} does not fit: give a whole number of at least 0.")
    settings: dict[str, Any] = {given[0]: limit, "share": share, "from_step": from_step, "per_step": "per" in own}
    return Threshold(own["value"], statistic, better=own.get("better", "lower"), **settings)


def _mapping(content: Any, keys: set[str], where: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}={content!r} does not fit: give a mapping with {', '.join(sorted(keys))}.")
    if unknown := sorted(map(str, content.keys() - keys)):
        raise ValueError(f"{where}: {', '.join(unknown)} does not fit: {', '.join(sorted(keys))} do.")
    return content


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _number(value: Any, what: str, *, negative: bool = False) -> float:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or (value < 0 and not negative):
        raise ValueError(f"{what}={value!r} does not fit: give a number{'' if negative else ' of at least 0'}.")
    return float(value)
