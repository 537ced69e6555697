"""Ranks agree through the store, also when they come to the same question again."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lightning_dist.parallel.agreement import DisagreementError, agree


def test_what_was_agreed_on_before_is_no_answer_now():
    """A second Trainer in the same processes asks the first one's questions again; rank 1 comes to them late."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:
        for value in ("train_loss", "val_loss"):
            first = ranks.submit(agree, store, "name#1", value, 0, [0, 1], 5.0)
            with pytest.raises(TimeoutError):
                first.result(timeout=0.3)
            agree(store, "name#1", value, 1, [0, 1], 5.0)
            first.result(timeout=5.0)
        first = ranks.submit(agree, store, "name#1", "a", 0, [0, 1], 5.0)
        with pytest.raises(DisagreementError, match="rank 0 has a; rank 1 has b"):
            agree(store, "name#1", "b", 1, [0, 1], 5.0)
        with pytest.raises(DisagreementError, match="rank 0 has a; rank 1 has b"):
            first.result(timeout=5.0)
