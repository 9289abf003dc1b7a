"""Cross-field checks: each rule has a configuration that breaks it, and one at its limit that passes."""

import json

import pytest
from omegaconf import OmegaConf

from rlhpc.config.checks import check, check_run
from rlhpc.config.load import load
from rlhpc.config.model_dir import read_model_config
from rlhpc.errors import ConfigError, DataError, ModelError

ROW = '{"question": "1 + 1?", "answer": "#### 2"}\n'
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
KEEP = f"{ROLLOUT}.enable_rollout_routing_replay"

# 8 experts, 4 heads, 2 KV heads, 4 layers, expert width 64, 512 positions
MODEL = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 500,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}
BASE = {
    "actor_rollout_ref.model.path": "/m",
    "data.train_files": "/d.jsonl",
    "data.train_batch_size": 12,
    "data.max_prompt_length": 100,
    "data.max_response_length": 100,
    f"{ACTOR}.ppo_mini_batch_size": 6,
    f"{ROLLOUT}.n": 4,
}


def config(overrides):
    cfg = OmegaConf.create({})
    for key, value in {**BASE, **overrides}.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return load(cfg)


def violations_of(overrides, world_size=4, model=None):
    try:
        check(config(overrides), model or MODEL, world_size)
    except ConfigError as error:
        return str(error).splitlines()
    return []


M = f"{ACTOR}.megatron"
TP, PP = f"{M}.tensor_model_parallel_size", f"{M}.pipeline_model_parallel_size"
EP, ETP = f"{M}.expert_model_parallel_size", f"{M}.expert_tensor_parallel_size"
RTP, REP = f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.expert_parallel_size"


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ({}, 1),
        ({TP: 2, PP: 2, EP: 1, RTP: 4}, 4),
        ({EP: 4, RTP: 2}, 4),
        ({EP: 2, ETP: 2, TP: 2}, 4),
        ({f"{ROLLOUT}.max_model_len": 200, f"{ACTOR}.ppo_max_token_len_per_gpu": 200}, 4),
        ({f"{ROLLOUT}.max_model_len": 512}, 4),
        ({"data.max_prompt_length": 412}, 4),  # 412 + 100 = 512 positions
        (
            {
                "algorithm.adv_estimator": "reinforce_plus_plus",
                f"{ROLLOUT}.n": 1,
                "data.train_batch_size": 12,
            },
            2,
        ),
        ({f"{ROLLOUT}.max_num_seqs": 64, f"{ROLLOUT}.max_num_batched_tokens": 64}, 4),
        ({"trainer.test_freq": 5, "data.val_files": "/v.jsonl"}, 4),
        ({"trainer.logger": ["console", "wandb"], "trainer.wandb_mode": "offline"}, 4),
        ({f"{ROLLOUT}.chunk_prompts": 4}, 4),
        ({RTP: 2, REP: 2}, 4),
        ({f"{ROLLOUT}.temperature": 0.01, f"{ROLLOUT}.val_kwargs.temperature": 0}, 4),
        ({f"{ROLLOUT}.temperature": 2, f"{ROLLOUT}.val_kwargs.temperature": 2}, 4),
        ({"reward.name": "gsm8k"}, 4),
        ({"reward.name": f"{__file__}:config"}, 4),
        ({"cluster.nodes": 2, "launch.mode": "slurm"}, 4),
        ({"cluster.nodes": 2, "launch.mode": "allocation"}, 4),
        ({"launch.mode": "slurm", "launch.time_min": 6}, 4),
        ({"cluster.sbatch.mail-type": "END", "cluster.sbatch.gres": "gpu:h100:8"}, 4),
        ({"launch.stop_lead_s": 0}, 4),
    ],
)
def test_allowed(overrides, world_size):
    assert violations_of(overrides, world_size) == []


