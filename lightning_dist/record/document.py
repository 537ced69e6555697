"""The record's form: five stages and seven questions, as data and as a page to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STAGES = ("partition", "compute", "communicate", "synchronise", "recover")
PARTS = ("inputs", "outputs", "resources", "decisions", "uncertainty")
QUESTIONS = {
    "objective": "What is the run for?",
    "mechanism": "How does it work?",
    "baseline": "What is it compared with?",
    "evidence": "What was observed?",
    "operations": "What does it take to run it?",
    "risk": "What may go wrong, and what is not known?",
    "recovery": "How does it come back after a failure?",
}
_STAGE_OF = {
    "layout": "partition",
    "stall": "communicate",
    "straggler": "communicate",
    "hang": "communicate",
    "rule": "synchronise",
    "skip": "synchronise",
    "hold": "synchronise",
}


def stage_of(kind: str) -> str:
    """The stage whose section an event belongs to: by the first word of its kind, else ``"recover"``."""
    return _STAGE_OF.get(kind.split("_")[0].split(" ")[0], "recover")


def empty_stages() -> dict[str, dict[str, Any]]:
    return {
        stage: {"inputs": {}, "outputs": {}, "resources": {}, "decisions": [], "uncertainty": []} for stage in STAGES
    }


def with_events(record: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A copy of the record whose stages hold their events as decisions."""
    stages = {name: {**part, "decisions": list(part["decisions"])} for name, part in record["stages"].items()}
    for event in events:
        stages[stage_of(event["kind"])]["decisions"].append({key: event[key] for key in ("step", "kind", "evidence")})
    return {**record, "stages": stages, "events": list(events)}


def as_page(record: Mapping[str, Any]) -> str:
    """The record as Markdown: the run, the seven questions, the five stages, events, versions."""
    run = record["run"]
    lines = [f"# Run: {run['state']}", "", *_items(run), "", "## Seven questions", ""]
    for name, question in QUESTIONS.items():
        lines += [f"**{question}** {_text(record['questions'][name])}", ""]
    for number, stage in enumerate(STAGES, 1):
        lines += [f"## Stage {number}: {stage}", ""]
        for part in PARTS:
            content = record["stages"][stage][part]
            lines += [f"### {part.capitalize()}", "", *(_items(content) or ["none"]), ""]
    lines += ["## Versions", ""]
    for name, content in record["versions"].items():
        lines += [f"### {name.replace('_', ' ').capitalize()}", "", *(_items(content) or ["none"]), ""]
    return "\n".join(lines)


def _items(content: Any) -> list[str]:
    if isinstance(content, Mapping):
        return [f"- {name}: {_text(value)}" for name, value in content.items()]
    if isinstance(content, list):
        return [f"- {_text(value)}" for value in content]
    return [_text(content)] if content is not None else []


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        return "; ".join(_text(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "not known" if value is None else " ".join(str(value).split())
