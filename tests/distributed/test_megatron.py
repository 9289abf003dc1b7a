"""The Megatron trainer against Transformers, against itself under other layouts, and across restarts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlhpc.layout.parallel import ParallelLayout
from tests.distributed.megatron_ranks import ENTROPY_COEFF, KL_COEF, TEMPERATURE, sequences
from tests.distributed.ranks import run_ranks
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.distributed
RANKS = "tests.distributed.megatron_ranks"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=319)  # odd: TP=2 pads the vocabulary


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, Any]:
    """The same step with Transformers: one sequence at a time, the loss spelled out, autograd's gradients."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    batch = sequences(12, seed=3)
    num_tokens = sum(s.response_len for s in batch)
    logprobs, sums = {}, dict.fromkeys(("pg", "entropy", "kl", "clipped", "clipped_lower"), 0.0)
    for sequence in batch:
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        logits = model(ids[None]).logits[0, sequence.prompt_len - 1 : -1] / TEMPERATURE
        table = logits.log_softmax(-1)
        policy = table[torch.arange(len(table)), ids[sequence.prompt_len :]]
        fields = {name: torch.from_numpy(values) for name, values in sequence.fields.items()}
        behaviour = policy.detach() + fields["behaviour_shift"]
        reference = policy.detach() + fields["ref_shift"]
        ratio, advantage = (policy - behaviour).exp(), fields["advantages"]
        free, clipped = -advantage * ratio, -advantage * ratio.clamp(0.8, 1.3)
        pessimistic = torch.maximum(free, clipped)
        bounded = torch.where(advantage < 0, torch.minimum(pessimistic, -advantage * 1.5), pessimistic)
        terms = {
            "pg": (bounded * fields["rollout_weights"]).sum(),
            "entropy": -(table.exp() * table).sum(),
            "kl": ((reference - policy).exp() - (reference - policy) - 1).sum(),
        }
        loss = (terms["pg"] - ENTROPY_COEFF * terms["entropy"] + KL_COEF * terms["kl"]) / num_tokens
        loss.backward()
        logprobs[sequence.sequence_id] = policy.detach().numpy()
        terms |= {"clipped": (clipped > free).sum(), "clipped_lower": (bounded < pessimistic).sum()}
        sums = {name: sums[name] + terms[name].item() / num_tokens for name in sums}
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.numpy()
        for expert, part in enumerate(gradient) if ".experts." in name else ():  # Transformers 5 stacks experts
            stem = f"{name.rpartition('.')[0]}.{expert}"
            if name.endswith("gate_up_proj"):
                half = len(part) // 2
                gradients |= {f"{stem}.gate_proj.weight": part[:half], f"{stem}.up_proj.weight": part[half:]}
            else:
                gradients[f"{stem}.down_proj.weight"] = part
        if ".experts." not in name:
            gradients[name] = gradient
    return {"logprobs": logprobs, "sums": sums, "gradients": gradients}


LAYOUTS: list[Any] = [
    pytest.param(1, {}, 1000, False, id="one-microbatch"),
    pytest.param(1, {}, 25, True, id="many-microbatches-recompute"),
    pytest.param(2, {}, 40, False, id="dp2"),
    pytest.param(2, {"ep": 2}, 40, False, id="ep2"),
    pytest.param(2, {"ep": 2}, 40, True, id="ep2-recompute"),
    pytest.param(2, {"tp": 2}, 40, False, id="tp2"),
    pytest.param(2, {"pp": 2}, 40, False, id="pp2"),
    pytest.param(4, {"tp": 2, "ep": 2}, 40, False, id="tp2-ep2-dp2"),
]


