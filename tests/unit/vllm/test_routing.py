"""Every token's experts from what an engine was fed, by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhpc.backends.vllm.routing import chosen_experts, whole_routing
from rlhpc.errors import EngineError
from rlhpc.reshard.families import model_facts
from tests.tiny_model import tiny_config


def experts(*values: int) -> np.ndarray:
    """One layer, one expert of a token."""
    return np.array(values, np.uint8).reshape(-1, 1, 1)


def test_what_the_prefix_cache_answered_is_taken_from_who_computed_it() -> None:
    """The third lacks eight tokens; the second has seven of them, and lacks the one that the first has."""
    common = [1, 2, 3, 4, 5, 6, 7, 8]
    tokens = [np.array(ids, np.int32) for ids in ([1, 9, 9], [*common, 50, 51], [*common, 60, 61])]
    positions = [np.arange(0, 2), np.arange(1, 9), np.arange(8, 9)]
    found = [experts(100, 101), experts(*range(201, 209)), experts(38)]
    whole = whole_routing(positions, found, tokens)
    assert [routing.ravel().tolist() for routing in whole] == [
        [100, 101], [100, *range(201, 209)], [100, *range(201, 208), 38],
    ]  # fmt: skip


def test_tokens_fed_after_the_end_of_an_answer_are_left_out() -> None:
    [whole] = whole_routing([np.arange(5)], [experts(0, 1, 2, 3, 4)], [np.array([7, 8, 9])])
    assert whole.ravel().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("positions", "tokens"),
    [([0, 1, 3], [1, 2, 3, 4, 5]), ([2, 3], [1, 2, 3, 4, 5])],
    ids=["a gap", "nobody computed the beginning"],
)
def test_a_token_that_nobody_was_seen_to_route_is_no_guess(positions: list[int], tokens: list[int]) -> None:
    found = [experts(*positions), experts(1)]
    with pytest.raises(EngineError, match=r"request 0: .*set .*enable_rollout_routing_replay=false"):
        whole_routing([np.array(positions), np.array([0])], found, [np.array(tokens), np.array([1, 3])])


def test_experts_are_kept_in_as_few_bytes_as_torch_can_index() -> None:
    facts = model_facts(tiny_config())
    for num_experts, dtype, size in ((256, torch.uint8, 1), (257, torch.int16, 2)):
        wide = replace(facts, num_experts=num_experts)
        assert chosen_experts(wide).ids.dtype == dtype
        assert wide.routing_bytes == size * facts.num_layers * facts.experts_per_token
