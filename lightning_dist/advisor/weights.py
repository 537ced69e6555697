"""Counts a module's parameters by what each kind of parallelism does with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_dist.advisor.profile import Amount, LayerProfile
from lightning_dist.parallel.tensor.resolve import COLUMNS, EMBEDDINGS, ROWS, ResolvedPlan
from lightning_dist.plan import ModelPlan, expand_names
from lightning_dist.plan.units import find_network

CUT_STYLES = (*COLUMNS, *ROWS, *EMBEDDINGS, "attention")


@dataclass
class Weights:
    """The parameters of each module of the chain (``""`` is what no module of it holds), and where experts are."""

    parts: dict[str, LayerProfile]
    experts: list[str] = field(default_factory=list)
    num_experts: int = 0


def find_experts(module: nn.Module, plan: ModelPlan | None) -> dict[str, int]:
    """Modules that hold experts, and how many: what the plan names; modules called ``experts`` whose parameters have
    one more dimension than a matrix (Hugging Face's fused ones), or lists of like modules of that name."""
    prefix, network = find_network(module, plan)
    written = expand_names(network, plan.experts, "experts") if plan is not None and plan.experts else []
    found: dict[str, int] = {}
    for name, child in module.named_modules():
        named = any(name == (f"{prefix}.{other}" if prefix else other) for other in written)
        if named or name.rpartition(".")[2] == "experts":
            fused = [parameter.shape[0] for parameter in child.parameters() if parameter.dim() == 3]
            lists = [len(inner) for inner in child.modules() if isinstance(inner, nn.ModuleList)]
            count = max(fused or lists or [0])
            if count > 1 and not any(name.startswith(f"{other}.") for other in found):
                found[name] = count
    return found


def count_weights(
    module: nn.Module, chain: Sequence[str], rules: ResolvedPlan | None, plan: ModelPlan | None
) -> Weights:
    """Counts each parameter once, where the first module of the chain holds it; tied ones outside the chain too."""
    experts = find_experts(module, plan)
    holders: dict[int, set[str]] = {}
    chain_set = set(chain)

    def part_of(name: str) -> str:
        pieces = name.split(".")
        return next((p for p in (".".join(pieces[:n]) for n in range(len(pieces), 0, -1)) if p in chain_set), "")

    for name, parameter in module.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), set()).add(part_of(name))
    seen: set[int] = set()
    sums: dict[tuple[str, str], list[float]] = {}  # by part and kind: elements whole, cut; trainable whole, cut
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        # A parameter that several modules of the chain hold is on each of their stages, as one outside the chain is.
        part = part_of(name) if len(holders[id(parameter)]) == 1 else ""
        kind = "experts" if any(name.startswith(f"{owner}.") for owner in experts) else "parameters"
        where = 1 if is_cut(name, rules) else 0
        entry = sums.setdefault((part, kind), [0.0, 0.0, 0.0, 0.0])
        entry[where] += parameter.numel()
        entry[2 + where] += parameter.numel() if parameter.requires_grad else 0
    parts = {}
    for part in ("", *chain):
        dense, routed = (sums.get((part, kind), [0.0, 0.0, 0.0, 0.0]) for kind in ("parameters", "experts"))
        parts[part] = LayerProfile(
            name=part,
            parameters=Amount(*dense[:2]),
            trainable=Amount(*dense[2:]),
            experts=Amount(*routed[:2]),
            trainable_experts=Amount(*routed[2:]),
        )
    return Weights(parts, list(experts), max(experts.values(), default=0))


def is_cut(name: str, rules: ResolvedPlan | None) -> bool:
    """Whether the tensor plan cuts the parameter of that full name."""
    if rules is None:
        return False
    owner, _, parameter = name.rpartition(".")
    style = rules.parameter_rules.get(owner, {}).get(parameter)
    if style is not None:
        return style != "replicate"
    holder = owner
    while holder and holder not in rules.rules:
        holder = holder.rpartition(".")[0]
    rule = rules.rules.get(holder)
    if rule is None or (holder != owner and rule != "attention"):
        return False
    if not isinstance(rule, str):
        return True
    if parameter == "bias" and rule in ROWS:
        return False
    return rule in CUT_STYLES
