"""The training bench's count of FLOPs, against products written out."""

from __future__ import annotations

from rlhpc.reshard.families import family_for
from scripts.bench.sync import QWEN3_30B
from scripts.bench.train import model_flops


def test_flops_of_two_sequences() -> None:
    """Two layers of Qwen3-30B-A3B, sequences of 3 and 1 tokens, 2 of them predicted. Forward 2, backward 4 per weight
    and token: q, k, v and o; router and 8 experts of three matrices; and per pair of positions, of which 3 + 2 + 1 and
    1 see each other, a score and a sum over 32 heads of 128."""
    facts = family_for(QWEN3_30B).model_facts(QWEN3_30B | {"num_hidden_layers": 2})
    attention = 2048 * 4096 + 2 * 2048 * 512 + 4096 * 2048
    experts = 2048 * 128 + 8 * 3 * 2048 * 768
    assert model_flops(facts, [3, 1], 2) == {
        "projections": 6 * 2 * 4 * attention,
        "mlp": 6 * 2 * 4 * experts,
        "attention": 6 * 2 * 7 * 2 * 32 * 128,
        "head": 6 * 2 * 2048 * 151936,
    }
