"""The typed configuration schema: the only place where a default lives.

Leaf names follow verl where verl has the thing (`actor_rollout_ref.rollout.n`, `algorithm.adv_estimator`);
`cluster`, `launch`, `checkpoint`, `resume` and `reshard` are rlhpc's own. YAML files under `configs/` only override.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


def written(name: str) -> str:
    """The key that users write for a field: `from` is a keyword of Python, so its field is `from_`."""
    return name.removesuffix("_")


@dataclass
class ModelConfig:
    path: str = "???"  # directory with config.json, safetensors and tokenizer
    trust_remote_code: bool = False  # let the tokenizer run code from the model directory
    enable_gradient_checkpointing: bool = False  # the backward computes whole layers again, to save memory
    dtype: str = "bfloat16"  # float32 | bfloat16: the trainer's parameters and the engine's


@dataclass
class OptimConfig:
    lr: float = 1e-6  # peak
    lr_warmup_steps: int = 0  # optimizer steps of linear warm-up from 0
    lr_decay_style: str = "constant"  # constant | linear | cosine
    min_lr: float = 0.0  # where the decay ends
    weight_decay: float = 0.01  # decoupled (AdamW); norms and biases are exempt
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # Adam's moment decay rates
    eps: float = 1e-8  # Adam's
    clip_grad: float = 1.0  # global gradient norm; 0: off


@dataclass
class RouterReplayConfig:
    mode: str = "disabled"  # updates route as the policy did before them (R2), or it routes as the engine did (R3)


@dataclass
class MegatronConfig:
    tensor_model_parallel_size: int = 1  # ranks per dense layer
    pipeline_model_parallel_size: int = 1  # stages of layers
    context_parallel_size: int = 1  # ranks per sequence; only 1 for now
    expert_model_parallel_size: int = 1  # groups that the experts are divided among
    expert_tensor_parallel_size: int = 1  # ranks per expert
    use_distributed_optimizer: bool = True  # optimizer state sharded over data-parallel ranks
    freeze_moe_router: bool = False  # router weights keep their initial values
    moe_aux_loss_coeff: float = 0.0  # weight of the load-balancing loss, which is summed over layers; 0: off
    moe_router_bias_update_rate: float = 0.0  # moves correction biases (DeepSeek-V3's) by it every update; 0: they stay
    recompute_modules: list[str] = field(default_factory=list)  # run again in the backward: core_attn, moe (mlp)
    overlap_grad_reduce: bool = False  # reduce gradients over data-parallel ranks while the backward still runs
    param_offload: bool | str = True  # weights, the reference's too, wait in host memory during generation (GPU)
    optimizer_offload: bool | str = True  # so do masters and moments. auto, for both: what lacks room beside the engine
    grad_offload: bool = True  # gradients are freed meanwhile (GPU)
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    attention_backend: str = "auto"  # fused (cuDNN by Transformer Engine), flash, local; auto: the fastest there is


@dataclass
class PolicyLossConfig:
    loss_mode: str = "vanilla"  # a name in rlhpc.algorithms.losses.POLICY_LOSSES


@dataclass
class ActorConfig:
    ppo_mini_batch_size: int = 256  # prompts per optimizer step
    ppo_micro_batch_size_per_gpu: int | None = None  # trajectories; None: by token budget alone
    ppo_max_token_len_per_gpu: int = 16384  # tokens per microbatch per rank
    ppo_epochs: int = 1  # passes over each rollout
    clip_ratio: float = 0.2  # the ratio stays within [1 - low, 1 + high]
    clip_ratio_low: float | None = None  # None: clip_ratio
    clip_ratio_high: float | None = None  # None: clip_ratio
    clip_ratio_c: float = 3.0  # dual clip: bound of the loss for negative advantages, in advantages
    loss_agg_mode: str = "token-mean"  # how per-token losses become one number
    loss_scale_factor: float | None = None  # divisor of seq-mean-token-sum-norm, tokens; None: its width
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    use_kl_loss: bool = False  # add the KL to the reference policy to the loss
    kl_loss_coef: float = 0.001  # its weight
    kl_loss_type: str = "low_var_kl"  # k1|kl, abs, k2|mse, k3|low_var_kl; "+" suffix: gradient of k2
    shuffle: bool = False  # shuffle trajectories between ppo epochs
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


@dataclass
class ValSamplingConfig:
    n: int = 1  # samples per prompt
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = -1  # -1: off


@dataclass
class RolloutConfig:
    name: str = "vllm"  # the engine
    n: int = 1  # samples per prompt
    temperature: float = 1.0  # the trainer's logits are divided by it too
    top_p: float = 1.0  # 1: off
    top_k: int = -1  # -1: off
    stop: list[str] = field(default_factory=list)  # stop strings; the model's eos always stops
    ignore_eos: bool = False  # sample up to max_response_length, for benchmarks
    tensor_model_parallel_size: int = 1  # ranks per replica
    expert_parallel_size: int = 1  # tensor_model_parallel_size: whole experts per rank (GPU); 1: a part of each
    gpu_memory_utilization: float = 0.5  # share of the GPU that the engine may fill while it is awake
    max_num_seqs: int = 1024  # sequences decoded at once per replica
    max_num_batched_tokens: int = 8192  # tokens per engine step per replica
    max_model_len: int | None = None  # tokens; None: max_prompt_length + max_response_length
    enforce_eager: bool = False  # no CUDA graphs
    cudagraph_capture_sizes: list[int] | None = None  # batch sizes that get a graph; None: vLLM's, and to max_num_seqs
    enable_prefix_caching: bool = True  # the n samples of a prompt share its KV cache
    free_cache_engine: bool = True  # sleep between rollouts (GPU)
    enable_rollout_routing_replay: bool = False  # keep the experts of every token, for router_replay.mode and a metric
    cpu_kv_cache_gib: float = 0.5  # CPU only: KV cache per rank, GiB
    chunk_prompts: int = 0  # prompts per generate call, between which progress is told; 0: one call
    log_prob_max_token_len_per_gpu: int | None = None  # tokens per microbatch; None: the actor's budget
    log_prob_micro_batch_size_per_gpu: int | None = None  # trajectories; None: by token budget alone
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)


@dataclass
class RefConfig:
    log_prob_max_token_len_per_gpu: int | None = None  # tokens per microbatch; None: the actor's budget
    log_prob_micro_batch_size_per_gpu: int | None = None  # trajectories; None: by token budget alone


@dataclass
class ActorRolloutRefConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ref: RefConfig = field(default_factory=RefConfig)


@dataclass
class CriticModelConfig:
    path: str | None = None  # HF directory with the decoder to begin with (the head begins at 0); None: the actor's
    enable_gradient_checkpointing: bool | None = None  # None: the actor's


@dataclass
class CriticMegatronConfig:
    tensor_model_parallel_size: int | None = None  # ranks per dense layer; like all sizes here None, or the actor's
    pipeline_model_parallel_size: int | None = None  # stages of layers
    context_parallel_size: int | None = None  # ranks per sequence
    expert_model_parallel_size: int | None = None  # groups that the experts are divided among
    expert_tensor_parallel_size: int | None = None  # ranks per expert
    param_offload: bool | str | None = None  # as the actor's; None: the same. All else of its section holds for both
    optimizer_offload: bool | str | None = None  # None: the actor's
    grad_offload: bool | None = None  # None: the actor's


@dataclass
class CriticConfig:
    """Of PPO's critic, which algorithm.adv_estimator=gae needs, and nothing else has."""

    enable: bool | None = None  # None: what adv_estimator asks for
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    ppo_mini_batch_size: int | None = None  # prompts per optimizer step; None: the actor's
    ppo_micro_batch_size_per_gpu: int | None = None  # trajectories; None: by token budget alone
    ppo_max_token_len_per_gpu: int = 32768  # tokens per microbatch per rank
    forward_micro_batch_size_per_gpu: int | None = None  # for the values; None: ppo_micro_batch_size_per_gpu
    forward_max_token_len_per_gpu: int | None = None  # tokens, for the values; None: ppo_max_token_len_per_gpu
    ppo_epochs: int | None = None  # passes over each rollout; None: the actor's
    shuffle: bool | None = None  # None: the actor's
    cliprange_value: float = 0.5  # how far from the old value a value still earns the loss's decrease
    loss_agg_mode: str | None = None  # None: the actor's
    loss_scale_factor: float | None = None  # None: the actor's
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    megatron: CriticMegatronConfig = field(default_factory=CriticMegatronConfig)


