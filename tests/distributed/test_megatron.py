"""The Megatron trainer against Transformers, and against itself under other layouts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.megatron_ranks import NUM_SEQUENCES, routed, sequences
from tests.distributed.megatron_reference import (
    BALANCE_CASES,
    BF16_CASES,
    CASES,
    RECORDED_CASES,
    REPLAY_CASES,
    Balance,
    Case,
    assert_equal_steps,
    transformers_step,
    whole_step,
)
from tests.distributed.ranks import run_ranks
from tests.hf_files import read_tensors
from tests.tiny_model import write_tiny_model

RANKS = "tests.distributed.megatron_ranks"
Outcomes = dict[str, list[Any]]  # by call, then by rank


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its odd vocabulary is padded under TP, and it has fewer KV heads (2) than the largest TP."""
    return write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=319, num_hidden_layers=4)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, Any]:
    return transformers_step(model_dir)


@pytest.fixture(scope="module")
def outcomes(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Outcomes]:
    """All that tests ask of one number of ranks, which start only once: imports take longer than most of it."""
    work_dir = tmp_path_factory.mktemp("work")

    @cache
    def of(world_size: int) -> Outcomes:
        cases = (case for case in (*CASES, *BF16_CASES, *BALANCE_CASES, *REPLAY_CASES) if case.world_size == world_size)
        calls = {case.name: ("one_step", case.arguments) for case in cases}
        for case in (case for case in RECORDED_CASES if case.world_size == world_size):
            calls[case.name] = "second_step", case.arguments | {"output_dir": work_dir / case.name}
        calls |= {name: (name, arguments) for name, arguments in other_calls(world_size, model_dir, work_dir).items()}
        return run_calls(world_size, model_dir, calls)

    return of


def run_calls(world_size: int, model_dir: Path, calls: dict[str, tuple[str, dict[str, Any]]]) -> Outcomes:
    in_turn = [(function, {"model_dir": model_dir} | arguments) for function, arguments in calls.values()]
    ranks = run_ranks(f"{RANKS}:in_turn", world_size, 500.0, calls=in_turn)
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(calls)}


def other_calls(world_size: int, model_dir: Path, work_dir: Path) -> dict[str, dict[str, Any]]:
    if world_size == 1:
        return {"reference_stays": {}, "learning_rates": {"steps": 5, "actor__optim__lr_warmup_steps": 4}}
    if world_size == 2:
        return {
            "survive_nan": {},
            "export": {"output_dir": work_dir / "export", "sizes": {"ep": 2}},
            "plain_and_sparing": {},
            "tiny_steps": {"sizes": {"ep": 2}, "num_steps": 20, "lr": 5e-5},
            "refusal": {
                "function": "load_broken", "broken_dir": broken_copy(model_dir, work_dir), "sizes": {"ep": 2},
            },
        }  # fmt: skip
    return {}