@pytest.mark.parametrize(
    ("overrides", "world_size", "parts"),
    [
        ({TP: 2, PP: 2}, 6, ["tensor_model_parallel_size=2", "= 4 must", "the 6 ranks", "choose 1, 2, 3, 6"]),
        ({EP: 8}, 4, ["expert_model_parallel_size=8", "= 8 must divide the 4 ranks", "choose 1, 2, 4"]),
        ({EP: 2, ETP: 2, PP: 2}, 4, ["expert_tensor_parallel_size=2", "= 8 must divide the 4 ranks"]),
        ({f"{M}.attention_backend": "te"}, 4, ["attention_backend='te' is unknown; choose auto, flash, fused, local"]),
        ({EP: 3}, 3, ["expert_model_parallel_size=3 must divide num_experts=8; choose 1, 2, 4, 8"]),
        ({f"{M}.context_parallel_size": 2}, 4, ["context_parallel_size=2", "set 1"]),
        ({RTP: 3}, 4, [f"{RTP}=3 must divide the 4 ranks", "choose 1, 2, 4"]),
        ({TP: 8}, 8, [f"{TP}=8 must divide num_attention_heads=4; choose 1, 2, 4"]),
        ({RTP: 8}, 8, [f"{RTP}=8 must divide num_attention_heads=4; choose 1, 2, 4"]),
        ({PP: 3}, 3, [f"{PP}=3: stages of 2 layers leave none of num_hidden_layers=4 to the last; choose 1, 2, 4"]),
        (
            {f"{ACTOR}.ppo_mini_batch_size": 5},
            4,
            ["=5 must divide data.train_batch_size=12", "choose 1, 2, 3, 4, 6, 12"],
        ),
        ({f"{ROLLOUT}.n": 5}, 4, ["ppo_mini_batch_size=6 * rollout.n=5 = 30", "4 data-parallel ranks"]),
        ({"data.train_batch_size": 6, f"{ROLLOUT}.n": 8}, 16, ["=6 is below the 16 rollout replicas"]),
        ({f"{ROLLOUT}.chunk_prompts": 3}, 4, ["chunk_prompts=3 is below the 4", "set 0 or at least 4"]),
        ({"data.max_prompt_length": 413}, 4, ["413", "= 513 tokens exceed", "max_position_embeddings=512"]),
        (
            {f"{ROLLOUT}.max_model_len": 199},
            4,
            ["= 200 tokens exceed", "max_model_len=199", "set it to 200 or null"],
        ),
        ({f"{ROLLOUT}.max_model_len": 513}, 4, ["max_model_len=513 exceeds", "=512", "at most 512, or null"]),
        ({f"{ACTOR}.ppo_max_token_len_per_gpu": 199}, 4, ["ppo_max_token_len_per_gpu=199", "at least 200"]),
        ({f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 9}, 4, ["rollout.log_prob_max_token_len_per_gpu=9"]),
        (
            {"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 9},
            4,
            ["ref.log_prob_max_token_len_per_gpu=9"],
        ),
        ({f"{ROLLOUT}.max_num_batched_tokens": 512}, 4, ["max_num_seqs=1024 exceeds", "at most 512"]),
        (
            {f"{ROLLOUT}.cudagraph_capture_sizes": [8, 9000]},
            4,
            ["sizes of 1 to max_num_batched_tokens=8192", "set null"],
        ),
        ({f"{ROLLOUT}.n": 1}, 2, ["rollout.n=1 leaves", "at least 2"]),
        ({f"{ROLLOUT}.n": 1, "algorithm.adv_estimator": "rloo"}, 2, ["adv_estimator=rloo without a group"]),
        ({"algorithm.adv_estimator": "remax"}, 4, ["remax needs greedy baselines"]),
        ({"trainer.resume_mode": "resume_path"}, 4, ["resume_mode=resume_path with resume_from_path=None"]),
        ({"trainer.resume_from_path": "/c"}, 4, ["resume_mode=auto with resume_from_path=/c"]),
        (
            {"trainer.resume_from_path": "/c", "trainer.resume_mode": "resume_path", "resume.from": "/d"},
            4,
            ["resume.from=/d and trainer.resume_from_path=/c mean the same; set one"],
        ),
        ({"resume.what": "weights"}, 4, ["resume.what=weights needs something to take from; set resume.from"]),
        ({"resume.from": "/c", "resume.what": "model"}, 4, ["resume.what='model' is unknown", "choose all, weights"]),
        ({"reward.name": "gsm8"}, 4, ["reward.name='gsm8' is unknown", "gsm8k", "FILE.py:FUNCTION"]),
        ({"reward.name": "nowhere.py:score"}, 4, ["there is no file", "nowhere.py"]),
        ({"trainer.test_freq": 5}, 4, ["trainer.test_freq=5 needs data.val_files"]),
        ({"checkpoint.best_metric": "val-core/a"}, 4, ["best_metric=val-core/a chooses nothing while", "keep_best=0"]),
        (
            {"checkpoint.keep_best": 2, "data.val_files": "/v", "trainer.test_freq": 2, "trainer.save_freq": 2},
            4,
            ["keep_best=2 ranks by checkpoint.best_metric=None, which must be a validation metric", "val-core/<data"],
        ),
        (
            {"checkpoint.keep_best": 2, "checkpoint.best_metric": "val-core/a", "trainer.save_freq": 2},
            4,
            ["keep_best=2 needs steps that are validated and saved; set trainer.test_freq"],
        ),
        (
            {"checkpoint.keep_every": 5, "trainer.save_freq": 2},
            4,
            ["keep_every=5 must be a multiple of", "save_freq=2"],
        ),
        ({"checkpoint.keep_every": 5}, 4, ["keep_every=5 must be a multiple of trainer.save_freq=-1"]),
        ({"checkpoint.best_mode": "highest"}, 4, ["best_mode='highest' is unknown", "choose max, min"]),
        ({"checkpoint.keep_every": -1}, 4, ["checkpoint.keep_every=-1 is out of range; set at least 0"]),
        (
            {f"{ACTOR}.optim.lr_warmup_steps": 20, "trainer.total_training_steps": 10},
            4,
            [f"{ACTOR}.optim.lr_warmup_steps=20 must be below the 20 optimizer steps", "lower it"],
        ),
        ({f"{ACTOR}.optim.lr_decay_style": "cosine"}, 4, ["lr_decay_style=cosine", "total_training_steps"]),
        ({"trainer.balance_batch": False}, 4, ["balance_batch=false", "set true"]),
        ({f"{M}.moe_aux_loss_coeff": -0.01}, 4, ["moe_aux_loss_coeff=-0.01", "at least 0"]),
        (
            {f"{M}.recompute_modules": ["mlp"]},
            4,
            ["recompute_modules has mlp; a layer of this model has core_attn and moe"],
        ),
        (
            {f"{M}.recompute_modules": ["moe"], "actor_rollout_ref.model.enable_gradient_checkpointing": True},
            4,
            ["recompute_modules=['moe'] adds nothing", "set one of them"],
        ),
        ({f"{M}.use_distributed_optimizer": False}, 4, ["use_distributed_optimizer=false", "set true"]),
        ({"trainer.nnodes": 2}, 4, ["trainer.nnodes=2 needs launch=slurm, or launch=allocation inside a job"]),
        ({"cluster.nodes": 2}, 4, ["trainer.nnodes=2 needs launch=slurm"]),
        ({"launch.mode": "slurm", "launch.time_min": 5}, 4, ["launch.stop_lead_s=300 must leave something of launch."]),
        ({f"{M}.optimizer_offload": "some"}, 4, ["optimizer_offload='some' is unknown; choose true, false or auto"]),
        ({"launch.mode": "slrum"}, 4, ["launch.mode='slrum' is unknown; did you mean slurm? choose allocation, local"]),
        ({"cluster.sbatch.cpus_per_task": 4}, 4, ["cluster.sbatch.cpus_per_task=4: set cluster.cpus_per_node instead"]),
        ({"cluster.sbatch.requeue": False}, 4, ["cluster.sbatch.requeue=False: set launch.max_attempts_without_prog"]),
        ({"cluster.sbatch.licenses": ["a"]}, 4, ["cluster.sbatch.licenses=['a'] must be a text, a number, or true"]),
        ({"cluster.memory_gib_per_node": 0.0}, 4, ["cluster.memory_gib_per_node=0.0 is out of range; set it above 0"]),
        ({f"{ROLLOUT}.temperature": 0}, 4, [f"{ROLLOUT}.temperature=0.0 is out of range", "0.01 to 2"]),
        ({f"{ROLLOUT}.temperature": 0.009}, 4, [f"{ROLLOUT}.temperature=0.009 is out of range", "0.01 to 2"]),
        ({f"{ROLLOUT}.temperature": 2.1}, 4, [f"{ROLLOUT}.temperature=2.1 is out of range", "0.01 to 2"]),
        ({f"{ROLLOUT}.val_kwargs.temperature": 0.009}, 4, ["temperature=0.009", "0.01 to 2", "or 0 (greedy)"]),
        ({f"{ROLLOUT}.val_kwargs.temperature": 2.1}, 4, ["temperature=2.1", "0.01 to 2", "or 0 (greedy)"]),
        ({f"{ROLLOUT}.stop": ["a", ""]}, 4, ["rollout.stop=['a', ''] has an empty string"]),
        ({f"{ROLLOUT}.top_p": 1.1}, 4, ["top_p=1.1 is out of range", "at most 1"]),
        ({f"{ROLLOUT}.top_k": 0}, 4, ["top_k=0 is out of range; set -1 (off) or at least 1"]),
        ({f"{ROLLOUT}.n": 0}, 4, ["rollout.n=0 is out of range; set at least 1"]),
        ({f"{ACTOR}.clip_ratio_c": 1.0}, 4, ["clip_ratio_c=1.0", "more than 1"]),
        ({f"{ACTOR}.clip_ratio_low": 1.5}, 4, ["clip_ratio_low=1.5", "at most 1"]),
        ({f"{ACTOR}.optim.betas": [0.9]}, 4, ["betas=[0.9] must be two numbers"]),
        ({"trainer.save_freq": 0}, 4, ["save_freq=0", "-1 (off)"]),
        ({TP: 0}, 4, [f"{TP}=0 is out of range"]),
        ({"algorithm.adv_estimator": "grppo"}, 4, ["'grppo' is unknown; did you mean grpo? choose gae,"]),
        ({f"{ACTOR}.policy_loss.loss_mode": "ppo"}, 4, ["loss_mode='ppo' is unknown", "vanilla"]),
        ({f"{ACTOR}.loss_agg_mode": "token_mean"}, 4, ["did you mean token-mean?"]),
        ({f"{ACTOR}.kl_loss_type": "k4"}, 4, ["kl_loss_type='k4' is unknown", "low_var_kl"]),
        ({"algorithm.kl_penalty": "full"}, 4, ["kl_penalty='full' is unknown"]),
        ({"algorithm.rollout_correction.rollout_is": "seq"}, 4, ["rollout_is='seq'", "sequence, token"]),
        ({"trainer.logger": ["console", "tensorboard"]}, 4, ["trainer.logger='tensorboard'", "console, wandb"]),
        ({"trainer.device": "gpu"}, 4, ["trainer.device='gpu'", "auto, cpu, cuda"]),
        ({"actor_rollout_ref.model.dtype": "float16"}, 4, ["dtype='float16'", "bfloat16, float32"]),
        ({f"{ROLLOUT}.name": "sglang"}, 4, ["rollout.name='sglang'", "choose vllm"]),
        ({f"{M}.moe_router_bias_update_rate": 1e-3}, 4, ["bias_update_rate=0.001 moves correction biases", "set 0"]),
        ({f"{M}.router_replay.mode": "R1"}, 4, ["router_replay.mode='R1' is unknown", "choose R2, R3, disabled"]),
        ({f"{M}.router_replay.mode": "R3"}, 4, [f"router_replay.mode=R3 needs {KEEP}=true; or set disabled"]),
        (
            {f"{M}.router_replay.mode": "R2", KEEP: True},
            4,
            ["router_replay.mode=R2 replays the trainer's own routing", f"{KEEP}=true keeps the engine's"],
        ),
        ({"reshard.sink": "loader"}, 4, ["reshard.sink='loader' is unknown", "choose direct, reference"]),
        ({RTP: 4, REP: 2}, 4, [f"{REP}=2 must be 1 or tensor_model_parallel_size=4"]),
        ({RTP: 2, REP: 2, "trainer.device": "cpu"}, 4, [f"{REP}=2 needs GPUs", "set 1"]),
    ],
)
def test_refused_alone(overrides, world_size, parts):
    lines = violations_of(overrides, world_size)
    hits = [line for line in lines if all(part in line for part in parts)]
    assert len(hits) == 1, lines


def test_an_engine_that_holds_whole_experts_must_divide_their_number_and_not_their_width():
    wide = MODEL | {"num_experts": 8, "moe_intermediate_size": 99}
    assert violations_of({RTP: 2, f"{ROLLOUT}.n": 4, REP: 2}, 2, wide) == []
    odd = MODEL | {"num_experts": 9}
    [line] = violations_of({RTP: 2, REP: 2}, 2, odd)
    assert line == f"{REP}=2 must divide num_experts=9; choose 1, 3, 9"


def test_options_of_experts_on_a_dense_model():
    dense = MODEL | {"model_type": "qwen3"}
    asked = {EP: 2, ETP: 2, f"{M}.moe_aux_loss_coeff": 0.1, f"{M}.freeze_moe_router": True, KEEP: True}
    asked[f"{M}.router_replay.mode"] = "R3"
    lines = violations_of(asked, 4, dense)
    assert lines == [
        f"{key} needs a mixture of experts, this model has none; set {off}"
        for key, off in (
            (f"{EP}=2", "1"),
            (f"{ETP}=2", "1"),
            (f"{M}.moe_aux_loss_coeff=0.1", "0"),
            (f"{M}.freeze_moe_router=true", "false"),
            (f"{KEEP}=true", "false"),
            (f"{M}.router_replay.mode=R3", "disabled"),
        )
    ]


def test_a_replica_has_a_part_of_a_node_or_whole_nodes():
    two_nodes = {"cluster.nodes": 2, "launch.mode": "slurm", "trainer.n_gpus_per_node": 2, "trainer.device": "cuda"}
    for size in (1, 2, 4):
        assert violations_of(two_nodes | {RTP: size}) == []
    odd = two_nodes | {"trainer.n_gpus_per_node": 3, RTP: 2}
    assert violations_of(odd | {"trainer.device": "cpu"}) == []  # over gloo it makes no difference
    [line] = violations_of(odd)
    assert "a replica has a part of a node or whole nodes; choose 1, 3" in line


def test_kv_heads():
    model = MODEL | {"num_attention_heads": 12, "num_key_value_heads": 4}
    line = "must divide num_key_value_heads=4 or be a multiple of it; choose 1, 2, 4 or a multiple of 4"
    assert violations_of({TP: 3, RTP: 1, f"{ROLLOUT}.n": 6}, 3, model) == [f"{TP}=3 {line}"]
    three_wide = model | {"moe_intermediate_size": 96, "vocab_size": 192}
    assert violations_of({RTP: 3}, 3, three_wide) == [f"{RTP}=3 {line}"]
    assert violations_of({TP: 12, RTP: 1, f"{ROLLOUT}.n": 2}, 12, model) == []


def test_head_dims_of_vllm_on_a_cpu():
    on = {name: {"trainer.device": name} for name in ("cpu", "cuda")}
    assert violations_of(on["cpu"], 4, MODEL | {"head_dim": 80}) == []
    [line] = violations_of(on["cpu"], 4, MODEL | {"head_dim": 16})
    assert "no attention for head_dim=16, only for 32, 64, 80" in line
    assert violations_of(on["cuda"], 4, MODEL | {"head_dim": 16}) == []


def test_the_device_that_auto_becomes_is_checked(tmp_path):
    (tmp_path / "train.jsonl").write_text(ROW)
    more_than_any_machine_has = {"trainer.n_gpus_per_node": 1024, "trainer.device": "auto"}
    overrides = {
        "actor_rollout_ref.model.path": str(model_dir(tmp_path)),
        "data.train_files": str(tmp_path / "train.jsonl"),
        f"{ACTOR}.ppo_mini_batch_size": 1024,
        "data.train_batch_size": 1024,
        RTP: 2,
        REP: 2,
    }
    with pytest.raises(ConfigError, match=f"{REP}=2 needs GPUs"):
        check_run(config(overrides | more_than_any_machine_has))
    check_run(config(overrides | more_than_any_machine_has | {"trainer.device": "cuda"}))  # planned for elsewhere


def test_expert_width_and_vocabulary():
    model = MODEL | {"num_attention_heads": 12, "num_key_value_heads": 6, "vocab_size": 100}  # padded to 128
    lines = violations_of({ETP: 3, RTP: 3}, 3, model)
    assert lines == [
        f"{RTP}=3 must divide the padded vocabulary=128; choose 1, 2, 4, 8, 16, 32, 64, 128",
        f"{ETP}=3 must divide moe_intermediate_size=64; choose 1, 2, 4, 8, 16, 32, 64",
        f"{RTP}=3 must divide moe_intermediate_size=64; choose 1, 2, 4, 8, 16, 32, 64",
    ]


def test_all_violations_at_once():
    overrides = {EP: 3, RTP: 3, "data.max_prompt_length": 600, f"{ROLLOUT}.n": 1, "critic.enable": True}
    lines = violations_of(overrides, 4)
    for part in (
        "expert_model_parallel_size=3",
        f"{RTP}=3",
        "= 700 tokens",
        "rollout.n=1",
        "critic.enable=true",
    ):
        assert any(part in line for line in lines), lines


def test_unsupported_model_is_a_model_error():
    with pytest.raises(ModelError, match="sliding_window"):
        check(config({}), MODEL | {"use_sliding_window": True}, 4)


def model_dir(tmp_path, text=None):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL) if text is None else text)
    return directory


