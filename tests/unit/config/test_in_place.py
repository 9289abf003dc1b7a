"""Where experts can be shared between trainer and engine, as the configuration is told it."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.config.in_place import shared_experts
from tests.unit.config.test_checks import EP, ETP, MODEL, PP, REP, ROLLOUT, RTP, TP, config, violations_of

ON = {"reshard.in_place_experts": True, "trainer.device": "cuda"}
SPREAD, CUT = {EP: 4, RTP: 4, REP: 4}, {ETP: 4, RTP: 4, TP: 4}
TO_SPREAD = "expert_model_parallel_size=4 and expert_tensor_parallel_size=1 with rollout.tensor_model_parallel_size=4"
TO_CUT = "expert_tensor_parallel_size=4 and expert_model_parallel_size=1 with rollout.tensor_model_parallel_size=4"


@pytest.mark.parametrize(("sizes", "world_size"), [({}, 1), (SPREAD, 4), (SPREAD | {TP: 2}, 4), (CUT, 4)])
def test_allowed_where_layouts_agree(sizes: dict[str, int], world_size: int) -> None:
    assert violations_of(ON | sizes, world_size) == []
    pairs = shared_experts(config(ON | sizes), MODEL, world_size)
    assert len(pairs) == 2 * MODEL["num_hidden_layers"]
    assert pairs["decoder.layers.3.mlp.experts.w2"] == "model.layers.3.mlp.experts.routed_experts.w2_weight"
    assert shared_experts(config(sizes), MODEL, world_size) == {}


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({EP: 4, RTP: 4}, ["experts.0.gate_proj.weight on rank 0: the trainer has [0:64, 0:128] at [0, 0, 0] of "
                           "decoder.layers.0.mlp.experts.w13, the engine [0:16, 0:128] at", TO_SPREAD, TO_CUT]),
        ({ETP: 4, RTP: 4, REP: 4}, ["on rank 0: the trainer has [0:16, 0:128]", "the engine [0:64,", TO_SPREAD]),
        ({EP: 4, RTP: 2, REP: 2}, ["experts.0.gate_proj.weight on rank 2: the trainer has nothing, the engine"]),
        ({EP: 2, PP: 2, RTP: 4, REP: 4}, ["on rank ", "set pipeline_model_parallel_size=1, actor.megatron.exper"]),
        ({EP: 2, RTP: 2, REP: 2}, ["expert_model_parallel_size=2 * expert_tensor_parallel_size=1 * pipeline_model_para"
                                   "llel_size=1 on 4 ranks gives the same experts to 2 of them", TO_SPREAD]),
        ({EP: 2, RTP: 2, REP: 2, "trainer.nnodes": 2, "trainer.n_gpus_per_node": 2, "launch.mode": "slurm"},
         ["them, each of which updates a part; only one may have them; set reshard.in_place_experts=false"]),
        (CUT | {"trainer.device": "cpu"}, ["needs GPUs: on a CPU vLLM packs weights", "set false"]),
        (CUT | {"reshard.sink": "reference"}, ["reshard.sink=reference", "set sink=direct, or false"]),
        (CUT | {"actor_rollout_ref.model.dtype": "float32"}, ["dtype=bfloat16, got float32", "their own masters"]),
    ],
)  # fmt: skip
def test_refused_with_what_to_set_instead(overrides: dict[str, Any], parts: list[str]) -> None:
    (line,) = violations_of(ON | overrides, 4)
    assert line.startswith("reshard.in_place_experts=true") and all(part in line for part in parts), line


def test_refused_without_experts() -> None:
    dense = {k: v for k, v in MODEL.items() if "expert" not in k and not k.startswith("moe")} | {"model_type": "qwen2"}
    (line,) = violations_of(ON | {f"{ROLLOUT}.n": 4}, 1, dense)
    assert line == "reshard.in_place_experts=true needs a mixture of experts, this model has none; set false"
