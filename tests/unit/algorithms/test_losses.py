"""Policy losses and aggregation against hand-worked numbers, hand-derived gradients and arbitrary splits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.algorithms.losses import AGG_MODES, POLICY_LOSSES, aggregate
from rlhpc.errors import ConfigError

CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}
# Rows with tokens 1, 2, 3 | 10 | none; the rest is padding, which must not matter whatever it holds.
VALUES = torch.tensor([[1.0, 2.0, 3.0], [10.0, math.nan, math.inf], [math.nan, 7.0, 8.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 4),
        ("token-sum", 16.0),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 3),
    ],
)
def test_aggregate_by_hand(mode: str, expected: float) -> None:
    assert aggregate(VALUES, MASK, mode).item() == pytest.approx(expected)


def test_aggregate_with_global_counts() -> None:
    counts: dict[str, Any] = {"num_global_tokens": 32, "num_global_seqs": 8, "scale": 4}
    by_mode = {mode: aggregate(VALUES, MASK, mode, **counts).item() for mode in AGG_MODES}
    assert by_mode == pytest.approx(
        {
            "token-mean": 0.5,
            "token-sum": 16.0,
            "seq-mean-token-sum": 2.0,
            "seq-mean-token-mean": 1.5,
            "seq-mean-token-sum-norm": 0.5,
        }
    )


@pytest.mark.parametrize("mode", AGG_MODES)
def test_an_empty_mask_aggregates_to_zero_with_zero_gradient(mode: str) -> None:
    values = torch.ones(2, 3, requires_grad=True)
    total = aggregate(values, torch.zeros(2, 3), mode)
    total.backward()
    assert total.item() == 0 and torch.equal(values.grad, torch.zeros(2, 3))


def policy_loss(
    name: str, ratios: list[float], advantages: list[float], **options: Any
) -> tuple[float, list[float], dict[str, float]]:
    """Loss, gradient with respect to each logprob and metrics for one row of tokens, at token-sum."""
    behavior = torch.full((1, len(ratios)), -1.0)
    logprobs = (behavior + torch.tensor([ratios], dtype=torch.float64).log()).float().requires_grad_()
    loss, metrics = POLICY_LOSSES[name](
        logprobs,
        behavior,
        torch.tensor([advantages]),
        torch.ones(1, len(ratios)),
        **({**CLIP, "loss_agg_mode": "token-sum"} | options),
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient[0].tolist(), {name: value.item() for name, value in metrics.items()}


# Every region of the clipped surrogate with A = ±2: its loss -A·r, or the clip's, and dL/dlogp = -A·r where
# the ratio still acts, 0 where a clip has taken over. Low is 0.8, high 1.3, the dual clip is at 3.
REGIONS = [
    # ratio, advantage, loss, gradient, clipped, clipped_lower
    (1.1, 2.0, -2.2, -2.2, 0, 0),
    (1.4, 2.0, -2.6, 0.0, 1, 0),  # above 1 + high, A > 0: no more reward for raising the probability
    (0.5, 2.0, -1.0, -1.0, 0, 0),  # below 1 - low, A > 0: pessimism keeps the gradient
    (0.9, -2.0, 1.8, 1.8, 0, 0),
    (0.5, -2.0, 1.6, 0.0, 1, 0),  # below 1 - low, A < 0: low enough
    (1.4, -2.0, 2.8, 2.8, 0, 0),  # above 1 + high, A < 0: still pushed down
    (5.0, -2.0, 6.0, 0.0, 0, 1),  # above the dual clip: loss bounded at -A·3
    (1.2, 0.0, 0.0, 0.0, 0, 0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "clipped", "lower"), REGIONS)
def test_clip_regions(ratio: float, advantage: float, loss: float, gradient: float, clipped: int, lower: int) -> None:
    got_loss, got_gradient, metrics = policy_loss("vanilla", [ratio], [advantage])
    assert got_loss == pytest.approx(loss, rel=1e-5)
    assert got_gradient == pytest.approx([gradient], rel=1e-5)
    assert metrics["actor/pg_clipfrac"] == clipped
    assert metrics["actor/pg_clipfrac_lower"] == lower
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(ratio), rel=1e-5)


def test_gradient_jumps_at_the_high_clip_only_for_positive_advantages() -> None:
    below, above = policy_loss("vanilla", [1.3 - 1e-4], [1.0]), policy_loss("vanilla", [1.3 + 1e-4], [1.0])
    assert below[1] == pytest.approx([-(1.3 - 1e-4)], rel=1e-5)
    assert above[1] == [0.0]
    assert below[0] == pytest.approx(above[0], abs=2e-4)  # the loss itself is continuous


def test_clipfracs_are_token_means() -> None:
    ratios, advantages = [row[0] for row in REGIONS], [row[1] for row in REGIONS]
    loss, gradient, metrics = policy_loss("vanilla", ratios, advantages, loss_agg_mode="token-mean")
    assert loss == pytest.approx(sum(row[2] for row in REGIONS) / 8, rel=1e-5)
    assert gradient == pytest.approx([row[3] / 8 for row in REGIONS], rel=1e-5)
    assert metrics["actor/pg_clipfrac"] == 2 / 8
    assert metrics["actor/pg_clipfrac_lower"] == 1 / 8


def test_rollout_weights_scale_each_token() -> None:
    weights = torch.tensor([[0.5, 2.0]], requires_grad=True)
    loss, gradient, _ = policy_loss("vanilla", [1.1, 0.9], [2.0, -2.0], rollout_weights=weights)
    assert loss == pytest.approx(0.5 * -2.2 + 2.0 * 1.8, rel=1e-5)
    assert gradient == pytest.approx([0.5 * -2.2, 2.0 * 1.8], rel=1e-5)


def test_gspo_clips_the_geometric_mean_and_reaches_every_token() -> None:
    # Ratios 1.44 and 1: the sequence's is sqrt(1.44) = 1.2. Unclipped at high 0.3: loss, gradient -A·1.2.
    loss, gradient, metrics = policy_loss("gspo", [1.44, 1.0], [1.0, 1.0], loss_agg_mode="seq-mean-token-mean")
    assert loss == pytest.approx(-1.2, rel=1e-5)
    assert gradient == pytest.approx([-0.6, -0.6], rel=1e-5)
    assert metrics["actor/pg_clipfrac"] == 0
    # At high 0.1 the whole sequence is clipped.
    loss, gradient, metrics = policy_loss(
        "gspo", [1.44, 1.0], [1.0, 1.0], loss_agg_mode="seq-mean-token-mean", clip_high=0.1
    )
    assert loss == pytest.approx(-1.1, rel=1e-5)
    assert gradient == [0.0, 0.0]
    assert metrics["actor/pg_clipfrac"] == 1


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    # dL/dlogp = -clip(r)·A; the loss is that times logp, here -1 + log r.
    loss, gradient, metrics = policy_loss("cispo", [1.5, 1.0], [2.0, -1.0])
    assert gradient == pytest.approx([-1.3 * 2.0, 1.0], rel=1e-5)
    assert loss == pytest.approx(-2.6 * (-1 + math.log(1.5)) + 1.0 * -1.0, rel=1e-5)
    assert metrics["actor/pg_clipfrac"] == 0.5


def test_gpg_is_the_plain_policy_gradient() -> None:
    loss, gradient, metrics = policy_loss("gpg", [5.0, 0.1], [2.0, -1.0])
    assert gradient == pytest.approx([-2.0, 1.0])
    assert loss == pytest.approx(-2.0 * (-1 + math.log(5)) + (-1 + math.log(0.1)), rel=1e-5)
    assert metrics["actor/pg_clipfrac"] == 0


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_padding_may_hold_anything(name: str) -> None:
    logprobs = torch.tensor([[-1.0, -math.inf], [-2.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    junk = torch.tensor([[-1.2, -math.inf], [-1.9, math.inf]])
    loss, metrics = POLICY_LOSSES[name](
        logprobs, junk, torch.tensor([[1.0, math.nan], [-1.0, 3.0]]), mask, rollout_weights=junk.abs(), **CLIP
    )
    loss.backward()
    clean = logprobs.detach()[:, :1].clone().requires_grad_()
    expected, expected_metrics = POLICY_LOSSES[name](
        clean,
        junk[:, :1],
        torch.tensor([[1.0], [-1.0]]),
        mask[:, :1],
        rollout_weights=junk[:, :1].abs(),
        **CLIP,
    )
    expected.backward()
    assert torch.equal(loss, expected) and metrics == expected_metrics
    assert torch.equal(logprobs.grad, torch.cat((clean.grad, torch.zeros(2, 1)), 1))


def test_only_the_policy_is_differentiated() -> None:
    tensors = [torch.full((1, 2), value, requires_grad=True) for value in (-1.0, -1.1, 0.5, 0.9)]
    loss, metrics = POLICY_LOSSES["vanilla"](
        tensors[0], tensors[1], tensors[2], torch.ones(1, 2), rollout_weights=tensors[3], **CLIP
    )
    loss.backward()
    assert tensors[0].grad is not None
    assert all(tensor.grad is None for tensor in tensors[1:])
    assert not any(value.requires_grad for value in metrics.values())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(sorted(POLICY_LOSSES)),
    mode=st.sampled_from(AGG_MODES),
    data=st.data(),
)
def test_any_split_adds_up_to_the_whole(seed: int, name: str, mode: str, data: st.DataObject) -> None:
    """Loss, gradient and metrics of microbatches, each padded to its own width, sum to the whole batch's."""
    rows, width = 7, 6
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(rows, width, generator=generator)  # noqa: E731
    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    mask = (torch.arange(width) < lengths.unsqueeze(-1)).float()
    logprobs = (draw() - 2).requires_grad_()
    behavior, advantages, weights = logprobs.detach() + 0.5 * draw(), draw(), draw().abs()
    options: dict[str, Any] = {
        **CLIP,
        "loss_agg_mode": mode,
        "num_global_tokens": float(mask.sum()),
        "num_global_seqs": float((lengths > 0).sum()),
        "scale": 11.0,
    }

    def evaluate(index: torch.Tensor, columns: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        part = [tensor[index, :columns] for tensor in (logprobs, behavior, advantages, mask)]
        return POLICY_LOSSES[name](*part, rollout_weights=weights[index, :columns], **options)

    whole, metrics = evaluate(torch.arange(rows), width)
    (gradient,) = torch.autograd.grad(whole, logprobs)
    order = data.draw(st.permutations(range(rows)))
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1))))
    total, total_metrics = torch.zeros(()), dict.fromkeys(metrics, 0.0)
    for begin, end in zip([0, *cuts], [*cuts, rows], strict=True):
        index = torch.tensor(order[begin:end])
        loss, part_metrics = evaluate(index, max(int(lengths[index].max()), 1))
        total = total + loss
        total_metrics = {key: total_metrics[key] + float(part_metrics[key]) for key in metrics}
    (total_gradient,) = torch.autograd.grad(total, logprobs)
    torch.testing.assert_close(total, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total_gradient, gradient, atol=1e-6, rtol=1e-5)
    assert total_metrics == pytest.approx({key: float(value) for key, value in metrics.items()}, abs=1e-5)


def test_bfloat16_inputs_are_reduced_in_float32() -> None:
    # 4096 ones of bfloat16 sum to 256 when added up in bfloat16.
    ones = torch.ones(1, 4096, dtype=torch.bfloat16)
    assert aggregate(ones, ones, "token-sum").item() == 4096


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="loss_agg_mode='mean' is unknown; choose token-mean"):
        aggregate(VALUES, MASK, "mean")
    with pytest.raises(ConfigError, match="clip_ratio_c=1.0 must be > 1"):
        policy_loss("vanilla", [1.0], [1.0], clip_c=1.0)
    with pytest.raises(ConfigError, match="loss_mode='ppo' is unknown; choose cispo, gpg, gspo, vanilla"):
        POLICY_LOSSES["ppo"]
    with pytest.raises(ConfigError, match="already registered"):
        POLICY_LOSSES.add("vanilla", POLICY_LOSSES["gpg"])
