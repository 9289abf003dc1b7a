#!/usr/bin/env bash
# rlhpc on the shared model and prompts; what it measured is in OUT/metrics.jsonl.
# usage: scripts/bench/peers/rlhpc.sh INPUTS OUT [OVERRIDE...]     such as data.max_response_length=512
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
inputs=$(realpath "${1:?usage: rlhpc.sh INPUTS OUT [OVERRIDE...]}"); out=$(realpath -m "${2:?OUT}"); shift 2
exec python3 "$here/../../../launch/run.py" \
    actor_rollout_ref.model.path="$inputs/model" \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.ignore_eos=true \
    data.train_files="$inputs/prompts.jsonl" \
    data.shuffle=false \
    data.train_batch_size=64 \
    data.max_prompt_length=256 \
    data.max_response_length=256 \
    reward.name="$here/reward.py:share_of_digits" \
    trainer.total_training_steps=5 \
    checkpoint.save_final=false \
    run_dir="$out" "$@"
