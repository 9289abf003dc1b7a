"""Whether the ranks can share out a run's batches, and whether its longest sequence fits wherever it goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhpc.config.model_fit import must_divide
from rlhpc.config.schema import RunConfig

if TYPE_CHECKING:
    from rlhpc.reshard.families import ModelFacts

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def mini_batch_problems(cfg: RunConfig, section: str, size: int, num_ranks: int) -> Iterator[str]:
    """Of the `size` prompts of each optimizer step of the model that `section` trains."""
    megatron, n = cfg.actor_rollout_ref.actor.megatron, cfg.actor_rollout_ref.rollout.n
    key, trajectories = f"{section}.ppo_mini_batch_size", size * n
    yield from must_divide(key, size, "data.train_batch_size", cfg.data.train_batch_size)
    dp = max(1, num_ranks // (megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size))
    if trajectories % dp:
        yield (
            f"{key}={size} * rollout.n={n} = {trajectories} trajectories must be a multiple of the {dp} data-parallel "
            f"ranks; set n or the mini-batch to a multiple of {dp}"
        )


def too_long(cfg: RunConfig, name: str, limit: int | None, fix: str = "") -> Iterator[str]:
    """Where a prompt and its response can have more tokens than `limit`."""
    prompt, response = cfg.data.max_prompt_length, cfg.data.max_response_length
    if limit is not None and (longest := prompt + response) > limit:
        yield (
            f"data: max_prompt_length={prompt} + max_response_length={response} = {longest} tokens exceed "
            f"{name}={limit}; {fix or f'set it to at least {longest}'}"
        )


def batch_problems(cfg: RunConfig, num_ranks: int) -> Iterator[str]:
    """Of the policy's batches, and of what is sampled at a time."""
    rollout, data = cfg.actor_rollout_ref.rollout, cfg.data
    yield from mini_batch_problems(cfg, _ACTOR, cfg.actor_rollout_ref.actor.ppo_mini_batch_size, num_ranks)
    replicas = num_ranks // rollout.tensor_model_parallel_size
    if data.draw_size < replicas:
        yield (
            f"{data.draw_key}={data.draw_size} is below the {replicas} "
            f"rollout replicas (ranks / rollout tensor_model_parallel_size); set at least {replicas}"
        )
    if 0 < rollout.chunk_prompts < replicas:
        yield (
            f"{_ROLLOUT}.chunk_prompts={rollout.chunk_prompts} is below the {replicas} rollout "
            f"replicas; set 0 or at least {replicas}"
        )


def length_problems(cfg: RunConfig, facts: ModelFacts) -> Iterator[str]:
    """Of the policy's sequences, and of what the engine takes at a time."""
    ref, longest = cfg.actor_rollout_ref, cfg.data.max_prompt_length + cfg.data.max_response_length
    for name, limit, fix in (
        ("the model's max_position_embeddings", facts.max_positions, "shorten one of them"),
        (f"{_ROLLOUT}.max_model_len", ref.rollout.max_model_len, f"set it to {longest} or null"),
        (f"{_ACTOR}.ppo_max_token_len_per_gpu", ref.actor.ppo_max_token_len_per_gpu, ""),
        (f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", ref.rollout.log_prob_max_token_len_per_gpu, ""),
        ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", ref.ref.log_prob_max_token_len_per_gpu, ""),
    ):
        yield from too_long(cfg, name, limit, fix)
    asked, positions = ref.rollout.max_model_len, facts.max_positions
    if asked is not None and asked > positions:
        yield (
            f"{_ROLLOUT}.max_model_len={asked} exceeds the model's max_position_embeddings={positions}, where vLLM "
            f"ends; set at most {positions}, or null"
        )
    if ref.rollout.max_num_batched_tokens < ref.rollout.max_num_seqs:
        yield (
            f"{_ROLLOUT}.max_num_seqs={ref.rollout.max_num_seqs} exceeds max_num_batched_tokens="
            f"{ref.rollout.max_num_batched_tokens}; a decoding sequence takes one token of each engine step: "
            f"set max_num_seqs to at most {ref.rollout.max_num_batched_tokens}"
        )
    graphs, most = ref.rollout.cudagraph_capture_sizes, ref.rollout.max_num_batched_tokens
    if graphs is not None and not all(1 <= size <= most for size in graphs or [0]):
        yield (
            f"{_ROLLOUT}.cudagraph_capture_sizes={graphs} must be sizes of 1 to max_num_batched_tokens={most}; set "
            "null for rlhpc's choice, or enforce_eager=true for no graphs"
        )
