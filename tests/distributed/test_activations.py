"""What the plan counts of activations, against every byte that autograd keeps of the model that trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhpc.layout.parallel import ParallelLayout
from rlhpc.memory.activations import Microbatch, Model
from rlhpc.reshard.families import model_facts
from tests.distributed.activation_ranks import LENGTH, NUM, PROMPT
from tests.distributed.ranks import run_ranks
from tests.tiny_family import write_tiny_family

# model_type, dtype, parallel sizes, what is computed again
CASES: dict[str, tuple[str, str, dict[str, int], tuple[str, ...] | str]] = {
    "dense": ("llama", "bfloat16", {}, ()),
    "dense-fp32-tp2": ("qwen3", "float32", {"tp": 2}, ()),
    "dense-parts": ("llama", "bfloat16", {}, ("core_attn", "mlp")),
    "experts": ("qwen3_moe", "bfloat16", {}, ()),
    "experts-fp32-tp2-ep2": ("qwen3_moe", "float32", {"tp": 2, "ep": 2}, ()),
    "experts-etp2": ("mixtral", "bfloat16", {"tp": 2, "etp": 2}, ()),
    "experts-parts": ("qwen3_moe", "bfloat16", {"ep": 2}, ("core_attn", "moe")),
    "experts-full": ("qwen3_moe", "bfloat16", {"tp": 2}, "full"),
    "latent": ("deepseek_v3", "bfloat16", {}, ()),
    "latent-fp32-tp2": ("deepseek_v3", "float32", {"tp": 2}, ()),
    "latent-parts": ("deepseek_v3", "bfloat16", {"ep": 2}, ("core_attn", "moe", "mlp")),
}


@pytest.mark.timeout(300)
def test_what_autograd_keeps_is_what_the_plan_counts(tmp_path: Path) -> None:
    """Within a percent, on average over ranks: how many tokens go to which rank's experts is a matter of chance."""
    models = {kind: write_tiny_family(tmp_path / kind, kind) for kind in {case[0] for case in CASES.values()}}
    calls = {name: (models[kind], sizes, settings(dtype, again)) for name, (kind, dtype, sizes, again) in CASES.items()}
    ranks = run_ranks("tests.distributed.activation_ranks:kept", 2, cases=calls)
    for name, (kind, dtype, sizes, again) in CASES.items():
        facts = model_facts(json.loads((models[kind] / "config.json").read_text()))
        layout = ParallelLayout(world_size=2, **sizes)
        model = Model(facts, layout, {"bfloat16": 2, "float32": 4}[dtype], "cpu", recompute=again)
        planned = model.of_training(Microbatch(NUM * LENGTH, NUM * (LENGTH - PROMPT), LENGTH)).kept
        measured = sum(rank[name] for rank in ranks) / len(ranks)
        assert planned == pytest.approx(measured, rel=0.01), name


def settings(dtype: str, again: tuple[str, ...] | str) -> dict[str, Any]:
    chosen: dict[str, Any] = {"model__dtype": dtype}
    if again == "full":
        return chosen | {"model__enable_gradient_checkpointing": True}
    return chosen | {"actor__megatron__recompute_modules": list(again)}
