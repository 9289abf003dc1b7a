"""Functions that run on each rank of the Megatron trainer's tests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.config.schema import RunConfig
from rlhpc.data.packing import FILLER_ID, TokenSequence, pack, split_by_sequence, split_experts
from rlhpc.data.types import PackedBatch
from rlhpc.errors import RlhpcError, TrainingError
from rlhpc.train.protocols import LossSpec

VOCAB = 319
NUM_SEQUENCES = 13  # of one_step: no even split
LAYERS, EXPERTS, TOP_K = 4, 8, 2  # of the tests' model
TEMPERATURE = 0.7
KL_COEF, ENTROPY_COEFF = 0.3, 0.05
MEGATRON_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def sequences(num: int, seed: int) -> list[TokenSequence]:
    """Random prompts and responses of 1 to 9 tokens with fields that make every term of the loss count. The first
    prompt has one token, the second response too."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(num):
        prompt, response = (1 if i == 0 else int(rng.integers(1, 10))), (1 if i == 1 else int(rng.integers(1, 10)))
        made.append(
            TokenSequence(
                i,
                rng.integers(5, VOCAB, prompt + response).astype(np.int32),
                prompt,
                {
                    "advantages": np.full(response, rng.standard_normal(), np.float32),
                    "rollout_weights": rng.uniform(0.5, 1.5, response).astype(np.float32),
                    "behaviour_shift": rng.normal(0, 0.5, response).astype(np.float32),
                    "ref_shift": rng.normal(0, 0.3, response).astype(np.float32),
                },
            )
        )
    return made


def routed(batch: list[TokenSequence]) -> list[TokenSequence]:
    """With experts drawn at random for every token of every layer: hardly ever the routers' own choice."""
    rng = np.random.default_rng(5)
    shapes = [(len(sequence.token_ids) - 1, LAYERS, EXPERTS) for sequence in batch]
    drawn = [rng.random(shape).argsort(-1)[..., :TOP_K].astype(np.uint8) for shape in shapes]
    return [replace(sequence, experts=experts) for sequence, experts in zip(batch, drawn, strict=True)]


def loss_spec(batch: list[TokenSequence]) -> LossSpec:
    return LossSpec(
        loss_mode="vanilla", clip_low=0.2, clip_high=0.3, clip_c=1.5, loss_agg_mode="token-mean",
        num_global_tokens=float(sum(s.response_len for s in batch)), num_global_seqs=float(len(batch)),
        loss_scale_factor=None, entropy_coeff=ENTROPY_COEFF, kl_coef=KL_COEF, kl_type="k3", temperature=TEMPERATURE,
    )  # fmt: skip


def make_trainer(
    model_dir: Path,
    sizes: Mapping[str, int],
    device: str = "cpu",
    shared: Any = None,
    adv_estimator: str = "grpo",
    **settings: Any,
) -> Any:
    """`settings` are dotted paths below actor_rollout_ref, dots written as two underscores."""
    from rlhpc.backends.megatron.trainer import MegatronTrainer

    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    cfg = RunConfig()
    cfg.algorithm.adv_estimator = adv_estimator
    cfg.actor_rollout_ref.model.dtype = "float32"
    cfg.actor_rollout_ref.actor.optim.lr = 1e-2
    for axis, size in sizes.items():
        setattr(cfg.actor_rollout_ref.actor.megatron, MEGATRON_SIZES[axis], size)
    for path, value in settings.items():
        *parents, leaf = path.split("__")
        node: Any = cfg.actor_rollout_ref
        for parent in parents:
            node = getattr(node, parent)
        setattr(node, leaf, value)
    hf_config = json.loads((model_dir / "config.json").read_text())
    return MegatronTrainer(cfg, hf_config, model_dir, device, shared)


