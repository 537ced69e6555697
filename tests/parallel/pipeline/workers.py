"""What ranks do in the tests of the runner's behaviour."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_dist.parallel.pipeline import (
    PipelineError,
    PipelineRunner,
    RandomStreams,
    add_gradients,
    attach_pipeline,
    equalise_shared,
    new_gradients,
    plan_pipeline,
)
from tests.parallel.pipeline import awkward, networks
from tests.parallel.pipeline.networks import CHAIN, language_step


def runner_for(
    module: nn.Module, schedule: str, microbatches: int = 4, chain: Sequence[str] = CHAIN, seed: int | None = None
) -> tuple[Any, PipelineRunner]:
    plan = plan_pipeline(chain, dist.get_world_size(), schedule)
    pipeline = attach_pipeline(module, plan, dist.get_rank())
    device = torch.device("cpu")
    streams = RandomStreams(seed, 0, device) if seed is not None else None
    world = dist.group.WORLD
    return pipeline, PipelineRunner(pipeline, world, world, device, streams=streams, microbatches=microbatches)


def count_calls(schedule: str, batches: list[Any]) -> dict[str, Any]:
    """How often the step was called for each microbatch, and each own module, in training and evaluation."""
    module = networks.language_model()
    pipeline, runner = runner_for(module, schedule)
    calls: list[int] = []
    forwards = {name: 0 for name in CHAIN}

    def count(name: str, *_: Any) -> None:
        forwards[name] += 1

    for name in CHAIN:
        module.get_submodule(name).register_forward_hook(partial(count, name))

    def step(part: Any, microbatch: int) -> Any:
        calls.append(microbatch)
        return language_step(module, part)

    number = 0
    for batch in batches:
        cut = runner.split(batch)
        number += len(cut.parts)
        runner.train(cut, step)
        with torch.no_grad():
            runner.evaluate(cut, step)
    return {
        "calls": calls,
        "forwards": {name: count for name, count in forwards.items() if count},
        "microbatches": number,
        "stages": len(pipeline.stages),
        "own": [name for stage in pipeline.plan.stages_of(dist.get_rank()) for name in pipeline.plan.modules_of(stage)],
    }


def evaluate(schedule: str, batches: list[Any], train_between: bool) -> list[Any]:
    """Outputs of evaluation before, between and after training, on the rank that has them."""
    module = networks.language_model()
    _, runner = runner_for(module, schedule)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    results = []
    for batch in batches:
        cut = runner.split(batch)
        with torch.no_grad():
            outputs = runner.evaluate(
                cut, lambda part, _: {"logits": module.model(part[0]), "text": ["x"] * len(part[0])}
            )
        results.append(None if outputs is None else torch.cat([output["logits"] for output in outputs]))
        if train_between:
            runner.train(cut, lambda part, _: language_step(module, part))
            optimizer.step()
            optimizer.zero_grad()
    return results


def live_activations(schedule: str, microbatches: int) -> int:
    """The most microbatches whose activations of this rank's first own block were alive at once."""
    module = networks.language_model()
    pipeline, runner = runner_for(module, schedule, microbatches)
    name = next(
        name for name in pipeline.plan.modules_of(pipeline.plan.stages_of(dist.get_rank())[0]) if "blocks" in name
    )
    alive: set[int] = set()
    most = 0

    def watch(inner: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal most
        key = id(output.grad_fn)
        alive.add(key)
        weakref.finalize(output, alive.discard, key)
        most = max(most, len(alive))

    # The input of `down` is saved for its weight's gradient, so it lives until the backward of its microbatch.
    module.get_submodule(f"{name}.up").register_forward_hook(watch)
    gc.disable()  # nothing may need the garbage collector to be freed
    try:
        for batch in networks.token_batches([2 * microbatches] * 2):
            runner.train(runner.split(batch), lambda part, _: language_step(module, part))
    finally:
        gc.enable()
    return most


def own_memory(schedule: str) -> dict[str, Any]:
    """What this rank holds of a module built on meta, by name."""
    with torch.device("meta"):
        module = networks.language_model()
    attach_pipeline(module, plan_pipeline(CHAIN, dist.get_world_size(), schedule), dist.get_rank())
    return {
        "parameters": [name for name, _ in module.named_parameters()],
        "text": repr(module),
        "attributes": type(module.model.blocks[0].up).__name__,
        "isinstance": isinstance(module.model.embed, nn.Embedding),
    }


def call_outside(part: str) -> str:
    """What happens when the network is called outside a step, or a parameter of another rank is used."""
    module: Any = networks.language_model()
    runner_for(module, "1F1B")
    foreign = module.model.embed if dist.get_rank() == 0 else module.model.head
    try:
        if part == "network":
            module.model(torch.zeros(2, 3, dtype=torch.long))
        elif part == "module":
            foreign(torch.zeros(2, 8, dtype=torch.float64))
        elif part == "forward":
            foreign.forward(torch.zeros(2, 8, dtype=torch.float64))
        elif part == "parameter":
            foreign.weight + 1
        elif part == "shape":
            return f"{tuple(foreign.weight.shape)} {foreign.weight.dtype} {foreign.weight is not None}"
    except PipelineError as error:
        return str(error)
    return "nothing"


def statistics(momentum: float | None, batches: list[Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = networks.Wrapper(awkward.NormalisedFirst(momentum)).double()
    chain = [f"model.layers.{index}" for index in range(3)]
    _, runner = runner_for(module, "1F1B", 4, chain)
    for batch in batches:
        runner.train(runner.split(batch), lambda part, _: networks.classification_step(module, part))
    return {name: value.clone() for name, value in module.named_buffers()}


def residual_statistics(schedule: str, batches: list[Any], microbatches: int) -> dict[str, torch.Tensor]:
    module = networks.residual_network()
    from lightning_dist.plan.chain import find_chain

    _, runner = runner_for(module, schedule, microbatches, find_chain(module).names)
    for batch in batches:
        runner.train(runner.split(batch), lambda part, _: networks.classification_step(module, part))
    result = {name: value.clone() for name, value in module.named_buffers()}
    return {**result, **{name: value.grad for name, value in module.named_parameters() if value.grad is not None}}


def masked_mean(weights: Sequence[float], as_tensors: bool, batch: Any) -> dict[str, Any]:
    """Gradients where some microbatch's loss is a mean over nothing."""
    module: Any = networks.language_model()
    _, runner = runner_for(module, "1F1B", len(weights))

    def step(part: Any, _: int) -> torch.Tensor:
        ids, labels = part
        return nn.functional.cross_entropy(module.model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)

    total = sum(weights)
    scales: list[Any] = [weight / total for weight in weights]
    if as_tensors:
        scales = [torch.tensor(scale, dtype=torch.float64) for scale in scales]
    runner.train(runner.split(batch), step, scales=scales)
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def taken_off(batch: Any) -> bool:
    """Gradients are collected beside what is there, and added later."""
    module = networks.language_model()
    _, runner = runner_for(module, "1F1B")
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 7.0)
    with new_gradients(parameters) as collected:
        runner.train(runner.split(batch), lambda part, _: language_step(module, part))
    assert all(bool((parameter.grad == 7.0).all()) for parameter in parameters)
    add_gradients(parameters, collected)
    moved = [
        bool((parameter.grad != 7.0).any())
        for parameter, new in zip(parameters, collected, strict=True)
        if new is not None
    ]
    return bool(moved) and all(moved)


def failing(where: str) -> None:
    """A user's error reaches the user as it was raised, on the rank where it happened."""
    module = networks.language_model()
    _, runner = runner_for(module, "ZBVZeroBubble")

    def step(part: Any, microbatch: int) -> torch.Tensor:
        loss = language_step(module, part)
        if where == "behind":
            raise KeyError("a user's mistake")
        return {"nothing": None, "vector": loss.reshape(1).expand(2)}[where]  # type: ignore[return-value]

    runner.train(runner.split(networks.token_batches([8])[0]), step)


def swallowing() -> None:
    module = networks.language_model()
    _, runner = runner_for(module, "1F1B")

    def step(part: Any, microbatch: int) -> torch.Tensor:
        try:
            return language_step(module, part)
        except:  # noqa: E722
            return torch.zeros((), requires_grad=True)

    runner.train(runner.split(networks.token_batches([8])[0]), step)


def draws(factory: Callable[[], nn.Module], schedule: str, batches: list[Any]) -> dict[str, Any]:
    """Gradients with dropout and random prefixes, and whether the generators are as they were."""
    module = factory()
    _, runner = runner_for(module, schedule, seed=11)
    torch.manual_seed(123 + dist.get_rank())  # ranks need not be alike: the streams make them so
    before = torch.get_rng_state()
    for index, batch in enumerate(batches):
        runner.train(runner.split(batch), lambda part, _: language_step(module, part), step_index=index)
    assert torch.equal(before, torch.get_rng_state())
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def unseeded(kind: str) -> dict[str, torch.Tensor]:
    """Initial weights after what several stages have was made equal, on ranks that draw different ones."""
    torch.manual_seed(dist.get_rank())
    module = networks.Wrapper(awkward.KINDS[kind]())
    pipeline, _ = runner_for(module, "1F1B")
    equalise_shared(pipeline.ownership, module, dist.group.WORLD)
    return {name: value.detach().clone() for name, value in module.named_parameters(remove_duplicate=False)}
