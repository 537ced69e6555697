"""``layout="auto"``: the advisor reads the module, the links are measured, and rank 0 decides for all."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_dist import _compat
from lightning_dist.advisor import Advice, choose_layout
from lightning_dist.advisor.links import measure_links
from lightning_dist.advisor.words import gigabytes, seconds

MESSAGE_SIZE = 8 * 2**20
TRAINING_SHARE = 0.6
"""What training reaches of the rate of large matrix products, about (docs/ADVISOR.md varies it)."""


def decide(
    trainer: Trainer,
    module: LightningModule,
    device: torch.device,
    broadcast: Callable[[Any], Any],
    *,
    schedules: list[str] | None,
) -> tuple[dict[str, Any], Advice | None]:
    """The arguments of ``HybridParallelStrategy`` for this module on this world, the same on every rank.

    The first training batch is taken on rank 0 alone; random numbers are put back behind it.

    Collectives: those of :func:`~lightning_dist.advisor.links.measure_links` and a broadcast.

    Args:
        trainer: Its training data is defined.
        module: The whole module, its parameters real or on the meta device; it is not changed.
        device: This rank's device.
        broadcast: Gives every rank what rank 0 has.
        schedules: Pipeline schedules to look at; None is all.

    Returns:
        The arguments, and on rank 0 the whole advice.

    Raises:
        ValueError: On every rank, if nothing fits or the module can't be read.
    """
    links = measure_links(size=MESSAGE_SIZE, device=device)
    answer: dict[str, Any] = {}
    advice = None
    if dist.get_rank() == 0:
        measured = links.as_json()["links"]
        speeds: dict[str, Any] = {}
        for name, link in measured.items():
            if link is not None:
                speeds |= {name: link["bandwidth"], f"{name}_latency": link["latency"]}
        try:
            with isolate_rng():
                batch = _compat.first_training_batch(trainer)
            advice = choose_layout(
                copy_without_values(module),
                dist.get_world_size(),
                devices_per_node=links.per_node,
                memory=memory_of(device, links.per_node),
                flops=TRAINING_SHARE * multiplication_rate(device, str(trainer.precision)),
                batches=[batch],
                precision=str(trainer.precision),
                schedules=schedules,
                **speeds,
            )
            assert advice.recommended is not None
            answer = {"arguments": advice.recommended.candidate.strategy_arguments()}
        except Exception as error:  # whatever a user's module or loader raises: the other ranks must hear of it
            answer = {"error": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}
    answer = broadcast(answer)
    if "error" in answer:
        raise ValueError(f"layout='auto' found no layout: {answer['error']}")
    return answer["arguments"], advice


def describe(advice: Advice) -> str:
    """The layout that was taken, the runner-up, the baselines, and what was rejected, a line each."""
    assert advice.recommended is not None
    named = [("layout='auto' takes", advice.recommended)]
    named += [("runner-up:", estimate) for estimate in advice.alternatives[:1]]
    named += [(f"{name}:", estimate) for name, estimate in advice.baselines.items()]
    lines = []
    for words, estimate in named:
        fits = "" if advice.fits(estimate) else ", which does not fit"
        numbers = f"{seconds(estimate.time.total)} a step, {gigabytes(estimate.memory.total)} on each device"
        lines.append(f"{words} {estimate.candidate.describe()}, {numbers}{fits}")
    lines += [f"rejected ({rejection.reason}): {rejection.sentence}" for rejection in advice.rejected]
    return "\n".join(lines + list(advice.advice))


def copy_without_values(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers have shapes and no memory."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def memory_of(device: torch.device, per_node: int) -> float:
    """Bytes that one rank can have: its GPU's, or its part of the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / per_node


def multiplication_rate(device: torch.device, precision: str) -> float:
    """Floating-point operations per second of a large matrix product on this device, in a Trainer's precision."""
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16 if "16" in precision else torch.float32
    dtype = torch.float64 if "64" in precision else dtype
    size = 4096 if device.type == "cuda" else 512
    a = torch.ones(size, size, device=device, dtype=dtype)
    fastest = float("inf")
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * size**3 / fastest