def filled_batches(
    trainer: Any, batch: list[TokenSequence], max_tokens: int, max_sequences: int | None = None
) -> list[PackedBatch]:
    """This rank's microbatches with behaviour and reference logprobs at fixed distances from the policy's own."""
    packed_by_rank = pack(batch, dp_size=trainer.data_parallel_size, max_tokens=max_tokens, max_sequences=max_sequences)
    batches = packed_by_rank[trainer.data_parallel_rank]
    values = trainer.logprobs(batches, temperature=TEMPERATURE, model="policy")
    filled = []
    for packed, logprobs in zip(batches, values, strict=True):
        fields = dict(packed.token_fields)
        shift, ref_shift = fields.pop("behaviour_shift"), fields.pop("ref_shift")
        fields |= {"trainer_logprobs": logprobs.cpu() + shift, "ref_logprobs": logprobs.cpu() + ref_shift}
        filled.append(replace(packed, token_fields=fields))
    return filled


def in_turn(calls: Sequence[tuple[str, dict[str, Any]]], functions: Mapping[str, Any] | None = None) -> list[Any]:
    """Several functions in one start of the ranks, each with Megatron's groups to itself: those of this module, or of
    the one whose `functions` are given."""
    outcomes = []
    for name, arguments in calls:
        outcomes.append((functions or globals())[name](**arguments))
        forget_groups()
    return outcomes


def forget_groups() -> None:
    from megatron.core import parallel_state

    for group in parallel_state._global_process_group_list or ():
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def megatron_groups() -> dict[str, list[int]]:
    """The ranks of this rank's groups, by the axis along which they differ."""
    from megatron.core import parallel_state as ps

    groups = {
        "tp": ps.get_tensor_model_parallel_group(),
        "dp": ps.get_data_parallel_group(),
        "pp": ps.get_pipeline_model_parallel_group(),
        "etp": ps.get_expert_tensor_parallel_group(),
        "ep": ps.get_expert_model_parallel_group(),
        "edp": ps.get_expert_data_parallel_group(),
    }
    return {axis: dist.get_process_group_ranks(group) for axis, group in groups.items()}


def refusal(model_dir: Path, function: str, **arguments: Any) -> str | None:
    """The error that another of these functions ends in."""
    try:
        globals()[function](model_dir, **arguments)
    except RlhpcError as error:
        return f"{type(error).__name__}: {error}"
    return None


def load_broken(model_dir: Path, broken_dir: Path, sizes: Mapping[str, int]) -> None:
    """Rank 1 alone sees the broken directory, as where one node's copy of a model is damaged."""
    make_trainer(broken_dir if dist.get_rank() == 1 else model_dir, sizes)


def one_step(
    model_dir: Path, sizes: Mapping[str, int], max_tokens: int, max_sequences: int | None = None, **settings: Any
) -> dict[str, Any]:
    """Logprobs by sequence, metrics, this rank's parts of all gradients and the specs to place them with. With
    `rollout__enable_rollout_routing_replay` the batch is `routed`."""
    trainer = make_trainer(model_dir, sizes, **{"actor__optim__clip_grad": 0.0} | settings)
    batch = sequences(NUM_SEQUENCES, seed=3)
    if settings.get("rollout__enable_rollout_routing_replay"):
        batch = routed(batch)
    return step_of(trainer, batch, max_tokens, max_sequences)


def second_step(
    model_dir: Path, output_dir: Path, sizes: Mapping[str, int], max_tokens: int, **settings: Any
) -> dict[str, Any]:
    """As one_step, after one in other microbatches on the same batch, with the routing recorded before that; and that
    routing by sequence, the first step's metrics, and the weights after it in `output_dir`."""
    trainer = make_trainer(model_dir, sizes, **{"actor__optim__clip_grad": 0.0} | settings)
    batch = sequences(NUM_SEQUENCES, seed=3)
    everything = pack(batch, dp_size=trainer.data_parallel_size, max_tokens=1000)[trainer.data_parallel_rank]
    values, experts = trainer.routed_logprobs(everything, temperature=TEMPERATURE)
    recorded: dict[int, np.ndarray] = {}
    for packed, of_tokens in zip(everything, experts, strict=False):
        recorded |= split_experts(of_tokens, packed)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, recorded)
    assert sum(map(len, parts)) == NUM_SEQUENCES, "one rank of a model returns it"
    found = {key: of_sequence for part in parts for key, of_sequence in part.items()}
    batch = [replace(sequence, experts=found[sequence.sequence_id]) for sequence in batch]
    in_policy = pack(batch, dp_size=trainer.data_parallel_size, max_tokens=1000)[trainer.data_parallel_rank]
    for i, old in enumerate(values):
        fields = in_policy[i].token_fields
        given = {"trainer_logprobs": old, "ref_logprobs": old, "rollout_weights": torch.ones_like(old)}
        in_policy[i] = replace(in_policy[i], token_fields={"advantages": fields["advantages"]} | given)
    first = trainer.step(in_policy, loss_spec(batch))
    trainer.save_hf(output_dir)
    return step_of(trainer, batch, max_tokens) | {"experts": found, "first": first, "weights": output_dir}


