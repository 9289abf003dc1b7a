"""The typed configuration schema: the only place where a default lives.

Leaf names follow verl where verl has the thing (`actor_rollout_ref.rollout.n`, `algorithm.adv_estimator`, ...);
`cluster`, `launch`, `checkpoint` and `reshard` are rlhpc's own. YAML files under `configs/` only override.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

# OmegaConf reads these annotations at run time and knows `Optional[X]`, not `X | None`.


@dataclass
class ModelConfig:
    path: str = "???"  # directory with config.json, safetensors and tokenizer
    trust_remote_code: bool = False
    enable_gradient_checkpointing: bool = False  # full activation recompute
    dtype: str = "bfloat16"  # float32 | bfloat16: the trainer's parameters and the engine's


@dataclass
class OptimConfig:
    lr: float = 1e-6
    lr_warmup_steps: int = 0
    lr_decay_style: str = "constant"  # constant | linear | cosine
    min_lr: float = 0.0
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass
class MegatronConfig:
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    use_distributed_optimizer: bool = True
    freeze_moe_router: bool = False
    moe_aux_loss_coeff: float = 0.0


@dataclass
class PolicyLossConfig:
    loss_mode: str = "vanilla"


@dataclass
class ActorConfig:
    ppo_mini_batch_size: int = 256  # prompts per optimizer step
    ppo_micro_batch_size_per_gpu: Optional[int] = None  # trajectories; None: by token budget alone
    ppo_max_token_len_per_gpu: int = 16384  # tokens per microbatch per rank
    ppo_epochs: int = 1
    clip_ratio: float = 0.2
    clip_ratio_low: Optional[float] = None  # None: clip_ratio
    clip_ratio_high: Optional[float] = None  # None: clip_ratio
    clip_ratio_c: float = 3.0  # dual clip
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: Optional[float] = None  # divisor of seq-mean-token-sum-norm; None: response width
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    shuffle: bool = False  # shuffle trajectories between ppo epochs
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


@dataclass
class ValSamplingConfig:
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass
class RolloutConfig:
    name: str = "vllm"
    n: int = 1  # samples per prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    stop: list[str] = field(default_factory=list)  # stop strings; the model's eos always stops
    ignore_eos: bool = False
    tensor_model_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    max_model_len: Optional[int] = None  # None: max_prompt_length + max_response_length
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    free_cache_engine: bool = True  # sleep between rollouts (GPU)
    cpu_kv_cache_gib: float = 0.5  # CPU only: per-rank KV cache
    chunk_prompts: int = 0  # prompts per generate call, between which the driver may stop; 0: one call
    log_prob_max_token_len_per_gpu: Optional[int] = None  # None: the actor's token budget
    log_prob_micro_batch_size_per_gpu: Optional[int] = None
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)


@dataclass
class RefConfig:
    log_prob_max_token_len_per_gpu: Optional[int] = None
    log_prob_micro_batch_size_per_gpu: Optional[int] = None


@dataclass
class ActorRolloutRefConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ref: RefConfig = field(default_factory=RefConfig)


@dataclass
class CriticConfig:
    enable: Optional[bool] = None  # None: what adv_estimator asks for


@dataclass
class KlCtrlConfig:
    type: str = "fixed"
    kl_coef: float = 0.001


@dataclass
class RolloutCorrectionConfig:
    rollout_is: Optional[str] = None  # null | token | sequence
    rollout_is_threshold: float = 2.0  # cap of the importance weight


@dataclass
class AlgorithmConfig:
    adv_estimator: str = "grpo"
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    use_critic: Optional[bool] = None
    use_kl_in_reward: bool = False
    kl_penalty: str = "kl"
    kl_ctrl: KlCtrlConfig = field(default_factory=KlCtrlConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


@dataclass
class DataConfig:
    train_files: Any = "???"  # a path or a list of paths; .jsonl or .parquet
    val_files: Any = None
    prompt_key: str = "prompt"
    train_batch_size: int = 1024  # prompts per step
    val_batch_size: Optional[int] = None  # None: all at once
    val_max_samples: int = -1
    max_prompt_length: int = 512
    max_response_length: int = 512
    filter_overlong_prompts: bool = True
    shuffle: bool = True
    chat_template: bool = True  # apply the tokenizer's chat template to the messages
    system_prompt: Optional[str] = None
    data_source: Optional[str] = None  # reward name for rows without a data_source column


@dataclass
class RewardConfig:
    name: Optional[str] = None  # None: by each row's data_source
    kwargs: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 10.0
    num_workers: int = 2
    shuffle_control: bool = False  # permutes rewards over the batch: a control run that must not learn


@dataclass
class TrainerConfig:
    project_name: str = "rlhpc"
    experiment_name: str = "default"
    logger: list[str] = field(default_factory=lambda: ["console"])  # console, wandb; metrics.jsonl is always written
    nnodes: int = 1
    n_gpus_per_node: int = 1  # ranks per node; on a CPU machine, CPU ranks
    device: str = "auto"  # auto | cpu | cuda
    total_epochs: int = 1
    total_training_steps: Optional[int] = None  # None: epochs decide
    save_freq: int = -1  # steps; -1: only at the end
    test_freq: int = -1
    val_before_train: bool = True
    critic_warmup: int = 0
    resume_mode: str = "auto"  # auto | disable | resume_path
    resume_from_path: Optional[str] = None
    default_local_dir: Optional[str] = None  # None: <run_dir>/checkpoints
    balance_batch: bool = True
    log_val_generations: int = 3
    wandb_mode: Optional[str] = None  # online | offline; None: wandb's own default


@dataclass
class CheckpointConfig:
    keep: int = 3  # newest N committed steps
    save_final: bool = True


@dataclass
class ReshardConfig:
    bucket_bytes: int = 512 * 1024**2
    verify_every: int = 0  # publishes between fingerprint comparisons; 0: never


@dataclass
class ClusterConfig:
    cpus_per_rank: int = 1
    threads_per_rank: int = 1
    ray_temp_root: str = "/tmp"  # node-local, short
    object_store_bytes: int = 256 * 1024**2
    collective_timeout_s: float = 600.0


@dataclass
class LaunchConfig:
    mode: str = "local"  # local | slurm
    dry_run: bool = False


@dataclass
class RunConfig:
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    run_dir: str = "outputs/${trainer.project_name}/${trainer.experiment_name}"
    seed: int = 0
