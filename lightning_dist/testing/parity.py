"""Does a module train to the same numbers under a parallel layout as on one process?"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_dist.layout import ParallelLayout
from lightning_dist.testing.parity_report import ParityReport, compare
from lightning_dist.testing.parity_run import (
    FactoryError,
    RunSettings,
    count_samples,
    run_on_one_process,
    run_under_layout,
)
from lightning_dist.testing.pool import WorkerError, WorkerPool, torchrun_environment


def assert_parity(
    module_factory: Callable[[], Any],
    batch_factory: Callable[[], Any] | None,
    layout: str | ParallelLayout,
    **settings: Any,
) -> ParityReport:
    """Asserts that a module trains to the same losses, gradients and weights under a layout as on one process.

    Args:
        module_factory: As for `compare_with_one_process`.
        batch_factory: As for `compare_with_one_process`.
        layout: As for `compare_with_one_process`.
        settings: The other arguments of `compare_with_one_process`.

    Returns:
        The report, for further questions.

    Raises:
        AssertionError: With the verdict and all largest differences, if something differs by more than the tolerance.
        ValueError: As `compare_with_one_process`.
        WorkerError: As `compare_with_one_process`.
        TimeoutError: As `compare_with_one_process`.
    """
    report = compare_with_one_process(module_factory, batch_factory, layout, **settings)
    if not report.same:
        lines = [f"  {quantity}: {d.largest:.3e} ({d.where})" for quantity, d in report.differences.items()]
        raise AssertionError("\n".join([report.verdict, *lines, *report.problems, *report.notes]))
    return report


def compare_with_one_process(
    module_factory: Callable[[], Any],
    batch_factory: Callable[[], Any] | None,
    layout: str | ParallelLayout,
    *,
    steps: int = 5,
    precision: str = "64-true",
    tolerance: float = 1e-9,
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    strategy_kwargs: Mapping[str, Any] | None = None,
    trainer_kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    timeout: float = 600.0,
    pool: WorkerPool | None = None,
    progress: Callable[[str], None] | None = None,
) -> ParityReport:
    """Trains a module on one process and under a layout, from equal weights on equal data, and compares the numbers.

    The reference is Lightning's own single-device strategy in one process on the global batches. The layout run is
    ``Trainer(strategy=HybridParallelStrategy(layout=...))`` on CPU processes, one per rank, where each data rank gets
    a contiguous part of every global batch (parts may be unequal). Both start from the weights that the factory makes
    in the first run. The loss of a step is the mean over data ranks (and accumulated batches), weighted by samples or
    by the module's ``loss_weight(batch)``. Gradients are compared as the optimizer would get them, before clipping.

    Args:
        module_factory: A function without arguments, importable by name, that returns the LightningModule, alone or as
            the first of a tuple.
        batch_factory: Such a function that returns an iterable of global batches: any nesting of tensors with the
            samples in dimension 0. With ``None`` the batches are the second value of the module factory's tuple, or
            come from the module's own ``train_dataloader()``.
        layout: The sizes, such as ``"replicate=2,shard=2"``.
        steps: Optimizer steps. If the batches do not suffice, they are used again from the first.
        precision: The Trainer's ``precision`` of both runs.
        tolerance: Largest relative difference that counts as the same: 1e-9 suits float64; 1e-6 a model that computes
            a part in float32 by itself; 1e-5 float32.
        accumulate_grad_batches: Batches per optimizer step. A shorter last window is used if the batches give one.
        gradient_clip_val: The Trainer's argument of that name.
        gradient_clip_algorithm: The Trainer's argument of that name.
        strategy_kwargs: More arguments for the strategy.
        trainer_kwargs: More arguments for both Trainers.
        seed: Seed of the factories and of both runs.
        timeout: Seconds that each of the two runs may take.
        pool: Workers to run on; by default some are started and ended here.
        progress: Called with a sentence when a part of the work begins.

    Raises:
        ValueError: If the layout does not parse, a factory cannot be found by name from another process or does not
            return what is asked for (`FactoryError`), or a global batch has fewer samples than there are data ranks.
        WorkerError: If a run fails; shows the traceback of every rank that failed.
        TimeoutError: If a run takes longer than ``timeout``.
    """
    sizes = ParallelLayout.parse(layout) if isinstance(layout, str) else layout
    sizes = sizes.resolve(sizes.minimum_world_size)
    for name, factory in (("module_factory", module_factory), ("batch_factory", batch_factory)):
        _check_factory(name, factory)
    settings = RunSettings(
        module_factory,
        batch_factory,
        steps,
        precision,
        accumulate_grad_batches,
        gradient_clip_val,
        gradient_clip_algorithm,
        dict(trainer_kwargs or {}),
        seed,
    )
    note = progress or (lambda sentence: None)
    with _workers(pool, sizes.world_size) as workers:
        count = f"{steps} step{'s' if steps != 1 else ''}"
        note(f"training {count} on one process")
        unset = dict.fromkeys(torchrun_environment(0, 1, 0))
        try:
            (reference,) = workers.run(
                run_on_one_process, 1, settings, init_process_group=False, env=unset, timeout=timeout
            )
        except WorkerError as error:
            if error.failures[0].kind == FactoryError.__name__:
                raise FactoryError(error.failures[0].message) from None
            raise
        batches = _cut_for_ranks(reference.batches, sizes)
        note(f"training {count} under {sizes} on {sizes.world_size} processes")
        recordings = workers.run(
            run_under_layout,
            sizes.world_size,
            settings,
            str(sizes),
            dict(strategy_kwargs or {}),
            reference.initial_state,
            batches,
            init_process_group=False,
            timeout=timeout,
        )
    return compare(reference, recordings, sizes, settings, tolerance)


@contextlib.contextmanager
def _workers(pool: WorkerPool | None, world_size: int) -> Iterator[WorkerPool]:
    if pool is not None:
        yield pool
        return
    with WorkerPool(max_workers=world_size) as own:
        yield own


def _check_factory(name: str, factory: Callable[[], Any] | None) -> None:
    if factory is None and name == "batch_factory":
        return
    if not callable(factory):
        raise ValueError(
            f"{name} is of type {type(factory).__name__}, not callable: give a function without arguments."
        )
    try:
        pickle.dumps(factory)
    except Exception as error:
        shown = getattr(factory, "__qualname__", repr(factory))
        raise ValueError(
            f"{name}={shown} cannot be found by name from another process ({error}): give a function at the top level"
            " of an importable module, not a lambda or a function inside another."
        ) from None


def _cut_for_ranks(batches: list[Any], layout: ParallelLayout) -> list[list[Any]]:
    """For every rank its part of each global batch; ranks of one model replica get the same part."""
    parts = [[cut_batch(batch, part, layout.data_size) for batch in batches] for part in range(layout.data_size)]
    return [parts[layout.data_coordinate(rank)] for rank in range(layout.world_size)]


def cut_batch(batch: Any, part: int, parts: int) -> Any:
    """Part ``part`` of ``parts`` contiguous parts of a batch; the first ones are one sample larger where it matters.

    Args:
        batch: Any nesting of tensors; those whose dimension 0 has the batch's number of samples are cut, everything
            else stays as it is.
        part: From 0 to ``parts - 1``.
        parts: Number of data ranks.

    Raises:
        ValueError: If there are fewer samples than parts.
    """
    samples = count_samples(batch)
    if samples < parts:
        raise ValueError(
            f"A global batch of {samples} sample{'s' if samples != 1 else ''} cannot be cut for {parts} data ranks;"
            f" give batches of at least {parts}, better several times as many."
        )
    smaller, larger = divmod(samples, parts)
    start = part * smaller + min(part, larger)
    end = start + smaller + (part < larger)

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == samples:
            return value[start:end].clone()  # a view would carry the whole batch to every rank
        return value

    return apply_to_collection(batch, Tensor, cut)