def test_read_model_config(tmp_path):
    assert read_model_config(model_dir(tmp_path)) == MODEL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": ', "can't be read as JSON"),
        ("[1]", "JSON list"),
        ('{"model_type": "mamba"}', "'mamba' is unknown; known: .*qwen3_moe"),
        ("{}", "model_type=None is unknown"),
    ],
)
def test_bad_model_config(tmp_path, text, message):
    with pytest.raises(ModelError, match=message):
        read_model_config(model_dir(tmp_path, text))


def test_missing_model(tmp_path):
    with pytest.raises(ModelError, match="is not a directory; check the path"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="run python scripts/make_tiny_model.py first"):
        read_model_config("outputs/assets/tiny_arithmetic/nowhere")
    with pytest.raises(ModelError, match="run python scripts/make_smollm2.py and rlhpc upcycle first, as README.md"):
        read_model_config("outputs/assets/smollm2/nowhere")
    with pytest.raises(ModelError, match="config.json is missing"):
        read_model_config(tmp_path)


def test_check_run_looks_at_files(tmp_path):
    train = tmp_path / "train.jsonl"
    paths = {"actor_rollout_ref.model.path": str(model_dir(tmp_path)), "data.train_files": str(train)}
    with pytest.raises(DataError, match=r"data\.train_files: .*train\.jsonl: no such file"):
        check_run(config(paths))
    train.write_text(ROW)
    assert check_run(config(paths)) == MODEL
    with pytest.raises(DataError, match=r"data\.val_files: .*val\.jsonl"):
        check_run(config({**paths, "data.val_files": str(tmp_path / "val.jsonl")}))
    with pytest.raises(
        ConfigError, match=r"trainer.device=auto: .*set trainer.device=cuda \(asks Slurm for 3 GPUs a node"
    ):
        check_run(config({**paths, "launch.mode": "slurm", "trainer.n_gpus_per_node": 3}))
    assert check_run(config({**paths, "launch.mode": "slurm", "trainer.device": "cpu"})) == MODEL
