"""Which rank has which parameter: those of its stages, and those that several stages have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.parallel.data import local_tensor
from lightning_dist.parallel.pipeline.placement import PipelinePlan


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several pipeline ranks have: one outside the chain, or one tied across stages.

    Args:
        name: Its first full name in the module.
        ranks: The pipeline ranks that have it, ascending. Their gradients add up; the first of them counts it in
            norms and stores it.
    """

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Ownership:
    """The parameters and buffers of the whole module by name, and the pipeline ranks that have each.

    Args:
        rank: This pipeline rank.
        ranks_of: The pipeline ranks that have each name (tied parameters under each of their names), ascending.
        shared: Those parameters that more than one rank has, in module order, the same on every rank.
        loose: Names of parameters outside the chain, or tied between its modules: whole on each rank that has them.
    """

    rank: int
    ranks_of: dict[str, tuple[int, ...]]
    shared: tuple[SharedParameter, ...]
    loose: frozenset[str]

    def is_local(self, name: str) -> bool:
        """Whether this rank has the parameter or buffer."""
        return self.rank in self.ranks_of[name]

    def counts(self, name: str) -> bool:
        """Whether this rank is the one that counts the parameter in norms and stores it."""
        return self.rank == self.ranks_of[name][0]

    def holders(self, name: str) -> int:
        """How many pipeline ranks have the parameter."""
        return len(self.ranks_of[name])


def find_ownership(module: nn.Module, plan: PipelinePlan, rank: int, shared: Sequence[str] = ()) -> Ownership:
    """Reads off a whole module, before anything is dropped, who will have which parameter.

    Args:
        module: The module that the chain's names are relative to, with all its parameters (on meta is enough).
        plan: Stages and ranks.
        rank: This pipeline rank.
        shared: Full names of parameters that every stage is to have.
    """
    everyone = tuple(range(plan.num_ranks))
    chain = {name: plan.rank_of_stage[stage] for name, stage in zip(plan.chain, plan.stage_of, strict=True)}

    def place(name: str) -> str | None:
        return next((link for link in chain if name.startswith(f"{link}.") or name == link), None)

    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    places: dict[int, set[str | None]] = {}
    for name, tensor in named:
        places.setdefault(id(tensor), set()).add(None if name in shared else place(name))
    ranks_of: dict[str, tuple[int, ...]] = {}
    for name, tensor in named:
        links = places[id(tensor)]
        ranks = everyone if None in links else tuple(sorted({chain[link] for link in links if link is not None}))
        ranks_of[name] = ranks
    parameters = list(module.named_parameters())
    several = tuple(SharedParameter(name, ranks_of[name]) for name, _ in parameters if len(ranks_of[name]) > 1)
    loose = frozenset(name for name, tensor in parameters if None in places[id(tensor)] or len(places[id(tensor)]) > 1)
    return Ownership(rank, ranks_of, several, loose)


def sum_shared_gradients(
    ownership: Ownership,
    parameters: dict[str, nn.Parameter],
    group: dist.ProcessGroup,
    control_group: dist.ProcessGroup,
) -> None:
    """Adds up the gradients that several stages have of one parameter, so that all of them have the whole one.

    The sum is formed on the first of a parameter's ranks, in rank order, and sent to the others, so copies stay
    equal bit by bit. A parameter that no stage has used keeps no gradient.

    Collectives: one all-reduce of a byte for each shared parameter on ``control_group``; for each shared parameter
    with a gradient one message from and to every rank but the first that has it, on ``group``.

    Args:
        ownership: Who has what.
        parameters: This rank's parameters by name, as the optimizer sees them.
        group: The pipeline's ranks.
        control_group: A CPU group of the same ranks.
    """
    shared = [entry for entry in ownership.shared]
    if not shared:
        return
    used = torch.tensor(
        [entry.name in parameters and parameters[entry.name].grad is not None for entry in shared], dtype=torch.uint8
    )
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=control_group)
    for entry, is_used in zip(shared, used.tolist(), strict=True):
        if not is_used or ownership.rank not in entry.ranks:
            continue
        parameter = parameters[entry.name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        _sum_over(local_tensor(parameter.grad), entry.ranks, ownership.rank, group)


def _sum_over(gradient: Tensor, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup) -> None:
    first, *others = ranks
    if rank != first:
        whole = gradient.contiguous()
        dist.send(whole, group=group, group_dst=first)
        dist.recv(whole, group=group, group_src=first)
        if whole is not gradient:
            gradient.copy_(whole)
        return
    total = gradient.clone(memory_format=torch.contiguous_format)
    part = torch.empty_like(total)
    for other in others:
        dist.recv(part, group=group, group_src=other)
        total += part
    for other in others:
        dist.send(total, group=group, group_dst=other)
    gradient.copy_(total)


def equalise_shared(ownership: Ownership, module: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives every rank the same values of what several stages have, parameters and buffers, from the first of them.

    Each rank fills memory and draws initial weights by itself, so outside the chain, and where weights are tied, they
    would differ. To be called before sharding; stages themselves are made equal over the data ranks.

    Collectives: one message for each such tensor to every rank but the first that has it, on ``group``.
    """
    named = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
    sent: set[int] = set()
    for name, ranks in ownership.ranks_of.items():
        if len(ranks) < 2 or ownership.rank not in ranks or id(named[name]) in sent:
            continue
        tensor = named[name]
        sent.add(id(tensor))
        whole = tensor.detach().contiguous()
        if ownership.rank == ranks[0]:
            for other in ranks[1:]:
                dist.send(whole, group=group, group_dst=other)
        else:
            dist.recv(whole, group=group, group_src=ranks[0])
            with torch.no_grad():
                tensor.copy_(whole)
