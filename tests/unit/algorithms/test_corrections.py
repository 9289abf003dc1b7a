"""Rollout correction weights and mismatch statistics, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlhpc.algorithms.corrections import kept_by, parse_rejections, parse_threshold, rollout_weights
from rlhpc.algorithms.statistics import effective_sample_size, masked_whiten, mismatch
from rlhpc.errors import ConfigError

# Ratios π_trainer / π_rollout: row 0 has 4, 1/2 and 1 (product 2), row 1 has 1/8; then padding.
RATIOS = torch.tensor([[4.0, 0.5, 1.0], [0.125, 1.0, 1.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
ROLLOUT = torch.tensor([[-3.0, -1.0, -2.0], [-1.0, -math.inf, math.nan]])
TRAINER = ROLLOUT + RATIOS.log()


@pytest.mark.parametrize(
    ("level", "threshold", "expected"),
    [
        ("token", 2.0, [[2.0, 0.5, 1.0], [0.125, 0.0, 0.0]]),
        ("token", 10.0, [[4.0, 0.5, 1.0], [0.125, 0.0, 0.0]]),
        ("token", "0.2_3.0", [[0.0, 0.5, 1.0], [0.0, 0.0, 0.0]]),
        ("sequence", 10.0, [[2.0, 2.0, 2.0], [0.125, 0.0, 0.0]]),
        ("sequence", 1.5, [[1.5, 1.5, 1.5], [0.125, 0.0, 0.0]]),
        ("sequence", "0.5_2.5", [[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]),
    ],
)
def test_weights(level: str, threshold: float | str, expected: list[list[float]]) -> None:
    weights, _ = rollout_weights(TRAINER, ROLLOUT, MASK, level=level, threshold=threshold)
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_weight_metrics() -> None:
    _, metrics = rollout_weights(TRAINER, ROLLOUT, MASK, level="token", threshold=2.0)
    applied = np.array([2.0, 0.5, 1.0, 0.125])
    assert metrics == pytest.approx(
        {
            "rollout_corr/rollout_is_mean": applied.mean(),
            "rollout_corr/rollout_is_std": applied.std(),
            "rollout_corr/rollout_is_max": 4.0,
            "rollout_corr/rollout_is_min": 0.125,
            "rollout_corr/rollout_is_ratio_fraction_high": 1 / 4,
            "rollout_corr/rollout_is_ratio_fraction_low": 1 / 4,  # below 1/2: only 1/8
            "rollout_corr/rollout_is_eff_sample_size": applied.sum() ** 2 / (4 * (applied**2).sum()),
        },
        rel=1e-5,
    )
    _, window = rollout_weights(TRAINER, ROLLOUT, MASK, level="token", threshold="0.2_3.0")
    assert window["rollout_corr/rollout_is_oob_ratio"] == 0.5
    _, sequence = rollout_weights(TRAINER, ROLLOUT, MASK, level="sequence", threshold=1.5)
    assert sequence["rollout_corr/rollout_is_max"] == pytest.approx(2.0)
    assert sequence["rollout_corr/rollout_is_ratio_fraction_high"] == 0.5  # of sequences


def test_extreme_ratios_stay_finite() -> None:
    weights, metrics = rollout_weights(
        torch.tensor([[0.0, -500.0]]),
        torch.tensor([[-500.0, 0.0]]),
        torch.ones(1, 2),
        level="token",
        threshold=1e12,
    )
    assert weights[0].tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_batch_without_tokens_has_no_metrics() -> None:
    weights, metrics = rollout_weights(TRAINER, ROLLOUT, torch.zeros(2, 3), level="sequence", threshold=2.0)
    assert metrics == {} and torch.equal(weights, torch.zeros(2, 3))
    assert mismatch(TRAINER, ROLLOUT, torch.zeros(2, 3)) == {}


@pytest.mark.parametrize("threshold", [0.0, -1.0, 0.52, "2_1", "a_b", "_", "nan", "0_2"])
def test_malformed_thresholds_are_refused(threshold: float | str) -> None:
    with pytest.raises(ConfigError, match="rollout_is_threshold"):
        parse_threshold(threshold)


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="rollout_is='batch' is unknown; choose null, token, sequence"):
        rollout_weights(TRAINER, ROLLOUT, MASK, level="batch", threshold=2.0)


LN2 = math.log(2)  # the log ratios are 2, -1 and 0 times it in row 0, -3 times in row 1


@pytest.mark.parametrize(
    ("rules", "threshold", "expected"),
    [
        ("token_k1", "0.3_3.0", [[0, 1, 1], [0, 0, 0]]),  # of 1/r: 1/4 is below, 8 above
        ("token_k1", "0.2_3.0", [[1, 1, 1], [0, 0, 0]]),
        ("token_k1", 3.0, [[0, 1, 1], [0, 0, 0]]),  # 1/3 to 3
        ("token_k1", 10.0, [[1, 1, 1], [1, 0, 0]]),
        ("token_k2", 1.0, [[1, 1, 1], [0, 0, 0]]),  # 0.96, 0.24, 0; 2.16
        ("token_k3", 1.0, [[0, 1, 1], [0, 0, 0]]),  # 1.61, 0.19, 0; 1.20
        ("seq_sum_k1", "0.4_9.0", [[1, 1, 1], [1, 0, 0]]),  # products 1/2 and 8
        ("seq_sum_k1", "0.6_9.0", [[0, 0, 0], [1, 0, 0]]),
        ("seq_mean_k1", "0.79_2.0", [[1, 1, 1], [0, 0, 0]]),  # geometric means 0.794 and 8
        ("seq_mean_k1", "0.80_9.0", [[0, 0, 0], [1, 0, 0]]),
        ("seq_sum_k2", 1.21, [[1, 1, 1], [0, 0, 0]]),  # 1.2011
        ("seq_mean_k2", 0.41, [[1, 1, 1], [0, 0, 0]]),  # 0.4004
        ("seq_mean_k3", 0.61, [[1, 1, 1], [0, 0, 0]]),  # 0.6023
        ("seq_max_k2", 0.95, [[0, 0, 0], [0, 0, 0]]),
        ("seq_max_k3", 1.5, [[0, 0, 0], [1, 0, 0]]),
        ("token_k3, seq_sum_k1", "1.0,0.4_7.0", [[0, 1, 1], [0, 0, 0]]),
    ],
)
def test_rejections(rules: str, threshold: float | str, expected: list[list[float]]) -> None:
    kept, _ = kept_by(parse_rejections(rules, threshold), TRAINER, ROLLOUT, MASK)
    assert kept.tolist() == expected


def test_rejection_metrics() -> None:
    """Of four tokens in two sequences."""
    _, metrics = kept_by(parse_rejections("token_k2,seq_sum_k1", "1.0,0.6_10"), TRAINER, ROLLOUT, MASK)
    k2 = [2 * LN2**2, LN2**2 / 2, 0, 4.5 * LN2**2]
    expected = {
        "token_k2_mean": sum(k2) / 4,
        "token_k2_max": k2[3],
        "token_k2_min": 0.0,
        "token_k2_fraction_high": 1 / 4,
        "token_k2_fraction_low": 0.0,
        "token_k2_masked_fraction": 1 / 4,
        "token_k2_seq_masked_fraction": 1 / 2,
        "seq_sum_k1_mean": (3 * -LN2 + 3 * LN2) / 4,  # each token counts, with its sequence's sum
        "seq_sum_k1_max": 3 * LN2,
        "seq_sum_k1_min": -LN2,
        "seq_sum_k1_fraction_high": 0.0,
        "seq_sum_k1_fraction_low": 1 / 2,
        "seq_sum_k1_masked_fraction": 3 / 4,
        "seq_sum_k1_seq_masked_fraction": 1 / 2,
        "masked_fraction": 1.0,
        "seq_masked_fraction": 1.0,
    }
    assert metrics == pytest.approx({f"rollout_corr/rollout_rs_{n}": v for n, v in expected.items()}, abs=1e-6)


@pytest.mark.parametrize(
    ("rules", "threshold", "message"),
    [
        ("token", 1.0, "rollout_rs='token' is unknown; choose null, or by commas of token_k1, .*seq_max_k3"),
        ("seq_max_k1", 1.0, "'seq_max_k1' is unknown"),
        (" , ", 1.0, "is unknown"),
        ("token_k1", None, "rollout_rs_threshold=None has 0 thresholds for rollout_rs=token_k1"),
        ("token_k1,token_k2,token_k3", "1,2", "has 2 thresholds"),
        ("token_k1", 0.52, "=0.52 of token_k1 must be a window of ratios .* at least 1"),
        ("token_k1", "2.0_0.5", "a window of ratios"),
        ("token_k1", 0, "a window of ratios"),
        ("token_k3", "0.1_2.0", "=0.1_2.0 of token_k3 must be one number above 0"),
        ("token_k3", "nan", "one number above 0"),
    ],
)
def test_malformed_rejections_are_refused(rules: str, threshold: float | str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_rejections(rules, threshold)


def test_mismatch_against_numpy() -> None:
    rng = np.random.default_rng(3)
    lengths = [4, 1, 3]
    rollout = [rng.uniform(-3, -0.1, size=length) for length in lengths]
    trainer = [row + rng.normal(0, 0.2, size=len(row)) for row in rollout]
    padded = [torch.full((4, 4), math.nan) for _ in range(2)]
    mask = torch.zeros(4, 4)  # and a fourth row without a token
    for row in range(3):
        padded[0][row, : lengths[row]] = torch.from_numpy(trainer[row])
        padded[1][row, : lengths[row]] = torch.from_numpy(rollout[row])
        mask[row, : lengths[row]] = 1
    got = mismatch(padded[0], padded[1], mask)
    t, r = np.concatenate(trainer), np.concatenate(rollout)
    ratio = np.exp(t - r)
    log_ppl_diff = np.array([b.mean() - a.mean() for a, b in zip(trainer, rollout, strict=True)])
    seq_ratio = np.array([np.exp(a.sum() - b.sum()) for a, b in zip(trainer, rollout, strict=True)])
    probs_diff = np.abs(np.exp(t) - np.exp(r))
    expected = {
        "rollout_corr/kl": (r - t).mean(),
        "rollout_corr/k3_kl": (ratio - np.log(ratio) - 1).mean(),
        "rollout_corr/training_ppl": np.mean([np.exp(-row.mean()) for row in trainer]),
        "rollout_corr/training_log_ppl": np.mean([-row.mean() for row in trainer]),
        "rollout_corr/rollout_ppl": np.mean([np.exp(-row.mean()) for row in rollout]),
        "rollout_corr/rollout_log_ppl": np.mean([-row.mean() for row in rollout]),
        "rollout_corr/log_ppl_diff": log_ppl_diff.mean(),
        "rollout_corr/log_ppl_abs_diff": np.abs(log_ppl_diff).mean(),
        "rollout_corr/log_ppl_diff_max": log_ppl_diff.max(),
        "rollout_corr/log_ppl_diff_min": log_ppl_diff.min(),
        "rollout_corr/ppl_ratio": np.exp(log_ppl_diff).mean(),
        "rollout_corr/chi2_token": (ratio**2).mean() - 1,
        "rollout_corr/chi2_seq": (seq_ratio**2).mean() - 1,
        "rollout_corr/ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "training/rollout_probs_diff_mean": probs_diff.mean(),
        "training/rollout_probs_diff_max": probs_diff.max(),
        "training/rollout_probs_diff_std": probs_diff.std(ddof=1),
        "training/rollout_logprobs_diff_mean": np.abs(t - r).mean(),
        "training/rollout_logprobs_diff_max": np.abs(t - r).max(),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(np.exp(t), np.exp(r))[0, 1],
    }
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_identical_engines_do_not_differ() -> None:
    got = mismatch(ROLLOUT, ROLLOUT, MASK)
    assert got["rollout_corr/kl"] == 0 and got["rollout_corr/k3_kl"] == 0
    assert got["rollout_corr/ess"] == 1 and got["rollout_corr/ppl_ratio"] == 1
    assert got["training/rollout_probs_diff_max"] == 0


def test_effective_sample_size() -> None:
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]])
    assert effective_sample_size(torch.tensor([[2.0, 2.0, 2.0, 2.0, 9.0]]), mask).item() == 1
    assert effective_sample_size(torch.tensor([[5.0, 0.0, 0.0, 0.0, 9.0]]), mask).item() == 0.25
    assert effective_sample_size(torch.zeros(1, 5), mask).item() == 0


def test_whitening() -> None:
    white = masked_whiten(torch.tensor([[1.0, 3.0], [8.0, math.nan]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    # Mean 4, unbiased variance (9 + 1 + 16) / 2 = 13.
    torch.testing.assert_close(white, torch.tensor([[-3.0, -1.0], [4.0, 0.0]]) / math.sqrt(13))
    assert masked_whiten(torch.tensor([[5.0]]), torch.ones(1, 1)).item() == 0
