"""What a GPU has room for: by hand, and as measured on H200s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhpc.layout.parallel import ParallelLayout
from rlhpc.memory.activations import Microbatch, Model
from rlhpc.memory.device import cramped, doubtful, impossible, kv_cache, microbatch, phases
from rlhpc.memory.state import rank_memory
from rlhpc.reshard.families import model_facts
from scripts.bench.deepseek import DEEPSEEK_V3
from tests.unit.cli.test_plan import QWEN3_30B_A3B, config
from tests.unit.config.test_checks import MODEL

GIB = 2**30
RESULTS = Path(__file__).resolve().parents[3] / "scripts/bench/results"


@pytest.mark.parametrize(
    ("name", "ep", "recompute"),
    [("train-h200", 1, ()), ("train-h200-recompute", 1, ("moe",)), ("train-h200-x2-ep2", 2, ())],
)
def test_a_training_step_takes_what_was_measured(name: str, ep: int, recompute: tuple[str, ...]) -> None:
    """8 layers of Qwen3-30B-A3B under torch 2.11: the allocator's peak above state, 11 to 20 GiB, within 5 %."""
    measured = json.loads((RESULTS / f"{name}.json").read_text())
    shape = QWEN3_30B_A3B | {"num_hidden_layers": 8}
    cfg = config(ep, "bfloat16", expert_model_parallel_size=ep)
    cfg.actor_rollout_ref.rollout.tensor_model_parallel_size = 1
    (rank, *_) = rank_memory(cfg, shape)
    state = rank.trainer_weights + rank.gradients + rank.optimizer
    layout = ParallelLayout(ep=ep, world_size=ep)
    model = Model(model_facts(shape), layout, 2, "cuda", recompute=recompute, repeats_keys=True)
    batch = Microbatch(measured["tokens_per_rank"], int(measured["predicted_tokens_per_rank"]), 1024)
    peak = measured["peak_memory_gib"] - state / GIB
    assert 11 < peak < 21 and model.of_training(batch).peak / GIB == pytest.approx(peak, rel=0.05)


def test_phases_take_what_a_run_took() -> None:
    """The same shape where weights and optimizer stay: what the whole device held at the end of each phase, in GiB."""
    measured = json.loads((RESULTS / "step-h200-resident.json").read_text())["memory_gib"]["device"]
    shape = QWEN3_30B_A3B | {"num_hidden_layers": 8}
    cfg = config(1, "bfloat16", param_offload=False, optimizer_offload=False)
    rollout = cfg.actor_rollout_ref.rollout
    rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization = 1, 0.25
    cfg.actor_rollout_ref.actor.use_kl_loss = False
    (rank,) = rank_memory(cfg, shape)
    planned = phases(cfg, shape, rank, int(139.8 * GIB))
    for phase, of_run in (("generate", "gen"), ("logprobs", "old_log_prob"), ("update", "update_actor")):
        assert planned[phase] / GIB == pytest.approx(measured[of_run]["last"], rel=0.05), phase


def test_stages_keep_the_microbatches_under_way() -> None:
    """Layers computed again keep their input alone, H elements of a token, and a stage those of all that follow it."""
    facts, batch = model_facts(MODEL), Microbatch(100, 100, 100)
    of_stage = 2 * 128 * 4 + 2 * 32 * 4 + 3 * 8  # two layers' inputs; cosines, sines; ids, positions, order
    model = Model(facts, ParallelLayout(pp=2, world_size=2), 4, "cuda", recompute="full")
    assert model._of_stage(batch, 0, head=True).kept == 2 * 100 * of_stage
    of_last = of_stage + 128 * 4 + 4  # the last norm's input and scale
    assert model._of_stage(batch, 1, head=True).kept == 100 * of_last + 100 * (128 * 4 + 36)  # and what logits need


