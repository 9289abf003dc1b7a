"""Advantage estimators against numbers worked out by hand and independent NumPy loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.algorithms.advantages import ESTIMATORS
from rlhpc.errors import ConfigError

OUTCOME = ("grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")


def outcome_batch(scores: list[float], lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards at the last response token, and the mask."""
    rewards, mask = torch.zeros(len(scores), width), torch.zeros(len(scores), width)
    for row, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        rewards[row, length - 1] = score
        mask[row, :length] = 1
    return rewards, mask


# Group 7 holds rows 0, 2, 3 with scores 1, 0, 2 (mean 1, unbiased std 1); group 3 rows 1, 4 with 0, 1
# (mean 0.5, std sqrt(0.5)); group 5 is row 5 alone with score 3. Lengths 1, 3, 2, 1, 1, 2.
SCORES, LENGTHS, GROUPS = [1.0, 0.0, 0.0, 2.0, 1.0, 3.0], [1, 3, 2, 1, 1, 2], torch.tensor([7, 3, 7, 7, 3, 5])
ROOT_HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {}, [0.0, -0.5 / ROOT_HALF, -1.0, 1.0, 0.5 / ROOT_HALF, 3.0]),
        ("grpo", {"norm_by_std": False}, [0.0, -0.5, -1.0, 1.0, 0.5, 3.0]),
        ("grpo", {"eps": 1.0}, [0.0, -0.5 / (ROOT_HALF + 1), -0.5, 0.5, 0.5 / (ROOT_HALF + 1), 1.5]),
        # R minus the others' mean: row 0: 1 - (0+2)/2, row 2: 0 - (1+2)/2, row 3: 2 - (1+0)/2.
        ("rloo", {}, [0.0, -1.0, -1.5, 1.5, 1.0, 3.0]),
        # Length-weighted baselines: group 7 (1·1 + 2·0 + 1·2)/4 = 0.75; group 3 (3·0 + 1·1)/4 = 0.25.
        ("opo", {}, [0.25, -0.25, -0.75, 1.25, 0.75, 3.0]),
        # Four of six scores are not zero: alpha = 1.5.
        ("gpg", {}, [0.0, -0.75, -1.5, 1.5, 0.75, 4.5]),
    ],
)
def test_outcome_estimators_by_hand(name: str, options: dict[str, float], expected: list[float]) -> None:
    rewards, mask = outcome_batch(SCORES, LENGTHS, 4)
    advantages, returns = ESTIMATORS[name](rewards, mask, GROUPS, **options)
    torch.testing.assert_close(advantages, torch.tensor(expected).unsqueeze(-1) * mask, atol=4e-6, rtol=0)
    assert torch.equal(returns, advantages)


def test_reinforce_plus_plus_baseline_whitens_tokens_not_sequences() -> None:
    # One group, scores 3 and 0, lengths 1 and 2: centred 1.5, -1.5; tokens 1.5, -1.5, -1.5 with mean -0.5 and
    # unbiased variance (4 + 1 + 1) / 2 = 3.
    rewards, mask = outcome_batch([3.0, 0.0], [1, 2], 2)
    advantages, _ = ESTIMATORS["reinforce_plus_plus_baseline"](rewards, mask, torch.tensor([0, 0]))
    expected = torch.tensor([[2.0, 0.0], [-1.0, -1.0]]) / math.sqrt(3)
    torch.testing.assert_close(advantages, expected)


def test_reinforce_plus_plus_discounts_over_response_tokens_only() -> None:
    # Row 0: tokens at 0 and 2 (1 is a tool's), reward 4 at the end, gamma 0.5: returns 2, -, 4. Row 1: 0.
    rewards = torch.tensor([[0.0, 9.0, 4.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    advantages, returns = ESTIMATORS["reinforce_plus_plus"](rewards, mask, torch.tensor([0, 1]), gamma=0.5)
    torch.testing.assert_close(returns, torch.tensor([[2.0, 0.0, 4.0], [0.0, 0.0, 0.0]]))
    # Mean 2 and unbiased variance 4 of 2, 4, 0.
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0]]))


