"""Splitting work into parts of nearly equal cost: Karmarkar–Karp differencing for k parts."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np

# A partial solution: its non-empty parts as (cost, node), largest first. A node: an item or a pair of nodes.
_Parts = list[tuple[float, Any]]


def imbalance(costs: Sequence[float] | np.ndarray, parts: Sequence[Sequence[int]]) -> float:
    """The largest part's cost over the mean's: 1.0 is perfectly even."""
    sums = [sum(float(costs[item]) for item in part) for part in parts]
    return max(sums) * len(sums) / sum(sums)


def partition(costs: Sequence[float] | np.ndarray, num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Splits items 0..n-1 of positive `costs` [n] into `num_parts` non-empty parts of nearly equal cost.

    Largest differencing method (Karmarkar and Karp, 1982): the two partial solutions that are least even are
    merged, the largest part of one with the smallest of the other, until one is left. With `equal_size` part
    sizes differ by at most one (balanced differencing, Yakir 1996), from blocks of `num_parts` items.
    Deterministic: equal costs keep the items' order; items ascend within a part.
    """
    assert 1 <= num_parts <= len(costs), f"num_parts={num_parts} of {len(costs)} items"
    costs = np.asarray(costs, dtype=np.float64)
    assert costs.min() > 0, "costs must be positive"
    order = np.argsort(-costs, kind="stable").tolist()
    items: _Parts = [(float(costs[item]), item) for item in order]
    block = num_parts if equal_size else 1
    heap = []
    for serial, start in enumerate(range(0, len(items), block)):
        parts = items[start : start + block]
        heap.append((-_difference(parts, num_parts), serial, parts))
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        merged = _merge(first, second, num_parts)
        heapq.heappush(heap, (-_difference(merged, num_parts), serial, merged))
        serial += 1
    return [_members(node) for _, node in heap[0][2]]


def _difference(parts: _Parts, num_parts: int) -> float:
    return parts[0][0] - (parts[-1][0] if len(parts) == num_parts else 0.0)


def _merge(first: _Parts, second: _Parts, num_parts: int) -> _Parts:
    """Largest of one onto smallest of the other; only where the non-empty parts overlap is anything added."""
    overlap = len(first) + len(second) - num_parts
    if overlap <= 0:
        merged = first + second
    else:
        kept_first, kept_second = len(first) - overlap, len(second) - overlap
        merged = first[:kept_first] + second[:kept_second]
        for (cost_a, node_a), (cost_b, node_b) in zip(first[kept_first:], reversed(second[kept_second:]), strict=True):
            merged.append((cost_a + cost_b, (node_a, node_b)))
    merged.sort(key=itemgetter(0), reverse=True)
    return merged


def _members(node: Any) -> list[int]:
    found, stack = [], [node]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        else:
            found.append(node)
    return sorted(found)
