"""DAPO's soft punishment of answers that come near the length limit (arXiv 2503.14476 eq. 13)."""

from __future__ import annotations


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int, factor: float) -> float:
    """What is added to the reward of an answer of `num_tokens` <= `max_tokens`, from -factor to 0.

    0 up to `buffer_tokens` before the limit, then falling linearly to -factor at the limit.
    """
    exceed = num_tokens - (max_tokens - buffer_tokens)
    return -factor * exceed / buffer_tokens if exceed > 0 else 0.0
