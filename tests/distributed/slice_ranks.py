"""What the ranks of test_megatron_gpu.py run on a slice of Qwen3-30B-A3B."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rlhpc.data.packing import FILLER_ID, TokenSequence, split_by_sequence
from tests.distributed import megatron_ranks
from tests.distributed.megatron_ranks import TEMPERATURE, filled_batches, loss_spec, make_trainer


def in_turn(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    return megatron_ranks.in_turn(calls, globals())


def write_slice(model_dir: Path) -> None:
    """Rank 0 writes two layers of Qwen3-30B-A3B's shape with random bfloat16 weights; 3.7 GB."""
    from rlhpc.reshard.families import family_for
    from scripts.bench.sync import QWEN3_30B

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    if dist.get_rank() == 0:
        config = QWEN3_30B | {
            "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "attention_bias": False, "eos_token_id": 151645, "torch_dtype": "bfloat16",
        }  # fmt: skip
        (model_dir / "config.json").write_text(json.dumps(config))
        torch.manual_seed(0)
        tensors = {}
        for name, shape in family_for(config).canonical_tensors(config).items():
            tensor = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
            tensors[name] = (torch.ones_like(tensor) if len(shape) == 1 else tensor).cpu()
        save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()


def steps_on_slice(model_dir: Path, sizes: Mapping[str, int], num_steps: int = 3) -> list[dict[str, Any]]:
    """Steps on 16 sequences of 512 random tokens each, in microbatches of at most 2,048 tokens: their metrics, and of
    each sequence the mean logprob before the step."""
    trainer = make_trainer(
        model_dir, sizes, device="cuda", model__dtype="bfloat16", actor__optim__lr=1e-5, actor__optim__clip_grad=1.0
    )
    outcomes = []
    for step in range(num_steps):
        rng = np.random.default_rng(step)
        batch = [
            TokenSequence(
                i,
                rng.integers(5, 151_000, 512).astype(np.int32),
                64,
                {
                    "advantages": np.full(448, rng.standard_normal(), np.float32),
                    "rollout_weights": np.ones(448, np.float32),
                    "behaviour_shift": np.zeros(448, np.float32),
                    "ref_shift": rng.normal(0, 0.3, 448).astype(np.float32),
                },
            )
            for i in range(16)
        ]
        batches = filled_batches(trainer, batch, max_tokens=2048)
        values = trainer.logprobs(batches, temperature=TEMPERATURE, model="policy")
        means: dict[int, float] = {}
        for packed, value in zip(batches, values, strict=True):
            means |= {i: float(row.mean()) for i, row in split_by_sequence(value, packed).items() if i != FILLER_ID}
        metrics = trainer.step(batches, loss_spec(batch))
        outcomes.append({"dp_rank": trainer.data_parallel_rank, "metrics": metrics, "logprobs": means})
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return outcomes
