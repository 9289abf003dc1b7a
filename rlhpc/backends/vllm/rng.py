"""Keeps the engine's random numbers and the process's apart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import xxhash

_MASK_63 = (1 << 63) - 1


def hash64(*values: int) -> int:
    """A non-negative 63-bit hash of integers, the same on every machine and in every process."""
    data = b"".join(value.to_bytes(16, "little", signed=True) for value in values)
    return xxhash.xxh3_64_intdigest(data) & _MASK_63


@contextmanager
def isolated_rng(seed: int, device: str) -> Iterator[None]:
    """Gives torch's, numpy's and Python's global generators a state that `seed` determines; restores theirs after.

    Ranks of one replica sample together and must draw the same numbers, while a trainer in the same process has
    moved each rank's generators differently and must find them where it left them.
    """
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
