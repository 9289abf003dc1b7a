"""Trainer and engine with one set of experts between them: what they compute, and what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 32, 512, 512
EXPERT_BYTES = 2 * LAYERS * EXPERTS * 3 * HIDDEN * WIDTH  # bfloat16: 96 MiB


def test_one_set_of_experts_changes_no_bit_and_takes_their_bytes_less(tmp_path: Path) -> None:
    """Three publishes and two updates each, with CUDA graphs, which have the weights' addresses. Sequences are of 56
    tokens: flash attention's backward adds in no fixed order over blocks of 64 and more."""
    model = write_tiny_model(
        tmp_path / "model", hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=EXPERTS,
        num_hidden_layers=LAYERS, initializer_range=0.03,
    )  # fmt: skip
    two, one = (cycles(model, in_place, tmp_path / f"{in_place}.log") for in_place in (False, True))
    assert (two["shared_bytes"], one["shared_bytes"]) == (0, EXPERT_BYTES)
    assert two["moved_bytes"] - one["moved_bytes"] == EXPERT_BYTES
    for cycle in range(3):
        assert one["weights"][cycle] == two["weights"][cycle], cycle
        assert one["samples"][cycle] == two["samples"][cycle], cycle
    before, after = one["weights"][0], one["weights"][2]
    assert all(before[name] != after[name] for name in before if "experts" in name)
    assert taken(two) - taken(one) == pytest.approx(EXPERT_BYTES, rel=0.01)


def taken(outcome: dict[str, Any]) -> int:
    """Bytes that a publish needs on top of generation, which has the KV cache and the engine's weights. Of torch's
    allocator: others may use the device as well."""
    return outcome["bytes"]["publish"]["allocated"] - outcome["bytes"]["generate"]["allocated"]


def cycles(model: Path, in_place: bool, log: Path) -> dict[str, Any]:
    settings = {"actor_rollout_ref.actor.optim.lr": 1e-2, "actor_rollout_ref.rollout.gpu_memory_utilization": 0.1}
    arguments = {"device": "cuda", "num": 3, "settings": settings, "look": True}
    try:
        [outcome] = run_ranks(
            "scripts.bench.in_place:cycles", 1, 400, model=model, in_place=in_place, log=log, **arguments
        )
    except RuntimeError as error:
        error.add_note(log.read_text()[-6000:] if log.exists() else "no log")
        raise
    return outcome
