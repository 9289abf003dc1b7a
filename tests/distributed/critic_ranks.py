"""Functions that run on each rank of the critic's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlhpc.data.packing import TokenSequence, pack, split_by_sequence
from rlhpc.train.protocols import ValueLossSpec
from tests.distributed import megatron_ranks
from tests.distributed.megatron_ranks import NUM_SEQUENCES, make_trainer, sequences

CLIP = 0.2


def head(hidden_size: int) -> torch.Tensor:
    """A head that was trained already, so that the decoder gets gradients: float32 [hidden_size]."""
    return 0.1 * torch.randn(hidden_size, generator=torch.Generator().manual_seed(11))


def one_step(
    model_dir: Path, sizes: Mapping[str, int], max_tokens: int, device: str = "cpu", **settings: Any
) -> dict[str, Any]:
    """Values by sequence, metrics, this rank's parts of all gradients and the specs to place them with. Old values and
    returns are at fixed distances from the critic's own."""
    trainer = make_trainer(model_dir, sizes, device=device, adv_estimator="gae", **settings)
    critic = trainer.critic
    batch = sequences(NUM_SEQUENCES, seed=3)
    batches = pack(batch, dp_size=trainer.data_parallel_size, max_tokens=max_tokens)[trainer.data_parallel_rank]
    untrained = trainer.values(batches)
    for shard in critic.optimizer.shards():
        if shard.name == "output_layer.weight":
            with torch.no_grad():
                shard.master.copy_(head(critic.module.facts.hidden_size)[shard.start : shard.stop])
    critic.optimizer.publish_masters()
    policy = {name: value.clone() for name, value in trainer.source_buffers().items()}
    values, by_sequence, filled = [of_tokens.cpu() for of_tokens in trainer.values(batches)], {}, []
    for packed, of_tokens in zip(batches, values, strict=True):
        by_sequence |= {i: row.numpy() for i, row in split_by_sequence(of_tokens, packed).items()}
        shifts = packed.token_fields
        fields = {"values": of_tokens + shifts["behaviour_shift"], "returns": of_tokens + shifts["ref_shift"]}
        filled.append(replace(packed, token_fields=fields))
    metrics = trainer.step(filled, loss_spec(batch))
    return {
        "dp_rank": trainer.data_parallel_rank,
        "elsewhere": max(
            float(of_tokens[packed.loss_mask == 0].abs().max())
            for packed, of_tokens in zip(batches, values, strict=True)
        ),
        "untrained": max(float(of_tokens.abs().max()) for of_tokens in untrained),
        "values": by_sequence,
        "metrics": metrics,
        "policy_changed": [n for n, value in trainer.source_buffers().items() if not torch.equal(value, policy[n])],
        "moved": float((trainer.values(batches)[0].cpu() - values[0]).abs().max()),
        "gradient_shards": {
            s.name: (s.start, s.stop, s.master.grad.cpu().numpy().copy()) for s in critic.optimizer.shards()
        },
        "shapes": {name: tuple(value.shape) for name, value in critic.buffers().items()},
        "specs": critic.specs,
        "layout": trainer.layout,
    }


def critic_step(trainer: Any, seed: int) -> dict[str, float]:
    """On random sequences, whose returns are their advantages."""
    batch = sequences(8, seed)
    batches = pack(batch, dp_size=trainer.data_parallel_size, max_tokens=60)[trainer.data_parallel_rank]
    filled = [
        replace(packed, token_fields={"values": of_tokens, "returns": packed.token_fields["advantages"]})
        for packed, of_tokens in zip(batches, trainer.values(batches), strict=True)
    ]
    return trainer.step(filled, loss_spec(batch))


def loss_spec(batch: list[TokenSequence]) -> ValueLossSpec:
    return ValueLossSpec(
        clip=CLIP,
        loss_agg_mode="token-mean",
        num_global_tokens=float(sum(s.response_len for s in batch)),
        num_global_seqs=float(len(batch)),
        loss_scale_factor=None,
    )


def in_turn(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    """See megatron_ranks.in_turn."""
    return megatron_ranks.in_turn(calls, globals())
