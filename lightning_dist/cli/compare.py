"""``lightning-dist compare``: a run judged against a baseline by thresholds that were written before it."""

from __future__ import annotations

import json as json_format
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def compare(
    baseline: Annotated[str, typer.Argument(help="The folder of the baseline's record.")],
    run: Annotated[str, typer.Argument(help="The folder of the run's record.")],
    accept: Annotated[str, typer.Option(metavar="ACCEPTANCE.YAML", help="The thresholds (docs/run_record.md).")],
    canary: Annotated[
        bool, typer.Option(help="Of a run under way: say only whether it is certain to be rejected.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Accept or reject a run, or say that there is not enough evidence.

    Exit code 0: accepted (with --canary: it may still be). 1: rejected (certain to be). 2: wrong use. 3: not enough
    evidence.
    """
    from lightning_dist.record.acceptance import read_acceptance
    from lightning_dist.record.comparison import ACCEPT, OPEN, REJECT, certain_rejections
    from lightning_dist.record.comparison import compare as judge

    try:
        acceptance = read_acceptance(accept)
        if canary:
            findings = certain_rejections(baseline, run, acceptance)
            verdict = "certain to be rejected" if findings else "may still be accepted"
            _print(verdict, findings, [], json)
            raise typer.Exit(1 if findings else 0)
        judgement = judge(baseline, run, acceptance)
    except (OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    _print(judgement.verdict, judgement.findings, judgement.reasons, json, judgement.confirmation)
    raise typer.Exit({ACCEPT: 0, REJECT: 1, OPEN: 3}[judgement.verdict])


def _print(
    verdict: str, findings: list[Any], reasons: list[str], json: bool, confirmation: list[Any] | None = None
) -> None:
    from lightning_dist.record.page import number
    from lightning_dist.record.redaction import redact

    if json:
        content = {
            "verdict": verdict,
            "findings": [vars(finding) for finding in findings],
            "reasons": reasons,
            "confirmation": [vars(finding) for finding in confirmation or []],
        }
        print(json_format.dumps(redact(content), indent=2, ensure_ascii=False))
        return
    console = Console(soft_wrap=True, highlight=False)
    for title, some in (("Thresholds", findings), ("Untouched set", confirmation or [])):
        if some:
            table = Table("value", "baseline", "run", "demand", "verdict", "", title=title)
            for own in some:
                cells = (own.value, number(own.baseline), number(own.run), own.demand, own.verdict, own.why)
                table.add_row(*(escape(cell) for cell in cells))
            console.print(table)
    for reason in reasons:
        console.print(f"Note: {escape(reason)}")
    console.print(f"[bold]{verdict}[/bold]")
