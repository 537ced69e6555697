"""The only door to private API of torch and Lightning, with the versions each entry was tested on.

Tested on torch 2.13 and Lightning 2.6.6.
"""

from __future__ import annotations

import copy
import datetime
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def _missing(what: str, package: str) -> ImportError:
    version = torch.__version__ if package == "torch" else _lightning_version()
    return ImportError(f"lightning_dist needs {what}, which {package} {version} does not have; see _compat.py.")


def _lightning_version() -> str:
    from lightning import __version__

    return __version__


def flatten_mesh(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """The one-dimensional mesh over ``axes`` of ``mesh`` (torch 2.13: ``DeviceMesh._flatten``)."""
    if len(axes) == 1:
        return mesh[axes[0]]
    return mesh[axes]._flatten(name)


def replicate_module(module: nn.Module, *, mesh: DeviceMesh, ignored_params: set[nn.Parameter] | None = None) -> None:
    """Whole copies on FSDP2's machinery: gradients are all-reduced as backward makes them (torch 2.13)."""
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError as error:
        raise _missing("torch.distributed._composable.replicate_with_fsdp", "torch") from error
    replicate(module, mesh=mesh, ignored_params=ignored_params)


def initialise_fsdp_root(module: nn.Module) -> None:
    """Makes ``module`` the root of its FSDP tree now, not at whatever forward happens to come first (torch 2.13)."""
    module._get_fsdp_state()._lazy_init()  # type: ignore[operator, union-attr]


def default_store() -> dist.Store:
    """The key-value store through which the default process group met (torch 2.13)."""
    return dist.distributed_c10d._get_default_store()


def broadcast_flattened(tensors: list[torch.Tensor], group: dist.ProcessGroup | None, source: int) -> None:
    """Broadcasts tensors of any dtype in buckets of 64 MiB (torch 2.13: ``dist._broadcast_coalesced``)."""
    world = group or dist.distributed_c10d._get_default_group()
    dist._broadcast_coalesced(world, tensors, 64 * 2**20, source)


def default_timeout() -> datetime.timedelta:
    """How long torch lets a collective wait when nothing else is said (torch 2.13)."""
    from torch.distributed.constants import default_pg_timeout

    return default_pg_timeout


def clear_dtensor_caches() -> None:
    """Forgets what DTensor remembers about earlier meshes (torch 2.11 to 2.13).

    Meshes of one shape compare equal whatever their process groups are, so a process that destroys its groups and
    builds new ones would be handed cached results that name the old groups.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    for clear in (
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
        getattr(getattr(_redistribute, "_gen_transform_infos", None), "cache_clear", None),
    ):
        if clear is not None:
            clear()


def epoch_metrics(trainer: Any) -> dict[str, Any]:
    """What ``self.log`` has collected for the end of this epoch, by name (Lightning 2.6: ``trainer._results``)."""
    results = trainer._results or {}
    return {
        name: metric
        for name, metric in results.items()
        if metric.is_tensor and metric.meta.on_epoch and not metric.meta.sync.rank_zero_only and not metric.has_reset
    }


def names_logged(trainer: Any) -> set[str]:
    """What ``self.log`` was called with in the loop that runs (Lightning 2.6: ``trainer._results``)."""
    return {metric.meta.name for metric in (trainer._results or {}).values()}


def synchronise_metric(metric: Any) -> None:
    """Computes an epoch's logged value over all ranks, as with ``sync_dist=True``, this once (Lightning 2.6)."""
    sync = metric.meta.sync
    if sync.should:
        return
    sync.should, metric._computed = True, None
    try:
        metric.compute()
    finally:
        sync.should = False


def subprocess_launcher(environment: Any, num_processes: int, num_nodes: int) -> Any:
    """Starts this script again once for each further rank of this node (Lightning 2.6)."""
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    return _SubprocessScriptLauncher(environment, num_processes, num_nodes)


def init_process_group(environment: Any, backend: str, timeout: datetime.timedelta, device: torch.device) -> None:
    """Meets the other ranks at the cluster environment's address (Lightning 2.6: ``_init_dist_connection``).

    torchrun keeps one store over all restarts of a job, with the addresses of the processes that died in it; a rank
    that reads such an address before its new owner has written there waits for ever (torch 2.13). So each restart has
    keys of its own.
    """
    from lightning.fabric.utilities.distributed import _init_dist_connection

    device_id = device if device.type != "cpu" else None
    settings: dict[str, Any] = {}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not dist.is_initialized():
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        agent = dist.TCPStore(address, port, environment.world_size(), is_master=False, timeout=timeout)
        settings["store"] = dist.PrefixStore(f"lightning_dist/attempt {attempt}", agent)
    _init_dist_connection(environment, backend, timeout=timeout, device_id=device_id, **settings)


def worker_init_function(rank: int) -> Any:
    """Seeds a dataloader worker from its rank and number (Lightning: ``pl_worker_init_function``)."""
    import functools

    from lightning.fabric.utilities.seed import pl_worker_init_function

    return functools.partial(pl_worker_init_function, rank=rank)


def checkpoint_item_place(info: Any) -> tuple[str, int, int]:
    """File name, first byte and length in bytes of one item of a distributed checkpoint (torch 2.11 to 2.13).

    What `Metadata.storage_data` maps to belongs to torch's file writer and has no public type.
    """
    return info.relative_path, info.offset, info.length


def pipeline_input(name: str, source: int, buffer: torch.Tensor, requires_grad: bool) -> Any:
    """What a pipeline stage receives from a neighbour, and where it puts it (torch 2.13: ``stage._RecvInfo``)."""
    from torch.distributed.pipelining._utils import _TensorMeta
    from torch.distributed.pipelining.stage import _RecvInfo

    return _RecvInfo(name, source, buffer, _TensorMeta(buffer.shape, buffer.stride(), buffer.dtype, requires_grad))


def no_pipeline_input(name: str, source: int) -> Any:
    """The place of a gradient that nobody sends, for a tensor that needs none (torch 2.13)."""
    from torch.distributed.pipelining.stage import _RecvInfo

    return _RecvInfo(name, source, None, None)


def forward_only_schedule(stages: list[Any], microbatches: int, order: dict[int, list[tuple[int, int]]]) -> Any:
    """torch's pipeline runtime with forward actions only (torch 2.13).

    Its schedules' ``eval`` crashes where a rank holds both ends of a V, and its forward-only schedule knows one stage
    for each rank.

    Args:
        stages: This rank's stages.
        microbatches: Number of microbatches.
        order: For each rank the (stage, microbatch) it runs, in order.
    """
    from torch.distributed.pipelining import schedules

    runtime = schedules._PipelineScheduleRuntime(stages, microbatches)
    actions = {
        rank: schedules._add_unshard_reshard(
            [schedules._Action(stage, schedules._ComputationType.FORWARD, microbatch) for stage, microbatch in todo]
        )
        for rank, todo in order.items()
    }
    owner = {stage: rank for rank, todo in order.items() for stage, _ in todo}
    runtime.stage_index_to_group_rank = owner
    for stage in stages:
        stage.stage_index_to_group_rank = owner
    runtime.pipeline_order_with_comms = schedules._add_send_recv(
        actions, stage_to_rank=owner.__getitem__, num_stages=len(owner)
    )
    return runtime


def fake_mode() -> Any:
    """A mode in which tensors have shapes and no values (torch 2.13: ``FakeTensorMode``)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_copy(module: nn.Module, mode: Any, keep: Iterable[object]) -> nn.Module:
    """A deep copy of a module whose tensors have no values (torch 2.13: ``FakeCopyMode``).

    Args:
        module: The module.
        mode: From :func:`fake_mode`.
        keep: Objects that the copy shares with the module (its Trainer).
    """
    from torch._subclasses.fake_tensor import FakeCopyMode

    with mode, FakeCopyMode(mode):
        return copy.deepcopy(module, {id(entry): entry for entry in keep})


@contextmanager
def optimizers_of_nothing() -> Iterator[None]:
    """Within it an optimizer may be made of no parameters: a pipeline stage may have none to train (torch 2.13)."""
    original = torch.optim.Optimizer.__init__

    def accept(self: torch.optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        params = params if isinstance(params, torch.Tensor | dict) else list(params)
        original(self, params if len(params) else [{"params": []}], defaults)

    torch.optim.Optimizer.__init__ = accept  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.optim.Optimizer.__init__ = original  # type: ignore[method-assign]


def set_context_rotation(method: str) -> None:
    """How torch's context parallelism passes keys and values on, "allgather" or "alltoall" (torch 2.11 to 2.13)."""
    try:
        from torch.distributed.tensor.experimental._attention import set_rotate_method
    except ImportError as error:
        raise _missing("torch.distributed.tensor.experimental._attention.set_rotate_method", "torch") from error
    set_rotate_method(method)


def after_backward(callback: Callable[[], None]) -> None:
    """From a gradient hook: calls back when the running backward, and what it has queued by then, is over (torch 2.13).

    Reductions of gradients finish in callbacks that hooks of later gradients queue, so this one queues itself again.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(callback))


def in_backward() -> bool:
    """Whether this thread runs a backward, as a checkpointed forward that is computed again does (torch 2.13)."""
    return torch._C._current_graph_task_id() != -1


def masks_as_with_values() -> Any:
    """A context in which Hugging Face models build the masks that they build for real tensors (transformers 5.24).

    They write a causal mask out when they see a tensor without values, where a real run tells the attention kernel.
    """
    import contextlib
    import sys
    from unittest import mock

    masking = sys.modules.get("transformers.masking_utils")
    if masking is None or not hasattr(masking, "is_tracing"):
        return contextlib.nullcontext()
    return mock.patch.object(masking, "is_tracing", lambda tensor=None: False)


def resolve_resume_path(trainer: Any, resolve: Any) -> None:
    """Asks ``resolve(path)`` which checkpoint a run goes on from, once the ranks have met; None starts afresh.

    Lightning 2.6 settles the path on each rank by itself before there is a process group, and hands it to
    ``_CheckpointConnector.resume_start``; this stands before that method for the trainer's next run.
    """
    connector = trainer._checkpoint_connector

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        del connector.resume_start
        connector.resume_start(resolve(checkpoint_path) if checkpoint_path else None, weights_only)

    connector.resume_start = resume_start


def take_over_signals(trainer: Any) -> None:
    """Ends Lightning 2.6's own exchange about SIGTERM: a broadcast and an ``.item()`` on every training batch.

    The callback that calls this handles the signal instead; :func:`give_back_signals` undoes it.
    """
    loop = trainer.fit_loop.epoch_loop
    if not hasattr(type(loop), "_broadcast_sigterm_tensor"):
        return  # Lightning before 2.6 has none
    loop._broadcast_sigterm_tensor = lambda: None


def give_back_signals(trainer: Any) -> None:
    trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)


def first_training_batch(trainer: Any) -> Any:
    """The first batch that the training data gives now (Lightning 2.6: ``fit_loop._data_source``)."""
    loader = trainer.fit_loop._data_source.dataloader()
    return next(iter(loader))


def batches_processed(trainer: Any) -> int:
    """How many batches of this epoch have been trained on, the one that just ends included (Lightning 2.6)."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)


def validation_or_epoch_end_follows(trainer: Any, *, validation: bool = True) -> bool:
    """Whether the batch that just ended is the epoch's last, or validation runs on it next (Lightning 2.6)."""
    loop = trainer.fit_loop.epoch_loop
    if loop.batch_progress.is_last_batch or loop._num_ready_batches_reached():
        return True
    return validation and bool(loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def batches_fetched_ahead(trainer: Any) -> int:
    """How many training batches wait to be trained on (Lightning 2.6 fetches one ahead where data has no length)."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def loader_states(trainer: Any) -> list[Any]:
    """The states of this rank's training loaders that have one (Lightning 2.6)."""
    loader = trainer.fit_loop._combined_loader
    return loader._state_dicts() if loader is not None else []


def set_loader_states(checkpoint: dict[str, Any], states: list[Any]) -> None:
    """Changes what the training loaders will be given as their states (the loops' state of Lightning 2.6)."""
    checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = states


def set_batches_done(checkpoint: dict[str, Any], batches: int) -> None:
    """Changes how many batches of its epoch a checkpoint counts as done (the loops' state of Lightning 2.6)."""
    current = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    behind = current["processed"] - current["completed"]
    current.update(ready=batches, started=batches, processed=batches, completed=batches - behind)


COLLECTIVES = [
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "all_gather_single",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "send",
    "recv",
    "barrier",
]


def watch_collectives(watch: Any) -> Callable[[], None]:
    """Tells ``watch`` of every collective that Python issues, and of every wait for one (torch 2.11 to 2.13).

    The classes that C++ exports for process groups and their work take attributes, which is how they are wrapped here;
    waits in C++ (DDP's reducer) are not seen.

    Args:
        watch: Has ``issued``, ``begin_wait``, ``functional_group``, ``begin_functional_wait`` and ``end_wait``, see
            ``telemetry/collectives.py``.

    Returns:
        A function that puts everything back.
    """
    from torch.distributed import _functional_collectives as functional

    originals: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, wrapper: Any) -> None:
        originals.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, wrapper)

    def issuing(name: str, original: Any) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(group, *args, **kwargs)
            watch.issued(name, group, args[0] if args else None, work)
            return work

        return call

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        token = watch.begin_wait(work)
        try:
            return original_wait(work, *args, **kwargs)
        finally:
            watch.end_wait(token)

    def resolve(*args: Any, **kwargs: Any) -> str:
        name = original_resolve(*args, **kwargs)
        watch.functional_group(name)
        return name

    def functional_wait(tensor: Any) -> Any:
        token = watch.begin_functional_wait()
        try:
            return original_functional_wait(tensor)
        finally:
            watch.end_wait(token)

    for name in COLLECTIVES:
        if name in dist.ProcessGroup.__dict__:
            replace(dist.ProcessGroup, name, issuing(name, getattr(dist.ProcessGroup, name)))
    original_wait = dist.Work.wait
    replace(dist.Work, "wait", wait)
    original_resolve, original_functional_wait = functional._resolve_group_name, functional.wait_tensor
    replace(functional, "_resolve_group_name", resolve)
    replace(functional, "wait_tensor", functional_wait)

    def put_back() -> None:
        for owner, name, original in reversed(originals):
            setattr(owner, name, original)

    return put_back


