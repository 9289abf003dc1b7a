"""Which checkpoints stay: the newest, every so many steps, the best. Pure; standard library only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isnan


def retained(
    steps: Collection[int],
    whole: Collection[int],
    scores: Mapping[int, float],
    *,
    newest: int,
    every: int = 0,
    best: int = 0,
    mode: str = "max",
) -> set[int]:
    """The steps to keep. Of those that are `whole`: the `newest` ones, and the `best` by `scores`, the largest with
    mode "max", the smallest with "min"; of all: those that `every` divides (0: none for that), and what is newer than
    the oldest of the newest whole ones, damaged or not.

    Only whole steps have scores; NaN is never among the best, and of equal ones the newer are. Where fewer are whole
    than should stay, everything stays. Raises ValueError for newest=0.
    """
    if newest < 1:
        raise ValueError(f"newest={newest} would delete the only checkpoint; choose 1 or more")
    if len(whole) < newest:
        return set(steps)
    oldest = sorted(whole)[-newest]
    sign = 1.0 if mode == "max" else -1.0
    ranked = sorted(((sign * score, step) for step, score in scores.items() if not isnan(score)), reverse=True)
    kept = {step for step in steps if step >= oldest or (every and step % every == 0)}
    return kept | {step for _, step in ranked[:best]}
