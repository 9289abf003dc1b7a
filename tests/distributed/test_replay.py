"""Router replay where routers do disagree: an engine and a trainer that round in bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.distributed.ranks import run_ranks
from tests.tiny_model import write_tiny_model


def test_with_the_engines_routing_the_logprobs_come_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = [(i, rng.integers(5, 320, length).tolist()) for i, length in enumerate((5, 20, 60, 140))]
    [found] = run_ranks(
        "tests.distributed.replay_ranks:rolled_and_trained", 1,
        model_dir=str(write_tiny_model(tmp_path / "model")), prompts=prompts,
    )  # fmt: skip
    assert found["batches"] > 1
    own, replay = found["own"], found["replay"]
    assert own["known"] == replay["known"] == own["counted"][1] == replay["counted"][1]
    assert own["elsewhere"] == own["counted"][0] > 0.005 * own["known"]
    assert replay["elsewhere"] == 0 < replay["counted"][0]  # every token went along, where its router wouldn't have
    gaps = [
        np.concatenate([np.abs(a - b) for a, b in zip(found["engine"], way["logprobs"], strict=True)])
        for way in (own, replay)
    ]
    assert gaps[1].max() < 0.1 < 5 * gaps[1].max() < gaps[0].max()
    assert gaps[1].mean() < 0.8 * gaps[0].mean()
