"""Lightning Callback classes: settings and short hooks that call what ``telemetry`` and ``checkpoint`` do."""

from lightning_dist.callbacks.checkpoint import FaultTolerantCheckpoint
from lightning_dist.callbacks.pipeline_drawing import PipelineDrawing
from lightning_dist.callbacks.router_health import RouterHealth
from lightning_dist.callbacks.run_record import RunRecord, record_event
from lightning_dist.callbacks.stall import SyncStallDetector
from lightning_dist.callbacks.stop_rules import StopRules
from lightning_dist.callbacks.weight_averaging import ShardedWeightAveraging

__all__ = [
    "FaultTolerantCheckpoint",
    "PipelineDrawing",
    "RouterHealth",
    "RunRecord",
    "ShardedWeightAveraging",
    "StopRules",
    "SyncStallDetector",
    "record_event",
]
