"""What an algorithm's settings ask of each other."""

from __future__ import annotations

from collections.abc import Iterator

from rlhpc.config.schema import RunConfig
from rlhpc.errors import ConfigError

GROUP_ESTIMATORS = ("grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")  # the group is the baseline
_ROLLOUT = "actor_rollout_ref.rollout"


def needs_reference(cfg: RunConfig) -> bool:
    """Whether anything looks at the reference policy's logprobs."""
    return cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward


def algorithm_problems(cfg: RunConfig) -> Iterator[str]:
    """A line for every contradiction."""
    algorithm, n = cfg.algorithm, cfg.actor_rollout_ref.rollout.n
    if algorithm.adv_estimator in GROUP_ESTIMATORS and n < 2:
        yield (
            f"{_ROLLOUT}.n={n} leaves algorithm.adv_estimator={algorithm.adv_estimator} without a "
            "group to compare with; set n to at least 2, or adv_estimator=reinforce_plus_plus"
        )
    if algorithm.adv_estimator == "remax":
        yield (
            "algorithm.adv_estimator=remax needs greedy baselines, which are not sampled yet; use "
            "algorithm.adv_estimator=grpo or another group estimator"
        )
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        yield (
            "algorithm.kl_ctrl.type=adaptive is for the KL in the reward, but algorithm.use_kl_in_reward=false; set "
            "that true, or type=fixed (actor.kl_loss_coef of a KL in the loss is constant)"
        )
    num_samples, horizon = cfg.data.train_batch_size * n, algorithm.kl_ctrl.horizon
    if algorithm.kl_ctrl.type == "adaptive" and num_samples >= 5 * horizon:
        yield (
            f"algorithm.kl_ctrl.horizon={horizon} is too short for the {num_samples} samples of a step: the "
            f"coefficient would not stay above 0; set at least {num_samples // 5 + 1}"
        )
    yield from _filter_groups(cfg)
    yield from _corrections(cfg)
    yield from _overlong_buffer(cfg)


def _filter_groups(cfg: RunConfig) -> Iterator[str]:
    filtering, data, n = cfg.algorithm.filter_groups, cfg.data, cfg.actor_rollout_ref.rollout.n
    on = "algorithm.filter_groups.enable=true"
    if not filtering.enable:
        if data.draw_size != data.train_batch_size:
            yield (
                f"data.gen_batch_size={data.gen_batch_size} is for {on}, which draws prompts until there are enough; "
                f"set null ({_ROLLOUT}.chunk_prompts cuts a generation into parts)"
            )
        return
    if n < 2:
        yield f"{on} compares the samples of a prompt, but {_ROLLOUT}.n={n}; set n to at least 2"
    if cfg.trainer.total_training_steps is None:
        yield (
            f"{on}: how many steps an epoch holds shows only as groups are dropped; set trainer.total_training_steps "
            "instead of total_epochs"
        )
    if filtering.metric == "seq_final_reward" and cfg.algorithm.use_kl_in_reward:
        yield (
            "algorithm.filter_groups.metric=seq_final_reward with algorithm.use_kl_in_reward=true: no two samples have "
            "the same KL, and nothing would be dropped; set metric=reward (without it), or acc"
        )


def _corrections(cfg: RunConfig) -> Iterator[str]:
    from rlhpc.algorithms.corrections import parse_rejections, parse_threshold

    correction, key = cfg.algorithm.rollout_correction, "algorithm.rollout_correction"
    try:
        parse_threshold(correction.rollout_is_threshold)
    except ConfigError as error:
        yield f"{key}.{error}"
    if correction.rollout_rs is None:
        if correction.rollout_rs_threshold is not None:
            yield (
                f"{key}.rollout_rs_threshold={correction.rollout_rs_threshold} says nothing without {key}.rollout_rs; "
                "set that, such as token_k1, or remove it"
            )
        return
    try:
        parse_rejections(correction.rollout_rs, correction.rollout_rs_threshold)
    except ConfigError as error:
        yield f"{key}.{error}"


def _overlong_buffer(cfg: RunConfig) -> Iterator[str]:
    overlong, limit = cfg.reward.overlong_buffer, cfg.data.max_response_length
    if overlong.enable and overlong.len is not None and not 1 <= overlong.len <= limit:
        yield (
            f"reward.overlong_buffer.len={overlong.len} must be 1 to data.max_response_length={limit} tokens, the last "
            "ones before that limit; set null for a fifth of it"
        )
