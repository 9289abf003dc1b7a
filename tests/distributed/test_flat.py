"""The real flat ranges of Megatron's distributed optimizer, resharded from one layout to others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks
from tests.tiny_model import write_tiny_model


def test_optimizer_state_under_one_layout_is_that_under_another(tmp_path: Path) -> None:
    """EP=2 to TP=2 (which pads the odd vocabulary) and to PP=2, on the same two ranks: masters are bit for bit those of
    the other layout, and training goes on with the same step."""
    model_dir = write_tiny_model(tmp_path / "model", vocab_size=319)
    ranks = run_ranks(
        "tests.distributed.flat_ranks:carry_over",
        2, model_dir=model_dir, sizes={"ep": 2}, others=[{"tp": 2}, {"pp": 2}], num_steps=3,
    )  # fmt: skip
    for i in range(2):
        for rank in ranks:
            outcome = rank[i]
            assert outcome["wrong"] == [] and outcome["num_ranges"] >= 9 and outcome["received"] > 10_000
            # Nothing but the padding of the vocabulary (zeros that the model began with) has no source.
            assert not any(value for values in outcome["missed"].values() for value in values)
            assert set(outcome["missed"]) <= {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert sum(len(values) for rank in ranks for values in rank[0]["missed"].values()) == 2 * 128  # a row of each table
    assert not any(rank[1]["missed"] for rank in ranks)
    for name in ("actor/grad_norm", "actor/lr"):
        for rank in ranks:
            for outcome in rank:
                assert outcome["metrics"][name] == pytest.approx(outcome["same_layout_metrics"][name], rel=1e-5), name
