"""Stage 1, partition: which layout to take, what it will cost, and why the others were rejected."""

from lightning_dist.advisor.advise import Advice, Missing, advise, choose_layout
from lightning_dist.advisor.candidate import Candidate, Estimate, Memory, StepTime
from lightning_dist.advisor.cluster import Cluster, Link
from lightning_dist.advisor.profile import ModelProfile, Precision
from lightning_dist.advisor.search import Rejection

__all__ = [
    "Advice",
    "Candidate",
    "Cluster",
    "Estimate",
    "Link",
    "Memory",
    "Missing",
    "ModelProfile",
    "Precision",
    "Rejection",
    "StepTime",
    "advise",
    "choose_layout",
]
