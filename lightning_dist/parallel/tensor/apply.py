"""Applies a tensor-parallel plan to a network, module by module, in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from lightning_dist.parallel.tensor import sequence, styles
from lightning_dist.parallel.tensor.attention import cut_attention, leave_fast_paths
from lightning_dist.parallel.tensor.dropout import RandomRegion
from lightning_dist.parallel.tensor.experts import cut_experts
from lightning_dist.parallel.tensor.global_shapes import (
    column_placements,
    row_placements,
    run_on_dtensors,
    run_on_plain_tensors,
)
from lightning_dist.parallel.tensor.heads import HeadPlan
from lightning_dist.parallel.tensor.loss import return_plain_loss
from lightning_dist.parallel.tensor.resolve import (
    COLUMNS,
    EMBEDDINGS,
    REPLICATED,
    ROWS,
    ResolvedPlan,
    Rule,
    is_inside,
    join,
    takes_sizes_from_tensors,
)
from lightning_dist.parallel.tensor.styles import TensorGroup


@dataclass(frozen=True)
class TensorParallelReport:
    """What was done to a network.

    Args:
        styles: The style of each module that the plan names.
        on_dtensors: Blocks whose code runs on DTensors with whole shapes.
        replicated: Parameters held whole by every rank, each rank computing the same gradient.
        summed: Parameters held whole whose gradients are parts of a sum until `sum_replicated_gradients`.
        tied: Parameters of two names, which stay one.
        sharded_logits: Whether the network returns logits cut along the classes (a DTensor); a loss that is computed
            outside of its forward then needs `sharded_loss` around it.
    """

    styles: Mapping[str, str]
    on_dtensors: tuple[str, ...]
    replicated: tuple[str, ...]
    summed: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    sharded_logits: bool


def apply_tensor_parallel(network: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Rule]) -> TensorParallelReport:
    """Spreads the layers of ``network`` over the tensor axis of ``mesh``, in place; call it before FSDP2.

    Parameters become DTensors on the tensor mesh, cut or replicated, under their own names, and tied parameters stay
    tied. Plain stay those of recurrent layers and those that a LightningModule itself owns. Weights are taken as equal
    on the ranks of the tensor group (see ``equalise_weights``); each keeps its part. A network on the meta device
    works too. Module names and class names stay.

    No collectives here; each style's function names those of its forward and backward.

    Args:
        network: The network; it must not hold DTensors yet.
        mesh: A mesh with an axis ``tensor``, or a one-dimensional one.
        plan: Style of modules, by name with ``*`` for one part of it: a name out of `STYLES` (Hugging Face's and a
            few of ours) or a torch ``ParallelStyle``; a later entry wins. An entry may name a parameter.

    Raises:
        ValueError: Before anything is changed, on every rank alike: a name that matches nothing, an unknown style, a
            style that does not fit its module, heads that do not divide by the number of ranks, tied parameters with
            different cuts.
    """
    tensor_mesh = mesh["tensor"] if "tensor" in (mesh.mesh_dim_names or ()) and mesh.ndim > 1 else mesh
    plan_of = ResolvedPlan(network, plan, tensor_mesh.size())
    group = TensorGroup(tensor_mesh, RandomRegion(tensor_mesh.get_local_rank()))
    return _Application(network, group, plan_of).run()


class _Application:
    """One pass over the network, in the order in which changes must happen."""

    def __init__(self, network: nn.Module, group: TensorGroup, plan: ResolvedPlan) -> None:
        self._network = network
        self._group = group
        self._plan = plan
        self._on_parts: dict[str, TensorGroup] = {}  # modules on tokens of this rank, and the group inside of them
        self._summed: set[str] = set()
        # Where sharded work may draw random numbers: blocks of pairs, and lists of blocks under sequence parallelism.
        drawing = (*dict.fromkeys(plan.pairs.values()), *plan.containers)
        self._own_random = {block for block in drawing if _may_drop(network, block)}

    def run(self) -> TensorParallelReport:
        self._mark_sequence_parallel()
        for name, rule in self._plan.rules.items():
            module = self._network.get_submodule(name)
            if isinstance(rule, ParallelStyle):
                parallelize_module(module, self._group.mesh, rule, src_data_rank=None)
            elif not self._plan.inside_dtensors(name):
                self._apply(name, module, rule)
            elif rule in ("attention", "moe_tp_experts", *EMBEDDINGS):
                self._apply(name, module, rule)
                run_on_plain_tensors(module, self._group)
        for owner, heads in self._plan.heads.items():
            for attribute, value in heads.attributes.items():
                setattr(self._network.get_submodule(owner), attribute, value)
        for block in self._plan.on_dtensors:
            run_on_dtensors(self._network.get_submodule(block), self._group, self._placements_in(block))
        for block in dict.fromkeys(self._plan.pairs.values()):
            if block in self._own_random and not self._plan.inside_dtensors(block):
                styles.close_random_region(self._network.get_submodule(block), self._group)
        self._tie_again()
        replicated = self._replicate_the_rest()
        self._apply_sequence_parallel()
        leave_fast_paths(self._network)
        classifiers = [name for name, rule in self._plan.rules.items() if rule == "loss_parallel"]
        for owner in dict.fromkeys(name.rpartition(".")[0] for name in classifiers):
            return_plain_loss(self._network.get_submodule(owner))
        return TensorParallelReport(
            styles={name: str(rule) for name, rule in self._plan.rules.items()},
            on_dtensors=tuple(self._plan.on_dtensors),
            replicated=tuple(name for name in replicated if name not in self._summed),
            summed=tuple(name for name in replicated if name in self._summed),
            tied=tuple(tuple(names) for names in self._plan.ties),
            sharded_logits=bool(classifiers),
        )

    def _apply(self, name: str, module: nn.Module, rule: str) -> None:
        group = self._group_at(name)
        paired = name in self._plan.pairs
        ends = self._block_that_ends_with(name) is not None
        block = self._plan.pairs.get(name) or self._block_that_ends_with(name)
        random = block in self._own_random and not self._under_sequence_parallel(name)
        if isinstance(module, nn.Embedding):
            cut_by_rows = rule in ("embedding_rowwise", *ROWS)
            (styles.cut_vocabulary if cut_by_rows else styles.cut_embedding_width)(module, group)
        elif rule in COLUMNS:
            owner, _, child = name.rpartition(".")
            heads = self._plan.heads.get(owner, HeadPlan())
            # What nobody cuts by inputs afterwards is wanted whole, where the code knows nothing of parts.
            lone = not paired and not takes_sizes_from_tensors(self._network.get_submodule(owner))
            styles.cut_columns(
                module,
                group,
                gather_output=rule in ("colwise_gather_output", "colwise_rep") or (lone and rule == "colwise"),
                keep_dtensor=rule == "loss_parallel",
                rows=heads.rows.get(child),
                own_random=random and paired,
            )
        elif rule in ROWS:
            lone = not ends and not takes_sizes_from_tensors(self._network.get_submodule(name.rpartition(".")[0]))
            styles.cut_rows(
                module, group, split_input=rule != "rowwise" or lone, ends_random=random and ends and not lone
            )
        elif rule == "replicated_with_grad_allreduce":
            self._summed.update(join(name, parameter) for parameter in module._parameters)
            styles.replicate_on_parts(module, group)
        elif rule == "attention":
            cut_attention(module, group)  # type: ignore[arg-type]
        elif rule == "moe_tp_experts":
            cut_experts(module, group, self._plan.parameter_rules.get(name, {}))
        elif rule == "moe_identity_expert":
            styles.divide_input(module, group)
        elif rule == "all_reduce":
            styles.sum_output(module, group)
        elif rule == "local_params":
            named = self._plan.parameter_rules.get(name, {})
            styles.cut_parameters(module, group, {key: _parameter_cut(module, key, how) for key, how in named.items()})
        elif rule == "mla_kv_a_proj":
            owner_module = self._network.get_submodule(name.rpartition(".")[0])
            styles.replicate_with_rotary_tail(module, group, owner_module.qk_rope_head_dim)  # type: ignore[arg-type]

    def _block_that_ends_with(self, name: str) -> str | None:
        """The innermost block of a pair around a matrix that is cut by its inputs."""
        return max((block for block in self._plan.pairs.values() if is_inside(name, block)), key=len, default=None)

    def _placements_in(self, block: str) -> dict[str, dict[str, Any]]:
        placements = {}
        for name, rule in self._plan.rules.items():
            if not is_inside(name, block) or not isinstance(rule, str):
                continue
            relative = name[len(block) + 1 :] if block else name
            module = self._network.get_submodule(name)
            if rule in COLUMNS:
                placements[relative] = column_placements(module)
            elif rule in ROWS:
                placements[relative] = row_placements(module)
        return placements

    def _tie_again(self) -> None:
        for names in self._plan.ties:
            first = next((p for name in names if isinstance(p := self._network.get_parameter(name), DTensor)), None)
            if first is None:
                continue
            for name in names:
                owner, _, parameter = name.rpartition(".")
                setattr(self._network.get_submodule(owner), parameter, first)

    def _replicate_the_rest(self) -> list[str]:
        replicated = []
        for name, module in self._network.named_modules():
            own = [key for key, value in module._parameters.items() if value is not None]
            if not own:
                continue
            names = [join(name, key) for key in own]
            replicated += [key for key in names if _is_whole(self._network.get_parameter(key))]
            if isinstance(module, nn.RNNBase):
                continue  # it keeps a list of its weights of its own, which would go stale
            if not name and hasattr(module, "training_step"):
                continue  # a LightningModule's steps use its own parameters past its forward
            if any(not isinstance(value, DTensor) for value in module._parameters.values() if value is not None):
                if name in self._on_parts:
                    self._summed.update(names)
                    styles.replicate_on_parts(module, self._group)
                else:
                    styles.replicate(module, self._group)
        return replicated

    # Sequence parallelism: a container's blocks hold parts of the sequence, except inside attention and MLP.

    def _mark_sequence_parallel(self) -> None:
        cut = TensorGroup(self._group.mesh, self._group.random, sequence_dim=1)
        for container in self._plan.containers:
            for index, block in enumerate(self._network.get_submodule(container).children()):
                name = f"{container}.{index}"
                inner = {}
                for child, _ in block.named_children():
                    rules = [rule for key, rule in self._plan.rules.items() if is_inside(key, f"{name}.{child}")]
                    if any(rule in COLUMNS or rule == "moe_tp_experts" for rule in rules):
                        plain = all(rule in (*COLUMNS, *ROWS, *REPLICATED) for rule in rules)
                        inner[f"{name}.{child}"] = cut if plain else self._group
                if not inner:
                    raise ValueError(
                        f"Sequence parallelism finds nothing to cut in {name}: the tensor plan gives none of its"
                        " children a style such as 'colwise'."
                    )
                for key, _ in block.named_modules(prefix=name):
                    if not any(is_inside(key, child) for child in inner):
                        self._on_parts[key] = cut
                self._on_parts.update({f"{child}.": group for child, group in inner.items()})

    def _group_at(self, name: str) -> TensorGroup:
        for child, group in self._on_parts.items():
            if child.endswith(".") and is_inside(name, child[:-1]):
                return group
        return self._group

    def _under_sequence_parallel(self, name: str) -> bool:
        return any(is_inside(name, container) for container in self._plan.containers)

    def _apply_sequence_parallel(self) -> None:
        cut = TensorGroup(self._group.mesh, self._group.random, sequence_dim=1)
        for name in [key[:-1] for key in self._on_parts if key.endswith(".")]:
            sequence.gather_inside(self._network.get_submodule(name), cut)
        for container in self._plan.containers:
            blocks = list(self._network.get_submodule(container).children())
            if container in self._own_random:
                for block in blocks:
                    sequence.draw_own_numbers(block, cut)
            sequence.cut_before(blocks[0], cut)
            sequence.gather_after(blocks[-1], cut)


def _parameter_cut(module: nn.Module, name: str, style: str) -> Placement:
    parameter = module._parameters[name]
    assert parameter is not None
    if style == "replicate":
        return Replicate()
    return Shard(max(parameter.dim() - 2, 0) if style == "colwise" else parameter.dim() - 1)


def _may_drop(network: nn.Module, block: str) -> bool:
    """Whether dropout may be on inside a block; only a Hugging Face config can tell that no plain function does it."""
    if any(m.p > 0 for m in network.get_submodule(block).modules() if isinstance(m, nn.modules.dropout._DropoutNd)):
        return True
    parts = block.split(".")
    for length in range(len(parts), -1, -1):
        config = getattr(network.get_submodule(".".join(parts[:length])), "config", None)
        if hasattr(config, "to_dict"):
            settings: dict[str, Any] = config.to_dict()  # type: ignore[union-attr]
            return any("drop" in key and isinstance(value, float) and value > 0 for key, value in settings.items())
    return True


def _is_whole(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, DTensor) or all(placement.is_replicate() for placement in parameter.placements)
