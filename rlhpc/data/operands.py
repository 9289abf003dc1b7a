"""Problems on two numbers, parted so that what validation asks was never trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations_with_replacement
from typing import TypeVar

import numpy as np

from rlhpc.errors import DataError

Problem = TypeVar("Problem")
Pair = tuple[int, int]


def split_by_pair(
    operands: range,
    num_val_pairs: int,
    seed: int,
    problems_of: Callable[[Pair, np.random.Generator], Iterable[Problem]],
) -> tuple[list[Problem], list[Problem]]:
    """All problems as (train, validation), each in an order drawn from `seed`.

    `problems_of` makes those of one unordered pair of operands, given as (lower, higher), and may draw from the
    generator. Validation holds those of `num_val_pairs` random pairs. Raises DataError for a number that leaves either
    side empty.
    """
    pairs = list(combinations_with_replacement(operands, 2))
    if not 0 < num_val_pairs < len(pairs):
        raise DataError(f"num_val_pairs={num_val_pairs} must be between 1 and {len(pairs) - 1}")
    rng = np.random.Generator(np.random.Philox(seed))
    order = rng.permutation(len(pairs))

    def shuffled(chosen: np.ndarray) -> list[Problem]:
        problems = [problem for i in chosen for problem in problems_of(pairs[i], rng)]
        return [problems[i] for i in rng.permutation(len(problems))]

    return shuffled(order[num_val_pairs:]), shuffled(order[:num_val_pairs])
