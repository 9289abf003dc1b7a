"""What each of four ranks does in test_verify.py: publishes, damages what one rank received, and verifies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.errors import EngineError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.reshard.execute import Resharder
from rlhpc.reshard.families import family_for, model_facts
from rlhpc.reshard.plan import plan
from rlhpc.reshard.verify import verify
from tests.unit.reshard.reference import CONFIG, trainer_buffers

LAYOUT = ParallelLayout(tp=2, pp=1, cp=1, ep=2, etp=1, world_size=4)
BUCKET_BYTES = 2048
TENSOR_PARALLEL = 4  # twice the KV heads: ranks 0 and 1 hold head 0, ranks 2 and 3 head 1
ROW, HEAD_DIM, HEADS = CONFIG["hidden_size"], CONFIG["head_dim"], CONFIG["num_attention_heads"]
Buffers = dict[str, torch.Tensor]


def canonical(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = family_for(CONFIG).canonical_tensors(CONFIG)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@contextmanager
def a_late_bucket(exchange: int) -> Iterator[None]:
    """Within it this rank finds, in its receive buffer of the `exchange`-th exchange, what the one before brought."""
    original, received = dist.all_to_all_single, []

    def all_to_all_single(output: torch.Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        work = original(output, *args, **kwargs)
        work.wait()
        received.append(output.clone())
        if len(received) == exchange + 1:
            size = min(len(part) for part in received[-2:])
            output[:size] = received[-2][:size]
        return work

    dist.all_to_all_single = all_to_all_single
    try:
        yield
    finally:
        dist.all_to_all_single = original
    assert len(received) > exchange


def layer(i: int, parameter: str) -> str:
    return f"model.layers.{i}.{parameter}"


W13, W2 = (f"mlp.experts.routed_experts.w{x}_weight" for x in ("13", "2"))
QKV = "self_attn.qkv_proj.weight"


def expert_swapped(held: Buffers, old: Buffers, weights: dict[str, np.ndarray]) -> None:
    held[layer(1, W13)][[2, 5]] = held[layer(1, W13)][[5, 2]]


def gate_and_up_exchanged(held: Buffers, old: Buffers, weights: dict[str, np.ndarray]) -> None:
    one = held[layer(0, W13)][6]
    one.copy_(one.roll(len(one) // 2, 0))


def rows_exchanged(held: Buffers, old: Buffers, weights: dict[str, np.ndarray]) -> None:
    one = held[layer(2, W2)][4]
    one[[9, 3]] = one[[3, 9]]


def bit_flipped(held: Buffers, old: Buffers, weights: dict[str, np.ndarray]) -> None:
    held["lm_head.weight"].view(torch.int16)[3, 7] ^= 1


def shard_missing(held: Buffers, old: Buffers, weights: dict[str, np.ndarray]) -> None:
    held[layer(2, "self_attn.o_proj.weight")].copy_(old[layer(2, "self_attn.o_proj.weight")])


def wrong_kv_head(held: Buffers, old: Buffers, weights: dict[str, np.ndarray]) -> None:
    k = torch.from_numpy(weights[layer(3, "self_attn.k_proj.weight")])[HEAD_DIM:]  # head 1, which rank 1 has not
    first = HEADS // TENSOR_PARALLEL * HEAD_DIM
    held[layer(3, QKV)][first : first + HEAD_DIM] = k


def truncated_instead_of_rounded(held: Buffers, old: Buffers, weights: dict[str, np.ndarray]) -> None:
    norm = weights["model.norm.weight"].view(np.uint32) & 0xFFFF0000
    held["model.norm.weight"].copy_(torch.from_numpy(norm.view(np.float32)))


def layers_exchanged(held: Buffers, old: Buffers, weights: dict[str, np.ndarray]) -> None:
    one, other = (held[layer(i, "mlp.gate.weight")] for i in (1, 2))
    one.copy_(other)


DAMAGES: dict[str, tuple[int, Callable[[Buffers, Buffers, dict[str, np.ndarray]], None]]] = {
    "expert swapped": (1, expert_swapped),
    "gate and up exchanged": (0, gate_and_up_exchanged),
    "rows exchanged": (0, rows_exchanged),
    "bit flipped": (2, bit_flipped),
    "shard missing": (3, shard_missing),
    "wrong KV head": (1, wrong_kv_head),
    "truncated instead of rounded": (3, truncated_instead_of_rounded),
    "layers exchanged": (2, layers_exchanged),
}


def damage_and_verify() -> dict[str, Any]:
    """Two publishes with other weights, then every damage alone; verify's message by damage."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    family, facts = family_for(CONFIG), model_facts(CONFIG)
    rollout = family.rollout_specs(CONFIG, TENSOR_PARALLEL, range(world_size), "bfloat16")
    copies = plan(family.trainer_specs(CONFIG, LAYOUT, "float32"), rollout)
    resharder = Resharder(copies, rank, bucket_bytes=BUCKET_BYTES)
    shapes = vllm_shapes(facts)
    held = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}

    def source(weights: dict[str, np.ndarray]) -> Buffers:
        buffers = trainer_buffers(weights, facts, LAYOUT, rank)
        return {name: torch.from_numpy(array.copy()) for name, array in buffers.items()}

    def message(src: Buffers) -> str:
        try:
            verify(copies, src, held, rank)
        except EngineError as error:
            return str(error)
        return ""

    first, second = canonical(0), canonical(1)
    result = {"before anything": message(source(first))}
    resharder.run(source(first), held)
    result["first"] = message(source(first))
    old = {name: buffer.clone() for name, buffer in held.items()}
    result["old against new"] = message(source(second))
    resharder.run(source(second), held)
    result["second"] = message(source(second))
    new = {name: buffer.clone() for name, buffer in held.items()}
    for name, (where, damage) in DAMAGES.items():
        if rank == where:
            damage(held, old, second)
        result[name] = message(source(second))
        for buffer, correct in zip(held.values(), new.values(), strict=True):
            buffer.copy_(correct)
    result["mended"] = message(source(second))
    for buffer, before in zip(held.values(), old.values(), strict=True):
        buffer.copy_(before)
    if rank == 2:
        with a_late_bucket(exchange=3):
            resharder.run(source(second), held)
    else:
        resharder.run(source(second), held)
    result["bucket late"] = message(source(second))
    result["late regions"] = [name for name in held if not torch.equal(held[name], new[name])]
    dist.destroy_process_group()
    return result


