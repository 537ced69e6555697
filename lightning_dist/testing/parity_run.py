"""The two runs that a parity check compares, each executed inside worker processes, and what they record."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from lightning_dist.parallel.expert import update_expert_biases


class FactoryError(ValueError):
    """A factory did not return what the parity check needs."""


@dataclass(frozen=True)
class RunSettings:
    """What both runs have in common; see `lightning_dist.testing.assert_parity` for the fields."""

    module_factory: Callable[[], Any]
    batch_factory: Callable[[], Any] | None
    steps: int
    precision: str
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    trainer_kwargs: dict[str, Any]
    seed: int


@dataclass
class Held:
    """One named tensor as one rank holds it.

    Attributes:
        digest: Hash of the whole tensor's bytes, equal on all ranks that hold equal copies.
        tensor: The whole tensor on the CPU, from the first rank that holds the name; ``None`` on the others.
    """

    digest: str
    tensor: Tensor | None


@dataclass
class Recording:
    """What one rank saw of a run.

    Attributes:
        losses: Per batch, the returned loss and its weight; ``None`` for a loss that this rank does not have.
        gradient_norms: Per optimizer step and parameter name, the 2-norm of the whole gradient.
        gradients: Per recorded optimizer step (the first and the last), the whole gradients by parameter name.
        weights: The final state by full name.
        optimizers: Class names of the optimizers.
        notes: What a reader of the comparison must know about the module.
    """

    losses: list[tuple[float | None, float]] = field(default_factory=list)
    gradient_norms: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, dict[str, Held]] = field(default_factory=dict)
    weights: dict[str, Held] = field(default_factory=dict)
    optimizers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Reference:
    """The one-process run and what the layout run starts from.

    Attributes:
        recording: What was recorded.
        batches: The global batches that were trained on.
        initial_state: The state before the first step, by full name.
        parameter_names: Names of distinct parameters: a tied one counts once.
    """

    recording: Recording
    batches: list[Any]
    initial_state: dict[str, Tensor]
    parameter_names: list[str]


def run_on_one_process(settings: RunSettings) -> Reference:
    """Trains the module with Lightning's own single-device strategy on the global batches."""
    module = _build_module(settings)
    batches = _draw_batches(settings)
    factors = _window_factors(module, batches, settings.accumulate_grad_batches)
    recorder = _Recorder(settings, initial_state=None)
    _fit(settings, module, batches, _SingleDevice(factors), devices=1, recorder=recorder)
    recorder.recording.notes += _exclusions(module)
    names = [name for name, _ in module.named_parameters()]
    return Reference(recorder.recording, batches, recorder.initial_state, names)


