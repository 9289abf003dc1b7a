"""This rank's training state as named tensors and JSON-able scalars, and back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from rlhpc.backends.megatron.optimizer import Optimizer
from rlhpc.errors import CheckpointError

STATE_VERSION = 1


def optimizer_state(optimizer: Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Masters and moments as `optimizer/<parameter>/{master,exp_avg,exp_avg_sq}`, each float32 [stop - start], and the
    flat ranges they cover. The tensors are live: write them before the next step."""
    tensors, ranges = {}, {}
    for shard in optimizer.shards():
        ranges[shard.name] = [shard.start, shard.stop]
        tensors[f"optimizer/{shard.name}/master"] = shard.master.detach()
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer/{shard.name}/{moment}"] = shard.state[moment]
    return tensors, {"ranges": ranges, "step": optimizer.schedule.num_steps}


@torch.no_grad()
def load_optimizer_state(optimizer: Optimizer, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
    """Raises CheckpointError unless the state is that of the same layout."""
    for shard in optimizer.shards():
        saved = scalars["ranges"].get(shard.name)
        if saved != [shard.start, shard.stop]:
            raise CheckpointError(
                f"optimizer state of {shard.name}: this rank updates elements {shard.start}..{shard.stop}, the "
                f"checkpoint holds {saved}; resume with the parallel sizes and number of ranks it was saved with"
            )
        shard.master.copy_(tensors[f"optimizer/{shard.name}/master"])
        for moment in ("exp_avg", "exp_avg_sq"):
            shard.state[moment].copy_(tensors[f"optimizer/{shard.name}/{moment}"])
        shard.state["step"].fill_(scalars["step"])
    optimizer.schedule.num_steps = 0
    optimizer.schedule.step(increment=scalars["step"])
    optimizer.publish_masters()


def rng_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All generators of the process: torch's, CUDA's, Megatron's named streams, numpy's and Python's."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, words, gauss_next = random.getstate()
    tensors = {
        "rng/torch": torch.get_rng_state(),
        "rng/numpy": torch.from_numpy(keys.astype(np.int64)),
        "rng/python": torch.tensor(words, dtype=torch.int64),
    }
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    tensors |= {f"rng/megatron/{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    return tensors, {"numpy": [kind, position, has_gauss, cached], "python": [version, gauss_next]}


def load_rng_state(tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
    torch.set_rng_state(tensors["rng/torch"].cpu())
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng/cuda"].cpu())
    kind, position, has_gauss, cached = scalars["numpy"]
    np.random.set_state((kind, tensors["rng/numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    version, gauss_next = scalars["python"]
    random.setstate((version, tuple(tensors["rng/python"].tolist()), gauss_next))
    prefix = "rng/megatron/"
    states = {name.removeprefix(prefix): state for name, state in tensors.items() if name.startswith(prefix)}
    get_cuda_rng_tracker().set_states(states)
