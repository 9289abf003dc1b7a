"""What each rank does in test_activations.py: keeps count of what autograd keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from rlhpc.data.packing import TokenSequence, pack
from tests.distributed.megatron_ranks import forget_groups, make_trainer
from tests.tiny_family import SIZES

LENGTH, PROMPT, NUM = 24, 8, 16


def kept(cases: Mapping[str, tuple[Path, Mapping[str, int], Mapping[str, Any]]]) -> dict[str, int]:
    """Bytes of all storages that one microbatch leaves for its backward, parameters left out; of each case's model
    directory, parallel sizes and settings."""
    counts = {}
    for name, (model_dir, sizes, settings) in cases.items():
        counts[name] = _kept(model_dir, sizes, settings)
        forget_groups()
    return counts


def _kept(model_dir: Path, sizes: Mapping[str, int], settings: Mapping[str, Any]) -> int:
    trainer = make_trainer(model_dir, sizes, **settings)
    rng = np.random.default_rng(0)
    sequences = [
        TokenSequence(i, rng.integers(3, SIZES["vocab_size"], LENGTH).astype(np.int32), PROMPT, {})
        for i in range(NUM * trainer.data_parallel_size)
    ]
    (batch,) = pack(sequences, dp_size=trainer.data_parallel_size, max_tokens=NUM * LENGTH)[trainer.data_parallel_rank]
    module = trainer.policy.module.train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # kept until all are counted, so that none takes another's place

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        packed = module.pack(batch)
        module.logprobs(module(packed), batch, packed, 1.0)
    for held in (packed.input_ids, packed.position_ids, packed.order, packed.cos, packed.sin):
        keep(held)  # as long as the backward may compute a layer again
    return sum(storage.nbytes() for storage in saved.values())
