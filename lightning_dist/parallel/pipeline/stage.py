"""One stage: the user's step as a module that torch's pipeline runtime drives, and the buffers around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from lightning_dist import _compat
from lightning_dist.parallel.pipeline.boundary import MOST_SIGNATURES, BoundaryBook
from lightning_dist.parallel.pipeline.split_backward import can_split
from lightning_dist.parallel.pipeline.timings import ActionClock, Kind


class StageModule(nn.Module):
    """The modules of one stage, and the user's step seen from it.

    It is the root for FSDP2, which has to see a forward that ends: the network's own forward is left half-way.

    Args:
        index: The stage.
        modules: Its chain modules, the user's own objects.
        loose: Parameters outside the chain, which every stage has; read by schedules that split the backward.
    """

    def __init__(self, index: int, modules: Sequence[nn.Module], loose: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.index = index
        self.chain_modules = nn.ModuleList(modules)
        self._loose = tuple(loose)
        self.run_microbatch: Callable[[int, int, tuple[Tensor, ...]], tuple[Tensor, ...]] | None = None

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        seen: set[int] = set()
        for parameter in (*super().parameters(recurse), *self._loose):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter

    def forward(self, *received: Tensor, microbatch: Tensor) -> tuple[Tensor, ...]:
        assert self.run_microbatch is not None
        return self.run_microbatch(self.index, int(microbatch), received)


class BoundaryStage(PipelineStage):
    """torch's ``PipelineStage`` with a buffer for each microbatch of its own shape, made when it is needed.

    torch's stage fixes one shape for all microbatches and allocates the buffers of all of them at once, which breaks
    ragged batches and holds for 1F1B what only GPipe should hold.

    Args:
        module: The stage.
        num_stages: Stages of the pipeline.
        device: Where it computes.
        group: The pipeline's ranks.
        schedule_rank: This rank's place in torch's schedules.
        group_rank_of: The rank in ``group`` of each place in torch's schedules.
        book: What crosses the boundaries.
        reduce_gradients: Asked at the end of each batch: whether gradients are exchanged over the data ranks now.
        clock: Asked at each action: what notes its times, or None.
    """

    observers: ClassVar[list[Callable[[Kind], AbstractContextManager[None]]]] = []
    """For telemetry: the last of them gives what every stage's actions run in; not where a clock measures."""

    def __init__(
        self,
        module: StageModule,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        schedule_rank: int,
        group_rank_of: Sequence[int],
        book: BoundaryBook,
        reduce_gradients: Callable[[], bool],
        clock: Callable[[], ActionClock | None],
    ) -> None:
        nothing = torch.empty(0, device=device)  # given so that torch infers nothing; replaced for every microbatch
        super().__init__(module, module.index, num_stages, device, input_args=nothing, output_args=nothing, group=group)
        self.group_rank = schedule_rank
        self._group_rank_of = group_rank_of
        self._book = book
        self._reduce_gradients = reduce_gradients
        self._clock = clock
        self._weights_done: set[int] = set()
        self._splits: dict[Any, bool] = {}

    def _measured(self, kind: Kind, microbatch: int) -> AbstractContextManager[None]:
        clock = self._clock()
        if clock is None and self.observers:
            return self.observers[-1](kind)
        return clock.measure(kind, self.stage_index, microbatch) if clock is not None else nullcontext()

    def _resolve_peer_global_rank(self, stage_idx: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, self._peer(stage_idx))

    def _peer(self, stage: int) -> int:
        return self._group_rank_of[self.stage_index_to_group_rank[stage]]

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        self.args_recv_info = {microbatch: () for microbatch in range(num_microbatches)}

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        return ()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        source = self.stage_index - 1
        spec = self._book.incoming(source, fwd_chunk_id, self._peer(source))
        self.args_recv_info[fwd_chunk_id] = tuple(
            _compat.pipeline_input(
                f"output {index} of stage {source}",
                source,
                torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device),
                tensor.requires_grad,
            )
            for index, tensor in enumerate(spec.output.tensors)
        )
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self.args_recv_info[mb_index] = tuple(
            _compat.pipeline_input("", self.stage_index - 1, tensor.detach(), tensor.requires_grad)
            for tensor in prev_stage_outputs
        )

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        self._book.announce(self.stage_index, fwd_chunk_id, self._peer(self.stage_index + 1))
        output, _ = self.fwd_cache[fwd_chunk_id]
        self.act_send_info = {index: [self.stage_index + 1] for index in range(len(output))}
        return super().get_fwd_send_ops(fwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._measured("forward", fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward:
            # Nothing will ask for the inputs again, and the output only as far as it is still to be sent.
            self.args_recv_info[fwd_chunk_id] = ()
            self.fwd_cache = {fwd_chunk_id: self.fwd_cache[fwd_chunk_id]}
        return output

    def _prepare_gradients(self, microbatch: int) -> None:
        if self.grad_recv_info.get(microbatch):
            return
        spec = self._book.outgoing(self.stage_index, microbatch)
        source = self.stage_index + 1
        self.grad_recv_info[microbatch] = tuple(
            _compat.pipeline_input(
                f"gradient {index} of stage {source}",
                source,
                torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device),
                False,
            )
            if tensor.requires_grad
            else _compat.no_pipeline_input(f"gradient {index} of stage {source}", source)
            for index, tensor in enumerate(spec.output.tensors)
        )

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        self._prepare_gradients(bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        self._prepare_gradients(mb_index)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        inputs = self.args_recv_info[bwd_chunk_id]
        metas = tuple(info.tensor_meta for info in inputs)
        self._stage_meta.inputs = metas  # type: ignore[assignment]
        if not full_backward and not self.is_first and not self._can_split(bwd_chunk_id, loss):
            self._weights_done.add(bwd_chunk_id)
            full_backward = True
        with self._measured("backward" if full_backward or self.is_first else "input", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.grad_recv_info[bwd_chunk_id] = ()

    def _can_split(self, microbatch: int, loss: Tensor | None) -> bool:
        kind = self._book.kind(microbatch)
        if kind not in self._splits:
            if len(self._splits) >= MOST_SIGNATURES:
                self._splits.clear()
            outputs, inputs = self.fwd_cache[microbatch]
            self._splits[kind] = can_split(outputs if loss is None else [loss], inputs)
        return self._splits[kind]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id in self._weights_done:
            self._weights_done.discard(bwd_chunk_id)
            return
        with self._measured("weights", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        # torch keeps a placeholder for each microbatch of the batch
        self.dw_runner.pop(bwd_chunk_id, None)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        gradients = super().get_local_bwd_output(mb_index)
        self.args_recv_info[mb_index] = ()
        return gradients

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        inputs = self.args_recv_info[bwd_chunk_id]
        self.args_recv_info[bwd_chunk_id] = ()
        self.grad_send_info = [self.stage_index - 1] * len(inputs)
        self._stage_meta.input_grads = tuple(
            info.tensor_meta if info.tensor_meta is not None and info.tensor_meta.requires_grad else None
            for info in inputs
        )
        gradients = self.bwd_cache[bwd_chunk_id]
        self.bwd_cache[bwd_chunk_id] = tuple(
            gradient.contiguous() if gradient is not None else None for gradient in gradients
        )
        return super().get_bwd_send_ops(bwd_chunk_id)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self._reduce_gradients():
            super().perform_reduce_grad(1)
