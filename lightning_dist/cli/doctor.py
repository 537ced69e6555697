"""``lightning-dist doctor``: is this job's environment in order, and how fast are its links?"""

from __future__ import annotations

import json as json_format
import os
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table


def doctor(
    layout: Annotated[
        str | None, typer.Option(help="A layout of the world, such as shard=4,tp=2, whose axes are measured too.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where the measured links go, for `plan --links`.")] = Path("links.json"),
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Where checkpoints will go: its disk is tried and its free space looked at.")
    ] = None,
    checkpoint_size: Annotated[str | None, typer.Option(help="Size of a checkpoint, such as 80GB.")] = None,
    megabytes: Annotated[int, typer.Option(min=1, help="Size of a large message.")] = 32,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check versions, variables, shared memory, clocks and disk on every rank, and measure the links between them.

    Run it as the job will run: torchrun --nproc-per-node 8 --no-python lightning-dist doctor. Alone it checks one
    process. Rank 0 reports and writes the links. Exit code 0: nothing looks wrong. 1: something does. 2: wrong use.
    """
    import torch
    import torch.distributed as dist

    from lightning_dist.advisor.cluster import parse_bytes
    from lightning_dist.advisor.environment import find_problems, gather, look_around
    from lightning_dist.advisor.links import measure_links
    from lightning_dist.layout import ParallelLayout

    world = int(os.environ.get("WORLD_SIZE", 1))
    try:
        needed = None if checkpoint_size is None else parse_bytes(checkpoint_size, "checkpoint-size")
        wanted = None if layout is None else ParallelLayout.parse(layout).resolve(world)
    except ValueError as error:
        _refuse(str(error))
    device = torch.device("cpu")
    links = None
    if world > 1:
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        seen = gather(look_around(checkpoint_dir))
        if world > 1:
            links = measure_links(layout=wanted, size=megabytes * 2**20, device=device)
        first = world == 1 or dist.get_rank() == 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    problems = find_problems(seen, needed) + (links.problems() if links is not None else [])
    if first:
        report: dict[str, Any] = {"problems": problems, "ranks": seen}
        if links is not None:
            report |= links.as_json()
            output.write_text(json_format.dumps(links.as_json(), indent=2) + "\n")
        if json:
            print(json_format.dumps(report, indent=2))
        else:
            _print(report, links, output, Console())
    raise typer.Exit(1 if problems else 0)


def _refuse(sentence: str) -> NoReturn:
    typer.echo(f"Error: {sentence}", err=True)
    raise typer.Exit(2)


def _print(report: dict[str, Any], links: Any, output: Path, console: Console) -> None:
    from lightning_dist.advisor.links import describe
    from lightning_dist.advisor.words import gigabytes, seconds

    ranks = report["ranks"]
    versions = ", ".join(f"{name} {version}" for name, version in ranks[0]["versions"].items() if version)
    console.print(f"{len(ranks)} rank{'s' * (len(ranks) > 1)}: {versions}", highlight=False, soft_wrap=True)
    disks = [entry["disk"] for entry in ranks if "speed" in entry.get("disk", {})]
    if disks:
        slowest, free = min(disk["speed"] for disk in disks), min(disk["free"] for disk in disks)
        console.print(f"Disk: {gigabytes(slowest)}/s on each rank, {gigabytes(free)} free", highlight=False)
    if links is not None:
        table = Table(title=f"links of {links.world_size // links.per_node} nodes with {links.per_node} ranks each")
        for column in ("", "slowest, one direction", "longest latency", "measured"):
            table.add_column(column, justify="right" if column else "left")
        for row in describe(links):
            table.add_row(row["name"], f"{gigabytes(row['bandwidth'])}/s", seconds(row["latency"]), str(row["count"]))
        console.print(table)
        console.print(f"The links are in {output}: lightning-dist plan … --links {output}", highlight=False)
    for problem in report["problems"]:
        console.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
    if not report["problems"]:
        console.print("Nothing looks wrong.", style="green")
