"""The critic against Transformers: hidden states times a head, and autograd's gradients, under every kind of layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.critic_ranks import CLIP, head
from tests.distributed.megatron_ranks import NUM_SEQUENCES, sequences
from tests.distributed.megatron_reference import Case, canonical_gradients, hf_gradients
from tests.distributed.ranks import run_ranks
from tests.tiny_model import write_tiny_model

CASES = (
    Case(2, {"ep": 2}),
    Case(2, {"tp": 2}, recompute=True),
    Case(4, {"tp": 2, "pp": 2, "ep": 2}),
    Case(4, {"tp": 4, "ep": 2, "etp": 2}),
    Case(4, {"pp": 2, "ep": 2}),
)


BF16 = Case(4, {"tp": 2, "ep": 2}, dtype="bfloat16")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tied_model(tmp_path_factory.mktemp("model"))


def tied_model(directory: Path) -> Path:
    """Its output layer is the embedding, which on the last stage is a parameter of its own: a critic has none."""
    return write_tiny_model(directory, vocab_size=319, num_hidden_layers=4, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, Any]:
    return reference(model_dir)


def reference(model_dir: Path) -> dict[str, Any]:
    """One sequence at a time, the loss spelled out."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    row = head(model.config.hidden_size).requires_grad_()
    batch, by_sequence = sequences(NUM_SEQUENCES, seed=3), {}
    num_tokens = sum(s.response_len for s in batch)
    sums = dict.fromkeys(("loss", "clipped", "values"), 0.0)
    for sequence in batch:
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        hidden = model.model(ids[None]).last_hidden_state[0, sequence.prompt_len - 1 : -1]
        values = hidden @ row
        old = values.detach() + torch.from_numpy(sequence.fields["behaviour_shift"])
        returns = values.detach() + torch.from_numpy(sequence.fields["ref_shift"])
        free = (values - returns) ** 2
        clipped = (torch.minimum(torch.maximum(values, old - CLIP), old + CLIP) - returns) ** 2
        loss = 0.5 * torch.maximum(free, clipped).sum() / num_tokens
        loss.backward()
        sums["loss"] += loss.item()
        sums["clipped"] += (clipped > free).sum().item() / num_tokens
        sums["values"] += values.sum().item() / num_tokens
        by_sequence[sequence.sequence_id] = values.detach().numpy()
    gradients = hf_gradients(model) | {"score.weight": row.grad.numpy()[None]}
    norm = float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values())))
    return {"values": by_sequence, "sums": sums, "gradients": gradients, "norm": norm}


@pytest.fixture(scope="module")
def outcomes(model_dir: Path) -> Any:
    @cache
    def of(world_size: int) -> dict[str, list[dict[str, Any]]]:
        cases = [case for case in (*CASES, BF16) if case.world_size == world_size]
        calls = [("one_step", {"model_dir": model_dir} | arguments(case)) for case in cases]
        ranks = run_ranks("tests.distributed.critic_ranks:in_turn", world_size, 300.0, calls=calls)
        return {case.name: [rank[i] for rank in ranks] for i, case in enumerate(cases)}

    return of


def arguments(case: Case) -> dict[str, Any]:
    return {
        "sizes": dict(case.sizes),
        "max_tokens": case.max_tokens,
        "model__enable_gradient_checkpointing": case.recompute,
        "model__dtype": case.dtype,
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_transformers(case: Case, outcomes: Any, expected: dict[str, Any]) -> None:
    check_step(outcomes(case.world_size)[case.name], expected, atol=2e-5)


def check_step(ranks: list[dict[str, Any]], expected: dict[str, Any], atol: float) -> None:
    """Values, loss, metrics and every element of every gradient; nothing of the policy changes. `atol` is of values,
    and of gradients relative to the largest of a tensor."""
    values = {i: row for rank in ranks for i, row in rank["values"].items()}
    assert values.keys() == expected["values"].keys()
    for index, row in expected["values"].items():
        np.testing.assert_allclose(values[index], row, atol=atol, rtol=0)
    assert np.std(np.concatenate(list(values.values()))) > 0.1
    replicas = {rank["dp_rank"]: rank["metrics"] for rank in ranks}.values()
    total = {name: sum(metrics[name] for metrics in replicas) for name in ranks[0]["metrics"]}
    assert total["critic/vf_loss"] == pytest.approx(expected["sums"]["loss"], rel=atol / 2)
    assert total["critic/vf_clipfrac"] == pytest.approx(expected["sums"]["clipped"], abs=1e-6)
    assert 0.05 < total["critic/vf_clipfrac"] < 0.95
    assert total["critic/vpred_mean"] == pytest.approx(expected["sums"]["values"], abs=atol)
    assert {rank["metrics"]["critic/lr"] for rank in ranks} == {1e-5}
    for rank in ranks:
        assert rank["metrics"]["critic/grad_norm"] == pytest.approx(expected["norm"], rel=atol / 2)
        assert rank["untrained"] == rank["elsewhere"] == 0.0 and rank["policy_changed"] == [] and rank["moved"] > 0
    clipped = min(1.0, 1.0 / (expected["norm"] + 1e-6))
    gradients = canonical_gradients(ranks)
    assert gradients.keys() == expected["gradients"].keys()
    for name, gradient in gradients.items():
        wanted = clipped * expected["gradients"][name]
        np.testing.assert_allclose(gradient, wanted, atol=atol * np.abs(wanted).max(), rtol=1e-4, err_msg=name)


def test_bfloat16_is_near(outcomes: Any, expected: dict[str, Any]) -> None:
    check_near(outcomes(4)[BF16.name], expected)


def check_near(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Where a router is nearly undecided, rounding chooses the expert: single tokens are far off."""
    values = {i: row for rank in ranks for i, row in rank["values"].items()}
    wanted = np.concatenate(list(expected["values"].values()))
    errors = np.abs(np.concatenate([values[i] for i in expected["values"]]) - wanted)
    assert 1e-4 < np.median(errors) < 0.03 * wanted.std()
    for rank in ranks:
        assert rank["metrics"]["critic/grad_norm"] == pytest.approx(expected["norm"], rel=0.2)