def vllm_shapes(facts: Any) -> dict[str, tuple[int, ...]]:
    """The parameters of one tensor-parallel rank, by hand."""
    local_heads = HEADS // TENSOR_PARALLEL + 2  # one KV head, k and v
    inter = facts.moe_intermediate_size // TENSOR_PARALLEL
    vocab = 128 // TENSOR_PARALLEL
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, ROW),
        "lm_head.weight": (vocab, ROW),
        "model.norm.weight": (ROW,),
    }
    for i in range(facts.num_layers):
        shapes |= {
            layer(i, "input_layernorm.weight"): (ROW,),
            layer(i, "post_attention_layernorm.weight"): (ROW,),
            layer(i, QKV): (local_heads * HEAD_DIM, ROW),
            layer(i, "self_attn.o_proj.weight"): (ROW, HEADS // TENSOR_PARALLEL * HEAD_DIM),
            layer(i, "self_attn.q_norm.weight"): (HEAD_DIM,),
            layer(i, "self_attn.k_norm.weight"): (HEAD_DIM,),
            layer(i, "mlp.gate.weight"): (facts.num_experts, ROW),
            layer(i, W13): (facts.num_experts, 2 * inter, ROW),
            layer(i, W2): (facts.num_experts, ROW, inter),
        }
    return shapes
