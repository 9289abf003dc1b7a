"""Router replay in Megatron's own router function: any score function, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from rlhpc.backends.megatron.replay import Replay, Routing
from rlhpc.data.packing import TokenSequence, pack

LOGITS = torch.tensor([[2.0, 1.0, 0.5, -1.0], [0.0, 3.0, 1.0, 2.0], [1.0, -1.0, 0.0, 2.0]])
OWN = [[0, 1], [1, 3], [3, 0]]  # of the two largest logits
ENGINE = torch.tensor([[2, 0], [3, 1], [1, 2]], dtype=torch.uint8)  # other, the same, unknown
KNOWN = torch.tensor([True, True, False])
FOLLOWED = [[0, 2], [1, 3], [0, 3]]
SCORES = {
    "softmax of the chosen": ({"score_function": "softmax"}, torch.Tensor.exp, True),
    "softmax of all": ({"score_function": "softmax", "use_pre_softmax": True}, lambda x: x.softmax(-1), False),
    "sigmoid, biased, grouped": (
        {
            "score_function": "sigmoid", "expert_bias": torch.tensor([0.0, 0.1, 0.0, 0.1]),
            "num_groups": 2, "group_topk": 2, "scaling_factor": 2.5,
        },
        torch.Tensor.sigmoid,
        True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_chosen_by_the_engine_weighed_by_the_router(name: str) -> None:
    options, score, renormalised = SCORES[name]
    logits, count = LOGITS.clone().requires_grad_(), torch.zeros(2, dtype=torch.int64)
    probs, chosen = topk_routing_with_score_function(
        logits, 2, **options, router_replay=Replay(ENGINE, KNOWN, True, count)
    )
    assert [row.nonzero()[:, 0].tolist() for row in chosen] == FOLLOWED
    wanted = torch.zeros_like(LOGITS)
    scores = score(LOGITS)
    for token, experts in enumerate(FOLLOWED):
        shares = scores[token, experts] / (scores[token, experts].sum() if renormalised else 1)
        wanted[token, experts] = options.get("scaling_factor", 1.0) * shares
    torch.testing.assert_close(probs, wanted)
    assert count.tolist() == [1, 2]
    probs[0, 2].backward()
    assert logits.grad[0, 2] > 0 and logits.grad[0, 0] < 0 and not logits.grad[1:].any()


@pytest.mark.parametrize("name", SCORES)
def test_what_agrees_or_is_only_compared_changes_no_bit(name: str) -> None:
    options, count = SCORES[name][0], torch.zeros(2, dtype=torch.int64)
    plain = topk_routing_with_score_function(LOGITS, 2, **options)
    agreeing = Replay(torch.tensor(OWN).flip(1), torch.tensor([True] * 3), True, None)
    for replay in (Replay(ENGINE, KNOWN, False, count), agreeing):
        found = topk_routing_with_score_function(LOGITS, 2, **options, router_replay=replay)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert count.tolist() == [1, 2]


def test_experts_follow_their_tokens_to_where_the_ranks_have_them() -> None:
    """Three sequences of 2, 4 and 3 tokens, shortest first, of whose last tokens nothing is known; filled up for two
    ranks to 10."""
    made = []
    for i, (first, length) in enumerate(((10, 2), (20, 4), (30, 3))):
        row = np.arange(first, first + length - 1, dtype=np.uint8).reshape(-1, 1, 1)
        made.append(TokenSequence(i, np.zeros(length, np.int32), 1, experts=np.repeat(row, 3, axis=1)))
    [[batch]] = pack(made, dp_size=1, max_tokens=100)
    starts = dict(zip(batch.cu_seqlens.diff().tolist(), batch.cu_seqlens.tolist(), strict=False))
    order = torch.cat([torch.arange(starts[length], starts[length] + length) for length in (2, 3, 4)])
    parts = [Routing.of(batch, order, 2, part) for part in range(2)]
    assert all(part.experts.shape == (5, 3, 1) for part in parts)
    found = [torch.where(part.known, part.experts[:, 2, 0].long(), -1).tolist() for part in parts]
    assert found == [[10, -1, 30, 31, -1], [20, 21, 22, -1, -1]]
    [[plain]] = pack([TokenSequence(0, np.zeros(2, np.int32), 1)], dp_size=1, max_tokens=9)
    assert Routing.of(plain, torch.arange(2), 1, 0) is None