def step_of(
    trainer: Any, batch: list[TokenSequence], max_tokens: int, max_sequences: int | None = None
) -> dict[str, Any]:
    batches = filled_batches(trainer, batch, max_tokens, max_sequences)
    values = trainer.logprobs(batches, temperature=TEMPERATURE, model="policy")
    metrics = trainer.step(batches, loss_spec(batch))
    logprobs: dict[int, np.ndarray] = {}
    for packed, value in zip(batches, values, strict=True):
        logprobs |= {i: row.cpu().numpy() for i, row in split_by_sequence(value, packed).items()}
    shards = {s.name: (s.start, s.stop, s.master.grad.cpu().numpy().copy()) for s in trainer.policy.optimizer.shards()}
    return {
        "num_microbatches": len(batches),
        "microbatches": [packed.sequence_ids.tolist() for packed in batches],
        "num_fillers": sum(int((packed.sequence_ids == FILLER_ID).sum()) for packed in batches),
        "groups": megatron_groups(),
        "dp_rank": trainer.data_parallel_rank,
        "rank": dist.get_rank(),
        "logprobs": logprobs,
        "metrics": metrics,
        "gradient_shards": shards,
        "shapes": {name: tuple(value.shape) for name, value in trainer.source_buffers().items()},
        "specs": trainer.source_specs(),
        "biases": {n: v.numpy().copy() for n, v in trainer.source_buffers().items() if n.endswith("expert_bias")},
        "layout": trainer.layout,
    }


def train(trainer: Any, steps: range) -> Iterator[dict[str, float]]:
    for step in steps:
        batch = sequences(8, seed=100 + step)
        yield trainer.step(filled_batches(trainer, batch, max_tokens=60), loss_spec(batch))


def plain_and_sparing(model_dir: Path) -> list[dict[str, Any]]:
    """Three bfloat16 steps, of more and more microbatches; the second time gradients are reduced during the backward,
    and parts of layers computed again, and the third time the experts lie in memory that is given."""
    sparing = {"actor__megatron__overlap_grad_reduce": True, "actor__megatron__recompute_modules": ["core_attn", "moe"]}
    outcomes: list[dict[str, Any]] = []
    given: dict[str, torch.Tensor] = {}
    for settings in ({}, sparing, sparing):
        shared = given if len(outcomes) == 2 else None
        trainer = make_trainer(model_dir, {"ep": 2}, model__dtype="bfloat16", shared=shared, **settings)
        first = copies(trainer.source_buffers())
        metrics, num_microbatches = [], []
        for step, max_tokens in enumerate((60, 35, 20)):
            batch = sequences(8, seed=step)
            batches = filled_batches(trainer, batch, max_tokens)
            metrics.append(trainer.step(batches, loss_spec(batch)))
            num_microbatches.append(len(batches))
        trained = copies(trainer.source_buffers() | (shared or {}))
        outcome = {"num_microbatches": num_microbatches, "metrics": metrics, "first": first, "weights": trained}
        if shared:
            trainer.load_weights(model_dir)
            outcome["loaded"] = copies(shared)
            buffers = trainer.policy.parallel.expert_parallel_buffers
            outcome["buffers"] = sum(buffer.param_data.numel() for buffer in buffers)
        outcomes.append(outcome)
        given = {n: torch.full_like(v, torch.nan) for n, v in trainer.source_buffers().items() if ".experts." in n}
        forget_groups()
    return outcomes