def run_under_layout(
    settings: RunSettings,
    layout: str,
    strategy_kwargs: dict[str, Any],
    initial_state: dict[str, Tensor],
    batches_by_rank: list[list[Any]],
) -> Recording:
    """Trains the module under the layout, as one of the ranks that share each global batch."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module = _build_module(settings)
    recorder = _Recorder(settings, initial_state)
    strategy = _strategy(layout, strategy_kwargs)
    _fit(settings, module, batches_by_rank[rank], strategy, devices=world_size, recorder=recorder)
    return recorder.recording


def _strategy(layout: str, strategy_kwargs: dict[str, Any]) -> Strategy:
    from lightning_dist.strategies import HybridParallelStrategy

    return HybridParallelStrategy(layout=layout, **strategy_kwargs)


def _fit(
    settings: RunSettings,
    module: pl.LightningModule,
    batches: list[Any],
    strategy: Strategy,
    devices: int,
    recorder: _Recorder,
) -> None:
    own = dict(settings.trainer_kwargs)
    callbacks = own.pop("callbacks", None) or []
    callbacks = [*callbacks] if isinstance(callbacks, Iterable) else [callbacks]
    arguments: dict[str, Any] = dict(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision=settings.precision,
        max_epochs=1,
        accumulate_grad_batches=settings.accumulate_grad_batches,
        gradient_clip_val=settings.gradient_clip_val,
        gradient_clip_algorithm=settings.gradient_clip_algorithm,
        use_distributed_sampler=False,  # every rank is given its own part of each global batch
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, recorder],
    )
    pl.seed_everything(settings.seed, verbose=False)
    with _quiet_lightning():
        pl.Trainer(**(arguments | own)).fit(module, train_dataloaders=_Batches(batches))


@contextlib.contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Keeps back what a Trainer tells about devices, loaders and its own use of torch; other warnings come through."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.")
            warnings.filterwarnings("ignore", category=PossibleUserWarning)
            warnings.filterwarnings("ignore", message="You defined a `validation_step` but have no `val_dataloader`")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _Batches:
    """A loader over given batches; Lightning would take a plain list for several loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class _SingleDevice(SingleDeviceStrategy):
    """Lightning's own, except that an accumulation window is one mean over its samples, not a mean of means, and that
    routers' biases are balanced after each step, as under our strategy.

    Args:
        factors: Per batch, what its loss is multiplied with before backward.
    """

    def __init__(self, factors: list[float]) -> None:
        super().__init__(device="cpu")
        self._factors = factors

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        factor = self._factors[self.lightning_module.trainer.fit_loop.batch_idx]
        return super().backward(closure_loss if factor == 1.0 else closure_loss * factor, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        assert self.lightning_module is not None
        update_expert_biases(self.lightning_module)
        return result


class _Recorder(pl.Callback):
    """Writes down losses, gradients before clipping, and final weights; sets the initial weights where it must."""

    def __init__(self, settings: RunSettings, initial_state: dict[str, Tensor] | None) -> None:
        self._settings = settings
        self._given_state = initial_state
        self.initial_state: dict[str, Tensor] = initial_state or {}
        self.recording = Recording()
        self._last: dict[str, Held] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Before the strategy takes the module apart, so that the strategy's own way of doing so is part of the check.
        if self._given_state is not None and _is_whole(pl_module, self._given_state):
            pl_module.load_state_dict(self._given_state)
            self._given_state = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.initial_state:
            state = pl_module.state_dict()
            self.initial_state = {name: tensor.detach().clone() for name, tensor in state.items()}
        elif self._given_state is not None:  # a module that is made in `configure_model`
            held = set(get_model_state_dict(pl_module))
            state = {name: tensor for name, tensor in self._given_state.items() if name in held}
            set_model_state_dict(pl_module, state, options=StateDictOptions(full_state_dict=True, strict=False))
        self.recording.optimizers = [type(optimizer).__name__ for optimizer in trainer.optimizers]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        # Lightning hands over the loss divided by the number of accumulated batches.
        window = self._settings.accumulate_grad_batches if pl_module.automatic_optimization else 1
        value = float(loss) * window if isinstance(loss, Tensor) else None
        self.recording.losses.append((value, loss_weight(pl_module, batch)))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = dict(pl_module.named_parameters(remove_duplicate=False))
        # A strategy may give the optimizer other tensors than the module's, such as a flat one.
        chosen = {name: p for name, p in named.items() if id(p) in stepped} or named
        gradients = {name: p.grad for name, p in chosen.items() if p.grad is not None}
        step = len(self.recording.gradient_norms)
        norms: dict[str, float] = {}
        held = _hold(gradients, norms, keep=step == 0 or self._is_last_step(trainer))
        if held:
            self.recording.gradients["first step" if step == 0 else "last step"] = held
        self.recording.gradient_norms.append(norms)

    def _is_last_step(self, trainer: pl.Trainer) -> bool:
        return trainer.is_last_batch

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.recording.weights = _hold(get_model_state_dict(pl_module), {}, keep=True)


def _hold(tensors: Mapping[str, Any], norms: dict[str, float], keep: bool) -> dict[str, Held]:
    """Makes every tensor whole, notes its 2-norm in ``norms``, and returns it if it is to be kept.

    Collectives: one gather of names over the world, then per tensor those of ``DTensor.full_tensor`` on its own mesh.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    first_holder = _first_holder(list(tensors)) if keep else {}
    rank = dist.get_rank() if dist.is_initialized() else 0
    held = {}
    for name, tensor in tensors.items():
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().contiguous()
        norms[name] = float(torch.linalg.vector_norm(whole.double()))
        if keep:
            digest = hashlib.blake2b(whole.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
            held[name] = Held(digest, whole.clone() if first_holder[name] == rank else None)
    return held


def _first_holder(names: list[str]) -> dict[str, int]:
    """For every name, the first rank that holds it."""
    if not dist.is_initialized():
        return dict.fromkeys(names, 0)
    names_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names_by_rank, names)
    first: dict[str, int] = {}
    for rank, held in enumerate(names_by_rank):
        for name in held:
            first.setdefault(name, rank)
    return first


def loss_weight(module: Any, batch: Any) -> float:
    """The weight of a batch's loss among others: the module's own ``loss_weight``, else its number of samples."""
    own = getattr(module, "loss_weight", None)
    return float(own(batch)) if callable(own) else float(count_samples(batch))


def count_samples(batch: Any) -> int:
    """The size of dimension 0 of the batch's first tensor that has one."""
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: sizes.extend(tensor.shape[:1]))
    return sizes[0] if sizes else 1


