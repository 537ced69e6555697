"""One HTML file about a run that needs nothing else: numbers, plots, decisions, the record's sections."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_dist.record.document import PARTS, QUESTIONS, STAGES
from lightning_dist.record.summary import Series

MOST_POINTS = 600
"""Plots of longer series show of each stretch its smallest and its largest value."""
_WIDTH, _HEIGHT = 460, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 10, 12, 22
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .5rem 0 1.5rem }
td, th { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums }
figure { display: inline-block; margin: 0 .5rem 1rem 0 }
figcaption { font-weight: 600 }
svg { background: #fafafa; border: 1px solid #ddd }
code { white-space: pre-wrap; overflow-wrap: anywhere }
"""


def as_html(
    record: Mapping[str, Any],
    series: Mapping[str, Series],
    replayed: Sequence[tuple[int, str, str, str]] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The page.

    Args:
        record: From :func:`~lightning_dist.record.files.read_record`.
        series: The run's values by name.
        replayed: What other rules would have done: step, action, rule, evidence.
        notes: Sentences about the replay.
    """
    run = record["run"]
    marks = [(event["step"], event["kind"]) for event in record["events"]]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{_text(run['folder'])}</title><style>{_STYLE}</style>",
        f"<h1>Run: {_text(run['state'])}</h1>",
        _table(("", ""), run.items()),
        "<h2>Seven questions</h2>",
        _table(("", ""), ((question, record["questions"][name]) for name, question in QUESTIONS.items())),
        "<h2>Values</h2>",
        _table(
            ("name", "values", "not finite", "last", "min", "median", "p90", "p99", "max"),
            (summary_row(own) for own in series.values()),
        ),
        *(plot(own, marks) for own in series.values()),
        "<h2>Events</h2>",
        _table(
            ("step", "rank", "what", "evidence"),
            ((event["step"], event["rank"], event["kind"], event["evidence"]) for event in record["events"]),
        ),
    ]
    if replayed is not None:
        parts += ["<h2>What the rules would have done</h2>", _table(("step", "action", "rule", "evidence"), replayed)]
        parts += [f"<p>{_text(note)}</p>" for note in notes]
    for number, stage in enumerate(STAGES, 1):
        parts += [f"<h2>Stage {number}: {stage}</h2>", _table(("", ""), _parts_of(record["stages"][stage]))]
    parts += ["<h2>Versions</h2>", _table(("", ""), record["versions"].items()), "</html>"]
    return "\n".join(parts) + "\n"


def summary_row(own: Series) -> tuple[Any, ...]:
    """Name, number of values, how many are not finite, last, min, median, p90, p99, max."""
    strange = len(own.values) - len(own.finite)
    shares = [own.quantile(share) for share in (0, 0.5, 0.9, 0.99, 1)]
    return (own.name, len(own.values), strange, own.values[-1], *shares)


def plot(own: Series, marks: Sequence[tuple[int, str]] = ()) -> str:
    """A picture of a series over the steps, with a line where something happened and a cross for what is not finite."""
    finite = [(step, value) for step, value in zip(own.steps, own.values, strict=True) if math.isfinite(value)]
    strange = [step for step, value in zip(own.steps, own.values, strict=True) if not math.isfinite(value)]
    low, high = (min(v for _, v in finite), max(v for _, v in finite)) if finite else (0.0, 1.0)
    first, last = min(own.steps), max(own.steps)

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * ((step - first) / (last - first) if last > first else 0.5)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * ((value - low) / (high - low) if high > low else 0.5)

    lines = []
    for stretch in _without_way_back(finite):
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in _thinned(stretch))
        lines.append(f'<polyline points="{points}" fill="none" stroke="#0b5fa5" stroke-width="1.5"/>')
        if len(stretch) == 1:
            lines.append(f'<circle cx="{x(stretch[0][0]):.1f}" cy="{y(stretch[0][1]):.1f}" r="2.5" fill="#0b5fa5"/>')
    for step, kind in marks:
        if first <= step <= last:
            place = f'x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"'
            title = f"<title>{_text(kind)} at step {step}</title>"
            lines.append(f'<line {place} stroke="#c0392b" stroke-dasharray="3 3">{title}</line>')
    for place_of in strange:
        lines.append(f'<text x="{x(place_of) - 4:.1f}" y="{_TOP + 10}" fill="#c0392b" font-size="12">&#215;</text>')
    labels = [
        (4, _TOP + 6, number(high)),
        (4, _HEIGHT - _BOTTOM, number(low)),
        (_LEFT, _HEIGHT - 6, f"step {number(first)}"),
        (_WIDTH - 70, _HEIGHT - 6, number(last)),
    ]
    lines += [f'<text x="{a}" y="{b}" font-size="11" fill="#555">{_text(text)}</text>' for a, b, text in labels]
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img">'
    return f"<figure><figcaption>{_text(own.name)}</figcaption>{picture}{''.join(lines)}</svg></figure>"


def number(value: Any) -> str:
    """A number as people read it."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.6g}"
    return str(value)


def _without_way_back(points: list[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Cut where a restart or a rollback has gone back, so that no line leads backwards."""
    stretches: list[list[tuple[float, float]]] = []
    for point in points:
        if not stretches or point[0] < stretches[-1][-1][0]:
            stretches.append([])
        stretches[-1].append(point)
    return stretches


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(len(points) / (MOST_POINTS // 2))
    kept = []
    for place in range(0, len(points), size):
        part = points[place : place + size]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept


def _parts_of(stage: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(part.capitalize(), stage[part]) for part in PARTS]


def _table(head: Sequence[str], rows: Any) -> str:
    titles = "".join(f"<th>{_text(title)}</th>" for title in head)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f"<table>{f'<tr>{titles}</tr>' if any(head) else ''}{body}</table>" if body else "<p>none</p>"


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return f'<td class="number">{number(value)}</td>'
    if isinstance(value, dict | list):
        return f"<td><code>{_text(json.dumps(value, ensure_ascii=False)) if value else 'none'}</code></td>"
    return f"<td>{_text(value)}</td>"


def _text(value: Any) -> str:
    return html.escape(str(value))