def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Their bytes."""
    return {name: value.view(torch.uint8).numpy().copy() for name, value in tensors.items()}


def tiny_steps(model_dir: Path, sizes: Mapping[str, int], num_steps: int, lr: float) -> dict[str, Any]:
    """bfloat16 with steps far below its resolution, all on one batch. Looks at elements of at least 1/16, where
    neighbouring bfloat16 values are at least 2^-11 apart."""
    trainer = make_trainer(model_dir, sizes, model__dtype="bfloat16", actor__optim__lr=lr)
    masters = [shard.master for shard in trainer.policy.optimizer.shards()]
    batch = sequences(8, seed=5)
    batches = filled_batches(trainer, batch, max_tokens=60)

    def flat() -> torch.Tensor:
        return torch.cat([master.detach() for master in masters])

    start = flat()
    large = start.abs() >= 2**-4
    without_masters = start.bfloat16()
    longest = torch.zeros(())
    for _ in range(num_steps):
        before = flat()
        trainer.step(batches, loss_spec(batch))
        moved = flat() - before
        longest = torch.maximum(longest, moved[large].abs().max())
        without_masters += moved.bfloat16()
    buffers = trainer.source_buffers()
    weights = torch.cat([buffers[s.name].flatten()[s.start : s.stop] for s in trainer.policy.optimizer.shards()])
    return {
        "num_large": int(large.sum()),
        "longest_step": float(longest),
        "moved": float((weights != start.bfloat16())[large].float().mean()),
        "moved_without_masters": float((without_masters != start.bfloat16())[large].float().mean()),
        "weights_are_masters": torch.equal(weights, flat().bfloat16()),
    }


def survive_nan(model_dir: Path) -> dict[str, Any]:
    """A step whose advantages are NaN on rank 1 alone, between two good ones."""
    trainer = make_trainer(model_dir, {"ep": 2})
    list(train(trainer, range(1)))
    before = {piece: tensor.clone() for piece, tensor in trainer.state_pieces().pieces}
    batch = sequences(8, seed=7)
    batches = filled_batches(trainer, batch, max_tokens=60)
    if dist.get_rank() == 1:
        bad = batches[0].token_fields["advantages"] * float("nan")
        batches[0] = replace(batches[0], token_fields={**batches[0].token_fields, "advantages": bad})
    try:
        trainer.step(batches, loss_spec(batch))
        message = None
    except TrainingError as error:
        message = str(error)
    after = trainer.state_pieces().pieces
    changed = [piece.key for piece, tensor in after if not torch.equal(before[piece], tensor)]
    return {"message": message, "changed": changed, "metrics": list(train(trainer, range(1, 2)))}


def reference_stays(model_dir: Path) -> dict[str, Any]:
    trainer = make_trainer(model_dir, {}, actor__use_kl_loss=True, actor__megatron__freeze_moe_router=True)
    batches = pack(sequences(6, seed=1), dp_size=1, max_tokens=60)[0]

    def reference() -> list[torch.Tensor]:
        return trainer.logprobs(batches, temperature=1.0, model="reference")

    initial, policy = reference(), trainer.logprobs(batches, temperature=1.0, model="policy")
    routers = {n: v.clone() for n, v in trainer.source_buffers().items() if "router" in n}
    list(train(trainer, range(2)))
    moved = trainer.logprobs(batches, temperature=1.0, model="policy")
    return {
        "same_at_start": all(map(torch.equal, initial, policy)),
        "reference_same": all(map(torch.equal, initial, reference())),
        "policy_moved": max(float((a - b).abs().max()) for a, b in zip(policy, moved, strict=True)),
        "routers_same": all(torch.equal(v, trainer.source_buffers()[n]) for n, v in routers.items()),
    }


def learning_rates(model_dir: Path, steps: int, **settings: Any) -> list[float]:
    trainer = make_trainer(model_dir, {}, **settings)
    return [metrics["actor/lr"] for metrics in train(trainer, range(steps))]


def export(model_dir: Path, output_dir: Path, sizes: Mapping[str, int]) -> Path:
    make_trainer(model_dir, sizes).save_hf(output_dir)
    return output_dir
