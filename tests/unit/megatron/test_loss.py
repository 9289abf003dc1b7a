"""What the loss mask leaves out of the losses: the rest is a batch of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhpc.algorithms.losses import AGG_MODES
from rlhpc.backends.megatron.loss import microbatch_loss, microbatch_value_loss
from rlhpc.data.packing import TokenSequence, pack, split_by_sequence
from rlhpc.data.types import PackedBatch
from rlhpc.train.protocols import LossSpec, ValueLossSpec

RESPONSES = (3, 5, 2, 4)
FIELDS = ("trainer_logprobs", "advantages", "ref_logprobs", "values", "returns")


def sequences(rows: tuple[int, ...], masks: dict[int, list[float]] | None = None) -> list[TokenSequence]:
    """Some of the four, each with its own numbers; `masks` are ones where not given; None: there are none."""
    made = []
    for row in rows:
        rng = np.random.default_rng(row)
        fields = {name: rng.normal(size=RESPONSES[row]).astype(np.float32) for name in FIELDS}
        if masks is not None:
            fields["kept"] = np.array(masks.get(row, [1.0] * RESPONSES[row]), np.float32)
        tokens = np.arange(2 + RESPONSES[row], dtype=np.int32)
        made.append(TokenSequence(row, tokens, 2, fields))
    return made


def losses(made: list[TokenSequence], mode: str) -> tuple[dict[str, float], dict[int, list[float]]]:
    """Policy's and value loss with their metrics, and the gradient of both by the sequences' response tokens."""
    ((batch,),) = pack(made, dp_size=1, max_tokens=64)
    lengths = [sequence.num_loss_tokens for sequence in made]
    counts = {"num_global_tokens": float(sum(lengths)), "num_global_seqs": float(sum(n > 0 for n in lengths))}
    policy = LossSpec(
        loss_mode="vanilla", clip_low=0.2, clip_high=0.28, clip_c=3.0, loss_agg_mode=mode, loss_scale_factor=8.0,
        entropy_coeff=0.01, kl_coef=0.1, kl_type="k3", temperature=1.0, **counts,
    )  # fmt: skip
    outputs = predictions(batch).requires_grad_()
    pg_loss, metrics = microbatch_loss(outputs, outputs, batch, policy)
    value_spec = ValueLossSpec(clip=0.5, loss_agg_mode=mode, loss_scale_factor=8.0, **counts)
    vf_loss, more = microbatch_value_loss(outputs, batch, value_spec)
    (gradient,) = torch.autograd.grad(pg_loss + vf_loss, outputs)
    named = {name: value.item() for name, value in (metrics | more | {"loss": pg_loss}).items()}
    return named, {key: part.tolist() for key, part in split_by_sequence(gradient, batch).items()}


def predictions(batch: PackedBatch) -> torch.Tensor:
    """[T], a function of the token and its sequence alone."""
    rows = torch.repeat_interleave(batch.sequence_ids, batch.cu_seqlens.diff().long())
    return torch.sin(3.0 * rows + batch.position_ids).float()


@pytest.mark.parametrize("mode", AGG_MODES)
def test_masked_sequences_might_as_well_not_be_there(mode: str) -> None:
    found, gradients = losses(sequences((0, 1, 2, 3), {1: [0.0] * 5}), mode)
    expected, without = losses(sequences((0, 2, 3)), mode)
    assert found == pytest.approx(expected, rel=1e-6)
    assert gradients.pop(1) == [0.0] * 5
    assert gradients == {key: pytest.approx(values, rel=1e-5) for key, values in without.items()}


def test_masked_tokens_leave_the_mean_of_the_others() -> None:
    """token-mean over 12 of 14 tokens: 14/12 of the whole, less what the two were of it."""
    whole, of_whole = losses(sequences((0, 1, 2, 3)), "token-mean")
    masked, of_masked = losses(sequences((0, 1, 2, 3), {0: [1, 0, 1], 3: [0, 1, 1, 1]}), "token-mean")
    for row in range(4):
        expected = [14 / 12 * value for value in of_whole[row]]
        if row in (0, 3):
            expected[1 if row == 0 else 0] = 0.0
        assert of_masked[row] == pytest.approx(expected, rel=1e-5)
    assert masked["actor/pg_loss"] != pytest.approx(whole["actor/pg_loss"], rel=1e-3)


def test_a_batch_without_anything_left_teaches_nothing() -> None:
    found, gradients = losses(sequences((0, 2), {0: [0.0] * 3, 2: [0.0] * 2}), "token-mean")
    assert set(found.values()) == {0.0} and not any(any(values) for values in gradients.values())