@dataclass
class KlCtrlConfig:
    type: str = "fixed"  # fixed | adaptive: the coefficient follows the KL towards target_kl, step by step
    kl_coef: float = 0.001  # weight of the KL taken from each token's reward; adaptive: at first
    target_kl: float = 0.1  # adaptive: mean KL of an answer's tokens, nats
    horizon: int = 10000  # adaptive: samples after which an error of a fifth has changed the coefficient by a fifth


@dataclass
class RolloutCorrectionConfig:
    rollout_is: str | None = None  # null | token | sequence: level of trainer/rollout importance weights
    rollout_is_threshold: float | str = 2.0  # their cap; or a window such as 0.5_5.0, beyond which they are 0
    rollout_rs: str | None = None  # what is left out of the loss: token_k1, seq_mean_k1, ..., several by commas
    rollout_rs_threshold: float | str | None = None  # k1: a window of ratios, 0.5_2.0; k2, k3: a bound; by commas


@dataclass
class FilterGroupsConfig:
    enable: bool = False  # drop groups whose samples are all alike, and draw more prompts in their place (DAPO)
    metric: str = "reward"  # that they are alike in: acc, score: as the reward function gave it; reward: less penalties
    max_num_gen_batches: int = 0  # most generation batches of a step, then the run ends; 0: an epoch's, at least 10


