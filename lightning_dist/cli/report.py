"""``lightning-dist report``: what a run was, what it measured and decided, and what other rules would have done."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def report(
    run: Annotated[str, typer.Argument(help="The folder that RunRecord wrote into.")],
    replay: Annotated[
        str | None, typer.Option(metavar="RULES.YAML", help="Show what these rules would have done on this run.")
    ] = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write one HTML file with plots that needs nothing else.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show a run: its state, what it measured, its decisions and failures.

    Needs no GPU. Exit code 0: shown. 2: there is no record, or the rules can't be read.
    """
    from lightning_dist.record.files import read_record, read_values
    from lightning_dist.record.page import as_html, summary_row
    from lightning_dist.record.redaction import redact
    from lightning_dist.record.replay import ENDING, read_rules
    from lightning_dist.record.replay import replay as replay_rules
    from lightning_dist.record.summary import series_of

    try:
        record, rows = read_record(run), read_values(run)
        rules = read_rules(replay) if replay is not None else None
    except (OSError, ValueError) as error:
        _refuse(str(error))
    series = series_of(rows)
    replayed: list[tuple[int, str, str, str]] | None = None
    notes: list[str] = []
    if rules is not None:
        firings, notes = replay_rules(rows, *rules)
        replayed = [
            (firing.step, firing.rule.action, firing.rule.text, _evidence(firing.evidence)) for firing in firings
        ]
        end = next((firing.step for firing in firings if firing.rule.action in ENDING), None)
        if end is not None:
            notes = [f"The run would have ended at step {end}; what is listed after it would not have come.", *notes]
    if html is not None:
        Path(html).write_text(as_html(record, series, replayed, notes), encoding="utf-8")
    if json:
        summary = {name: list(summary_row(own)[1:]) for name, own in series.items()}
        columns = ["values", "not_finite", "last", "min", "median", "p90", "p99", "max"]
        values = {name: dict(zip(columns, own, strict=True)) for name, own in summary.items()}
        content: dict[str, Any] = {"run": record["run"], "values": values, "events": record["events"]}
        if replayed is not None:
            keys = ("step", "action", "rule", "evidence")
            content["replay"] = [dict(zip(keys, row, strict=True)) for row in replayed]
            content["notes"] = notes
        print(json_format.dumps(redact(content), indent=2, ensure_ascii=False))  # texts for what is not finite
        return
    _print(record, series, replayed, notes)
    if html is not None:
        typer.echo(f"The page is in {html}.")


def _print(record: dict[str, Any], series: dict[str, Any], replayed: Any, notes: list[str]) -> None:
    from lightning_dist.record.page import number, summary_row

    console = Console(soft_wrap=True, highlight=False)
    about, stages = record["run"], record["stages"]
    partition = stages["partition"]["outputs"]
    console.print(
        f"{about['folder']}: [bold]{about['state']}[/bold], attempt {about['attempts']},"
        f" {partition['strategy']} ({partition['layout']})"
    )
    console.print(f"For: {escape(str(record['questions']['objective']))}")
    table = Table("value", "number", "not finite", "last", "min", "median", "p90", "p99", "max")
    for own in series.values():
        table.add_row(*(escape(number(cell)) for cell in summary_row(own)))
    console.print(table if series else "No values were recorded.")
    if record["events"]:
        table = Table("step", "rank", "event", "evidence")
        for event in record["events"]:
            text = json_format.dumps(event["evidence"], ensure_ascii=False)
            table.add_row(str(event["step"]), str(event["rank"]), escape(event["kind"]), escape(text))
        console.print(table)
    else:
        console.print("Nothing was decided and nothing failed.")
    if replayed is not None:
        table = Table("step", "action", "rule", "evidence", title="What the rules would have done")
        for row in replayed:
            table.add_row(*(escape(str(cell)) for cell in row))
        console.print(table if replayed else "None of the rules would have fired.")
        for note in notes:
            console.print(f"Note: {escape(note)}")


def _evidence(values: dict[str, float]) -> str:
    from lightning_dist.record.page import number

    return ", ".join(f"{name} {number(value)}" for name, value in values.items())


def _refuse(sentence: str) -> NoReturn:
    typer.echo(f"Error: {sentence}", err=True)
    raise typer.Exit(2)