def test_remax_subtracts_the_greedy_reward() -> None:
    rewards, mask = outcome_batch([1.0, 0.5], [2, 1], 2)
    advantages, returns = ESTIMATORS["remax"](rewards, mask, torch.tensor([0, 1]), baselines=torch.tensor([0.25, 1.0]))
    torch.testing.assert_close(returns, torch.tensor([[1.0, 1.0], [0.5, 0.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[0.75, 0.75], [-0.5, 0.0]]))


def test_gae_by_hand() -> None:
    # gamma 0.5, lambda 0.5. Row 0, values 1, 2: delta_1 = 3 - 2 = 1, delta_0 = 0 + 0.5·2 - 1 = 0,
    # A_1 = 1, A_0 = 0 + 0.25·1 = 0.25; returns 1.25, 3. Row 1, value 4 then padding of 100: A_0 = 1 - 4 = -3.
    rewards = torch.tensor([[0.0, 3.0], [1.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    values = torch.tensor([[1.0, 2.0], [4.0, 100.0]])
    advantages, returns = ESTIMATORS["gae"](rewards, mask, torch.arange(2), values=values, gamma=0.5, lam=0.5)
    torch.testing.assert_close(returns, torch.tensor([[1.25, 3.0], [1.0, 0.0]]))
    raw = np.array([0.25, 1.0, -3.0])
    white = (raw - raw.mean()) / raw.std(ddof=1)
    torch.testing.assert_close(advantages, torch.tensor([[white[0], white[1]], [white[2], 0.0]], dtype=torch.float32))


def test_gae_steps_over_masked_tokens() -> None:
    """Tokens of a tool between response tokens change nothing: as if they were cut out."""
    whole = torch.tensor([[0.5, 1.0, 2.0], [1.0, 0.0, 3.0]])  # rewards; values are twice that
    gap = torch.tensor([[0.5, 70.0, 1.0, 2.0], [1.0, 0.0, -80.0, 3.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0]])
    options = {"gamma": 0.9, "lam": 0.8}
    cut = ESTIMATORS["gae"](whole, torch.ones(2, 3), torch.arange(2), values=2 * whole, **options)
    stepped = ESTIMATORS["gae"](gap, mask, torch.arange(2), values=2 * gap, **options)
    for expected, got in zip(cut, stepped, strict=True):
        torch.testing.assert_close(got[mask > 0].view(2, 3), expected)
        assert torch.equal(got[mask == 0], torch.zeros(2))


def gae_loop(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """A_t = Σ_k (γλ)^k δ_{t+k}, summed straight from the definition."""
    length = len(rewards)
    following = np.append(values[1:], 0.0)
    delta = rewards + gamma * following - values
    advantages = np.array([sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)])
    return advantages, advantages + values


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.7]))
def test_gae_is_its_definition(seed: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, size=5)
    rewards, values, mask = rng.normal(size=(5, 6)), rng.normal(size=(5, 6)), np.zeros((5, 6))
    raw, returns = np.zeros((5, 6)), np.zeros((5, 6))
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
        raw[row, :length], returns[row, :length] = gae_loop(rewards[row, :length], values[row, :length], gamma, lam)
    selected = raw[mask > 0]
    whitened = np.where(mask > 0, (raw - selected.mean()) / selected.std(ddof=1), 0)
    tensors = [torch.from_numpy(array).float() for array in (rewards, mask, values)]
    got, got_returns = ESTIMATORS["gae"](
        tensors[0], tensors[1], torch.arange(5), values=tensors[2], gamma=gamma, lam=lam
    )
    np.testing.assert_allclose(got_returns.numpy(), returns, atol=1e-5)
    np.testing.assert_allclose(got.numpy(), whitened, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=12),
    group_of=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_group_estimators_against_loops(scores: list[float], group_of: list[int]) -> None:
    groups, x = np.array(group_of[: len(scores)]), np.array(scores)
    rewards, mask = outcome_batch(scores, [1] * len(scores), 1)
    grpo, dr_grpo, rloo = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    for i, score in enumerate(x):
        others = [x[j] for j in range(len(x)) if groups[j] == groups[i] and j != i]
        members = [*others, score]
        alone = not others
        rloo[i] = score - (0 if alone else np.mean(others))
        dr_grpo[i] = score - (0 if alone else np.mean(members))
        grpo[i] = dr_grpo[i] / ((1 if alone else np.std(members, ddof=1)) + 1e-6)
    ids = torch.from_numpy(groups)
    for name, expected, options in (
        ("grpo", grpo, {}),
        ("grpo", dr_grpo, {"norm_by_std": False}),
        ("rloo", rloo, {}),
    ):
        advantages, _ = ESTIMATORS[name](rewards, mask, ids, **options)
        np.testing.assert_allclose(advantages[:, 0].numpy(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", OUTCOME)
def test_equal_rewards_teach_exactly_nothing(name: str) -> None:
    # 0.1 has no exact binary form: a float32 mean of seven may differ, and 1 / (std + eps) blows that up.
    rewards, mask = outcome_batch([0.1] * 7, [1, 1, 1, 1, 1, 1, 1], 2)
    advantages, _ = ESTIMATORS[name](rewards, mask, torch.zeros(7, dtype=torch.int64))
    assert torch.equal(advantages, torch.zeros(7, 2))


def test_rewards_and_values_stay_untouched() -> None:
    rewards, mask = outcome_batch(SCORES, LENGTHS, 4)
    values, before = torch.ones(6, 4), rewards.clone()
    for name, estimator in ESTIMATORS.items():
        estimator(rewards, mask, GROUPS, values=values, baselines=torch.zeros(6))
        assert torch.equal(rewards, before), name
        assert torch.equal(values, torch.ones(6, 4)), name


def test_missing_inputs_and_names_are_refused() -> None:
    rewards, mask = outcome_batch([1.0], [1], 1)
    with pytest.raises(ConfigError, match="values"):
        ESTIMATORS["gae"](rewards, mask, torch.tensor([0]))
    with pytest.raises(ConfigError, match="baselines"):
        ESTIMATORS["remax"](rewards, mask, torch.tensor([0]))
    with pytest.raises(ConfigError, match=r"adv_estimator='grop' is unknown; choose .*grpo.*rloo"):
        ESTIMATORS["grop"]
