"""Pipeline parallelism for a module that is not changed: every stage runs the user's own step up to its boundary."""

from lightning_dist.parallel.pipeline.attach import AttachedPipeline, attach_pipeline
from lightning_dist.parallel.pipeline.foreign import PipelineError
from lightning_dist.parallel.pipeline.ownership import (
    Ownership,
    SharedParameter,
    equalise_shared,
    sum_shared_gradients,
)
from lightning_dist.parallel.pipeline.placement import SCHEDULES, PipelinePlan, plan_pipeline
from lightning_dist.parallel.pipeline.random_streams import RandomStreams
from lightning_dist.parallel.pipeline.runner import Microbatches, PipelineRunner, add_gradients, new_gradients

__all__ = [
    "SCHEDULES",
    "AttachedPipeline",
    "Microbatches",
    "Ownership",
    "PipelineError",
    "PipelinePlan",
    "PipelineRunner",
    "RandomStreams",
    "SharedParameter",
    "add_gradients",
    "attach_pipeline",
    "equalise_shared",
    "new_gradients",
    "plan_pipeline",
    "sum_shared_gradients",
]