def find_group(name: str) -> dist.ProcessGroup:
    """The process group that torch knows by a name (torch 2.13: ``_resolve_process_group``)."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def collectives_issued(group: dist.ProcessGroup) -> int:
    """How many collectives a group has been given, those of C++ included (torch 2.13)."""
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """From a gradient hook: calls back when the running backward has computed its last gradient (torch 2.13)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def wraps_tensors(kind: type) -> bool:
    """Whether a class of tensors is made of others, as DTensor is (torch 2.11 to 2.13)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

    return is_traceable_wrapper_subclass_type(kind)


def watch_fetching(begin: Callable[[], Any], end: Callable[[Any], None]) -> Callable[[], None]:
    """Calls ``begin`` before a Trainer waits for a batch and ``end`` with its result after (Lightning 2.6).

    Returns:
        A function that puts everything back.
    """
    from lightning.pytorch.loops.fetchers import _DataFetcher

    original = _DataFetcher.__next__

    def fetch(self: Any) -> Any:
        token = begin()
        try:
            return original(self)
        finally:
            end(token)

    def put_back() -> None:
        _DataFetcher.__next__ = original  # type: ignore[method-assign]

    _DataFetcher.__next__ = fetch  # type: ignore[method-assign]
    return put_back


def load_directories_by(read: Callable[[str], dict[str, Any]], is_directory: Callable[[Any], bool]) -> None:
    """Lets ``LightningModule.load_from_checkpoint`` take a directory (Lightning 2.6: ``core.saving.pl_load``).

    Args:
        read: Gives Lightning's dictionary for a directory.
        is_directory: Whether a path is one.
    """
    from lightning.pytorch.core import saving

    load_file = saving.pl_load

    def load(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | os.PathLike) and is_directory(path):
            return read(os.fspath(path))
        return load_file(path, *args, **kwargs)

    saving.pl_load = load  # type: ignore[assignment]
