"""One layer of experts in four ways: spread over ranks, whole on each rank, fairscale's, and Hugging Face's.

    python benchmarks/experts.py [--rounds 7] [--steps 5] [--tokens 2048]

Two CPU processes with one thread each, each with its own tokens, float32; a step is forward, backward, the gradients'
exchange and SGD, without Lightning. In every round, one after the other and in turning order:

* ``spread``: ``MixtureOfExperts``, half of the experts on each rank, tokens exchanged;
* ``whole``: the same layer with all experts on each rank, gradients averaged by an all-reduce;
* ``fairscale``: its ``MOELayer`` and ``Top2Gate`` with the same router, half of the experts on each rank; each expert's
  tokens are padded to a capacity of twice an even load, and what is beyond is dropped;
* ``hugging face``: Mixtral's block with its ``eager`` and ``grouped_mm`` experts, all of them on each rank, gradients
  averaged by an all-reduce.

Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist import ParallelLayout
from lightning_dist.parallel.expert import MixtureOfExperts, apply_expert_parallel, build_expert_mesh
from lightning_dist.testing import WorkerPool

RANKS, HIDDEN, EXPERT, EXPERTS = 2, 512, 1024, 8

Step = Callable[[Tensor], Tensor]


def layer() -> MixtureOfExperts:
    torch.manual_seed(0)
    return MixtureOfExperts(HIDDEN, EXPERT, EXPERTS, top_k=2)


def spread() -> tuple[Step, nn.Module, Iterable[nn.Parameter]]:
    module = layer()
    mesh = build_expert_mesh(ParallelLayout.parse("ep=2").resolve(RANKS), "cpu")
    apply_expert_parallel(module, ["experts"], mesh)
    return module, module, module.router.parameters()


def whole() -> tuple[Step, nn.Module, Iterable[nn.Parameter]]:
    module = layer()
    return module, module, module.parameters()


class OneExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, EXPERT, bias=False) for _ in range(2))
        self.down = nn.Linear(EXPERT, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def fairscale() -> tuple[Step, nn.Module, Iterable[nn.Parameter]]:
    from fairscale.nn.moe import top2gate
    from fairscale.nn.moe.moe_layer import MOELayer

    gate = top2gate.Top2Gate(HIDDEN, EXPERTS)
    with torch.no_grad():
        gate.wg.weight.copy_(layer().router.weight)
    module = MOELayer(gate, nn.ModuleList(OneExpert() for _ in range(EXPERTS // RANKS)))
    return lambda tokens: module(tokens.unsqueeze(1)).squeeze(1), module, gate.parameters()


def hugging_face(implementation: str) -> tuple[Step, nn.Module, Iterable[nn.Parameter]]:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    ours = layer()
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=EXPERT, num_local_experts=EXPERTS, num_experts_per_tok=2
    )
    config._experts_implementation = implementation
    module = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        module.gate.weight.copy_(ours.router.weight)
        module.experts.gate_up_proj.copy_(torch.cat([ours.experts.gate_proj, ours.experts.up_proj], dim=1))
        module.experts.down_proj.copy_(ours.experts.down_proj)
    return lambda tokens: module(tokens.unsqueeze(0)).squeeze(0), module, module.parameters()


KINDS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "spread": (spread, ()),
    "whole": (whole, ()),
    "fairscale": (fairscale, ()),
    "hugging face, eager": (hugging_face, ("eager",)),
    "hugging face, grouped_mm": (hugging_face, ("grouped_mm",)),
}


def average(parameters: Sequence[nn.Parameter]) -> None:
    """One all-reduce of all gradients, as DistributedDataParallel does for a layer of this size."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= RANKS
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def measure(kind: str, steps: int, tokens: int) -> dict[str, float]:
    """Seconds of a step, bytes of parameters on this rank, and the first step's loss over all ranks."""
    make, arguments = KINDS[kind]
    step, module, averaged = make(*arguments)
    averaged = list(averaged)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batch = torch.randn(tokens, HIDDEN, generator=generator)
    target = torch.randn(tokens, HIDDEN, generator=generator)
    times, losses = [], []
    for _ in range(steps + 2):
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.mse_loss(step(batch), target)
        loss.backward()
        average(averaged)
        optimizer.step()
        dist.barrier()
        times.append(time.perf_counter() - start)
        losses.append(loss.detach())
    dist.all_reduce(losses[0])
    local = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in module.parameters()]
    size = sum(parameter.numel() * parameter.element_size() for parameter in local)
    return {"step": statistics.median(times[2:]), "size": size, "loss": losses[0].item() / RANKS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank in a step")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    kinds = list(KINDS)
    with ExitStack() as stack:
        pool = stack.enter_context(WorkerPool(max_workers=RANKS))
        for turn in range(options.rounds):
            for kind in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
                ranks = pool.run(measure, RANKS, kind, options.steps, options.tokens, timeout=300)
                rounds[kind].append({key: max(rank[key] for rank in ranks) for key in ranks[0]})
    same = [found[0]["loss"] for kind, found in rounds.items() if kind != "fairscale"]
    assert max(same) - min(same) < 1e-5, f"the layers did not compute the same: {same}"
    print("| | step | spread ÷ it | parameters of a rank |\n|---|---|---|---|")
    for kind, found in rounds.items():
        ratios = [ours["step"] / theirs["step"] for ours, theirs in zip(rounds["spread"], found, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        step = statistics.median(each["step"] for each in found)
        print(
            f"| {kind} | {1000 * step:.0f} ms | {middle:.3f} [{low:.3f}, {high:.3f}] |"
            f" {found[0]['size'] / 1e6:.1f} MB |"
        )


if __name__ == "__main__":
    main()
