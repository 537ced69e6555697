"""The ranks that see other tokens of the same batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class TokenRanks:
    """A process group as a module's attribute: copies of the module share it, for a group cannot be copied."""

    group: dist.ProcessGroup

    def __deepcopy__(self, _memo: Any) -> TokenRanks:
        return self


def one_token_group(found: Iterable[TokenRanks | None]) -> dist.ProcessGroup | None:
    """The group that all of them share; None if none has one."""
    groups = {ranks.group if ranks else None for ranks in found}
    if len(groups) > 1:
        raise RuntimeError("Some routers share their tokens with other ranks and some don't; call share_tokens again.")
    return groups.pop() if groups else None
