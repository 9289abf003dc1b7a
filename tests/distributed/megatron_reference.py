"""The optimizer step of megatron_ranks.one_step: under which layouts, by other means, and its parts put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhpc.data.packing import TokenSequence
from rlhpc.layout.parallel import ParallelLayout
from tests.distributed.megatron_ranks import ENTROPY_COEFF, KL_COEF, NUM_SEQUENCES, TEMPERATURE, sequences


@dataclass(frozen=True)
class Case:
    """How the step's batch is divided among ranks and microbatches; `clip` 0 doesn't clip."""

    world_size: int
    sizes: Mapping[str, int] = field(default_factory=dict)  # of tp, pp, ep, etp; 1 where absent
    max_tokens: int = 40
    max_sequences: int | None = None
    recompute: bool | str = False  # all, or a part
    dtype: str = "float32"
    clip: float = 0.0
    balance: float = 0.0  # coefficient of the load-balancing loss
    replay: str | None = None  # router_replay.mode; but for R2 the batch is routed

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(**self.sizes, world_size=self.world_size)

    @property
    def name(self) -> str:
        axes = [(axis, getattr(self.layout, axis)) for axis in ("tp", "pp", "dp", "ep", "etp")]
        parts = [f"{axis}{size}" for axis, size in axes if size > 1] or ["one-rank"]
        limit = f"{self.max_sequences}seq" if self.max_sequences else f"{self.max_tokens}tok"
        flags = (
            limit,
            self.recompute and f"recompute{'' if self.recompute is True else f'-{self.recompute}'}",
            self.dtype != "float32" and self.dtype,
            self.clip and "clip",
            self.balance and "balance",
            self.replay and f"replay-{self.replay}",
        )
        return "-".join((*parts, *filter(None, flags)))

    @property
    def arguments(self) -> dict[str, Any]:
        """Of megatron_ranks.one_step."""
        return {
            "sizes": dict(self.sizes),
            "max_tokens": self.max_tokens,
            "max_sequences": self.max_sequences,
            "model__enable_gradient_checkpointing": self.recompute is True,
            "actor__megatron__recompute_modules": [self.recompute] if isinstance(self.recompute, str) else [],
            "model__dtype": self.dtype,
            "actor__optim__clip_grad": self.clip,
            "actor__megatron__moe_aux_loss_coeff": self.balance,
            "actor__megatron__router_replay__mode": self.replay or "disabled",
            "rollout__enable_rollout_routing_replay": self.replay in ("disabled", "R3"),
        }


CASES = (
    Case(1, max_tokens=1000),
    Case(1, max_tokens=25),
    Case(1, max_tokens=25, recompute=True),
    Case(2),
    Case(2, {"ep": 2}),
    Case(2, {"ep": 2}, recompute=True),
    Case(2, {"ep": 2}, max_sequences=1),  # an odd number of sequences: one microbatch is filler
    Case(2, {"etp": 2}),
    Case(2, {"tp": 2}),
    Case(2, {"tp": 2}, recompute=True),
    Case(2, {"tp": 2, "etp": 2}),
    Case(2, {"pp": 2}),
    Case(4),
    Case(4, {"tp": 4}, clip=0.1),  # two ranks per KV head
    Case(4, {"tp": 2, "pp": 2}),
    Case(4, {"tp": 2, "ep": 2}, clip=0.1),
    Case(4, {"tp": 2, "ep": 2, "etp": 2}, clip=0.1),
    Case(4, {"tp": 2, "pp": 2, "ep": 2}, clip=0.1),
    Case(4, {"tp": 4, "ep": 2, "etp": 2}),
    Case(4, {"pp": 4}, max_tokens=25),
    Case(4, {"pp": 2}, clip=0.1),
    Case(4, {"pp": 2, "ep": 2}),
    Case(4, {"pp": 2, "etp": 2}),
    Case(4, {"ep": 4}),
    Case(4, {"ep": 4}, max_sequences=1),
    Case(4, {"ep": 2, "etp": 2}, clip=0.1),
    Case(4, {"ep": 2, "etp": 2}, clip=0.1, recompute=True),
)
BF16_CASES = tuple(
    Case(4, sizes, dtype="bfloat16")
    for sizes in ({"tp": 2, "ep": 2}, {"pp": 2, "ep": 2}, {"ep": 2, "etp": 2}, {"tp": 4})
)
BALANCE_CASES = (
    Case(1, max_tokens=25, balance=0.5),
    Case(2, {"tp": 2}, balance=0.5, recompute=True),
    Case(4, {"tp": 2, "ep": 2}, balance=0.5),
    Case(4, {"pp": 2, "ep": 2}, balance=0.5, recompute=True),
    Case(4, {"tp": 2, "pp": 2}, balance=0.5),
)
REPLAY_CASES = (
    Case(1, max_tokens=25, recompute=True, replay="R3"),
    Case(2, {"tp": 2}, replay="R3"),
    Case(2, {"pp": 2}, max_tokens=25, recompute=True, replay="R3"),  # others go forward before one goes back
    Case(4, {"pp": 2, "ep": 2}, max_tokens=25, recompute="moe", replay="R3"),
    Case(4, {"tp": 2, "ep": 2}, recompute=True, replay="R3"),
    Case(1, replay="disabled"),
)
RECORDED_CASES = (
    Case(1, max_tokens=25, replay="R2"),
    Case(2, {"tp": 2}, recompute=True, replay="R2"),
    Case(4, {"tp": 2, "ep": 2}, max_tokens=25, replay="R2"),  # two data-parallel ranks
    Case(4, {"pp": 2, "ep": 2}, max_tokens=25, recompute=True, replay="R2"),
)


@dataclass(frozen=True)
class Balance:
    """The load-balancing loss: its coefficient, and the sequences of each microbatch."""

    coeff: float
    microbatches: Sequence[Sequence[int]]

    def term(self, model: torch.nn.Module, batch: Sequence[TokenSequence]) -> torch.Tensor:
        """Summed over layers, each microbatch by its share of all tokens. arXiv 2101.03961 section 2.2: the number of
        experts times the sum over them of the fraction of assignments times the mean probability."""
        num_experts, top_k = model.config.num_experts, model.config.num_experts_per_tok
        inputs: list[torch.Tensor] = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda gate, args, _: inputs.append(args[0] @ gate.weight.t()))
            for layer in model.model.layers
        ]
        terms, num_tokens = [], 0
        for members in self.microbatches:
            inputs.clear()
            for i in members:
                model(torch.from_numpy(batch[i].token_ids.astype(np.int64))[None])
            for layer in range(len(hooks)):
                probs = torch.cat([logits.flatten(0, -2) for logits in inputs[layer :: len(hooks)]]).softmax(-1)
                chosen = probs.topk(top_k).indices.flatten()
                fractions = torch.bincount(chosen, minlength=num_experts) / len(chosen)
                terms.append(len(probs) * num_experts * (fractions * probs.mean(0)).sum())
            num_tokens += len(probs)
        for hook in hooks:
            hook.remove()
        return torch.stack(terms).sum() / num_tokens


class Forced:
    """Has a model's routers take what a sequence brings: the softmax over all experts, of which the chosen ones' shares
    are renormalised. Of its last token they take their own choice. `differing` and `known` count what their own choices
    would have been on the others."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.experts, self.differing, self.known = torch.empty(0), 0, 0
        assert model.config.norm_topk_prob
        for layer, block in enumerate(model.model.layers):
            block.mlp.gate.register_forward_hook(partial(self._route, layer))

    def _route(self, layer: int, gate: Any, arguments: Any, output: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        logits, _, own = output
        chosen = torch.cat([self.experts[:, layer], own[-1:]])
        self.differing += sum(set(a) != set(b) for a, b in zip(own.tolist(), chosen.tolist(), strict=True))
        self.known += len(own) - 1
        shares = logits.softmax(-1).gather(1, chosen)
        return logits, shares / shares.sum(-1, keepdim=True), chosen


def transformers_step(
    model_dir: Path,
    dtype: torch.dtype = torch.float32,
    balance: Balance | None = None,
    experts: Mapping[int, np.ndarray] | None = None,
) -> dict[str, Any]:
    """Logprobs by sequence, the terms of the loss and all gradients by HF name, with Transformers: one sequence at a
    time, the loss spelled out, autograd's gradients. `loss` is that of the policy, without the balance. With `experts`
    by sequence the routers are made to follow them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    batch = sequences(NUM_SEQUENCES, seed=3)
    forced = Forced(model) if experts else None
    loads = loads_of(model)
    num_tokens = sum(s.response_len for s in batch)
    logprobs, sums = {}, dict.fromkeys(("pg", "entropy", "kl", "clipped", "clipped_lower", "loss"), 0.0)
    for sequence in batch:
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        if forced and experts:
            forced.experts = torch.from_numpy(experts[sequence.sequence_id].astype(np.int64))
        logits = model(ids[None]).logits[0, sequence.prompt_len - 1 : -1].float() / TEMPERATURE
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
    if balance:
        term = balance.term(model, batch)
        (balance.coeff * term).backward()
        sums["balance"] = term.item()
    if forced:
        sums["routing_diff"] = forced.differing / forced.known
    gradients = hf_gradients(model)
    norm = float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values())))
    return {"logprobs": logprobs, "sums": sums, "gradients": gradients, "norm": norm, "loads": loads}


def loads_of(model: torch.nn.Module) -> dict[int, np.ndarray]:
    """By layer, how many tokens each routed expert of a DeepSeek model will have been given; filled by its passes."""
    loads: dict[int, np.ndarray] = {}

    def count(layer: int, experts: Any, arguments: Sequence[torch.Tensor]) -> None:
        _, chosen, _ = arguments
        loads[layer] = loads.get(layer, 0) + np.bincount(chosen.flatten().numpy(), minlength=experts.num_experts)

    for layer, block in enumerate(model.model.layers):
        if model.config.model_type == "deepseek_v3" and hasattr(block.mlp, "experts"):
            block.mlp.experts.register_forward_pre_hook(partial(count, layer))
    return loads


def hf_gradients(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """By the names of the file. Transformers 5 stacks a layer's experts, and takes the stacks apart to save them."""
    from transformers.core_model_loading import revert_weight_conversion

    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient.float().numpy() for name, gradient in revert_weight_conversion(model, gradients).items()}


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


