"""How near the advisor's predictions are: memory and step time of layouts on two CPU processes.

    python benchmarks/advisor.py [--rounds 3] [--steps 4]

A small Llama (8 blocks, AdamW, float32), 8 samples of 128 tokens a step in every layout. Calibrated once: the rate of
a core from one process's step, the link as `lightning-dist doctor` measures it. Memory is the peak of what the process
holds in the fourth step over what it held before the module was made (Linux's peak resident set); it has to be put
down to the advisor's prediction of all that one rank holds. Time is the median step; layouts take turns.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import re
import statistics
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from torch import Tensor, nn

from lightning_dist import HybridParallelStrategy, ModelPlan, ParallelLayout
from lightning_dist.advisor import Candidate, Cluster, Link
from lightning_dist.advisor.estimator import Estimator
from lightning_dist.advisor.links import measure_links
from lightning_dist.advisor.model_reader import build_on_meta, read_model
from lightning_dist.testing import WorkerPool

TOKENS, SAMPLES = 128, 8

CASES = {
    "one device": Candidate(ParallelLayout(), samples=8),
    "one device, full checkpointing": Candidate(ParallelLayout(), checkpointing="full", samples=8),
    "replicate=2": Candidate(ParallelLayout(replicate=2), samples=4),
    "shard=2, ZeRO-3": Candidate(ParallelLayout(shard=2), zero=3, samples=4),
    "shard=2, ZeRO-2": Candidate(ParallelLayout(shard=2), zero=2, samples=4),
    "shard=2, ZeRO-3, full checkpointing": Candidate(ParallelLayout(shard=2), zero=3, checkpointing="full", samples=4),
    "tp=2": Candidate(ParallelLayout(tensor=2), samples=8),
    "tp=2, full checkpointing": Candidate(ParallelLayout(tensor=2), checkpointing="full", samples=8),
    "cp=2": Candidate(ParallelLayout(context=2), samples=8),
    "pp=2, 1F1B, 4 microbatches": Candidate(
        ParallelLayout(pipeline=2), schedule="1F1B", microbatches=4, samples=2
    ),
    "pp=2, GPipe, 4 microbatches": Candidate(
        ParallelLayout(pipeline=2), schedule="GPipe", microbatches=4, samples=2
    ),
    "pp=2, 1F1B, 8 microbatches": Candidate(ParallelLayout(pipeline=2), schedule="1F1B", microbatches=8),
    "pp=2, Interleaved1F1B, 4 microbatches": Candidate(
        ParallelLayout(pipeline=2), schedule="Interleaved1F1B", microbatches=4, samples=2
    ),
    "pp=2, 1F1B, 4 microbatches, full checkpointing": Candidate(
        ParallelLayout(pipeline=2), checkpointing="full", schedule="1F1B", microbatches=4, samples=2
    ),
}  # fmt: skip


class Module(L.LightningModule):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=width * 43 // 16,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=1024,
            max_position_embeddings=TOKENS,
        )
        self.model = transformers.LlamaForCausalLM(config)
        self.times: list[float] = []
        self.peaks: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    def parallel_plan(self) -> ModelPlan:
        return ModelPlan(network="model", sequence_dims={"input_ids": 1, "labels": 1})

    def on_train_batch_start(self, *_: Any) -> None:
        if len(self.times) == 3:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == 4:
            self.peaks.append(resident("VmHWM"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def batch_of(samples: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 1024, (samples, TOKENS))
    return {"input_ids": ids, "labels": ids}


class Repeat:
    def __init__(self, samples: int, steps: int) -> None:
        self.batch, self.steps = batch_of(samples), steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self):
        return iter([self.batch] * self.steps)


def resident(kind: str) -> float:
    """Bytes, from /proc."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024.0 * int(found[1])


def measure(name: str, steps: int) -> tuple[float, float]:
    """Bytes and seconds of a step on this rank."""
    candidate = resolved(CASES[name])
    warm_up()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    module = Module()
    world = candidate.layout.world_size
    arguments = candidate.strategy_arguments()
    strategy = HybridParallelStrategy(**arguments, batch_check="off")
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", devices=world, strategy=strategy, max_epochs=1, **quiet)
    samples = candidate.samples * (candidate.microbatches if candidate.schedule else 1)
    trainer.fit(module, Repeat(samples, steps + 3))
    took = statistics.median(after - start for start, after in itertools.pairwise(module.times[2:]))
    return module.peaks[0] - before, took


def warm_up() -> None:
    """A small step, for what libraries load and keep when they are first used."""
    module = Module(width=32)
    optimizer = module.configure_optimizers()
    module.training_step(batch_of(1), 0).backward()
    optimizer.step()


def links() -> tuple[float, float]:
    measured = measure_links(size=4 * 2**20).as_json()["links"]["intra"]
    return measured["bandwidth"], measured["latency"]


def factory() -> tuple[nn.Module, list[Any]]:
    return Module(), [batch_of(SAMPLES)]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=4)
    options = arguments.parse_args()
    cases = {name: resolved(case) for name, case in CASES.items()}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, case in cases.items():
            with WorkerPool() as pool:  # new processes: memory that an allocator keeps would hide what a layout takes
                world = case.layout.world_size
                results = pool.run(measure, world, name, options.steps, init_process_group=False, timeout=300)
            measured[name].append((max(peak for peak, _ in results), max(took for _, took in results)))
    with WorkerPool() as pool:
        bandwidth, latency = pool.run(links, 2)[0]

    module, batch = build_on_meta(factory)
    profile = read_model(module, batch)
    link = Link(bandwidth, latency)
    one = statistics.median(took for _, took in measured["one device"])
    guess = Estimator(profile, Cluster(1, 1, intra=link, flops=1e12, memory_bandwidth=1e12)).time(cases["one device"])
    rate = 1e12 * guess.total / one
    print(f"One core {rate / 1e9:.1f} GFLOPS, link {bandwidth / 1e9:.2f} GB/s and {1e6 * latency:.0f} microseconds\n")
    print("| layout | memory MB | predicted | error | step ms | predicted | error |\n|---|---|---|---|---|---|---|")
    pairs: dict[str, tuple[float, float]] = {}
    for name, case in cases.items():
        world = case.layout.world_size
        estimator = Estimator(profile, Cluster(world, world, intra=link, flops=rate, memory_bandwidth=1e12))
        memory, took = (statistics.median(values) for values in zip(*measured[name], strict=True))
        wanted, expected = estimator.memory(case).total, estimator.time(case).total
        pairs[name] = (took, expected)
        print(
            f"| {name} | {memory / 1e6:.0f} | {wanted / 1e6:.0f} | {wanted / memory - 1:+.0%} | {1e3 * took:.0f} |"
            f" {1e3 * expected:.0f} | {expected / took - 1:+.0%} |"
        )
    decided = [(a, b) for a, b in itertools.combinations(pairs.values(), 2) if max(a[0], b[0]) > 1.05 * min(a[0], b[0])]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in decided)
    print(f"\nOf {len(decided)} pairs whose measured steps differ by more than 5 %, {right} are ranked as measured.")


def resolved(case: Candidate) -> Candidate:
    return replace(case, layout=case.layout.resolve(case.layout.minimum_world_size))


if __name__ == "__main__":
    main()
