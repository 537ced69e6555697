"""Local updates: workers train alone for a while and exchange only what their weights changed by."""

from lightning_dist.parallel.local_updates.common import CommonWeights, OuterFactory, make_outer
from lightning_dist.parallel.local_updates.exchange import Compression, UpdateExchange
from lightning_dist.parallel.local_updates.limits import add_noise, clip_update
from lightning_dist.parallel.local_updates.padding import PaddedLoader
from lightning_dist.parallel.local_updates.participation import Participation, takes_part

__all__ = [
    "CommonWeights",
    "Compression",
    "OuterFactory",
    "PaddedLoader",
    "Participation",
    "UpdateExchange",
    "add_noise",
    "clip_update",
    "make_outer",
    "takes_part",
]
