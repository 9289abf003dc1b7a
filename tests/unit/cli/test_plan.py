"""Parameter counts and memory against hand computation."""

from omegaconf import OmegaConf

from rlhpc.cli.plan import describe
from rlhpc.config.load import load
from rlhpc.memory.state import (
    checkpoint_bytes,
    node_memory,
    parameter_counts,
    rank_memory,
    readable,
    routing_bytes,
    too_little_memory,
)
from scripts.bench.deepseek import DEEPSEEK_V3
from tests.unit.config.test_checks import MODEL

QWEN3_30B_A3B = MODEL | {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def test_published_size_of_qwen3_30b_a3b():
    total, active = parameter_counts(QWEN3_30B_A3B)
    assert total == 30_532_122_624  # the model card's 30.5B
    assert total - active == 48 * 120 * 3 * 768 * 2048  # 120 of 128 experts idle in each layer
    assert round(active / 1e9, 1) == 3.4


def test_published_size_of_deepseek_v3():
    total, active = parameter_counts(DEEPSEEK_V3)
    assert total == 671_026_419_200  # the model card's 671B
    assert total - active == 58 * 248 * 3 * 2048 * 7168  # 248 of 256 experts idle in each layer that has some
    assert round(active / 1e9, 1) == 37.6  # its 37B leaves the embedding's lookup out


def test_published_size_of_kimi_k2():
    kimi = DEEPSEEK_V3 | {
        "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "first_k_dense_replace": 1,
        "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "vocab_size": 163840,
    }  # fmt: skip
    total, active = parameter_counts(kimi)
    assert total - active == 60 * 376 * 3 * 2048 * 7168  # 376 of 384 experts idle in each layer that has some
    assert round(total / 1e9) == 1026  # its 1T
    assert round(active / 1e9) in (32, 33)  # its 32B leaves the embedding's lookup out


def config(world_size, dtype, checkpoint=None, cluster=None, **megatron):
    cfg = {
        "actor_rollout_ref": {
            "model": {"path": "/m", "dtype": dtype},
            "actor": {"megatron": megatron, "use_kl_loss": True},
            "rollout": {"tensor_model_parallel_size": 2},
        },
        "data": {"train_files": "/d"},
        "trainer": {"n_gpus_per_node": world_size, "save_freq": 10},
        "checkpoint": checkpoint or {},
        "cluster": cluster or {},
    }
    return load(OmegaConf.create(cfg))


def memory(world_size, dtype, **megatron):
    return rank_memory(config(world_size, dtype, **megatron), MODEL)


def test_rank_memory_by_hand():
    # per layer: q 128*128, k and v 64*128 each, o 128*128, four norms, router 8*128; experts 8*3*64*128
    attention_and_norms = 4 * (2 * 128 * 128 + 2 * 64 * 128 + 2 * 128 + 2 * 32 + 8 * 128)
    dense = attention_and_norms + 2 * 500 * 128 + 128
    experts = 4 * 8 * 3 * 64 * 128
    (first, *_) = memory(4, "bfloat16", expert_model_parallel_size=2)
    local = dense + experts // 2
    assert first.trainer_weights == first.reference_weights == 2 * local
    assert first.gradients == 4 * local
    assert first.optimizer == 12 * (dense // 4 + experts // 2 // 2)  # dp=4, edp=2; moments and masters

    (single, _) = memory(2, "float32", expert_model_parallel_size=2)
    assert single.optimizer == 8 * (dense // 2 + experts // 2)  # no masters
    replicated = 4 * (2 * 128 + 2 * 32 + 8 * 128) + 128  # norms and routers are whole on both engine ranks
    vocab_rows = 256  # 500 padded to 512, halved; rank 0's are all real
    halves = 4 * (2 * 128 * 128 + 2 * 64 * 128) // 2 + experts // 2 + 2 * vocab_rows * 128
    assert single.rollout_weights == 4 * (replicated + halves)
    assert single.total == sum(
        (single.trainer_weights, single.gradients, single.optimizer)
        + (single.reference_weights, single.rollout_weights)
    )


def test_experts_in_place_are_the_engines_alone():
    cfg = config(2, "bfloat16", expert_model_parallel_size=2)
    (twice, _) = rank_memory(cfg, MODEL)
    cfg.reshard.in_place_experts = True
    (once, _) = rank_memory(cfg, MODEL)
    experts = 2 * 4 * 4 * 3 * 64 * 128  # bytes: 4 layers, 4 of 8 experts
    assert twice.trainer_weights - once.trainer_weights == twice.total - once.total == experts
    assert node_memory(cfg, MODEL, "cuda").ranks == 2 * (once.trainer_weights + once.reference_weights + once.optimizer)


def test_node_memory_by_hand():
    dense = 4 * (2 * 128 * 128 + 2 * 64 * 128 + 2 * 128 + 2 * 32 + 8 * 128) + 2 * 500 * 128 + 128
    experts = 4 * 8 * 3 * 64 * 128
    for dtype in ("bfloat16", "float32"):
        cfg = config(4, dtype, expert_model_parallel_size=2)
        # Every element is updated by one rank of its replicas: together the ranks copy masters and moments once.
        copies = 12 * (dense + experts)
        assert node_memory(cfg, MODEL, "cpu").checkpoint_copies == copies
        everything = sum(rank.total for rank in rank_memory(cfg, MODEL))
        assert node_memory(cfg, MODEL, "cpu").total == everything + copies
    asleep = 2 * 2 * (4 * dense + 2 * experts) + 12 * (dense + experts)  # policy and reference, and the optimizer
    bfloat16 = config(4, "bfloat16", expert_model_parallel_size=2)
    assert node_memory(bfloat16, MODEL, "cuda").ranks == asleep
    optimizer = 12 * (dense + experts)
    for key, left in (("param_offload", optimizer), ("optimizer_offload", asleep - optimizer)):
        staying = config(4, "bfloat16", expert_model_parallel_size=2, **{key: False})
        assert node_memory(staying, MODEL, "cuda").ranks == left
    perhaps = config(4, "bfloat16", expert_model_parallel_size=2, optimizer_offload="auto")
    assert node_memory(perhaps, MODEL, "cuda").ranks == asleep  # at most
    synchronous = config(4, "bfloat16", {"async_save": False}, expert_model_parallel_size=2)
    assert node_memory(synchronous, MODEL, "cuda").total == asleep
    assert checkpoint_bytes(synchronous, MODEL) == copies


def test_a_job_that_asks_for_less_memory_than_is_kept():
    def problems(gib, **checkpoint):
        cfg = config(4, "bfloat16", checkpoint, {"memory_gib_per_node": gib})
        return list(too_little_memory(cfg, MODEL, "cuda"))

    assert problems(1) == []
    [line] = problems(0.01)
    assert line.startswith("cluster.memory_gib_per_node=0.01 is less than the ")
    assert "MiB of that copies for checkpoint.async_save; set more" in line
    assert line.endswith(
        "or {optimizer,param}_offload=false of actor_rollout_ref.actor.megatron: these stay on the GPU then"
    )
    [line] = problems(0.01, async_save=False)
    assert "copies" not in line
    [line] = too_little_memory(config(4, "bfloat16", {}, {"memory_gib_per_node": 0.01}), MODEL, "cpu")
    assert line.endswith("set more, for processes and libraries too")


def test_readable():
    assert [readable(n) for n in (0, 1023, 1536, 61 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "61 GiB"]


def test_what_a_step_of_routing_may_take():
    """48 layers times 8 experts, a byte each, for 1,024 answers of 512 tokens to prompts of 512."""
    cfg = config(2, "bfloat16")
    cfg.data.train_batch_size, cfg.actor_rollout_ref.rollout.n = 64, 16
    assert routing_bytes(cfg, QWEN3_30B_A3B) == 384 * 1024 * 1024
    assert "routing " not in (told := describe(cfg, QWEN3_30B_A3B))
    assert "reads     nothing yet: /m has neither model.safetensors.index.json nor model.safetensors" in told
    cfg.actor_rollout_ref.rollout.enable_rollout_routing_replay = True
    assert "routing   at most 384 MiB a step, twice, " in (kept := describe(cfg, QWEN3_30B_A3B))
    cfg.actor_rollout_ref.rollout.enable_rollout_routing_replay = False
    cfg.actor_rollout_ref.actor.megatron.router_replay.mode = "R2"
    assert describe(cfg, QWEN3_30B_A3B) == kept


def test_a_critic_counts_by_hand():
    """A policy without its head of 500 rows, and one row instead; on the two ranks of a data-parallel pair."""
    cfg = config(2, "bfloat16", expert_model_parallel_size=2)
    without = rank_memory(cfg, MODEL)
    size = checkpoint_bytes(cfg, MODEL)
    cfg.algorithm.adv_estimator = "gae"
    dense = 4 * (2 * 128 * 128 + 2 * 64 * 128 + 2 * 128 + 2 * 32 + 8 * 128) + 500 * 128 + 128 + 128
    experts = 4 * 8 * 3 * 64 * 128
    for before, after in zip(without, rank_memory(cfg, MODEL), strict=True):
        assert after.critic_weights == 2 * (dense + experts // 2)
        assert after.critic_gradients == 4 * (dense + experts // 2)
        assert after.critic_optimizer == 12 * (dense // 2 + experts // 2)
        critic = after.critic_weights + after.critic_gradients + after.critic_optimizer
        assert after.total == before.total + critic and before.critic_weights == 0
    assert checkpoint_bytes(cfg, MODEL) == size + 12 * (dense + experts)
    asleep = node_memory(cfg, MODEL, "cuda").ranks
    cfg.critic.megatron.param_offload = False
    assert node_memory(cfg, MODEL, "cuda").ranks == asleep - 2 * 2 * (dense + experts // 2)
    told = describe(cfg, MODEL)
    assert f"critic    qwen3_moe, bfloat16, {dense + experts:,} parameters" in told and "critic optimizer" in told
