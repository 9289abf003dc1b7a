"""Keys that verl recipes set and the schema doesn't have: accepted where they ask for what rlhpc does anyway,
else refused with what to write instead (verl 0.9.1, trainer/config/_generated_ppo_megatron_trainer.yaml)."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class VerlKey:
    """Values of a verl key that may stay because they change nothing here, and what to do about others."""

    instead: str
    accepted: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        return any(type(value) is type(known) and value == known for known in self.accepted)


_LAYOUT = "the reference policy has the actor's layout; remove it"
_OFFLOAD = "the reference goes with the policy: set actor_rollout_ref.actor.megatron.param_offload"
_NO_PROFILER = "profiling is not available yet; remove it"
_NO_REWARD_MODEL = "reward models are not available yet; use a rule reward: reward.name=gsm8k or FILE.py:FUNCTION"
_NO_MULTI_TURN = "multi-turn rollouts and tools are not available; remove it"
_NO_MULTIMODAL = "only text models are trained; remove it"
_NO_DISTILLATION = "distillation is not available; remove it"
_NO_MTP = "heads for several tokens ahead are not trained or used; remove it"
_NO_MUON = "the optimizer is AdamW; remove it"
_NO_QAT = "training for quantised weights is not available; remove it"
_NO_SANDBOX = "code is not run; use a reward of your own: reward.name=FILE.py:FUNCTION"
_OWN_REWARD = "set reward.name=FILE.py:FUNCTION, a function (completion, ground_truth) -> float"
_OVERLONG = "set reward.overlong_buffer.{}"
_TOKEN_BUDGET = "microbatches are always filled up to a token budget ({}); remove it"

_ANY = (True, False)  # a choice of kernels, or of something that rlhpc doesn't have: it changes nothing
_OFF = (False, None, 0)
_STATES = ["model", "optimizer", "extra"]

_ACTOR = "actor_rollout_ref.actor"
_MEGATRON = f"{_ACTOR}.megatron"
_MODEL = "actor_rollout_ref.model"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"


def _model(section: str) -> dict[str, VerlKey]:
    """What a section says of its model, the actor's as the critic's."""
    return {
        f"{section}.use_remove_padding": VerlKey("sequences are always packed without padding; set true", (True,)),
        f"{section}.use_fused_kernels": VerlKey("kernels are chosen by the backend; remove it", _ANY),
        f"{section}.mtp.*": VerlKey(_NO_MTP, _OFF),
        f"{section}.enable_activation_offload": VerlKey(f"set {section}.enable_gradient_checkpointing", (False,)),
        f"{section}.use_shm": VerlKey("each rank reads only its part of the files; remove it", (False,)),
        f"{section}.external_lib": VerlKey("external model code is not loaded; remove it", (None,)),
        f"{section}.override_config.*": VerlKey(f"edit the config.json of {section}.path"),
        f"{section}.lora*": VerlKey("LoRA is not available; remove it", (0,)),
    }


def _trained(section: str) -> dict[str, VerlKey]:
    """What a section says of training its model, the actor's as the critic's."""
    optim, megatron = f"{section}.optim", f"{section}.megatron"
    return {
        f"{section}.strategy": VerlKey("the trainer is Megatron-core; set megatron", ("megatron",)),
        f"{section}.use_dynamic_bsz": VerlKey(_TOKEN_BUDGET.format(f"{section}.ppo_max_token_len_per_gpu"), (True,)),
        f"{section}.ppo_micro_batch_size": VerlKey(f"set {section}.ppo_micro_batch_size_per_gpu", (None,)),
        f"{section}.grad_clip": VerlKey(f"set {optim}.clip_grad"),
        f"{section}.data_loader_seed": VerlKey("set seed", (None,)),
        f"{section}.load_weight": VerlKey("weights are always loaded; set true", (True,)),
        f"{section}.ulysses_sequence_parallel_size": VerlKey("sequences are not split over ranks; set 1", (1,)),
        f"{section}.checkpoint.async_save": VerlKey("set checkpoint.async_save"),
        f"{section}.checkpoint.*_contents": VerlKey(
            "checkpoints always hold the whole training state, and rlhpc export makes HF directories; remove it",
            (_STATES,),
        ),
        f"{section}.checkpoint.*": VerlKey("see the checkpoint section; remove it"),
        f"{section}.profiler.*": VerlKey(_NO_PROFILER),
        f"{optim}.optimizer": VerlKey("the optimizer is AdamW; set adam", ("adam",)),
        f"{optim}.lr_warmup_steps_ratio": VerlKey(f"set {optim}.lr_warmup_steps (steps)", (0.0, 0)),
        f"{optim}.warmup_style": VerlKey(f"set {optim}.lr_decay_style", ("constant",)),
        f"{optim}.total_training_steps": VerlKey("set trainer.total_training_steps", (-1,)),
        f"{optim}.lr_warmup_init": VerlKey("warm-up starts from 0; set 0", (0.0, 0)),
        f"{optim}.lr_decay_steps": VerlKey("the decay ends with the training; remove it", (None,)),
        f"{optim}.weight_decay_incr_style": VerlKey("weight decay is constant", ("constant",)),
        f"{optim}.override_optimizer_config.*offload*": VerlKey(
            "the optimizer works on the GPU, and its state waits in host memory meanwhile: set "
            f"{megatron}.optimizer_offload",
            _OFF,
        ),
        f"{optim}.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d": VerlKey("not needed; remove it", _ANY),
        f"{optim}.override_optimizer_config.*": VerlKey(f"only the keys of {optim} exist; remove it", _OFF),
        f"{optim}.lr_wsd_*": VerlKey(
            f"wsd is not available: set {optim}.lr_decay_style; remove it", (None, "exponential")
        ),
        f"{optim}.use_*": VerlKey("the optimizer keeps float32 masters and moments; remove it", _OFF),
        f"{optim}.*_dtype": VerlKey("the optimizer keeps float32 masters and moments; remove it", ("fp32", None)),
        f"{optim}.muon_*": VerlKey(_NO_MUON),
        **{
            f"{megatron}.override_transformer_config.{name}": VerlKey("rlhpc chooses it; remove it", accepted)
            for name, accepted in (
                ("*fusion", _ANY),
                ("moe_grouped_gemm", (True,)),
                ("moe_token_dispatcher_type", ("alltoall",)),
                ("moe_router_dtype", ("fp32",)),
                ("moe_router_load_balancing_type", ("aux_loss",)),
                ("moe_enable_deepep", (False,)),
                ("account_for_*_in_pipeline_split", (False,)),
                ("deallocate_pipeline_outputs", _ANY),
                ("persist_layer_norm", _ANY),
            )
        },
        f"{megatron}.override_transformer_config.moe_z_loss_coeff": VerlKey("not available; set 0", (0, 0.0, None)),
        **{
            f"{megatron}.override_transformer_config.{name}": VerlKey(f"set {_MEGATRON}.{name}", (0, 0.0))
            for name in ("moe_aux_loss_coeff", "moe_router_bias_update_rate")
        },
        f"{megatron}.vanilla_mbridge": VerlKey("HF weights are always read directly; remove it", _ANY),
        f"{megatron}.use_remove_padding": VerlKey("sequences are always packed without padding; set true", (True,)),
        f"{megatron}.pad_*": VerlKey("sequences are always packed without padding; remove it", _OFF),
        f"{megatron}.use_megatron_fsdp": VerlKey("FSDP is not available; set false", (False,)),
        f"{megatron}.forward_only": VerlKey("what is trained is not frozen; set false", (False,)),
        f"{megatron}.dynamic_context_parallel": VerlKey("sequences are not split over ranks; set false", (False,)),
        f"{megatron}.max_seqlen_per_dp_cp_rank": VerlKey("sequences are not split over ranks; remove it", (None,)),
        f"{megatron}.dist*_reshardable*": VerlKey("checkpoints load under any layout; remove it", _ANY),
        f"{megatron}.qat.*": VerlKey(_NO_QAT, _OFF),
        f"{megatron}.virtual_pipeline_model_parallel_size": VerlKey("interleaved stages are not available", (None,)),
        f"{megatron}.sequence_parallel": VerlKey("follows tensor_model_parallel_size; set true", (True,)),
        f"{megatron}.use_mbridge": VerlKey("HF weights are always read directly; remove it", (True,)),
        f"{megatron}.use_dist_checkpointing": VerlKey("checkpoints are safetensors; set false", (False,)),
        f"{megatron}.dist_checkpointing_*": VerlKey("set resume.from", (None, "")),
    }


# The first pattern that matches the whole dotted key counts.
VERL_KEYS: dict[str, VerlKey] = {
    "actor_rollout_ref.hybrid_engine": VerlKey("trainer and rollout always share the GPUs; remove it", (True,)),
    "actor_rollout_ref.nccl_timeout": VerlKey("set cluster.collective_timeout_s (seconds)"),
    # model
    f"{_MODEL}.fused_kernel_options.*": VerlKey(
        "kernels are chosen by the backend; remove it", (None, "torch", "triton")
    ),
    f"{_MODEL}.use_liger": VerlKey("kernels are chosen by the backend; remove it", _ANY),
    f"{_MODEL}.tiled_mlp.*": VerlKey("experts and MLPs are not cut into tiles; remove it", _OFF),
    f"{_MODEL}.*_path": VerlKey(f"config and tokenizer come from {_MODEL}.path; remove it", (None,)),
    f"{_MODEL}.target_modules": VerlKey("LoRA is not available; remove it", ("all-linear", None)),
    f"{_MODEL}.exclude_modules": VerlKey("LoRA is not available; remove it", (None,)),
    f"{_MODEL}.custom_chat_template": VerlKey("put the template into the tokenizer's files", (None,)),
    f"{_MODEL}.override_config.moe_config.freeze_moe_router": VerlKey(f"set {_MEGATRON}.freeze_moe_router"),
    **_model(_MODEL),
    # actor
    **_trained(_ACTOR),
    f"{_ACTOR}.use_torch_compile": VerlKey("the trainer is not compiled; set false", (False,)),
    f"{_ACTOR}.calculate_entropy": VerlKey("actor/entropy is always told; remove it", _ANY),
    f"{_ACTOR}.calculate_sum_pi_squared": VerlKey("not available; remove it", (False,)),
    f"{_ACTOR}.entropy_*": VerlKey(
        "the entropy is computed with the logprobs, some thousand tokens at a time; remove it", _ANY
    ),
    f"{_ACTOR}.freeze_vision_tower": VerlKey(_NO_MULTIMODAL, _ANY),
    f"{_ACTOR}.use_prefix_grouper": VerlKey("not available; remove it", (False,)),
    f"{_ACTOR}.tau_*": VerlKey("the loss mode sapo is not available; remove it"),
    f"{_ACTOR}.qat.*": VerlKey(_NO_QAT, _OFF),
    f"{_ACTOR}.fsdp_config.*": VerlKey(f"FSDP is not available yet; set the layout under {_MEGATRON}"),
    f"{_ACTOR}.policy_loss.*": VerlKey("this loss mode's option is not available; remove it"),
    f"{_MEGATRON}.seed": VerlKey("set seed"),
    f"{_MEGATRON}.dtype": VerlKey(f"set {_MODEL}.dtype"),
    f"{_MEGATRON}.override_transformer_config.recompute_*": VerlKey(
        f"set {_MODEL}.enable_gradient_checkpointing, or {_MEGATRON}.recompute_modules", (None,)
    ),
    f"{_MEGATRON}.override_transformer_config.attention_backend": VerlKey(f"set {_MEGATRON}.attention_backend"),
    f"{_MEGATRON}.override_ddp_config.overlap_grad_reduce": VerlKey(f"set {_MEGATRON}.overlap_grad_reduce"),
    f"{_MEGATRON}.override_*": VerlKey(f"only the keys of {_MEGATRON} and {_MODEL} exist; remove it"),
    f"{_MEGATRON}.router_replay.*": VerlKey(f"only {_MEGATRON}.router_replay.mode exists", (None,)),
    f"{_ACTOR}.router_replay.mode": VerlKey(f"set {_MEGATRON}.router_replay.mode", ("disabled",)),
    f"{_ACTOR}.router_replay.*": VerlKey(f"only {_MEGATRON}.router_replay.mode exists", (None,)),
    # ref
    f"{_REF}.strategy": VerlKey("the reference policy runs in the trainer; set megatron", ("megatron",)),
    f"{_REF}.log_prob_use_dynamic_bsz": VerlKey(
        _TOKEN_BUDGET.format(f"{_REF}.log_prob_max_token_len_per_gpu"), (True,)
    ),
    f"{_REF}.log_prob_micro_batch_size": VerlKey(f"set {_REF}.log_prob_micro_batch_size_per_gpu", (None,)),
    f"{_REF}.megatron.param_offload": VerlKey(_OFFLOAD, (True,)),
    f"{_REF}.megatron.*_offload": VerlKey("the reference has weights alone; remove it", (True, False)),
    f"{_REF}.*": VerlKey(_LAYOUT),
    # rollout
    f"{_ROLLOUT}.mode": VerlKey("the engine runs in the worker's process; remove it", ("sync", "async")),
    f"{_ROLLOUT}.calculate_log_probs": VerlKey("rollout logprobs are always kept; set true", (True,)),
    f"{_ROLLOUT}.do_sample": VerlKey(f"greedy decoding is {_ROLLOUT}.val_kwargs.temperature=0; set true", (True,)),
    f"{_ROLLOUT}.val_kwargs.do_sample": VerlKey("greedy is val_kwargs.temperature=0; remove it", (True,)),
    f"{_ROLLOUT}.prompt_length": VerlKey("set data.max_prompt_length"),
    f"{_ROLLOUT}.response_length": VerlKey("set data.max_response_length"),
    f"{_ROLLOUT}.dtype": VerlKey(f"set {_MODEL}.dtype"),
    f"{_ROLLOUT}.load_format": VerlKey("weights always come from the trainer", ("dummy",)),
    f"{_ROLLOUT}.enable_chunked_prefill": VerlKey("prefill is always chunked; set true", (True,)),
    f"{_ROLLOUT}.disable_log_stats": VerlKey("the engine's own log is off; set true", (True,)),
    f"{_ROLLOUT}.skip_tokenizer_init": VerlKey("the engine works on tokens; set true", (True,)),
    f"{_ROLLOUT}.multi_stage_wake_up": VerlKey("weights always wake before the KV cache; set true", (True,)),
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz": VerlKey(
        _TOKEN_BUDGET.format(f"{_ROLLOUT}.log_prob_max_token_len_per_gpu"), (True,)
    ),
    f"{_ROLLOUT}.log_prob_micro_batch_size": VerlKey(f"set {_ROLLOUT}.log_prob_micro_batch_size_per_gpu", (None,)),
    f"{_ROLLOUT}.data_parallel_size": VerlKey("replicas are ranks / rollout.tensor_model_parallel_size; set 1", (1,)),
    f"{_ROLLOUT}.pipeline_model_parallel_size": VerlKey("the rollout has no pipeline stages; set 1", (1,)),
    f"{_ROLLOUT}.update_weights_bucket_megabytes": VerlKey("set reshard.bucket_bytes"),
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": VerlKey("set reshard.bucket_bytes"),
    f"{_ROLLOUT}.checkpoint_engine.*": VerlKey(
        "weights go from trainer to engine as reshard.sink says; remove it", ("naive", None)
    ),
    f"{_ROLLOUT}.layered_summon": VerlKey("weights are never gathered whole; remove it", _ANY),
    f"{_ROLLOUT}.nnodes": VerlKey("trainer and rollout always share the GPUs; remove it", (0,)),
    f"{_ROLLOUT}.seed": VerlKey("set seed"),
    f"{_ROLLOUT}.full_determinism": VerlKey("sampling follows the seed anyway; remove it", (False,)),
    f"{_ROLLOUT}.logprobs_mode": VerlKey("of the distribution that was sampled; remove it", ("processed_logprobs",)),
    f"{_ROLLOUT}.scheduling_policy": VerlKey(
        "the order of requests changes no sample; remove it", ("fcfs", "priority")
    ),
    f"{_ROLLOUT}.over_sample_rate": VerlKey("every sample is waited for; set 0", (0, 0.0)),
    f"{_ROLLOUT}.moe_load_balance_metrics_interval": VerlKey("not available; set 0", (0,)),
    f"{_ROLLOUT}.router_config_path": VerlKey("not available; remove it", (None,)),
    f"{_ROLLOUT}.quantization_config_file": VerlKey("quantised rollouts are not available", (None,)),
    f"{_ROLLOUT}.disaggregation.*": VerlKey("prefill and decoding share an engine; remove it", _OFF),
    f"{_ROLLOUT}.trace.*": VerlKey("val_generations/ has what validation sampled; remove it", _OFF),
    f"{_ROLLOUT}.prometheus.*": VerlKey("metrics go to metrics.jsonl and wandb; remove it", _OFF),
    f"{_ROLLOUT}.profiler.*": VerlKey(_NO_PROFILER),
    f"{_ROLLOUT}.engine_kwargs.*": VerlKey(f"only the keys of {_ROLLOUT} reach the engine"),
    f"{_ROLLOUT}.multi_turn.enable": VerlKey(_NO_MULTI_TURN, (False,)),
    f"{_ROLLOUT}.multi_turn.*": VerlKey(_NO_MULTI_TURN),
    f"{_ROLLOUT}.agent.*": VerlKey(_NO_MULTI_TURN),
    f"{_ROLLOUT}.quantization": VerlKey("quantised rollouts are not available", (False, None)),
    # algorithm
    "algorithm.filter_groups.max_inflight_gen_batches": VerlKey("one generation batch follows the other; set 1", (1,)),
    "algorithm.rollout_correction.bypass_mode": VerlKey("trainer logprobs are always recomputed", (False,)),
    "algorithm.rollout_correction.loss_type": VerlKey(
        "set actor_rollout_ref.actor.policy_loss.loss_mode", ("ppo_clip",)
    ),
    "algorithm.rollout_correction.rollout_is_batch_normalize": VerlKey(
        "weights are not normalised; set false", (False,)
    ),
    "algorithm.rollout_correction.*": VerlKey("rollout_is, rollout_rs and their thresholds exist; remove it"),
    "algorithm.use_pf_ppo": VerlKey("PF-PPO is not available", (False,)),
    "algorithm.pf_ppo.*": VerlKey("PF-PPO is not available; remove it"),
    # data
    "data.tokenizer": VerlKey("the tokenizer of actor_rollout_ref.model.path is used", (None,)),
    "data.return_raw_chat": VerlKey("not needed, messages are read from the rows; remove it", (True, False)),
    "data.return_raw_input_ids": VerlKey("not needed; remove it", (False,)),
    "data.return_full_prompt": VerlKey("not needed; remove it", (False,)),
    "data.truncation": VerlKey("over-long prompts are dropped or refused, never cut: set error", ("error",)),
    "data.seed": VerlKey("set seed", (None,)),
    "data.reward_fn_key": VerlKey("the column is data_source", ("data_source",)),
    "data.train_max_samples": VerlKey("training uses all rows; set -1", (-1,)),
    "data.validation_shuffle": VerlKey("validation keeps the file's order; set false", (False,)),
    "data.use_shm": VerlKey("not needed; remove it", (False,)),
    "data.trust_remote_code": VerlKey(f"set {_MODEL}.trust_remote_code"),
    "data.dataloader_num_workers": VerlKey("prompts are tokenised once at the start; remove it"),
    "data.filter_overlong_prompts_workers": VerlKey("prompts are tokenised in one batch; remove it"),
    "data.image_*": VerlKey(_NO_MULTIMODAL),
    "data.audio_*": VerlKey(_NO_MULTIMODAL),
    "data.video_*": VerlKey(_NO_MULTIMODAL),
    "data.return_multi_modal_inputs": VerlKey(_NO_MULTIMODAL),
    "data.apply_chat_template_kwargs.*": VerlKey("the chat template gets no options; remove it"),
    "data.custom_cls.*": VerlKey(
        "write the rows as .jsonl or .parquet; custom dataset classes are not loaded", (None,)
    ),
    "data.sampler.*": VerlKey("custom samplers are not available", (None,)),
    # critic
    **_trained("critic"),
    "critic.rollout_n": VerlKey(f"set {_ROLLOUT}.n"),
    "critic.forward_micro_batch_size": VerlKey("set critic.forward_micro_batch_size_per_gpu", (None,)),
    "critic.nccl_timeout": VerlKey("set cluster.collective_timeout_s (seconds)"),
    "critic.model.tokenizer_path": VerlKey("tokens are the actor's; remove it", (None,)),
    "critic.model.trust_remote_code": VerlKey("no code of a critic's directory is run; remove it", (False,)),
    **_model("critic.model"),
    "critic.model.fsdp_config.*": VerlKey("FSDP is not available yet; the critic has the actor's layout"),
    "critic.model.*": VerlKey("only path and enable_gradient_checkpointing exist; remove it", _OFF),
    "critic.optim.*": VerlKey("only the keys of actor_rollout_ref.actor.optim exist under critic.optim"),
    "critic.megatron.use_distributed_optimizer": VerlKey("optimizers are always sharded; set true", (True,)),
    "critic.megatron.*": VerlKey(f"the critic's is what {_MEGATRON} says; remove it"),
    # rewards
    "reward_model.enable": VerlKey(_NO_REWARD_MODEL, (False,)),
    "reward.reward_manager.module.*": VerlKey(_OWN_REWARD, (None,)),
    "reward.reward_manager.source": VerlKey(_OWN_REWARD, ("register",)),
    "*sandbox_fusion.*": VerlKey(_NO_SANDBOX, _OFF),
    "reward_model.reward_manager": VerlKey("rewards are computed by row; set naive or dapo", ("naive", "dapo")),
    "reward.reward_manager.name": VerlKey("rewards are computed by row; set naive or dapo", ("naive", "dapo")),
    **{
        f"{section}.{name}": VerlKey(instead, accepted)
        for section in (
            "reward_model.overlong_buffer",
            "reward_model.reward_kwargs.overlong_buffer_cfg",
            "reward.reward_kwargs.overlong_buffer_cfg",
        )
        for name, instead, accepted in (
            ("enable", _OVERLONG.format("enable"), (False,)),
            ("len", _OVERLONG.format("len"), ()),
            ("penalty_factor", _OVERLONG.format("penalty_factor"), ()),
            ("log", "the metrics overlong/* are always there; remove it", (True, False)),
        )
    },
    "reward_model.reward_kwargs.max_resp_len": VerlKey("it is data.max_response_length; remove it"),
    "reward.reward_kwargs.max_resp_len": VerlKey("it is data.max_response_length; remove it"),
    "reward.overlong_buffer.log": VerlKey("the metrics overlong/* are always there; remove it", (True, False)),
    "reward_model.*": VerlKey(_NO_REWARD_MODEL),
    "reward.reward_model.*": VerlKey(_NO_REWARD_MODEL),
    "custom_reward_function.path": VerlKey(_OWN_REWARD, (None,)),
    "custom_reward_function.*": VerlKey(_OWN_REWARD),
    "reward.custom_reward_function.*": VerlKey(_OWN_REWARD),
    # trainer
    "trainer.val_only": VerlKey("validation without training is not available; set false", (False,)),
    "trainer.log_val_generations_*": VerlKey("set trainer.log_val_generations"),
    "trainer.rollout_data_dir": VerlKey("rollouts are not dumped; remove it", (None,)),
    "trainer.validation_data_dir": VerlKey("validation generations go to <run_dir>; remove it", (None,)),
    "trainer.default_hdfs_dir": VerlKey("set trainer.default_local_dir on a shared file system", (None,)),
    "trainer.max_actor_ckpt_to_keep": VerlKey("set checkpoint.keep"),
    "trainer.max_critic_ckpt_to_keep": VerlKey("set checkpoint.keep: one checkpoint holds both", (None,)),
    "trainer.del_local_ckpt_after_load": VerlKey("checkpoints stay until checkpoint.keep drops them", (False,)),
    "trainer.ray_wait_register_center_timeout": VerlKey("set cluster.collective_timeout_s (seconds)"),
    "trainer.use_legacy_worker_impl": VerlKey("there is one worker; remove it"),
    "trainer.esi_redundant_time": VerlKey("Slurm's time limit is known: set launch.stop_lead_s (seconds)", (0,)),
    "trainer.checkpoint_callback_class": VerlKey("not available; remove it", (None,)),
    "trainer.use_v1": VerlKey("there is one trainer; remove it", _ANY),
    "trainer.v1.*": VerlKey("generation and training take turns; remove it"),
    "trainer.run_id": VerlKey("set run_dir"),
    "ray_kwargs.*": VerlKey("set cluster.cpus_per_rank; Ray is started for you"),
    "ray_init.*": VerlKey("set cluster.cpus_per_rank; Ray is started for you"),
    "global_profiler.*": VerlKey(_NO_PROFILER),
    "distillation.*": VerlKey(_NO_DISTILLATION, _OFF),
    "skip.*": VerlKey("rollouts are not kept and used again; remove it", _OFF),
    "transfer_queue.*": VerlKey("not available; remove it"),
}


def verl_key(key: str) -> VerlKey | None:
    """The entry for a dotted key that the schema doesn't have, or None if verl doesn't know it either."""
    return next((entry for pattern, entry in VERL_KEYS.items() if fnmatchcase(key, pattern)), None)
