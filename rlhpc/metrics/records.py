"""A step's metrics, under verl's names (trainer/ppo/metric_utils.py), from what the step produced.

Everything but `timing_s/*`, `timing_per_token_ms/*`, `perf/*` and `checkpoint/*` is a function of the samples alone and
thus repeats bitwise with them. What the ranks measure of themselves is in rlhpc/train/usage.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from rlhpc.algorithms.critic import explained_variance
from rlhpc.metrics.timer import phase_seconds

if TYPE_CHECKING:
    from rlhpc.train.batch import TrainBatch

# Prefixes of metrics that differ from run to run.
MEASURED = ("timing_s/", "timing_per_token_ms/", "perf/", "checkpoint/")

# Phases in which the trainer works; through the others it waits.
TRAINER_PHASES = ("old_log_prob", "ref", "values", "update_critic", "update_actor")


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Scores, rewards, values, advantages, returns, lengths and reward failures of one step's trajectories.

    Scores are what the reward said less what an overlong answer costs, rewards that less an in-reward KL penalty; both
    leave out trajectories without a response token, as verl does. `response_length/clip_ratio` is the share that ran
    into the length limit.
    """
    trajectories, mask = batch.rollout.trajectories, batch.rollout.mask > 0
    answered = mask.any(-1)
    prompts = torch.tensor([len(t.prompt.token_ids) for t in trajectories], dtype=torch.float64)
    responses = mask.sum(-1).double()
    lengths = prompts + responses
    return {
        **_mean_max_min("critic/score", batch.rollout.scores.sum(-1)[answered]),
        **_mean_max_min("critic/rewards", batch.rewards.sum(-1)[answered]),
        **_mean_max_min("critic/advantages", batch.advantages[mask]),
        **_mean_max_min("critic/returns", batch.returns[mask]),
        **_value_metrics(batch),
        **_mean_max_min("response_length", responses),
        "response_length/clip_ratio": _share([t.completion.finish_reason == "length" for t in trajectories]),
        **_mean_max_min("prompt_length", prompts),
        "response/aborted_ratio": 1 - float(answered.double().mean()),
        **_overlong_metrics([t.overlong_penalty for t in trajectories if t.overlong_penalty is not None]),
        "reward/error_rate": _share([t.reward_status == "error" for t in trajectories]),
        "reward/timeout_rate": _share([t.reward_status == "timeout" for t in trajectories]),
        "reward/zero_std_group_ratio": _alike_ratio(batch.rollout.scores.sum(-1), batch.rollout.group_ids),
        "perf/total_num_tokens": int(lengths.sum()),
        # Keys that a token attends to under a causal mask, averaged over the tokens.
        "perf/mean_context_tokens": float((lengths * (lengths + 1) / 2).sum() / lengths.sum()),
    }


def means(learnt: Iterable[dict[str, float]]) -> dict[str, float]:
    """Of each metric over the optimizer steps that have it: the critic's have others than the policy's."""
    found: dict[str, list[float]] = {}
    for metrics in learnt:
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def _value_metrics(batch: TrainBatch) -> dict[str, float]:
    """Of the critic that the advantages were estimated with, if there is one."""
    if batch.values is None:
        return {}
    explained = explained_variance(batch.values, batch.returns, batch.rollout.mask)
    return _mean_max_min("critic/values", batch.values[batch.rollout.mask > 0]) | {"critic/vf_explained_var": explained}


def _overlong_metrics(penalties: list[float]) -> dict[str, float]:
    """The share of answers that got into the overlong buffer, and what an answer loses on average."""
    if not penalties:
        return {}
    ratio = _share([penalty < 0 for penalty in penalties])
    return {"overlong/ratio": ratio, "overlong/penalty/mean": sum(penalties) / len(penalties)}


def _alike_ratio(scores: torch.Tensor, group_ids: torch.Tensor) -> float:
    """The share of groups whose scores are all alike: a group baseline learns nothing from them."""
    groups = [scores[group_ids == group] for group in torch.unique(group_ids)]
    return _share([bool((group == group[0]).all()) for group in groups])


def _mean_max_min(name: str, values: torch.Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    values = values.double()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _share(flags: list[bool]) -> float:
    return sum(flags) / len(flags)


def timing_metrics(record: Mapping[str, float], step_s: float, num_ranks: int) -> dict[str, float]:
    """What follows from a step's `timing_s/*`, its tokens and the `step_s` seconds that it took in all.

    Throughput is in prompt and response tokens per second and rank, as verl's `perf/throughput`. Generation's
    time is per response token, the other phases' per token. `perf/wait_time_ratio` is the trainer's idle
    share of the step.
    """
    phases = phase_seconds(record)
    derived = {
        "timing_s/step": step_s,
        "timing_s/other": max(step_s - sum(phases.values()), 0.0),
        "perf/time_per_step": step_s,
    }
    num_tokens = record.get("perf/total_num_tokens")
    if not num_tokens:
        return derived
    mean_response, mean_prompt = record["response_length/mean"], record["prompt_length/mean"]
    num_response_tokens = num_tokens * mean_response / (mean_response + mean_prompt)
    for phase, seconds in phases.items():
        divisor = num_response_tokens if phase == "gen" else num_tokens
        if phase in ("gen", "adv", *TRAINER_PHASES) and divisor:
            derived[f"timing_per_token_ms/{phase}"] = 1000 * seconds / divisor
    derived["perf/throughput"] = num_tokens / (step_s * num_ranks)
    derived["perf/wait_time_ratio"] = 1 - sum(phases.get(p, 0.0) for p in TRAINER_PHASES) / step_s
    return derived