def broken_copy(model_dir: Path, work_dir: Path) -> Path:
    broken = Path(shutil.copytree(model_dir, work_dir / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    return broken


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_transformers(case: Case, outcomes: Callable[[int], Outcomes], expected: dict[str, Any]) -> None:
    """Logprobs, every metric and every element of every gradient, whatever the layout and the split."""
    ranks = outcomes(case.world_size)[case.name]
    assert expected["norm"] > 2 * case.clip
    assert_equal_steps(ranks, expected, case.clip / (expected["norm"] + 1e-6) if case.clip else 1.0)
    total = whole_step(ranks)["metrics"]
    for name, key in (
        ("pg_loss", "pg"), ("entropy", "entropy"), ("kl_loss", "kl"),
        ("pg_clipfrac", "clipped"), ("pg_clipfrac_lower", "clipped_lower"),
    ):  # fmt: skip
        assert total[f"actor/{name}"] == pytest.approx(expected["sums"][key], rel=2e-5), name
    assert total["actor/pg_clipfrac"] > 0.05 and total["actor/pg_clipfrac_lower"] > 0.05
    assert 0 <= total["actor/moe/avg_vio"] <= total["actor/moe/max_vio"] < 7  # 8 experts: all load on one is 7


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_run_as_many_microbatches(world_size: int, outcomes: Callable[[int], Outcomes]) -> None:
    """13 sequences on 2 and 4 data-parallel ranks, one each: the free places are filler."""
    for case in (case for case in CASES if case.world_size == world_size):
        ranks = outcomes(world_size)[case.name]
        (num_microbatches,) = {rank["num_microbatches"] for rank in ranks}
        assert (num_microbatches == 1) == (case.max_tokens == 1000 or case.layout.dp == 4 and not case.max_sequences)
        if case.max_sequences:
            assert num_microbatches == {2: 7, 4: 4}[case.layout.dp]
            assert sum(rank["num_fillers"] for rank in ranks) == {2: 1, 4: 3}[case.layout.dp]


@pytest.mark.parametrize("case", [case for case in CASES if case.recompute], ids=lambda case: case.name)
def test_recomputing_activations_changes_no_bit(case: Case, outcomes: Callable[[int], Outcomes]) -> None:
    kept = replace(case, recompute=False).name
    for one, two in zip(outcomes(case.world_size)[kept], outcomes(case.world_size)[case.name], strict=True):
        assert one["metrics"] == two["metrics"]
        for index, logprobs in one["logprobs"].items():
            np.testing.assert_array_equal(logprobs, two["logprobs"][index])
        for name, (start, stop, gradient) in one["gradient_shards"].items():
            assert two["gradient_shards"][name][:2] == (start, stop)
            np.testing.assert_array_equal(gradient, two["gradient_shards"][name][2], err_msg=name)


@pytest.mark.parametrize("world_size", [2, 4])
def test_coordinates_are_those_of_megatrons_groups(world_size: int, outcomes: Callable[[int], Outcomes]) -> None:
    """Each group of the initialised Megatron holds the ranks that differ along its axis alone, in order."""
    grids = {"dense": ("tp", "dp", "pp"), "expert": ("etp", "ep", "edp", "pp")}
    for case in (case for case in CASES if case.world_size == world_size):
        for rank, outcome in enumerate(outcomes(world_size)[case.name]):
            assert outcome["dp_rank"] == case.layout.coords(rank).dp
            for axis, members in outcome["groups"].items():
                at = case.layout.coords(rank)
                others = next(axes for axes in grids.values() if axis in axes)
                fixed = {other: getattr(at, other) for other in others if other != axis}
                assert tuple(members) == case.layout.ranks(**fixed), (case.name, rank, axis)
                assert members.index(rank) == getattr(at, axis), (case.name, rank, axis)


@pytest.mark.parametrize("case", BALANCE_CASES, ids=lambda case: case.name)
def test_load_balancing_loss(
    case: Case, outcomes: Callable[[int], Outcomes], expected: dict[str, Any], model_dir: Path
) -> None:
    """Its value and its part of every gradient, in the microbatches that were really run."""
    ranks = outcomes(case.world_size)[case.name]
    microbatches = {rank["dp_rank"]: rank["microbatches"] for rank in ranks}
    balance = Balance(case.balance, sum(microbatches.values(), []))
    wanted = transformers_step(model_dir, balance=balance)
    assert_equal_steps(ranks, wanted)
    assert whole_step(ranks)["metrics"]["actor/moe/aux_loss"] == pytest.approx(wanted["sums"]["balance"], rel=1e-5)
    assert wanted["sums"]["balance"] > 4.1  # 4 layers
    assert wanted["sums"]["loss"] == pytest.approx(expected["sums"]["loss"])  # is the policy's alone
    assert wanted["norm"] != pytest.approx(expected["norm"], rel=1e-3)


@pytest.fixture(scope="module")
def expected_replay(model_dir: Path) -> dict[str, Any]:
    drawn = routed(sequences(NUM_SEQUENCES, seed=3))
    return transformers_step(model_dir, experts={i: sequence.experts for i, sequence in enumerate(drawn)})


@pytest.mark.parametrize("case", REPLAY_CASES, ids=lambda case: case.name)
def test_tokens_go_where_the_engine_sent_them(
    case: Case, outcomes: Callable[[int], Outcomes], expected: dict[str, Any], expected_replay: dict[str, Any]
) -> None:
    """Logprobs and every gradient, whatever is computed again and however many microbatches are under way; without
    replay the trainer only tells how often it goes elsewhere."""
    ranks = outcomes(case.world_size)[case.name]
    found = whole_step(ranks)["metrics"]["training/rollout_routing_diff"]
    if case.replay == "R3":
        assert_equal_steps(ranks, expected_replay)
        assert found == pytest.approx(expected_replay["sums"]["routing_diff"], rel=1e-9)
        assert expected_replay["norm"] != pytest.approx(expected["norm"], rel=0.01)
    else:
        assert_equal_steps(ranks, expected)
        assert 0.9 < found < 1  # of 28 pairs of experts one is right


@pytest.mark.parametrize("case", RECORDED_CASES, ids=lambda case: case.name)
def test_a_second_update_goes_where_the_tokens_went_before_the_first(
    case: Case, outcomes: Callable[[int], Outcomes], model_dir: Path
) -> None:
    """The first is in policy, to the bit. It moves weights and routers; the second is Transformers' with those weights
    and the recorded routing, which is the same under every layout."""
    ranks = outcomes(case.world_size)[case.name]
    one_rank = outcomes(1)[RECORDED_CASES[0].name][0]
    for rank in ranks:
        assert (
            rank["first"]["actor/ppo_kl"] == rank["first"]["actor/pg_clipfrac"] == rank["first"]["actor/kl_loss"] == 0
        )
        for i, experts in one_rank["experts"].items():
            np.testing.assert_array_equal(np.sort(rank["experts"][i]), np.sort(experts))
    recorded = ranks[0]["experts"]
    before = transformers_step(model_dir, experts=recorded) if case.world_size == 1 else None
    assert before is None or before["sums"]["routing_diff"] == 0  # is what the routers chose then
    wanted = transformers_step(ranks[0]["weights"], experts=recorded)
    assert wanted["sums"]["routing_diff"] > 0.05  # wouldn't be any more
    assert_equal_steps(ranks, wanted)


@pytest.fixture(scope="module")
def expected_bf16(model_dir: Path) -> dict[str, Any]:
    return transformers_step(model_dir, torch.bfloat16)


@pytest.mark.parametrize("case", BF16_CASES, ids=lambda case: case.name)
def test_bfloat16_is_as_near_to_float32_as_transformers(
    case: Case, outcomes: Callable[[int], Outcomes], expected: dict[str, Any], expected_bf16: dict[str, Any]
) -> None:
    """Where a router is nearly undecided, rounding chooses the expert: single tokens are far off, in both."""
    found = whole_step(outcomes(case.world_size)[case.name])
    ours, theirs = (
        np.concatenate([np.abs(other["logprobs"][i] - values) for i, values in expected["logprobs"].items()])
        for other in (found, expected_bf16)
    )
    assert 1e-4 < ours.mean() < 1.5 * theirs.mean()
    assert found["loss"] == pytest.approx(expected["sums"]["loss"], rel=0.01)
    assert found["norm"] == pytest.approx(expected["norm"], rel=0.05)


def test_overlap_and_selective_recompute_change_no_bit(outcomes: Callable[[int], Outcomes]) -> None:
    """Megatron overlaps from the second step on, once it has counted in the first how often gradients come."""
    for plain, sparing, _ in outcomes(2)["plain_and_sparing"]:
        assert plain["num_microbatches"] == [1, 2, 3]
        assert plain["metrics"] == sparing["metrics"]
        for name, weights in plain["weights"].items():
            np.testing.assert_array_equal(weights, sparing["weights"][name], err_msg=name)


def test_experts_in_given_memory_change_no_bit(outcomes: Callable[[int], Outcomes]) -> None:
    """That memory itself is looked at, which was full of NaN: after loading, three steps, and loading again."""
    for plain, _, shared in outcomes(2)["plain_and_sparing"]:
        assert plain["metrics"] == shared["metrics"]
        for name, weights in plain["weights"].items():
            np.testing.assert_array_equal(weights, shared["weights"][name], err_msg=name)
            assert np.any(weights != plain["first"][name])
        assert len(shared["loaded"]) == 2 * 4 and shared["buffers"] == 0
        for name, weights in shared["loaded"].items():
            np.testing.assert_array_equal(weights, plain["first"][name], err_msg=name)


def test_masters_keep_what_bfloat16_would_lose(outcomes: Callable[[int], Outcomes]) -> None:
    """20 steps of about 5e-5 against a resolution of at least 2^-11 = 4.9e-4: added to bfloat16 weights, each would be
    rounded away. In the masters they add up, where a gradient keeps its sign to two units, and the weights follow."""
    for rank in outcomes(2)["tiny_steps"]:
        assert rank["num_large"] > 100_000
        assert 2e-5 < rank["longest_step"] < 2**-12
        assert rank["moved_without_masters"] == 0
        assert rank["moved"] > 0.1
        assert rank["weights_are_masters"]


def test_all_ranks_learn_of_the_one_that_cannot_load(outcomes: Callable[[int], Outcomes]) -> None:
    first, second = outcomes(2)["refusal"]
    assert first == second
    assert first.startswith("ModelError: rank 1: ") and "model.norm.weight has shape (127,)" in first


def test_non_finite_gradients_change_nothing_on_any_rank(outcomes: Callable[[int], Outcomes]) -> None:
    for rank in outcomes(2)["survive_nan"]:
        assert rank["message"].startswith("non-finite loss or gradient on 2 of 2 ranks in optimizer step 2")
        assert rank["changed"] == []
        assert np.isfinite(rank["metrics"][0]["actor/grad_norm"])


def test_reference_and_frozen_routers_stay(outcomes: Callable[[int], Outcomes]) -> None:
    (outcome,) = outcomes(1)["reference_stays"]
    assert outcome["policy_moved"] > 0.1
    assert all(outcome[name] for name in ("same_at_start", "reference_same", "routers_same"))


def test_warm_up_begins_above_zero(outcomes: Callable[[int], Outcomes]) -> None:
    """lr 0.01 over a warm-up of 4: the k-th update uses k quarters of it."""
    assert outcomes(1)["learning_rates"][0] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_export_is_the_model_that_was_loaded(model_dir: Path, outcomes: Callable[[int], Outcomes]) -> None:
    exported, _ = outcomes(2)["export"]
    original, saved = read_tensors(model_dir), read_tensors(exported)
    assert original.keys() == saved.keys()
    for name, tensor in original.items():
        assert torch.equal(tensor, saved[name]), name
