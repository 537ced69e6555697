"""``lightning-dist verify``: does a module train to the same numbers under a layout as on one process?"""

from __future__ import annotations

import json as json_format
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from lightning_dist.cli.target import load_factory

if TYPE_CHECKING:
    from lightning_dist.testing import ParityReport, WorkerError

Precision = Literal["64-true", "32-true", "bf16-true", "bf16-mixed"]
Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]

TOLERANCES = {"64-true": 1e-9, "32-true": 1e-5, "bf16-true": 5e-2, "bf16-mixed": 5e-2}
SHOWN_WEIGHTS = 8


def verify(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="An importable function without arguments that returns the LightningModule, or a tuple of it and an"
            " iterable of batches; without the latter the batches come from the module's train_dataloader().",
        ),
    ],
    layout: Annotated[str, typer.Option(help="The sizes to check, such as shard=2 or replicate=2,shard=2.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to train.")] = 5,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Largest relative difference; by default 1e-9 in float64, 1e-5 in float32."),
    ] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches per optimizer step.")] = 1,
    clip: Annotated[float | None, typer.Option(min=0.0, help="Clip the gradient norm to this.")] = None,
    precision: Annotated[Precision, typer.Option(help="The Trainer's precision of both runs.")] = "64-true",
    schedule: Annotated[Schedule | None, typer.Option(help="Pipeline schedule.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Microbatches of a pipeline step.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train some steps on one process and under LAYOUT on CPU processes, and compare the numbers.

    Prints losses, gradient norms and weights side by side, with the largest relative differences. Every batch counts
    as a global one: each data rank gets its part of it. Exit code 0: the numbers are the same. 1: they differ, or a
    run failed. 2: wrong use.
    """
    try:
        with redirect_stdout(sys.stderr):  # what the user's file prints is not part of the result
            factory = load_factory(target)
    except ValueError as error:
        _refuse(str(error))
    from lightning_dist.testing import WorkerError, compare_with_one_process

    strategy_kwargs: dict[str, Any] = {"pipeline_schedule": schedule, "microbatches": microbatches}
    output = Console()
    with _progress() as note:
        try:
            report = compare_with_one_process(
                factory,
                None,
                layout,
                steps=steps,
                precision=precision,
                tolerance=TOLERANCES[precision] if tolerance is None else tolerance,
                accumulate_grad_batches=accumulate,
                gradient_clip_val=clip,
                strategy_kwargs={name: value for name, value in strategy_kwargs.items() if value is not None},
                progress=note,
            )
        except ValueError as error:
            _refuse(str(error))
        except WorkerError as error:
            _fail(f"{note.last[:1].upper()}{note.last[1:]} failed.", _accounts(error), json)
        except TimeoutError as error:
            _fail(f"{note.last[:1].upper()}{note.last[1:]} did not end.", str(error), json)
    if json:
        print(json_format.dumps(_as_json(report), indent=2))
    else:
        _print(report, output)
    raise typer.Exit(0 if report.same else 1)


class _Note:
    """Tells what is being done, and remembers it for the message of a failure."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.last = ""

    def __call__(self, sentence: str) -> None:
        self.last = sentence
        self._tell(sentence)


@contextmanager
def _progress() -> Iterator[_Note]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Note(lambda sentence: console.print(f"{sentence} ...", highlight=False, soft_wrap=True))
        return
    with console.status("starting") as status:
        yield _Note(lambda sentence: status.update(f"{sentence} ..."))


def _refuse(sentence: str) -> NoReturn:
    typer.echo(f"Error: {sentence}", err=True)
    raise typer.Exit(2)


def _fail(sentence: str, account: str, json: bool) -> NoReturn:
    typer.echo(f"{account}\nFAILED: {sentence}", err=True)
    if json:
        print(json_format.dumps({"same": False, "verdict": f"FAILED: {sentence}", "error": account}, indent=2))
    raise typer.Exit(1)


def _accounts(error: WorkerError) -> str:
    """Each distinct error once, with the ranks that raised it, after the traceback of the first that came."""
    first = error.failures[0]
    for_people = first.kind in ("ValueError", "MisconfigurationException")
    lines = [] if for_people else [first.traceback.rstrip()]
    ranks_by_error: dict[tuple[str, str], list[int]] = {}
    for failure in error.failures:
        ranks_by_error.setdefault((failure.kind, failure.message), []).append(failure.rank)
    for (kind, message), ranks in ranks_by_error.items():
        lines.append(f"Rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}: {kind}: {message}")
    return "\n".join(lines)


def _print(report: ParityReport, console: Console) -> None:
    from lightning_dist.testing.parity_report import step_differences

    table = Table(title=f"{', '.join(report.optimizers)}, {report.precision}, {report.steps} optimizer steps")
    table.add_column("", overflow="fold")
    for column in ("one process", f"layout {report.layout}", "relative difference"):
        table.add_column(column, justify="right", overflow="fold")
    for quantity, pairs in (("loss", report.losses), ("gradient norm", report.gradient_norms)):
        for step, (pair, difference) in enumerate(zip(pairs, step_differences(pairs), strict=True), 1):
            numbers = [f"{number:.12g}" for number in pair]
            table.add_row(f"{quantity}, step {step}", *numbers, _coloured(difference, report.tolerance))
        table.add_section()
    for name, difference in report.worst_weights[:SHOWN_WEIGHTS]:
        norms = [f"{float(weight.double().norm()):.12g}" for weight in report.weights.get(name, ())] or ["", ""]
        table.add_row(f"|{name}|", *norms, _coloured(difference, report.tolerance))
    others = report.worst_weights[SHOWN_WEIGHTS:]
    if others:
        table.add_row(f"{len(others)} more weights", "", "", _coloured(others[0][1], report.tolerance))
    console.print(table)

    largest = Table(title="largest relative differences")
    largest.add_column("quantity")
    largest.add_column("where", overflow="fold")
    largest.add_column("relative difference", justify="right")
    for quantity, worst in report.differences.items():
        largest.add_row(quantity, worst.where, _coloured(worst.largest, report.tolerance))
    console.print(largest)
    for sentence in [*report.problems, *(f"Note: {note}" for note in report.notes)]:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    console.print(
        report.verdict, style="green" if report.same else "red", markup=False, highlight=False, soft_wrap=True
    )


def _coloured(difference: float, tolerance: float) -> str:
    colour = "green" if difference <= tolerance else "red"
    return f"[{colour}]{difference:.1e}[/{colour}]"


def _as_json(report: ParityReport) -> dict[str, Any]:
    """The report in plain values; a number that is not finite becomes null, which JSON can hold."""

    def plain(number: float) -> float | None:
        return number if math.isfinite(number) else None

    return {
        "same": report.same,
        "verdict": report.verdict,
        "layout": report.layout,
        "world_size": report.world_size,
        "steps": report.steps,
        "precision": report.precision,
        "tolerance": report.tolerance,
        "optimizers": report.optimizers,
        "losses": [[plain(number) for number in pair] for pair in report.losses],
        "gradient_norms": [[plain(number) for number in pair] for pair in report.gradient_norms],
        "differences": {
            quantity: {"largest": plain(difference.largest), "where": difference.where}
            for quantity, difference in report.differences.items()
        },
        "weights": {name: plain(difference) for name, difference in report.worst_weights},
        "problems": report.problems,
        "notes": report.notes,
    }
