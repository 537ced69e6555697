"""Mixtures of experts, on one device and spread over ranks that exchange tokens."""

from lightning_dist.parallel.expert.apply import ExpertReport, apply_expert_parallel, build_expert_mesh
from lightning_dist.parallel.expert.beside import check_beside_other_axes, leave_experts_out
from lightning_dist.parallel.expert.discovery import experts_within, find_experts, share_tokens
from lightning_dist.parallel.expert.exchange import exchange_tokens
from lightning_dist.parallel.expert.experts import Experts
from lightning_dist.parallel.expert.huggingface import save_pretrained
from lightning_dist.parallel.expert.layer import MixtureOfExperts
from lightning_dist.parallel.expert.losses import attach_loss, auxiliary_loss, load_balancing_loss, z_loss
from lightning_dist.parallel.expert.router import Routing, TopKRouter, update_expert_biases
from lightning_dist.parallel.expert.statistics import RouterStatistics, join_statistics, watch_routing

__all__ = [
    "ExpertReport",
    "Experts",
    "MixtureOfExperts",
    "RouterStatistics",
    "Routing",
    "TopKRouter",
    "apply_expert_parallel",
    "attach_loss",
    "auxiliary_loss",
    "build_expert_mesh",
    "check_beside_other_axes",
    "exchange_tokens",
    "experts_within",
    "find_experts",
    "join_statistics",
    "leave_experts_out",
    "load_balancing_loss",
    "save_pretrained",
    "share_tokens",
    "update_expert_biases",
    "watch_routing",
    "z_loss",
]
