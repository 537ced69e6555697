"""Random numbers that do not depend on how many stages a network is cut into.

Code outside the chain runs on several stages, so it must draw the same numbers on all of them; a module of the chain
runs on one, and what it draws must not move the others' numbers. So generators are set, not advanced: once before
each microbatch, before each call of a chain module, and after it, to seeds that are made from (seed, step, data
rank, microbatch, place in the chain) alone. Python's and NumPy's generators are set before each microbatch only.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

BEFORE_CHAIN = -1
MAIN, MODULE = 0, 1
"""Streams: of the code around the chain, and of a chain module."""

_MASK = 2**64 - 1


class RandomStreams:
    """Sets the generators of one rank.

    Args:
        seed: The run's seed, the same on all ranks.
        data_rank: Which part of the data this rank sees, the same on all ranks of a model replica.
        device: The stages' device.
    """

    def __init__(self, seed: int, data_rank: int, device: torch.device) -> None:
        self._seed = seed
        self._data_rank = data_rank
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._generators.append(torch.cuda.default_generators[index])
        self._batch = 0

    @contextmanager
    def batch(self, kind: str, step: int) -> Iterator[None]:
        """Names the batch that runs inside, and gives the generators back as they were before it."""
        saved = [generator.get_state() for generator in self._generators]
        saved_python, saved_numpy = random.getstate(), np.random.get_state()
        named = repr((self._seed, kind, step, self._data_rank)).encode()
        self._batch = int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little")
        try:
            yield
        finally:
            for generator, state in zip(self._generators, saved, strict=True):
                generator.set_state(state)
            random.setstate(saved_python)
            np.random.set_state(saved_numpy)

    def start_microbatch(self, microbatch: int) -> None:
        """Sets every generator for the code in front of the chain."""
        key = self._key(microbatch, BEFORE_CHAIN, MAIN)
        self._set(key)
        random.seed(key)
        np.random.seed(key % 2**32)

    def enter_module(self, microbatch: int, position: int) -> None:
        """Sets torch's generators for the chain module at ``position``."""
        self._set(self._key(microbatch, position, MODULE))

    def leave_module(self, microbatch: int, position: int) -> None:
        """Sets torch's generators for the code behind the chain module at ``position``."""
        self._set(self._key(microbatch, position, MAIN))

    def _key(self, microbatch: int, position: int, stream: int) -> int:
        """The batch's key moved on by a place of its own and mixed (splitmix64), which costs less than a hash."""
        place = (microbatch << 24) + ((position + 1) << 1) + stream + 1
        mixed = (self._batch + place * 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return (mixed ^ (mixed >> 31)) >> 1

    def _set(self, key: int) -> None:
        for generator in self._generators:
            generator.manual_seed(key)
