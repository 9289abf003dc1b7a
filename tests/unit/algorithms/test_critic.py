"""The value loss against numbers worked out by hand."""

import pytest
import torch

from rlhpc.algorithms.critic import explained_variance, value_loss

# Token by token with clip 0.5: (value, old value, return) -> free, clipped
#   (1.0, 0.8, 2.0)  within the clip: 1, 1
#   (2.0, 1.0, 2.5)  clipped to 1.5:  0.25, 1      the clip wins, no gradient
#   (-1., 0.0, 1.0)  clipped to -0.5: 4, 2.25      the free one wins
#   (0.3, 0.0, 0.0)  within:          0.09, 0.09
VALUES = [[1.0, 2.0, 7.0], [-1.0, 0.3, float("nan")]]
OLD = [[0.8, 1.0, 0.0], [0.0, 0.0, 0.0]]
RETURNS = [[2.0, 2.5, 0.0], [1.0, 0.0, float("inf")]]
MASK = [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]
SUMS = (0.5 * (1 + 1), 0.5 * (4 + 0.09))  # of the rows


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [("token-mean", sum(SUMS) / 4), ("seq-mean-token-sum", sum(SUMS) / 2), ("seq-mean-token-mean", sum(SUMS) / 4)],
)
def test_loss_and_gradient(mode: str, wanted: float) -> None:
    values = torch.tensor(VALUES, requires_grad=True)
    loss, metrics = value_loss(
        values, torch.tensor(OLD), torch.tensor(RETURNS), torch.tensor(MASK), clip=0.5, loss_agg_mode=mode
    )
    assert loss.item() == pytest.approx(wanted)
    assert metrics["critic/vf_clipfrac"].item() == pytest.approx(1 / 4)
    assert metrics["critic/vpred_mean"].item() == pytest.approx((1 + 2 - 1 + 0.3) / 4)
    loss.backward()
    weight = 2 if mode == "seq-mean-token-sum" else 1
    wanted_gradient = torch.tensor([[-1.0, 0.0, 0.0], [-2.0, 0.3, 0.0]]) / 4 * weight  # v - R where it isn't clipped
    torch.testing.assert_close(values.grad, wanted_gradient)


def test_parts_add_up_to_the_whole() -> None:
    tensors = [torch.tensor(rows) for rows in (VALUES, OLD, RETURNS, MASK)]
    whole, metrics = value_loss(*tensors, clip=0.5)
    parts = [value_loss(*(x[i : i + 1] for x in tensors), clip=0.5, num_global_tokens=4.0) for i in range(2)]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item())
    for name, value in metrics.items():
        assert sum(part[name].item() for _, part in parts) == pytest.approx(value.item())


def test_explained_variance() -> None:
    """Returns 0, 2, 4, 6 have the unbiased variance 20/3."""
    returns, mask = torch.tensor([[0.0, 2.0, 4.0, 6.0, 99.0]]), torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]])
    assert explained_variance(returns + 5, returns, mask) == pytest.approx(1.0)  # an offset explains all the same
    assert explained_variance(torch.full_like(returns, 3.0), returns, mask) == pytest.approx(0.0, abs=1e-5)
    assert explained_variance(torch.tensor([[0.0, 1.0, 2.0, 3.0, 0.0]]), returns, mask) == pytest.approx(0.75, abs=1e-5)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0, abs=1e-4)
    assert explained_variance(returns, returns, torch.zeros_like(mask)) == 0.0
