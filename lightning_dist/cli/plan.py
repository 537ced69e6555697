"""``lightning-dist plan``: which layout to train a module with, why, and what was rejected."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from lightning_dist.cli.target import load_factory

if TYPE_CHECKING:
    from lightning_dist.advisor import Advice, Estimate
    from lightning_dist.advisor.dry_run import RankHoldings

Precision = Literal["64-true", "32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed", "bf16-gathered"]


def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="An importable function without arguments that returns the LightningModule, or a tuple of it and an"
            " iterable of batches; without the latter the batch comes from the module's train_dataloader().",
        ),
    ],
    devices: Annotated[int, typer.Option(min=1, help="Number of devices.")],
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, help="Devices of one node; by default all of them.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of one device, such as 80GB.")] = None,
    intra: Annotated[
        str | None, typer.Option(help="Bandwidth inside a node for each device, one direction, such as 450GB/s.")
    ] = None,
    inter: Annotated[
        str | None, typer.Option(help="Bandwidth between nodes for each device, such as 50GB/s or 400Gb/s.")
    ] = None,
    links: Annotated[Path | None, typer.Option(help="A links.json with measured links.")] = None,
    flops: Annotated[str | None, typer.Option(help="What one device reaches in training, such as 400TFLOPS.")] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of one optimizer step; by default the batch times the devices.")
    ] = None,
    precision: Annotated[Precision, typer.Option(help="The Trainer's precision.")] = "32-true",
    alternatives: Annotated[int, typer.Option(min=0, help="How many other layouts to show.")] = 4,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build one rank of the recommended layout and show what it holds.")
    ] = False,
    rank: Annotated[int, typer.Option(min=0, help="The rank that --dry-run builds.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Rank the layouts of some devices by predicted step time, with memory per device and what was rejected.

    The model takes no memory, whatever its size. Exit code 0: there is an answer, which may be to stay on one
    device, or that nothing fits and what would. 2: wrong use, or a number that decides is missing.
    """
    try:
        factory = load_factory(target)
    except ValueError as error:
        _refuse(str(error))
    from lightning_dist.advisor import advise

    errors = Console(stderr=True)
    try:
        advice = advise(
            factory,
            devices=devices,
            devices_per_node=devices_per_node,
            memory=memory,
            intra=intra,
            inter=inter,
            links=links,
            flops=flops,
            global_batch=global_batch,
            precision=precision,
            alternatives=alternatives,
            note=lambda sentence: errors.print(f"Note: {sentence}", highlight=False, soft_wrap=True),
        )
        holdings = None
        if dry_run and advice.recommended is not None:
            import torch

            from lightning_dist.advisor.dry_run import hold

            own = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
            holdings = hold(
                factory,
                advice.recommended.candidate,
                rank,
                sends=advice.recommended.time,
                dtype=own.get(precision, torch.float32),
            )
    except ValueError as error:
        _refuse(str(error))
    if json:
        report = advice.as_json()
        if holdings is not None:
            report["dry_run"] = holdings.as_json()
        print(json_format.dumps(report, indent=2))
    else:
        _print(advice, holdings, Console())
    raise typer.Exit(2 if advice.missing else 0)


def _refuse(sentence: str) -> NoReturn:
    typer.echo(f"Error: {sentence}", err=True)
    raise typer.Exit(2)


def _print(advice: Advice, holdings: RankHoldings | None, console: Console) -> None:
    from lightning_dist.advisor.words import gigabytes

    cluster = advice.cluster
    title = f"{advice.model}, {advice.parameters / 1e9:.3g} billion parameters, {cluster.devices} devices"
    if advice.global_batch is not None:
        title += f", {advice.global_batch} samples a step"
    table = Table(title=title)
    table.add_column("", overflow="fold")
    table.add_column("layout", overflow="fold")
    for column in ("step", "range", "memory", "in node", "to nodes", "bubble"):
        table.add_column(column, justify="right", overflow="fold")
    if advice.recommended is not None:
        _row(table, advice, "recommended", advice.recommended, style="green")
    for estimate in advice.alternatives:
        _row(table, advice, "", estimate)
    table.add_section()
    for name, estimate in advice.baselines.items():
        _row(table, advice, name, estimate)
    console.print(table)

    if advice.rejected:
        rejected = Table(title=f"rejected ({advice.evaluated} settings predicted, {advice.cut} cut before)")
        rejected.add_column("reason")
        rejected.add_column("why", overflow="fold")
        for rejection in advice.rejected:
            rejected.add_row(rejection.reason, rejection.sentence)
        console.print(rejected)
    lines = [*advice.advice, *(f"Note: {note}." for note in advice.notes)]
    if advice.recommended is not None:
        arguments = ", ".join(f"{k}={v!r}" for k, v in advice.recommended.candidate.strategy_arguments().items())
        lines.append(f"HybridParallelStrategy({arguments})")
        if advice.recommended.candidate.accumulated_batches > 1:
            lines.append(f"Trainer(accumulate_grad_batches={advice.recommended.candidate.accumulated_batches})")
        lines.append(f"The range comes mostly from {advice.recommended.dominating}.")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if holdings is not None:
        for line in holdings.lines(gigabytes):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _row(table: Table, advice: Advice, name: str, estimate: Estimate, style: str | None = None) -> None:
    from lightning_dist.advisor.words import gigabytes, percent, seconds

    known = not advice.missing
    time = estimate.time
    span = f"{seconds(estimate.low)} to {seconds(estimate.high)}" if known and estimate.high else "?"
    memory = gigabytes(estimate.memory.total)
    if advice.cluster.memory is not None and not advice.fits(estimate):
        memory += " does not fit"
    table.add_row(
        name,
        estimate.candidate.describe(),
        seconds(time.total) if known else "?",
        span,
        memory,
        gigabytes(time.intra),
        gigabytes(time.inter),
        percent(time.bubble_share) if time.bubble else "",
        style=style,
    )