def _window_factors(module: Any, batches: list[Any], window: int) -> list[float]:
    """Per batch, window x weight / (sum of the window's weights), which undoes Lightning's division by the window."""
    if window == 1:
        return [1.0] * len(batches)
    factors: list[float] = []
    for start in range(0, len(batches), window):
        weights = [loss_weight(module, batch) for batch in batches[start : start + window]]
        total = sum(weights)
        factors += [window * weight / total if total else 0.0 for weight in weights]
    return factors


def _build_module(settings: RunSettings) -> pl.LightningModule:
    pl.seed_everything(settings.seed, verbose=False)
    built = settings.module_factory()
    module = built[0] if isinstance(built, tuple) and built else built
    if not isinstance(module, pl.LightningModule):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise FactoryError(
            f"The module factory returned {_with_article(kind)}; it must return a lightning.pytorch.LightningModule"
            " (from the package lightning, not pytorch_lightning)."
        )
    return module


def _draw_batches(settings: RunSettings) -> list[Any]:
    """The global batches: enough for all steps; drawn again from the start where the source has too few."""
    pl.seed_everything(settings.seed, verbose=False)
    source = settings.batch_factory() if settings.batch_factory is not None else _batches_of(settings)
    if not isinstance(source, Iterable):
        raise FactoryError(f"The batches are {_with_article(type(source).__name__)}; give an iterable of batches.")
    wanted = settings.steps * settings.accumulate_grad_batches
    batches = list(itertools.islice(source, wanted))
    if not batches:
        raise FactoryError("The batch factory gave no batches; give at least one global batch.")
    # A last window that is short is worth checking and stays as it is.
    if len(batches) <= wanted - settings.accumulate_grad_batches:
        batches = list(itertools.islice(itertools.cycle(batches), wanted))
    return batches


def _batches_of(settings: RunSettings) -> Any:
    """The factory's second return value, or the loader of a data module there, or of the module itself."""
    built = settings.module_factory()
    source = built[1] if isinstance(built, tuple) and len(built) > 1 else built
    if not isinstance(source, pl.LightningModule | pl.LightningDataModule):
        return source
    source.prepare_data()
    source.setup("fit")
    if not is_overridden("train_dataloader", source):
        raise FactoryError(
            f"{type(source).__name__} has no train_dataloader() to take batches from; define it, or let the factory"
            " return the module and an iterable of batches."
        )
    return source.train_dataloader()


def _with_article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _is_whole(module: nn.Module, state: Mapping[str, Tensor]) -> bool:
    own = module.state_dict()
    return set(own) == set(state) and not any(tensor.is_meta for tensor in own.values())


def _exclusions(module: nn.Module) -> list[str]:
    """Notes on layers whose numbers depend on how the batch is cut, which a parity claim leaves out."""
    notes = []
    for name, layer in module.named_modules():
        dropout = getattr(layer, "p", 0) if isinstance(layer, nn.modules.dropout._DropoutNd) else 0
        if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            dropout = layer.dropout
        if dropout:
            notes.append(f"{name} drops values at random (p={dropout:g}); set it to 0 to compare numbers.")
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats:
            notes.append(f"{name} normalises over the batch, which every rank sees a part of.")
    return notes[:5] + ([f"{len(notes) - 5} more layers like these."] if len(notes) > 5 else [])
