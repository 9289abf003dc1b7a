import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.data.cursor import PromptCursor
from rlhpc.errors import DataError


def test_without_shuffle_in_order_and_the_rest_dropped():
    cursor = PromptCursor(5, 2, shuffle=False)
    assert [cursor.next() for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]
    assert cursor.batches_per_epoch == 2 and cursor.epoch == 1 and cursor.num_batches_drawn == 3


def test_each_epoch_visits_every_prompt_once_in_another_order():
    cursor = PromptCursor(12, 3, seed=1)
    epochs = [[i for _ in range(4) for i in cursor.next()] for _ in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert PromptCursor(12, 12, seed=2).next() != PromptCursor(12, 12, seed=1).next() == epochs[0]


def test_the_order_is_pinned_to_the_raw_philox_stream():
    raw = np.random.Generator(np.random.Philox(key=[7, 0])).bit_generator.random_raw(6)
    assert PromptCursor(6, 6, seed=7).next() == sorted(range(6), key=lambda i: raw[i])
    assert PromptCursor(6, 6, seed=7).next() == [4, 1, 3, 2, 5, 0]  # what earlier runs saw


def test_places_are_uniform():
    counts = np.zeros((8, 8))
    for seed in range(2000):
        counts[PromptCursor(8, 8, seed=seed).next(), range(8)] += 1
    assert abs(counts - 250).max() < 6 * np.sqrt(250)


@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(-5, 2**70),
    st.booleans(),
    st.lists(st.integers(1, 25)),
)
def test_resuming_anywhere_equals_never_stopping(num_prompts, batch_size, seed, shuffle, legs):
    batch_size = min(num_prompts, batch_size)
    whole = PromptCursor(num_prompts, batch_size, seed, shuffle)
    expected = [whole.next() for _ in range(sum(legs))]
    got, state = [], None
    for leg in legs:
        cursor = PromptCursor(num_prompts, batch_size, seed, shuffle)
        if state:
            cursor.load(json.loads(state))
        got += [cursor.next() for _ in range(leg)]
        state = json.dumps(cursor.state())
    assert got == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_prompts": 11}, "num_prompts: checkpoint 10, now 11"),
        ({"batch_size": 3}, "batch_size: checkpoint 2, now 3"),
        ({"seed": 1}, "seed: checkpoint 0, now 1"),
        ({"shuffle": False}, "shuffle: checkpoint True, now False"),
    ],
)
def test_refuses_the_state_of_other_data(change, message):
    settings = {"num_prompts": 10, "batch_size": 2, "seed": 0, "shuffle": True}
    state = PromptCursor(**settings).state()
    with pytest.raises(DataError, match=message):
        PromptCursor(**{**settings, **change}).load(state)


def test_batch_larger_than_the_dataset():
    with pytest.raises(DataError, match="train_batch_size=8 exceeds the 5 prompts.*at most 5"):
        PromptCursor(5, 8)
    with pytest.raises(DataError, match="gen_batch_size=8 exceeds .* set data.gen_batch_size to at most 5"):
        PromptCursor(5, 8, key="data.gen_batch_size")
    with pytest.raises(DataError, match="train_batch_size=0"):
        PromptCursor(5, 0)
