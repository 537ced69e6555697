"""Tensor parallelism: step time and memory beside Lightning's own strategy and a loop written by hand, on one plan.

    python benchmarks/tensor.py [--rounds 7] [--steps 6] [--rows 4]

Two CPU processes with one thread each train a Llama of transformers. In every round, one after the other and in turning
order: the Trainer with HybridParallelStrategy, the Trainer with Lightning's ModelParallelStrategy and torch's
``parallelize_module`` in ``configure_model``, and a loop over the same without Lightning, each in processes of its own.
Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_dist import HybridParallelStrategy
from lightning_dist.testing import WorkerPool

RANKS, LENGTH, VOCABULARY, LAYERS = 2, 128, 2048, 4


def network() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def cut_by_hand(model: nn.Module, mesh: DeviceMesh) -> None:
    """The plan that the model ships, in torch's styles."""
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in range(LAYERS):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.{layer}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{layer}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = network()
        self.times: list[float] = []
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return next_token_loss(self.model, batch)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.times.append(time.perf_counter())
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class CutByHand(Module):
    def configure_model(self) -> None:
        if self.device_mesh is not None:
            cut_by_hand(self.model, self.device_mesh["tensor_parallel"])


class Repeat:
    """A loader that gives one batch again and again."""

    def __init__(self, batch: Tensor, steps: int) -> None:
        self.batch, self.steps = batch, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self.batch] * self.steps)


def batch_of(rows: int) -> Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def with_trainer(module: Module, strategy: Any, steps: int, rows: int) -> None:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = L.Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(module, Repeat(batch_of(rows), steps + 2))


def hybrid(steps: int, rows: int) -> dict[str, Any]:
    with resident_peak() as peak:
        module = Module()
        with_trainer(module, HybridParallelStrategy(layout="tp=2"), steps, rows)
    return result(module.times, module.losses, peak)


def lightning(steps: int, rows: int) -> dict[str, Any]:
    with resident_peak() as peak:
        module = CutByHand()
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=RANKS)
        with_trainer(module, strategy, steps, rows)
    return result(module.times, module.losses, peak)


def by_hand(steps: int, rows: int) -> dict[str, Any]:
    with resident_peak() as peak:
        model = network()
        cut_by_hand(model, init_device_mesh("cpu", (RANKS,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = batch_of(rows)
        times, losses = [], []
        for _ in range(steps + 2):
            optimizer.zero_grad()
            loss = next_token_loss(model, batch)
            loss.backward()
            optimizer.step()
            times.append(time.perf_counter())
            losses.append(loss.item())
    dist.barrier()
    return result(times, losses, peak)


def result(times: list[float], losses: list[float], peak: list[int]) -> dict[str, Any]:
    gaps = [after - before for before, after in itertools.pairwise(times[1:])]
    return {"step": statistics.median(gaps), "loss": losses[-1], "memory": peak[0]}


_before: int | None = None


@contextmanager
def resident_peak() -> Iterator[list[int]]:
    """By how many bytes this process's own memory rises at most above what it was before its first run."""
    global _before
    before, peak, running = _before or resident(), [0], [True]
    _before = before

    def sample() -> None:
        while running[0]:
            peak[0] = max(peak[0], resident() - before)
            time.sleep(0.01)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        running[0] = False
        thread.join()


def resident() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


KINDS: dict[str, Callable[..., dict[str, Any]]] = {"hybrid": hybrid, "lightning": lightning, "hand": by_hand}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=4, help=f"sequences of {LENGTH} tokens in a step")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rounds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        pools = {kind: stack.enter_context(WorkerPool(max_workers=RANKS)) for kind in KINDS}
        for turn in range(options.rounds):
            for kind in list(KINDS)[turn % 3 :] + list(KINDS)[: turn % 3]:
                arguments = (KINDS[kind], RANKS, options.steps, options.rows)
                ranks = pools[kind].run(*arguments, init_process_group=kind == "hand", timeout=300)
                rounds[kind].append({key: max(rank[key] for rank in ranks) for key in ranks[0]})
    losses = [found["loss"] for kind in rounds for found in rounds[kind]]
    assert max(losses) - min(losses) < 1e-4, f"the runs did not compute the same: {losses}"
    print("| | step | ours ÷ it | memory of a rank | ours ÷ it |\n|---|---|---|---|---|")
    for kind, found in rounds.items():
        ratios = {
            key: spread([ours[key] / theirs[key] for ours, theirs in zip(rounds["hybrid"], found, strict=True)])
            for key in ("step", "memory")
        }
        step, memory = (statistics.median(each[key] for each in found) for key in ("step", "memory"))
        print(f"| {kind} | {1000 * step:.0f} ms | {ratios['step']} | {memory / 1e6:.0f} MB | {ratios['memory']} |")


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
