"""DAPO's soft punishment, with the numbers of its paper."""

import pytest

from rlhpc.rewards.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0)],
)
def test_falls_linearly_over_the_last_tokens(num_tokens: int, expected: float) -> None:
    """16384 tokens are expected, the buffer is 4096: arXiv 2503.14476 section 4.1."""
    assert overlong_penalty(num_tokens, max_tokens=20480, buffer_tokens=4096, factor=1.0) == expected


def test_the_factor_scales_it() -> None:
    assert overlong_penalty(8, max_tokens=8, buffer_tokens=8, factor=0.5) == -0.5
    assert overlong_penalty(2, max_tokens=8, buffer_tokens=8, factor=0.5) == -0.125
