import random

import numpy as np
import pytest
import torch
import xxhash

from rlhpc.backends.vllm.rng import hash64, isolated_rng


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_one_state_within_and_the_callers_state_after() -> None:
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    expected_next = draw()
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    with isolated_rng(2**62 + 5, "cpu"):
        first = draw()
    torch.manual_seed(9), np.random.seed(9), random.seed(9)
    with isolated_rng(2**62 + 5, "cpu"):
        assert draw() == first
    with isolated_rng(6, "cpu"):
        assert draw() != first
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    with pytest.raises(KeyError), isolated_rng(6, "cpu"):
        draw()
        raise KeyError("the caller's state must survive an error too")
    assert draw() == expected_next


def test_hash64_is_xxh3_of_the_little_endian_values() -> None:
    data = bytes([7]) + bytes(15) + bytes([255]) * 16  # 7, -1 as 16 bytes each
    assert hash64(7, -1) == xxhash.xxh3_64_intdigest(data) % 2**63
    assert len({hash64(0, p, s) for p in range(100) for s in range(100)}) == 10_000
    assert hash64(1, 2) != hash64(2, 1) and hash64(2**64) != hash64(0)
