"""The optimizer step of megatron_ranks.one_step by other means, and its parts put together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhpc.layout.parallel import ParallelLayout
from tests.distributed.megatron_ranks import ENTROPY_COEFF, KL_COEF, NUM_SEQUENCES, TEMPERATURE, sequences


def transformers_step(model_dir: Path) -> dict[str, Any]:
    """Logprobs by sequence, the terms of the loss and all gradients by HF name, with Transformers in float32: one
    sequence at a time, the loss spelled out, autograd's gradients."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    batch = sequences(NUM_SEQUENCES, seed=3)
    num_tokens = sum(s.response_len for s in batch)
    logprobs, sums = {}, dict.fromkeys(("pg", "entropy", "kl", "clipped", "clipped_lower", "loss"), 0.0)
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
        terms["loss"] = terms["pg"] - ENTROPY_COEFF * terms["entropy"] + KL_COEF * terms["kl"]
        (terms["loss"] / num_tokens).backward()
        logprobs[sequence.sequence_id] = policy.detach().numpy()
        terms |= {"clipped": (clipped > free).sum(), "clipped_lower": (bounded < pessimistic).sum()}
        sums = {name: sums[name] + terms[name].item() / num_tokens for name in sums}
    gradients = hf_gradients(model)
    norm = float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values())))
    return {"logprobs": logprobs, "sums": sums, "gradients": gradients, "norm": norm}


def hf_gradients(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """By the names of the file; Transformers 5 stacks a layer's experts."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.numpy()
        if ".experts." not in name:
            gradients[name] = gradient
            continue
        for expert, part in enumerate(gradient):
            stem = f"{name.rpartition('.')[0]}.{expert}"
            if name.endswith("gate_up_proj"):
                half = len(part) // 2
                gradients |= {f"{stem}.gate_proj.weight": part[:half], f"{stem}.up_proj.weight": part[half:]}
            else:
                gradients[f"{stem}.down_proj.weight"] = part
    return gradients


def whole_step(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks of one_step found together: logprobs by sequence, metrics summed over data-parallel ranks, the
    loss, and the gradient norm, which must be the same on all."""
    logprobs: dict[int, np.ndarray] = {}
    for rank in ranks:
        logprobs |= rank["logprobs"]
    replicas = {rank["dp_rank"]: rank["metrics"] for rank in ranks}.values()
    total = {name: sum(metrics[name] for metrics in replicas) for name in next(iter(replicas))}
    (norm,) = {rank["metrics"]["actor/grad_norm"] for rank in ranks}
    loss = total["actor/pg_loss"] - ENTROPY_COEFF * total["actor/entropy"] + KL_COEF * total["actor/kl_loss"]
    return {"logprobs": logprobs, "metrics": total, "loss": loss, "norm": norm}


def canonical_gradients(ranks: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
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
