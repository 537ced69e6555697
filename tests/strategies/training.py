"""Small modules, the one-process loop that says what is right, and the function that trains them on a rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_dist.strategies import HybridParallelStrategy

FEATURES, CLASSES = 6, 5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self, width: int = 10, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Classifier(L.LightningModule):
    """An ordinary LightningModule."""

    def __init__(self, optimizer: str = "sgd", lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = Network()
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.hparams.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr / 10)


class MaskedClassifier(Classifier):
    """Targets of -100 do not count."""

    def loss_weight(self, batch: Any) -> Tensor:
        return (batch[1] != -100).sum()


def data(samples: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(0, CLASSES, (samples,), generator=generator))


def masked_data(valid: Sequence[int], batch_size: int) -> TensorDataset:
    """Two data ranks take turns with samples; batch i of rank r has ``valid[2 * i + r]`` targets that count."""
    x, y = data(len(valid) * batch_size).tensors
    for place, count in enumerate(valid):
        batch, rank = divmod(place, 2)
        rows = [2 * (batch * batch_size + i) + rank for i in range(batch_size)]
        y[rows[count:]] = -100
    return TensorDataset(x, y)


def make(factory: Callable[..., L.LightningModule], seed: int = 0, **kwargs: Any) -> L.LightningModule:
    torch.manual_seed(seed)
    return factory(**kwargs)


def reference(
    module: L.LightningModule,
    steps: Sequence[Sequence[Any]],
    *,
    clip: Callable[[Sequence[nn.Parameter]], Any] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[dict[str, Tensor], list[float]]:
    """One process: each step is a list of batches whose samples (or ``loss_weight``s) all count alike.

    Returns the final weights and the gradient norm (order 2) of each step.
    """
    module = module.to(dtype)
    optimizer = module.configure_optimizers()
    norms = []
    for batches in steps:
        optimizer.zero_grad()
        weigh = getattr(module, "loss_weight", lambda batch: len(batch[1]))
        weights = [float(weigh(batch)) for batch in batches]
        for batch, weight in zip(batches, weights, strict=True):
            if weight:
                (module.loss(cast(batch, dtype)) * (weight / sum(weights))).backward()
        norms.append(float(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm()))
        if clip is not None:
            clip(list(module.parameters()))
        optimizer.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, norms


def cast(batch: Any, dtype: torch.dtype) -> Any:
    return [item.to(dtype) if item.is_floating_point() else item for item in batch]


class RecordNorm(L.Callback):
    """The norm of the full gradient, seen where users look at gradients."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.strategy.layout.pipeline > 1:
            return
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        full = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
        self.norms.append(float(torch.cat([grad.flatten() for grad in full]).norm()))


def trainer(layout: str | None, **kwargs: Any) -> L.Trainer:
    warnings.filterwarnings("ignore", category=UserWarning)
    strategy_kwargs = kwargs.pop("strategy_kwargs", {})
    strategy = HybridParallelStrategy(layout=layout, timeout=kwargs.pop("patience", 60.0), **strategy_kwargs)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": strategy.layout.minimum_world_size,
        "strategy": strategy,
        "max_epochs": 1,
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{**settings, **kwargs})


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """The whole model's weights on every rank. All ranks must call it."""
    state = module.state_dict()
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for n, v in state.items()}


def train(
    layout: str,
    factory: Callable[..., L.LightningModule],
    dataset: Dataset,
    batch_size: int,
    *,
    seed: int | str = 0,
    factory_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Fits on this rank, with the sampler Lightning injects, unshuffled: batch i of rank r is every R-th sample."""
    module = make(factory, int(os.environ["RANK"]) if seed == "rank" else seed, **(factory_kwargs or {}))
    norms = RecordNorm()
    run = trainer(layout, callbacks=[norms, *kwargs.pop("callbacks", [])], use_distributed_sampler=False, **kwargs)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=InOrder(dataset, run.strategy))
    run.fit(module, loader)
    losses = getattr(module, "losses", [])
    return {"weights": full_state(module), "norms": norms.norms, "steps": run.global_step, "losses": losses}


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """The whole model out of the stages that the ranks have."""
    return {name: value for result in results for name, value in result["weights"].items()}


class InOrder(torch.utils.data.Sampler):
    """Gives data rank r of R the samples r, r + R, …; ranks may get unequal numbers."""

    def __init__(self, dataset: Dataset, strategy: HybridParallelStrategy) -> None:
        kwargs = strategy.distributed_sampler_kwargs
        self.indices = range(kwargs["rank"], len(dataset), kwargs["num_replicas"])

    def __iter__(self):
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def holdings(layout: str, factory: Callable[..., L.LightningModule]) -> dict[str, int]:
    """Bytes of parameters and optimizer state on this rank after two steps of AdamW."""
    module = make(factory, optimizer="adamw")
    run = trainer(layout, max_steps=2)
    run.fit(module, DataLoader(data(32), batch_size=2))
    state = [value for values in run.optimizers[0].state.values() for value in values.values() if value.ndim]
    return {"parameters": held_bytes(module.parameters()), "optimizer": held_bytes(state)}


def held_bytes(tensors: Iterable[Tensor]) -> int:
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.untyped_storage().nbytes() for tensor in local)


def worst(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of any tensor, relative to that tensor's largest element."""
    assert got.keys() == wanted.keys()
    return max(
        float((got[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-30)) for name in wanted
    )