@pytest.mark.parametrize(("world_size", "sizes", "max_tokens", "recompute"), LAYOUTS)
def test_equals_transformers(
    model_dir: Path,
    expected: dict[str, Any],
    world_size: int,
    sizes: dict[str, int],
    max_tokens: int,
    recompute: bool,
) -> None:
    """Logprobs, every metric and every element of every gradient, whatever the layout and the split."""
    ranks = run_ranks(
        f"{RANKS}:one_step",
        world_size,
        model_dir=model_dir,
        sizes=sizes,
        max_tokens=max_tokens,
        model__enable_gradient_checkpointing=recompute,
    )
    assert ranks[0]["num_microbatches"] > 1 or max_tokens == 1000
    found: dict[int, np.ndarray] = {}
    for rank in ranks:
        found |= rank["logprobs"]
    for index, logprobs in expected["logprobs"].items():
        np.testing.assert_allclose(found[index], logprobs, atol=1e-5, rtol=0)

    replicas = {rank["dp_rank"]: rank["metrics"] for rank in ranks}.values()
    total = {name: sum(metrics[name] for metrics in replicas) for name in next(iter(replicas))}
    for name, key in (
        ("pg_loss", "pg"), ("entropy", "entropy"), ("kl_loss", "kl"),
        ("pg_clipfrac", "clipped"), ("pg_clipfrac_lower", "clipped_lower"),
    ):  # fmt: skip
        assert total[f"actor/{name}"] == pytest.approx(expected["sums"][key], rel=2e-5), name
    assert total["actor/pg_clipfrac"] > 0.05 and total["actor/pg_clipfrac_lower"] > 0.05
    assert 0 <= total["actor/moe/avg_vio"] <= total["actor/moe/max_vio"] < 7  # 8 experts: all load on one is 7

    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in expected["gradients"].values()))
    for rank in ranks:
        assert rank["metrics"]["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, gradient in canonical_gradients(ranks).items():
        scale = np.abs(expected["gradients"][name]).max()
        np.testing.assert_allclose(gradient, expected["gradients"][name], atol=2e-5 * scale, rtol=1e-4, err_msg=name)


def canonical_gradients(ranks: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Every rank's copy of every HF tensor's gradient must be the same; returns one of each."""
    layout: ParallelLayout = ranks[0]["layout"]
    result: dict[str, np.ndarray] = {}

    @cache
    def local(rank: int, buffer: str) -> np.ndarray:
        """The gradient of a rank's parameter, from the optimizer shards of all ranks that hold a replica."""
        at = layout.coords(rank)
        axes = ("etp", "ep", "pp") if "experts" in buffer else ("tp", "pp")
        flat = np.full(int(np.prod(ranks[rank]["shapes"][buffer])), np.nan, np.float32)
        for replica in layout.ranks(**{axis: getattr(at, axis) for axis in axes}):
            if buffer in ranks[replica]["gradient_shards"]:
                start, stop, values = ranks[replica]["gradient_shards"][buffer]
                flat[start:stop] = values
        return flat.reshape(ranks[rank]["shapes"][buffer])

    for spec in ranks[0]["specs"]:
        whole = np.full(spec.shape, np.nan, np.float32)
        for shard in spec.shards:
            extent = [stop - start for start, stop in zip(shard.start, shard.stop, strict=True)]
            lead = len(shard.offset) - len(extent)
            inner = tuple(slice(o, o + e) for o, e in zip(shard.offset[lead:], extent, strict=True))
            box = tuple(slice(*bounds) for bounds in zip(shard.start, shard.stop, strict=True))
            values = local(shard.rank, shard.buffer)[(*shard.offset[:lead], *inner)]
            known = ~np.isnan(whole[box])
            np.testing.assert_array_equal(whole[box][known], values[known])
            whole[box] = values
        assert not np.isnan(whole).any(), spec.name
        result[spec.name] = whole
    return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumes_bitwise(model_dir: Path, tmp_path: Path, dtype: str) -> None:
    """Three steps, save, two more: a new process that loads the state takes the same two steps to the last bit."""
    settings = {
        "model__dtype": dtype, "actor__optim__lr_warmup_steps": 4, "actor__megatron__freeze_moe_router": True,
    }  # fmt: skip
    where = {"model_dir": model_dir, "state_dir": tmp_path, "sizes": {"ep": 2}} | settings
    straight = run_ranks(f"{RANKS}:train_save_train", 2, **where)
    resumed = run_ranks(f"{RANKS}:load_train", 2, **where)
    for one, two in zip(straight, resumed, strict=True):
        assert one["metrics"] == two["metrics"]
        assert one["random"] == two["random"]
        for name, weights in one["weights"].items():
            np.testing.assert_array_equal(weights, two["weights"][name], err_msg=name)


def test_refuses_the_state_of_another_layout(model_dir: Path, tmp_path: Path) -> None:
    run_ranks(f"{RANKS}:train_save_train", 2, model_dir=model_dir, state_dir=tmp_path, sizes={"ep": 2})
    with pytest.raises(RuntimeError, match=r"CheckpointError: training state has layout .*'ep': 2.*this run .*'ep': 1"):
        run_ranks(f"{RANKS}:load_train", 2, model_dir=model_dir, state_dir=tmp_path, sizes={})


def test_non_finite_gradients_change_nothing_on_any_rank(model_dir: Path) -> None:
    ranks = run_ranks(f"{RANKS}:survive_nan", 2, model_dir=model_dir)
    for rank in ranks:
        assert rank["message"].startswith("non-finite loss or gradient on 2 of 2 ranks in optimizer step 2")
        assert rank["changed"] == []
        assert np.isfinite(rank["metrics"][0]["actor/grad_norm"])


def test_reference_and_frozen_routers_stay(model_dir: Path) -> None:
    (outcome,) = run_ranks(f"{RANKS}:reference_stays", 1, model_dir=model_dir)
    moved = outcome.pop("policy_moved")
    assert outcome == dict.fromkeys(("same_at_start", "reference_same", "routers_same", "state_has_routers"), True)
    assert moved > 0.1


def test_warm_up_begins_above_zero(model_dir: Path) -> None:
    """lr 0.01 over a warm-up of 4: the k-th update uses k quarters of it."""
    (rates,) = run_ranks(f"{RANKS}:learning_rates", 1, model_dir=model_dir, steps=5, actor__optim__lr_warmup_steps=4)
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_export_is_the_model_that_was_loaded(model_dir: Path, tmp_path: Path) -> None:
    run_ranks(f"{RANKS}:export", 2, model_dir=model_dir, output_dir=tmp_path / "out", sizes={"ep": 2})
    original, saved = (
        {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}
        for path in (model_dir, tmp_path / "out")
    )
    assert original.keys() == saved.keys()
    for name, tensor in original.items():
        assert torch.equal(tensor, saved[name]), name
