#!/usr/bin/env bash
# verl 0.9.1 on the shared model and prompts: FSDP and vLLM on one GPU; what it logged is in OUT/metrics.jsonl.
# usage: scripts/bench/peers/verl.sh INPUTS OUT [OVERRIDE...]     such as data.max_response_length=512
# Where flash-attn is installed: ATTENTION=flash_attention_2; without it, torch's own varlen flash attention takes its place.
# Ray's num_cpus is no limit but what Ray counts with: on few cores verl would wait forever for places for its storage units.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
inputs=$(realpath "${1:?usage: verl.sh INPUTS OUT [OVERRIDE...]}"); out=$(realpath -m "${2:?OUT}"); shift 2
mkdir -p "$out"
export RAY_ADDRESS=local VERL_FILE_LOGGER_PATH="$out/metrics.jsonl" PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path="$inputs/model" \
    actor_rollout_ref.model.external_lib=torch_varlen \
    +actor_rollout_ref.model.override_config.attn_implementation="${ATTENTION:-torch_varlen}" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.model.enable_gradient_checkpointing=false \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.ignore_eos=true \
    actor_rollout_ref.rollout.max_num_seqs=1024 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    data.train_files="$inputs/prompts.jsonl" \
    data.val_files="$inputs/prompts.jsonl" \
    data.shuffle=false \
    data.train_batch_size=64 \
    data.max_prompt_length=256 \
    data.max_response_length=256 \
    reward.custom_reward_function.path="$here/reward.py" \
    reward.custom_reward_function.name=verl_score \
    trainer.logger='[console,file]' \
    ray_kwargs.ray_init.num_cpus=32 \
    trainer.n_gpus_per_node=1 \
    trainer.total_training_steps=5 \
    trainer.val_before_train=false \
    trainer.test_freq=-1 \
    trainer.save_freq=-1 \
    trainer.default_local_dir="$out/checkpoints" "$@"
