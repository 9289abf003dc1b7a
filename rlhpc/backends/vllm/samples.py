"""How tokens are drawn, and what is kept of every draw, in place of vLLM's seeds per request and its `logprobs`.

vLLM's own sampler loops over requests that have a seed, and its logprobs become Python objects token by token; on an
H200 that took half the throughput (docs/performance.md). Here one kernel draws for the whole batch, and logprobs stay
tensors on the device until the call ends.
"""

from __future__ import annotations

import numpy as np
import torch

from rlhpc.backends.vllm import private


def mix64(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Number `positions[i]` of the SplitMix64 sequence from `seeds[i]` (Steele, Lea and Flood, 2014), int64."""
    z = seeds.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = (z ^ (z >> np.uint64(31))).view(np.int64)
    return mixed


def split_by_request(
    rows: np.ndarray, positions: np.ndarray, values: np.ndarray, num_requests: int
) -> list[np.ndarray]:
    """`values` in the order of their recording as one array per request (0 to num_requests - 1), sorted by position.

    What was recorded at a position again replaces the first: vLLM throws away what it draws after a part of a prompt,
    and may preempt a request and compute it anew.
    """
    order = np.lexsort((positions, rows))  # stable: of equals the last recorded is last
    rows, positions = rows[order], positions[order]
    last = np.append((np.diff(rows) != 0) | (np.diff(positions) != 0), np.ones(min(1, len(rows)), bool))
    return np.split(values[order[last]], np.searchsorted(rows[last], np.arange(1, num_requests)))


class Samples:
    """The tokens of one call: drawn as a function of (the request's seed, position, logits), and recorded.

    Neither the order of the batch nor what else is in it, chunks of prompts, preemption or asynchronous scheduling
    change what is drawn from the same logits. `seeds` has one entry per request, at the request's `private.ROW`.
    """

    def __init__(self, batch: private.Batch, seeds: np.ndarray) -> None:
        self._batch, self._seeds = batch, seeds
        self._rows: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._tokens: list[torch.Tensor] = []
        self._logprobs: list[torch.Tensor] = []

    def draw(
        self, logits: torch.Tensor, generators: object, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B] and the logprobs [B, V] of the distribution that they are drawn from."""
        logits = private.apply_top_k_top_p(logits, k, p)
        seeds = torch.from_numpy(mix64(self._seeds[self._batch.rows()], self._batch.positions()))
        if logits.is_cuda:  # from pinned memory: the host must not wait for the device
            seeds = seeds.pin_memory().to(logits.device, non_blocking=True)
        return private.gumbel_argmax(logits, seeds), logits.log_softmax(dim=-1, dtype=torch.float32)

    def record(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        self._rows.append(self._batch.rows())
        self._positions.append(self._batch.positions())
        self._tokens.append(tokens.to(torch.int32))
        self._logprobs.append(logprobs.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1))

    def by_request(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Every request's tokens (int32) and their logprobs (float32). With asynchronous scheduling there may be one
        more than the answer has: when it was drawn, nobody knew that the one before was the last."""
        if not self._rows:
            return []
        rows, positions = np.concatenate(self._rows), np.concatenate(self._positions)
        tokens, logprobs = (
            split_by_request(rows, positions, torch.cat(parts).cpu().numpy(), len(self._seeds))
            for parts in (self._tokens, self._logprobs)
        )
        return list(zip(tokens, logprobs, strict=True))
