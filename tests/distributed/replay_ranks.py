"""What the rank of test_replay.py runs: engine and trainer in bfloat16 on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhpc.data.packing import TokenSequence, pack, split_by_sequence
from tests.distributed.megatron_ranks import make_trainer
from tests.distributed.vllm_ranks import Prompts, engine, publish, spec


def rolled_and_trained(model_dir: str, prompts: Prompts) -> dict[str, Any]:
    """Logprobs of the engine, and of the trainer with its own routing and with the engine's; how many of the tokens
    that the engine routed went elsewhere in a layer of the trainer, by what its layers were really given."""
    with engine(model_dir, 1, "rlhpcreplay", dtype="bfloat16", enable_rollout_routing_replay=True) as running:
        publish(running, model_dir)
        answers, _ = running.generate(prompts, spec(n=4, max_response_length=48, routing=True), seed=5)
    asked = dict(prompts)
    made = [
        TokenSequence(
            i, np.array([*asked[a.prompt_id], *a.token_ids], np.int32), len(asked[a.prompt_id]), {}, a.experts
        )
        for i, a in enumerate(answers)
    ]
    (batches,) = pack(made, dp_size=1, max_tokens=1000)
    trainer = make_trainer(
        Path(model_dir), {}, model__dtype="bfloat16", rollout__enable_rollout_routing_replay=True,
        actor__megatron__router_replay__mode="R3",
    )  # fmt: skip
    policy = trainer.policy.module
    maps: dict[int, list[torch.Tensor]] = {layer: [] for layer in policy.routers()}
    for layer, router in policy.routers().items():
        router.register_forward_hook(lambda router, args, output, layer=layer: maps[layer].append(output[1]))
    result: dict[str, Any] = {"engine": [answer.logprobs for answer in answers], "batches": len(batches)}
    for name, follow in (("own", False), ("replay", True)):
        policy.replays_routing = follow
        for found in maps.values():
            found.clear()
        values = trainer.logprobs(batches, temperature=1.0, model="policy")
        rows: dict[int, np.ndarray] = {}
        elsewhere = known = 0
        for i, (batch, value) in enumerate(zip(batches, values, strict=True)):
            rows |= {key: row.numpy() for key, row in split_by_sequence(value, batch).items()}
            order, routed = policy.pack(batch).order, torch.ones(batch.num_tokens, dtype=torch.bool)
            routed[batch.cu_seqlens[1:].long() - 1] = False
            for layer, found in maps.items():
                wanted = torch.zeros_like(found[i]).scatter(1, batch.experts[order, layer].long(), True)
                elsewhere += int(((wanted != found[i]).any(1) & routed[order]).sum())
                known += int(routed.sum())
        counted = sum(router.differing for router in policy.routers().values())
        result[name] = {
            "logprobs": [rows[i] for i in range(len(rows))], "elsewhere": elsewhere, "known": known,
            "counted": counted.tolist(),
        }  # fmt: skip
    return result