@dataclass
class AlgorithmConfig:
    adv_estimator: str = "grpo"  # a name in rlhpc.algorithms.advantages.ESTIMATORS
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    mask_truncated_completions: bool = False  # leave answers that ran into the length limit out of the loss
    gamma: float = 1.0  # discount per token
    lam: float = 1.0  # GAE's lambda
    norm_adv_by_std_in_grpo: bool = True  # false: Dr. GRPO's advantages
    use_critic: bool | None = None  # the same as critic.enable
    use_kl_in_reward: bool = False  # take the KL to the reference policy from each token's reward
    kl_penalty: str = "kl"  # its kind, as actor.kl_loss_type
    kl_ctrl: KlCtrlConfig = field(default_factory=KlCtrlConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


@dataclass
class DataConfig:
    train_files: Any = "???"  # a path or a list of paths; .jsonl or .parquet
    val_files: Any = None  # as train_files; None: no validation
    prompt_key: str = "prompt"  # column with the prompt
    train_batch_size: int = 1024  # prompts per step
    gen_batch_size: int | None = None  # prompts drawn at a time, with algorithm.filter_groups; None: train_batch_size
    val_batch_size: int | None = None  # prompts; None: all at once
    val_max_samples: int = -1  # the first N validation prompts; -1: all
    max_prompt_length: int = 512  # tokens
    max_response_length: int = 512  # tokens
    filter_overlong_prompts: bool = True  # drop prompts over max_prompt_length; false: refuse them
    shuffle: bool = True  # a new order each epoch, from the seed
    chat_template: bool = True  # apply the tokenizer's chat template to the messages
    system_prompt: str | None = None  # put before prompts that are plain strings; needs chat_template
    data_source: str | None = None  # reward name for rows without a data_source column

    @property
    def draw_size(self) -> int:
        """Prompts drawn at a time."""
        return self.gen_batch_size or self.train_batch_size

    @property
    def draw_key(self) -> str:
        """The key that says so."""
        return "data.gen_batch_size" if self.gen_batch_size else "data.train_batch_size"


@dataclass
class OverlongBufferConfig:
    enable: bool = False  # answers in training lose reward, the more the closer they come to the limit (DAPO)
    len: int | None = None  # in the last tokens before it; None: a fifth of data.max_response_length
    penalty_factor: float = 1.0  # what an answer of data.max_response_length loses


@dataclass
class RewardConfig:
    name: str | None = None  # a reward or FILE.py:FUNCTION; None: by each row's data_source
    kwargs: dict[str, Any] = field(default_factory=dict)  # passed to the reward function
    timeout_s: float = 10.0  # per completion; then it scores 0
    num_workers: int = 2  # processes
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    shuffle_control: bool = False  # permutes rewards over the batch: a control run that must not learn


@dataclass
class TrainerConfig:
    project_name: str = "rlhpc"  # wandb project and part of run_dir
    experiment_name: str = "default"  # wandb run name and part of run_dir
    logger: list[str] = field(default_factory=lambda: ["console"])  # and wandb; metrics.jsonl always
    nnodes: int = 1  # nodes
    n_gpus_per_node: int = 1  # ranks per node; on a CPU machine, CPU ranks
    device: str = "auto"  # cpu | cuda | auto: what this machine has; for launch=slurm say which (cuda asks for GPUs)
    total_epochs: int = 1  # passes over the training prompts
    total_training_steps: int | None = None  # rollouts; None: epochs decide
    save_freq: int = -1  # steps; -1: only at the end
    test_freq: int = -1  # steps between validations; -1: only at the end
    val_before_train: bool = True  # validate the initial policy
    critic_warmup: int = 0  # the first step that trains the policy too: those before it train the critic alone
    resume_mode: str = "auto"  # auto: newest in default_local_dir | disable | resume_path (verl's resume.from)
    resume_from_path: str | None = None  # for resume_mode=resume_path; the same as resume.from
    default_local_dir: str | None = None  # None: <run_dir>/checkpoints
    balance_batch: bool = True  # even out tokens over data-parallel ranks
    log_val_generations: int = 3  # shown on the console per validation; all go to JSON-lines
    wandb_mode: str | None = None  # online | offline; None: wandb's own default


@dataclass
class CheckpointConfig:
    async_save: bool = True  # train on while a checkpoint is written; takes host memory for a copy
    read_back: bool = True  # compare what was written with its checksums, from the disk, before older ones go
    keep: int = 3  # newest N committed steps
    keep_every: int = 0  # also every step that this divides, for good; 0: none
    keep_best: int = 0  # also the N best by best_metric, of the steps that were validated and saved; 0: none
    best_metric: str | None = None  # such as val-core/openai/gsm8k/reward/mean@1
    best_mode: str = "max"  # max | min
    save_final: bool = True  # commit a checkpoint after the last step


@dataclass
class ResumeConfig:
    from_: str | None = None  # begin from: an HF directory, a run or its step-NNNNNN; null: the model's directory
    what: str = "all"  # all: also optimizer, step, data cursor, random state | weights: step 0, fresh optimizer


@dataclass
class ReshardConfig:
    sink: str = "direct"  # into vLLM's fused parameters | reference: whole tensors through its loader
    bucket_bytes: int = 512 * 1024**2  # peak extra memory of a publish, per rank
    verify_every: int = 0  # publishes between fingerprint comparisons; 0: never
    in_place_experts: bool = False  # the trainer's experts are the engine's own (GPU, where layouts agree)


@dataclass
class ClusterConfig:
    nodes: int | None = None  # the same as trainer.nnodes; None: what that says
    partition: str | None = None  # Slurm's; None: the cluster's default
    account: str | None = None  # Slurm's; None: the user's default
    qos: str | None = None  # Slurm's quality of service
    constraint: str | None = None  # node features that Slurm must find
    reservation: str | None = None  # a Slurm reservation to run in
    nodelist: str | None = None  # only these nodes
    exclude: str | None = None  # not these nodes
    exclusive: bool = False  # whole nodes, shared with nobody
    cpus_per_node: int | None = None  # CPUs asked of Slurm; None: cpus_per_rank a rank, and 2 more
    gpu_memory_gib: float | None = None  # of one GPU, with which the plan compares; None: of a GPU here, if any
    memory_gib_per_node: float | None = None  # asked of Slurm, GiB; None: its default, with exclusive all of a node's
    sbatch: dict[str, Any] = field(default_factory=dict)  # further options of sbatch: {comment: text, mail-type: END}
    setup: list[str] = field(default_factory=list)  # shell lines before the program, for all nodes: module load cuda
    network_interface: str | None = None  # such as ib0, or a CIDR such as 10.1.0.0/16; None: the route to the head
    start_timeout_s: float = 300.0  # until every node has joined Ray
    cpus_per_rank: int = 1  # CPUs meant for a rank, asked of Slurm
    threads_per_rank: int = 1  # intra-op threads of torch and the engine
    ray_temp_root: str = "/tmp"  # node-local, short; also keeps what engines compile, for the node's next run
    object_store_bytes: int = 256 * 1024**2  # Ray's shared memory per node
    collective_timeout_s: float = 600.0  # then a collective that a rank never joined fails


@dataclass
class LaunchConfig:
    mode: str = "local"  # local: here | slurm: submit a job | allocation: over the nodes of the job this runs in
    dry_run: bool = False  # print the layout, the memory plan and what would be submitted; start nothing
    wait: bool = False  # launch=slurm: stay until the job has ended, and exit as it did
    job_name: str | None = None  # None: trainer.experiment_name
    time_min: int | None = None  # Slurm's time limit, minutes; None: the partition's default
    stop_lead_s: int = 300  # before the time limit, the job is told to stop: two steps and a save must fit
    array_parallelism: int = 16  # tasks of a sweep that run at the same time
    max_attempts_without_progress: int = 2  # attempts in a row without a new checkpoint before the job is held


@dataclass
class RunConfig:
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    # everything that a run writes goes here; relative to the working directory, like all paths
    run_dir: str = "outputs/${trainer.project_name}/${trainer.experiment_name}"
    seed: int = 0  # same seed, same run: data order and sampling derive from it

    def checkpoint_root(self) -> Path:
        """The directory of the run's checkpoints."""
        return Path(self.trainer.default_local_dir or Path(self.run_dir, "checkpoints"))

    def tree(self) -> dict[str, Any]:
        """Plain nested dictionaries, under the keys that users write."""
        return asdict(self, dict_factory=lambda pairs: {written(name): value for name, value in pairs})
