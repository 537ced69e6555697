"""``lightning-dist checkpoint``: look at, check, convert and compare checkpoints, without a GPU or a process group."""

from __future__ import annotations

import json as json_format
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

checkpoint = typer.Typer(
    name="checkpoint",
    help="Look at, check, convert and compare checkpoint directories; needs no GPU and no process group.",
    no_args_is_help=True,
)

PathArgument = Annotated[str, typer.Argument(help="A checkpoint directory, or a folder of them; any fsspec path.")]


@checkpoint.command()
def ls(
    path: PathArgument,
    tensors: Annotated[bool, typer.Option(help="List what is in the checkpoint, by name.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """List the checkpoints of a folder, newest first, or with --tensors what one of them holds.

    Looks for missing files and wrong sizes only; `verify` reads everything. Exit code 0: all are whole. 1: one is
    damaged, or there is none. 2: wrong use.
    """
    from lightning_dist import checkpoint as engine

    if tensors:
        _list_contents(path, json)
        return
    rows = _or_exit(lambda: engine.overview(path))
    if json:
        print(json_format.dumps([vars(row) for row in rows], indent=2))
    else:
        table = Table("name", "step", "saved", "ranks", "layout", "size", "", title=path)
        table.columns[0].overflow = "fold"
        for row in rows:
            state = f"[red]{row.problem}[/red]" if row.problem else "whole"
            name = row.path.rstrip("/").rpartition("/")[2]
            cells = [name, row.step, row.saved_at, row.world_size, row.layout, _size(row.size), state]
            table.add_row(*("" if cell is None else str(cell) for cell in cells))
        Console(soft_wrap=True).print(table if rows else f"There is no checkpoint in {path}.")
    raise typer.Exit(0 if rows and not any(row.problem for row in rows) else 1)


def _list_contents(path: str, json: bool) -> None:
    from lightning_dist import checkpoint as engine

    found = _or_exit(lambda: engine.contents(path))
    if json:
        print(json_format.dumps([vars(content) for content in found], indent=2))
        return
    table = Table("name", "shape", "type", "size", "pieces")
    for content in found:
        shape = "" if content.shape is None else str(list(content.shape))
        table.add_row(content.name, shape, content.dtype or "", _size(content.size) or "", str(content.pieces))
    Console(soft_wrap=True).print(table)


@checkpoint.command()
def verify(
    path: PathArgument,
    quick: Annotated[bool, typer.Option(help="Only look for missing files and wrong sizes.")] = False,
) -> None:
    """Compare every byte of a checkpoint, or of all in a folder, with its checksums; names bad files and tensors.

    Exit code 0: intact. 1: damaged or missing, which is named. 2: wrong use.
    """
    from lightning_dist import checkpoint as engine

    reports = _or_exit(lambda: engine.verify_all(path, full=not quick))
    for report in reports:
        typer.echo(str(report))
    raise typer.Exit(0 if all(report.intact for report in reports) else 1)


@checkpoint.command()
def export(
    path: Annotated[str, typer.Argument(help="A checkpoint directory; any fsspec path.")],
    file: Annotated[str, typer.Argument(help="The file to write: NAME.ckpt or NAME.safetensors.")],
) -> None:
    """Write a checkpoint as one file: .ckpt for load_from_checkpoint and one device, .safetensors for weights alone.

    Exit code 0: written. 1: the checkpoint is damaged or missing; nothing was written. 2: wrong use.
    """
    from lightning_dist import checkpoint as engine

    writers: dict[str, Any] = {".ckpt": engine.consolidate, ".safetensors": engine.export_safetensors}
    write = next((writer for ending, writer in writers.items() if file.endswith(ending)), None)
    if write is None:
        _refuse(f"file={file} does not fit: give a name that ends in .ckpt or .safetensors.", 2)
    _or_exit(lambda: write(path, file))
    typer.echo(f"{path} is in {file}.")


@checkpoint.command()
def diff(
    one: Annotated[str, typer.Argument(help="A checkpoint directory.")],
    other: Annotated[str, typer.Argument(help="Another one.")],
) -> None:
    """Say where two checkpoints hold other names, shapes, types or values.

    Exit code 0: equal to the bit. 1: they differ, or one is damaged or missing. 2: wrong use.
    """
    from lightning_dist import checkpoint as engine

    found = _or_exit(lambda: engine.diff(one, other))
    for difference in found:
        largest = "" if difference.largest is None else f" (largest difference {difference.largest:.3g})"
        typer.echo(f"{difference.name}: {difference.what}{largest}")
    if not found:
        typer.echo("They are equal to the bit.")
    raise typer.Exit(1 if found else 0)


def _or_exit(read: Any) -> Any:
    from lightning_dist.checkpoint import CheckpointError

    try:
        return read()
    except (CheckpointError, OSError) as error:
        _refuse(str(error), 1)


def _refuse(sentence: str, code: int) -> NoReturn:
    typer.echo(f"Error: {sentence}", err=True)
    raise typer.Exit(code)


def _size(size: int | None) -> str | None:
    if size is None:
        return None
    number = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