def test_the_largest_microbatch() -> None:
    cfg = config(4, "bfloat16", tensor_model_parallel_size=2)  # dp 2; 512 + 512 tokens
    actor = cfg.actor_rollout_ref.actor
    assert microbatch(cfg, actor) == Microbatch(16384, 16384, 1024)
    actor.ppo_micro_batch_size_per_gpu = 3
    assert microbatch(cfg, actor).tokens == 3 * 1024
    actor.ppo_micro_batch_size_per_gpu, actor.ppo_mini_batch_size = None, 4
    assert microbatch(cfg, actor).tokens == 2 * 1024  # all that a rank has of a mini-batch


def cache(model: dict[str, Any], tp: int, device: str, **rollout: Any) -> Any:
    cfg = config(tp, "bfloat16")
    of = cfg.actor_rollout_ref.rollout
    of.tensor_model_parallel_size = tp
    for name, value in rollout.items():
        setattr(of, name, value)
    return kv_cache(cfg, model_facts(model), rank_memory(cfg, model)[0], device, int(139.8 * GIB))


def test_kv_cache_by_hand() -> None:
    assert (
        cache(QWEN3_30B_A3B, 2, "cuda").token_bytes == 48 * 2 * 2 * 128 * 2
    )  # layers, K and V, heads, elements, bytes
    assert cache(QWEN3_30B_A3B, 8, "cuda").token_bytes == 48 * 2 * 1 * 128 * 2  # a head is on two ranks
    assert cache(DEEPSEEK_V3, 16, "cuda").token_bytes == 61 * (512 + 64) * 2  # whole on every rank
    small = cache(MODEL, 1, "cpu", cpu_kv_cache_gib=1.0, max_num_seqs=200)
    of_sequence = 4 * 2 * 2 * 32 * 2 * 1024
    assert small.room == GIB and small.sequences == GIB / of_sequence and list(cramped(small, "cpu")) == []
    weights = rank_memory(config(2, "bfloat16"), QWEN3_30B_A3B)[0].rollout_weights
    large = cache(QWEN3_30B_A3B, 2, "cuda", gpu_memory_utilization=0.6)
    assert 0 < 0.6 * 139.8 * GIB - weights - large.room < 8 * GIB  # what the engine computes with


def test_what_has_no_room_is_told() -> None:
    cfg = config(1, "bfloat16")
    cfg.actor_rollout_ref.rollout.tensor_model_parallel_size = 1
    cfg.actor_rollout_ref.rollout.cpu_kv_cache_gib = 0.0005
    (told,) = impossible(cfg, MODEL, "cpu")
    assert "a sequence of 1024 tokens takes 1 MiB: the engine will refuse to start; raise " in told
    cfg.actor_rollout_ref.rollout.cpu_kv_cache_gib = 0.01
    assert list(impossible(cfg, MODEL, "cpu")) == []
    (told,) = doubtful(cfg, MODEL, "cpu")
    assert "holds 10 sequences of 1024 tokens, fewer than actor_rollout_ref.rollout.max_num_seqs=1024" in told

    cfg = config(8, "bfloat16", expert_model_parallel_size=8)
    assert list(impossible(cfg, QWEN3_30B_A3B, "cuda")) == []  # of what GPU isn't known here
    cfg.cluster.gpu_memory_gib = 139.8
    assert list(impossible(cfg, QWEN3_30B_A3B, "cuda")) == []
    told = "\n".join(doubtful(cfg, QWEN3_30B_A3B, "cuda"))
    assert "update takes about" in told and "enable_gradient_checkpointing=true" in told and "publish" not in told
    cfg.actor_rollout_ref.model.enable_gradient_checkpointing = True
    assert "update" not in "\n".join(doubtful(cfg, QWEN3_30B_A3B, "cuda"))
    cfg.cluster.gpu_memory_gib = 39.4
    (told,) = impossible(cfg, QWEN3_30B_A3B, "cuda")
    assert told.startswith("weights, gradients and optimizer of a rank take ") and "a GPU's 39.4 GiB" in told
