"""KL estimators: values by hand, gradients by derivation, expectations by enumeration."""

from __future__ import annotations

import math

import pytest
import torch

from rlhpc.algorithms.kl import KL_KINDS, adapted_coef, kl_penalty, penalize_rewards
from rlhpc.errors import ConfigError

# d = logp - ref = log 2: k1 log 2, k2 log²2 / 2, k3 exp(-log 2) + log 2 - 1 = log 2 - 1/2.
LOG2 = math.log(2)
BY_HAND = {"k1": LOG2, "abs": LOG2, "k2": LOG2**2 / 2, "k3": LOG2 - 0.5}
# The same with d = -log 2; k3 is 2 - log 2 - 1.
BY_HAND_NEGATIVE = {"k1": -LOG2, "abs": LOG2, "k2": LOG2**2 / 2, "k3": 1 - LOG2}
# d/dlogp: 1, sign(d), d and 1 - exp(-d).
GRADIENT = {"k1": 1.0, "abs": 1.0, "k2": LOG2, "k3": 0.5}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


@pytest.mark.parametrize("kind", KL_KINDS)
def test_values_and_gradients(kind: str) -> None:
    base = kind.removesuffix("+")
    base = ALIASES.get(base, base)
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    values = kl_penalty(logprobs, torch.tensor([[-1.0 - LOG2, -1.0 + LOG2]]), kind)
    assert values[0].tolist() == pytest.approx([BY_HAND[base], BY_HAND_NEGATIVE[base]], abs=1e-6)
    (gradient,) = torch.autograd.grad(values[0, 0], logprobs)
    expected = LOG2 if kind.endswith("+") else GRADIENT[base]  # "+": k2's, which is d
    assert gradient[0].tolist() == pytest.approx([expected, 0.0], abs=1e-6)


def test_k3_is_clamped() -> None:
    values = kl_penalty(torch.tensor([[-50.0, 0.0]]), torch.tensor([[0.0, -50.0]]), "low_var_kl")
    # d = -50: exp(20) - 21 is cut to 10. d = 50, clamped to 20: exp(-20) + 19 as well.
    assert values.tolist() == [[10.0, 10.0]]


def test_estimators_against_the_exact_kl() -> None:
    """Over all tokens of a distribution: k1 and k3 have KL as expectation, k1+, k2 and k3+ its gradient."""
    logits = torch.tensor([0.3, -0.7, 1.1, 0.0], requires_grad=True)
    reference = torch.tensor([0.1, 0.2, -0.3, 0.4]).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    gradients = {}
    for kind in ("k1", "k3", "k1+", "k2", "k3+"):
        expectation = (logprobs.detach().exp() * kl_penalty(logprobs, reference, kind)).sum()
        if kind != "k2":
            assert expectation.item() == pytest.approx(exact.item(), rel=1e-5)
        (gradients[kind],) = torch.autograd.grad(expectation, logits, retain_graph=True)
    for kind in ("k1+", "k2", "k3+"):
        torch.testing.assert_close(gradients[kind], exact_gradient)
    torch.testing.assert_close(gradients["k1"], torch.zeros(4), atol=1e-6, rtol=0)
    assert not torch.allclose(gradients["k3"], exact_gradient, atol=1e-2)


def test_penalty_in_the_reward() -> None:
    rewards, mask = torch.tensor([[0.0, 1.0], [3.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    logprobs, reference = (
        torch.tensor([[-1.0, -2.0], [-1.0, -9.0]]),
        torch.tensor([[-1.5, -2.5], [-3.0, 9.0]]),
    )
    penalized, metrics = penalize_rewards(rewards, logprobs, reference, mask, kind="kl", coef=0.1)
    torch.testing.assert_close(penalized, torch.tensor([[-0.05, 0.95], [2.8, 0.0]]))
    # Sequence means 0.5 and 2.
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(1.25)


@pytest.mark.parametrize(("kl", "expected"), [(0.1, 0.5), (0.11, 0.501), (0.3, 0.502), (0.09, 0.499), (0.0, 0.498)])
def test_the_coefficient_follows_the_kl(kl: float, expected: float) -> None:
    """A fiftieth of the horizon in samples; an error of a tenth counts in full, of more than a fifth as a fifth."""
    assert adapted_coef(0.5, kl, target=0.1, horizon=10000, num_samples=200) == pytest.approx(expected, rel=1e-9)


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="'k4' is unknown; choose k1, kl, abs"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
