"""The command line: ``lightning-dist COMMAND``. Commands import torch when they run, not before."""

from __future__ import annotations

from typing import Annotated

import typer

from lightning_dist.cli.checkpoint import checkpoint
from lightning_dist.cli.compare import compare
from lightning_dist.cli.doctor import doctor
from lightning_dist.cli.plan import plan
from lightning_dist.cli.report import report
from lightning_dist.cli.verify import verify

app = typer.Typer(
    name="lightning-dist",
    help="Hybrid-parallel training with PyTorch Lightning: tools for the command line.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(plan)
app.command()(doctor)
app.command()(verify)
app.command()(report)
app.command()(compare)
app.add_typer(checkpoint)


def _print_version(wanted: bool) -> None:
    if wanted:
        from lightning_dist import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hybrid-parallel training with PyTorch Lightning: tools for the command line."""