def assert_equal_steps(ranks: Sequence[dict[str, Any]], expected: dict[str, Any], clipped: float = 1.0) -> None:
    """Logprobs, loss, gradient norm and every element of every gradient, which are `clipped` times `expected`'s."""
    found = whole_step(ranks)
    for index, logprobs in expected["logprobs"].items():
        np.testing.assert_allclose(found["logprobs"][index], logprobs, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found["loss"], expected["sums"]["loss"], rtol=1e-5)
    np.testing.assert_allclose(found["norm"], expected["norm"], rtol=1e-5)
    gradients = canonical_gradients(ranks)
    assert gradients.keys() == expected["gradients"].keys()
    for name, gradient in gradients.items():
        wanted = clipped * expected["gradients"][name]
        np.testing.assert_allclose(gradient, wanted, atol=2e-5 * np.abs(wanted).max(), rtol=1e-4, err_msg=name)


def canonical_gradients(ranks: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Every rank's copy of every trained HF tensor's gradient must be the same; returns one of each."""
    layout: ParallelLayout = ranks[0]["layout"]
    result: dict[str, np.ndarray] = {}

    @cache
    def local(rank: int, buffer: str) -> np.ndarray:
        """The gradient of a rank's parameter, from the optimizer shards of all ranks that hold a replica."""
        at = layout.coords(rank)
        axes = ("etp", "ep", "pp") if ".experts." in buffer else ("tp", "pp")
        flat = np.full(int(np.prod(ranks[rank]["shapes"][buffer])), np.nan, np.float32)
        for replica in layout.ranks(**{axis: getattr(at, axis) for axis in axes}):
            if buffer in ranks[replica]["gradient_shards"]:
                start, stop, values = ranks[replica]["gradient_shards"][buffer]
                flat[start:stop] = values
        return flat.reshape(ranks[rank]["shapes"][buffer])

    trained = {buffer for rank in ranks for buffer in rank["gradient_shards"]}
    for spec in (spec for spec in ranks[0]["specs"] if spec.buffers & trained):
        whole = np.full(spec.shape, np.nan, np.float32)
        for shard in spec.shards:
            box = tuple(map(slice, shard.start, shard.stop))
            values = local(shard.rank, shard.buffer)[tuple(map(slice, shard.offset, shard.end))].reshape(shard.shape)
            known = ~np.isnan(whole[box])
            np.testing.assert_array_equal(whole[box][known], values[known])
            whole[box] = values
        assert not np.isnan(whole).any(), spec.name
        result[spec.name] = whole
    return result
