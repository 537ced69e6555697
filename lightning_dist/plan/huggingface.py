"""Tensor-parallel plans that need not be written: Hugging Face's own, ours for families that ship none, torch's layers.

Styles are names, so nothing here needs a process group; `lightning_dist.parallel.tensor` applies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_dist.plan.model_plan import matches

# Keys are relative to the base model; heads are relative to the model that has one.
_GPT2 = {
    "wte": "embedding_rowwise",
    "h.*.attn.c_attn": "fused_qkv",
    "h.*.attn.c_proj": "rowwise",
    "h.*.crossattention.q_attn": "colwise",
    "h.*.crossattention.c_attn": "fused_qkv",
    "h.*.crossattention.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}
_BERT = {
    "embeddings.word_embeddings": "embedding_rowwise",
    "encoder.layer.*.attention.self.query": "colwise",
    "encoder.layer.*.attention.self.key": "colwise",
    "encoder.layer.*.attention.self.value": "colwise",
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.crossattention.self.query": "colwise",
    "encoder.layer.*.crossattention.self.key": "colwise",
    "encoder.layer.*.crossattention.self.value": "colwise",
    "encoder.layer.*.crossattention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}
_VIT = {
    "layers.*.attention.q_proj": "colwise",
    "layers.*.attention.k_proj": "colwise",
    "layers.*.attention.v_proj": "colwise",
    "layers.*.attention.o_proj": "rowwise",
    "layers.*.mlp.fc1": "colwise",
    "layers.*.mlp.fc2": "rowwise",
}
_OURS: dict[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "gpt2": (_GPT2, {"lm_head": "colwise_gather_output"}),
    "bert": (_BERT, {"cls.predictions.decoder": "colwise_gather_output"}),
    "vit": (_VIT, {}),
}
_ADDITIONS = ("sequence_parallel", "loss_parallel", "local_shapes", "global_shapes")
_TORCH_LAYER = {"linear1": "colwise", "linear2": "rowwise", "self_attn": "attention", "multihead_attn": "attention"}


def find_tensor_plan(network: nn.Module, *, sequence_parallel: bool = False) -> dict[str, str]:
    """The tensor-parallel style of each module of ``network`` that should have one.

    Looked for, in ``network`` and in what it contains: a Hugging Face model's own plan (``tp_plan``), our plans for
    gpt2, bert and vit, and torch's transformer layers.

    Args:
        network: The network, a single model or a module that contains some.
        sequence_parallel: Also cut activations between the blocks along the sequence.

    Returns:
        Style names by module (or parameter) name, ``*`` for the index of a layer.

    Raises:
        ValueError: If there is none; lists the linear layers and a plan to start from.
    """
    plan: dict[str, str] = {}
    blocks: list[str] = []
    done: list[str] = []
    for name, module in network.named_modules():
        if any(name == other or name.startswith(other + ".") for other in done) or "" in done:
            continue
        found = _plan_of(module)
        if found:
            done.append(name)
            prefix = f"{name}." if name else ""
            plan.update({prefix + key: style for key, style in found.items()})
            blocks += [prefix + key for key in _block_lists(module, found)]
    if not plan:
        raise ValueError(describe_missing_plan(network))
    if sequence_parallel:
        if not blocks:
            raise ValueError(f"{type(network).__name__} has no list of like blocks to cut the sequence in.")
        plan.update(dict.fromkeys(blocks, "sequence_parallel"))
    return plan


def complete_tensor_plan(network: nn.Module, written: Mapping[str, Any] | None) -> dict[str, Any]:
    """The plan to use, given what a user wrote: all of it, or additions to what is found.

    A plan that cuts no matrix by itself, but only says how (``"sequence_parallel"`` for a list of blocks,
    ``"loss_parallel"`` for a head, ``"local_shapes"``, ``"global_shapes"``), is added to the one that is found.

    Raises:
        ValueError: See :func:`find_tensor_plan`.
    """
    if not written:
        return dict(find_tensor_plan(network))
    if all(style in _ADDITIONS for style in written.values()):
        return find_tensor_plan(network) | dict(written)
    return dict(written)


def describe_missing_plan(network: nn.Module) -> str:
    """What to tell a user whose network has no plan: its linear layers, and a plan to start from."""
    layers: dict[str, tuple[int, int]] = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            layers.setdefault(_wildcard(name, network), (module.in_features, module.out_features))
    if not layers:
        return (
            f"{type(network).__name__} has no tensor-parallel plan and no nn.Linear to cut; use another layout, or give"
            " ModelPlan(tensor={...}) with torch ParallelStyle objects."
        )
    listed = "\n".join(f"  {name}: {inputs} -> {outputs}" for name, (inputs, outputs) in layers.items())
    start = _plan_to_start_from(layers)
    entries = "\n".join(f'    "{name}": "{style}",' for name, style in start.items())
    return (
        f"{type(network).__name__} has no tensor-parallel plan. Its linear layers are\n{listed}\nGive a plan, starting"
        f' from this one ("colwise" cuts outputs, "rowwise" inputs; what is not named is replicated):\n'
        f"ModelPlan(tensor={{\n{entries}\n}})"
    )


def _plan_of(module: nn.Module) -> dict[str, str]:
    config = getattr(module, "config", None)
    family = getattr(config, "model_type", None)
    if family is not None and hasattr(module, "base_model_prefix"):
        own = getattr(module, "tp_plan", None)
        return _existing(module, own) if own else _ours(module, family)
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return _existing(module, _TORCH_LAYER)
    return {}


def _ours(model: nn.Module, family: str) -> dict[str, str]:
    if family not in _OURS:
        return {}
    base_plan, heads = _OURS[family]
    prefix = getattr(model, "base_model_prefix", "")
    base = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    return _existing(model, {base + key: style for key, style in base_plan.items()} | dict(heads))


def _existing(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The plan without entries for modules this model does not have, such as dense layers in a family of experts."""
    names = {_wildcard(name, module) for name, _ in module.named_modules()}
    names |= {_wildcard(name, module) for name, _ in module.named_parameters(remove_duplicate=False)}
    return {key: style for key, style in plan.items() if any(matches(name, key) for name in names)}


def _block_lists(module: nn.Module, plan: Mapping[str, str]) -> list[str]:
    """Names of the lists of blocks in which the plan cuts something."""
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, nn.ModuleList)
        and len(child)
        and any(_matches_start(key, name) and style in ("rowwise", "fused_qkv") for key, style in plan.items())
    ]


def _plan_to_start_from(layers: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """A guess: in each group of layers with one parent, the last is cut by inputs and those before it by outputs."""
    groups: dict[str, list[str]] = {}
    for name in layers:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    start: dict[str, str] = {}
    for names in groups.values():
        if len(names) > 1:
            start.update(dict.fromkeys(names[:-1], "colwise"))
            start[names[-1]] = "rowwise"
    if not start:
        start = {name: "colwise_gather_output" for name in layers}
    return start


def _wildcard(name: str, network: nn.Module) -> str:
    """``name`` with ``*`` for its places in module lists."""
    parts = name.split(".")
    parents = [".".join(parts[:index]) for index in range(len(parts))]
    return ".".join(
        "*" if part.isdigit() and isinstance(network.get_submodule(parent), nn.ModuleList) else part
        for part, parent in zip(parts, parents, strict=True)
    )


def _matches_start(pattern: str, name: str) -> bool:
    wanted = pattern.split(".")[: name.count(".") + 1]
    return matches(name, ".".join(wanted)) and pattern.count(".") > name.count(".")
