"""A tensor-parallel plan with its wildcards expanded, and everything about it checked before anything is changed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor.parallel.style import ParallelStyle

from lightning_dist.parallel.tensor import styles
from lightning_dist.parallel.tensor.attention import check_attention
from lightning_dist.parallel.tensor.heads import HeadPlan, plan_heads
from lightning_dist.plan.model_plan import matches

Rule = str | ParallelStyle

COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "fused_qkv", "loss_parallel")
ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep")
EMBEDDINGS = ("embedding_rowwise", "embedding_colwise")
REPLICATED = ("replicate", "replicated", "replicated_with_grad_allreduce")
BLOCKS = ("local_shapes", "global_shapes", "sequence_parallel")
OTHERS = ("attention", "moe_tp_experts", "moe_identity_expert", "all_reduce", "local_params", "mla_kv_a_proj")
PARAMETERS = ("packed_colwise", "packed_rowwise", "colwise", "rowwise", "replicate")
STYLES = (*COLUMNS, *ROWS, *EMBEDDINGS, *REPLICATED, *BLOCKS, *OTHERS)
"""The names that a plan may give a module; those that Hugging Face's plans use mean what they mean there.

``colwise``: a matrix cut by its outputs, ``colwise_gather_output`` (``colwise_rep``) with the output joined again.
``fused_qkv``: the same for query, key and value in one matrix, one after the other.
``loss_parallel``: the same for a head whose logits stay cut (see `sharded_loss`).
``rowwise``: a matrix cut by its inputs; ``rowwise_split_input`` (``rowwise_rep``) takes a whole input.
``embedding_rowwise``, ``embedding_colwise``: an embedding cut by its rows or by its width.
``attention``: ``nn.MultiheadAttention``, each rank its heads.
``replicate`` (``replicated``), also what is not named: whole, on whole activations.
``replicated_with_grad_allreduce``: whole, on activations that are cut (norms of heads); gradients are summed.
``sequence_parallel``: on a ``ModuleList`` of blocks, activations between its sharded parts are cut by tokens.
``global_shapes``: the block's code runs on DTensors and sees whole shapes, as hand-written blocks do by themselves;
``local_shapes``: it runs on plain tensors of its part and takes its sizes from them, as blocks of transformers do.
``moe_tp_experts``, ``moe_identity_expert``, ``all_reduce``, ``local_params``, ``mla_kv_a_proj``: as Hugging Face's.
"""


@dataclass
class ResolvedPlan:
    """The plan with its wildcards expanded and everything about it checked."""

    network: nn.Module
    plan: Mapping[str, Rule]
    size: int
    rules: dict[str, Rule] = field(init=False)
    parameter_rules: dict[str, dict[str, str]] = field(init=False)  # by owning module
    pairs: dict[str, str] = field(init=False)  # matrix cut by outputs -> block in which one cut by inputs follows
    on_dtensors: list[str] = field(init=False)
    containers: list[str] = field(init=False)  # of blocks under sequence parallelism
    heads: dict[str, HeadPlan] = field(init=False)  # by the module that owns the projections
    ties: list[list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.rules, self.parameter_rules = _expand(self.network, self.plan)
        for name, rule in self.rules.items():
            _check_rule(name, self.network.get_submodule(name), rule, self.size)
        for owner, named in self.parameter_rules.items():
            self._check_parameters(owner, named)
        self.pairs = self._pair()
        self.containers = [
            name
            for name, rule in self.rules.items()
            if rule == "sequence_parallel" and isinstance(self.network.get_submodule(name), nn.ModuleList)
        ]
        self.on_dtensors = self._blocks_on_dtensors()
        self.heads = self._plan_heads()
        self.ties = _find_ties(self.network)
        self._check_ties()

    def inside_dtensors(self, name: str) -> bool:
        return any(is_inside(name, block) for block in self.on_dtensors)

    def _check_parameters(self, owner: str, named: Mapping[str, str]) -> None:
        for parameter, style in named.items():
            if style not in PARAMETERS:
                raise ValueError(
                    f"The tensor plan gives the parameter {owner}.{parameter} the style {style!r}, which is for"
                    f" modules; parameters take one of {', '.join(PARAMETERS)}."
                )
        if self.rules.get(owner) not in ("moe_tp_experts", "local_params"):
            raise ValueError(
                f"The tensor plan cuts parameters of {owner or type(self.network).__name__} one by one"
                f" ({', '.join(named)}); give the module itself the style 'moe_tp_experts' or 'local_params'."
            )
        if self.rules[owner] == "moe_tp_experts":
            for parameter, style in named.items():
                shape = self.network.get_parameter(f"{owner}.{parameter}").shape
                dim = len(shape) - (2 if style.endswith("colwise") else 1)
                pieces = 2 if style.startswith("packed_") else 1
                if shape[dim] % (pieces * self.size):
                    raise ValueError(
                        f"tensor_parallel_size={self.size} does not fit {owner}.{parameter}: its hidden width"
                        f" {shape[dim] // pieces} does not divide by {self.size}."
                    )

    def _pair(self) -> dict[str, str]:
        columns = [
            name
            for name, rule in self.rules.items()
            if rule in ("colwise", "fused_qkv") and _is_matrix(self.network, name)
        ]
        # Where sharded work begins is for the matrix that ends it to say: a head has matrices of blocks below it too.
        blocks = set()
        for name, rule in self.rules.items():
            if rule == "rowwise" and _is_matrix(self.network, name):
                block: str | None = name
                while block is not None and not any(is_inside(column, block) for column in columns):
                    block = block.rpartition(".")[0] if block else None
                # A LightningModule's steps use its layers past its forward, so each of them must stand alone there.
                if block is not None and (block or not hasattr(self.network, "training_step")):
                    blocks.add(block)
        return {
            name: max((block for block in blocks if is_inside(name, block)), key=len)
            for name in columns
            if any(is_inside(name, block) for block in blocks)
        }

    def _blocks_on_dtensors(self) -> list[str]:
        asked = {name: rule for name, rule in self.rules.items() if rule in ("local_shapes", "global_shapes")}
        blocks = [name for name, rule in asked.items() if rule == "global_shapes"]
        for block in dict.fromkeys(self.pairs.values()):
            above = max((name for name in asked if is_inside(block, name)), key=len, default=None)
            if above is None and not takes_sizes_from_tensors(self.network.get_submodule(block)):
                blocks.append(block)
        # The outermost ones: what is inside is then on DTensors too.
        blocks = [block for block in blocks if not any(block != other and is_inside(block, other) for other in blocks)]
        for block in blocks:
            if any(is_inside(block, container) or is_inside(container, block) for container in self.containers):
                raise ValueError(
                    f"Sequence parallelism does not fit {block or 'the network'}, whose code runs on DTensors; give it"
                    " the style 'local_shapes' if it takes its sizes from its tensors, or leave sequence_parallel out."
                )
        return list(dict.fromkeys(blocks))

    def _plan_heads(self) -> dict[str, HeadPlan]:
        owners: dict[str, dict[str, nn.Module]] = {}
        for name in self.pairs:
            if not self.inside_dtensors(name):
                owner, _, child = name.rpartition(".")
                owners.setdefault(owner, {})[child] = self.network.get_submodule(name)
        plans = {}
        for owner, columns in owners.items():
            fused = {child: 3 for child in columns if self.rules[join(owner, child)] == "fused_qkv"}
            fused = {child: 2 if _is_cross_attention(self.network.get_submodule(owner)) else 3 for child in fused}
            plans[owner] = plan_heads(owner, self.network.get_submodule(owner), columns, fused, self.size)
        return plans

    def _check_ties(self) -> None:
        for names in self.ties:
            cuts = {}
            for name in names:
                owner, _, parameter = name.rpartition(".")
                module = self.network.get_submodule(owner)
                rule = self.rules.get(owner)
                # A module that only registers the parameter (BERT's bias beside its decoder) computes nothing with it.
                if rule is not None or isinstance(module, nn.Linear | nn.Embedding) or styles.is_conv1d(module):
                    cuts[name] = _cut_of(module, parameter, rule)
            if len(set(cuts.values())) > 1:
                listed = "; ".join(f"{name}: {cut}" for name, cut in cuts.items())
                raise ValueError(
                    f"The tensor plan cuts tied parameters differently ({listed}); give their modules styles that cut"
                    " alike, such as 'embedding_rowwise' for an embedding and 'colwise_gather_output' for the head."
                )


def _expand(network: nn.Module, plan: Mapping[str, Rule]) -> tuple[dict[str, Rule], dict[str, dict[str, str]]]:
    modules = [name for name, _ in network.named_modules()]
    parameters = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    rules: dict[str, Rule] = {}
    parameter_rules: dict[str, dict[str, str]] = {}
    for pattern, rule in plan.items():
        found = [name for name in modules if matches(name, pattern)]
        rules.update(dict.fromkeys(found, rule))
        if found:
            continue
        found = [name for name in parameters if matches(name, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.4) or modules[1:6]
            raise ValueError(
                f"The tensor plan names {pattern!r}, which matches no module of {type(network).__name__}; near names:"
                f" {', '.join(near) or 'none, it has no submodules'}."
            )
        for name in found:
            owner, _, parameter = name.rpartition(".")
            parameter_rules.setdefault(owner, {})[parameter] = str(rule)
    order = {name: index for index, name in enumerate(modules)}
    return dict(sorted(rules.items(), key=lambda item: order[item[0]])), parameter_rules


def _check_rule(name: str, module: nn.Module, rule: Rule, size: int) -> None:
    if isinstance(rule, ParallelStyle):
        return
    if rule not in STYLES:
        near = difflib.get_close_matches(str(rule), STYLES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"The tensor plan gives {name} the style {rule!r}, which is none of {', '.join(STYLES)}{hint}."
        )
    fits: Callable[[nn.Module], bool] | None = None
    wants = ""
    if rule in (*COLUMNS, *ROWS):
        fits, wants = _is_linear_like, "nn.Linear, nn.Embedding or GPT-2's Conv1D with their own forward"
    elif rule in EMBEDDINGS:
        fits, wants = _is_embedding, "nn.Embedding"
    elif rule == "attention":
        fits, wants = lambda m: isinstance(m, nn.MultiheadAttention), "nn.MultiheadAttention"
    if fits is not None and not fits(module):
        raise ValueError(
            f"The tensor plan gives {name}, a {type(module).__name__}, the style {rule!r}, which takes {wants}; leave"
            " it out (it is then replicated) or give it a torch ParallelStyle."
        )
    if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq or module.sparse):
        raise ValueError(
            f"{name} uses max_norm, scale_grad_by_freq or sparse, which do not work on a part of its rows."
        )
    if isinstance(module, nn.MultiheadAttention):
        check_attention(name, module, size)
    if rule == "fused_qkv":
        width = styles.output_width(module)
        if width % (3 * size) and width % (2 * size):
            raise ValueError(
                f"tensor_parallel_size={size} does not fit {name}: its {width} outputs are not three equal parts"
                f" that divide by {size}."
            )


def _is_linear_like(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return isinstance(module, nn.Embedding) or styles.is_conv1d(module)


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)


def _is_matrix(network: nn.Module, name: str) -> bool:
    module = network.get_submodule(name)
    return isinstance(module, nn.Linear) or styles.is_conv1d(module)


def _is_cross_attention(module: nn.Module) -> bool:
    return bool(getattr(module, "is_cross_attention", False))


def takes_sizes_from_tensors(module: nn.Module) -> bool:
    """Whether the module's code takes its sizes from its tensors, as that of transformers and of torch itself does."""
    return type(module).__module__.startswith(("transformers.", "torch.nn."))


def _cut_of(module: nn.Module, parameter: str, rule: Rule | None) -> str:
    if rule is None or rule in REPLICATED:
        return "whole"
    if isinstance(rule, ParallelStyle):
        return f"as {type(rule).__name__} does"
    if isinstance(module, nn.Embedding):
        return f"along {0 if rule in ('embedding_rowwise', *ROWS) else 1}"
    output_dim, input_dim = styles.matrix_dims(module)
    if parameter == "bias":
        return "along 0" if rule in COLUMNS else "whole"
    return f"along {output_dim if rule in COLUMNS else input_dim}"


def _find_ties(network: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def is_inside(name: str, block: str) -> bool:
    return not block or name == block or name.startswith(block + ".")


def join(*parts: str) -> str:
    return ".".join(filter(None, parts))
