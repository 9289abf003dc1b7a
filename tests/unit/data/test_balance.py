import heapq
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.data.balance import imbalance, partition


def greedy(costs, num_parts):
    """Longest processing time first: the usual baseline, as an independent reference."""
    heap = [(0.0, part, []) for part in range(num_parts)]
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        total, part, members = heapq.heappop(heap)
        heapq.heappush(heap, (total + costs[item], part, [*members, item]))
    return [members for _, _, members in heap]


def test_differencing_by_hand():
    # 8,7 -> (8|7) diff 1; 6,5 -> (6|5) diff 1; 4 is the largest now: 4 with (8|7) -> 8 | 7+4, diff 3;
    # with (6|5): 11+5 | 8+6 = 16 | 14. The textbook example, where the optimum would be 15 | 15.
    assert sorted(partition([8, 7, 6, 5, 4], 2)) == [[0, 2], [1, 3, 4]]


def test_three_parts_by_hand():
    # 9, 8, 7 -> (9|8|7), diff 2; then 3, 2, 1 -> (3|2|1), diff 2; merged 9+1 | 8+2 | 7+3.
    assert sorted(partition([9, 8, 7, 3, 2, 1], 3)) == [[0, 5], [1, 4], [2, 3]]


def test_equal_size_keeps_counts_where_costs_alone_would_not():
    costs = [100, 1, 1, 1, 1, 1]
    assert sorted(map(len, partition(costs, 2))) == [1, 5]
    assert sorted(map(len, partition(costs, 2, equal_size=True))) == [3, 3]


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=80), st.data())
def test_is_a_partition_into_non_empty_parts(costs, data):
    num_parts = data.draw(st.integers(1, len(costs)))
    equal_size = data.draw(st.booleans())
    parts = partition(costs, num_parts, equal_size=equal_size)
    assert len(parts) == num_parts and all(parts)
    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    assert parts == partition(costs, num_parts, equal_size=equal_size)
    if equal_size:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("num_parts", [2, 8, 32])
def test_more_even_than_greedy_on_response_lengths(num_parts):
    rng = np.random.default_rng(0)
    ours, theirs = [], []
    for _ in range(20):
        lengths = np.clip(rng.lognormal(6, 0.7, 512), 16, 4096).astype(int)
        ours.append(imbalance(lengths, partition(lengths, num_parts)) - 1)
        theirs.append(imbalance(lengths, greedy(lengths, num_parts)) - 1)
    assert np.mean(ours) < 0.25 * np.mean(theirs)
    assert np.max(ours) < 3e-3


def test_sixteen_thousand_sequences_take_under_a_second():
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 16384), 16, 8192).astype(int)
    start = time.process_time()
    parts = partition(lengths, 512)
    assert time.process_time() - start < 1.0
    assert imbalance(lengths, parts) < 1.001
