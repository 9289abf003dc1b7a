"""Which experts the engine chose for every token that it was fed, for the trainer to choose the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rlhpc.backends.vllm import private
from rlhpc.backends.vllm.samples import split_by_request
from rlhpc.backends.vllm.sampling import Prompts
from rlhpc.data.types import EXPERT_DTYPES, Completion
from rlhpc.errors import EngineError
from rlhpc.reshard.families import ModelFacts

BYTES_ON_DEVICE = 64 * 2**20


def chosen_experts(facts: ModelFacts) -> private.ChosenExperts:
    dtype = EXPERT_DTYPES[facts.expert_number_bytes]
    return private.ChosenExperts(facts.num_layers, facts.experts_per_token, dtype)


class Routing:
    """The experts of one call's tokens. Like the logprobs they stay tensors until the call ends: a step costs a copy on
    the device, and every `bytes_on_device` one to the host."""

    def __init__(
        self, batch: private.Batch, chosen: private.ChosenExperts, bytes_on_device: int = BYTES_ON_DEVICE
    ) -> None:
        self._batch, self._chosen, self._bytes_on_device = batch, chosen, bytes_on_device
        self._rows: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._on_device: list[torch.Tensor] = []
        self._on_host: list[np.ndarray] = []
        self._num_bytes = 0

    def record(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """After every forward, beside Samples.record."""
        starts, counts = self._batch.fed()
        ends = counts.cumsum()
        num_tokens = int(ends[-1])
        self._rows.append(np.repeat(self._batch.rows(), counts))
        self._positions.append(np.arange(num_tokens) + np.repeat(starts - (ends - counts), counts))
        experts = self._chosen.ids[:num_tokens].clone()
        self._on_device.append(experts)
        self._num_bytes += experts.nbytes
        if self._num_bytes > self._bytes_on_device:
            self._to_host()

    def _to_host(self) -> None:
        if not self._on_device:
            return
        self._on_host.append(torch.cat(self._on_device).cpu().numpy())
        self._on_device.clear()
        self._num_bytes = 0

    def added_to(self, answers: Sequence[Completion], prompts: Prompts) -> list[Completion]:
        """`answers` of one call, the same number to each prompt, with the experts of all tokens but the last, which the
        engine was never fed."""
        if not answers:
            return []
        self._to_host()
        n = len(answers) // len(prompts)
        asked = [np.asarray(token_ids, np.int32) for _, token_ids in prompts for _ in range(n)]
        tokens = [np.concatenate([prompt, answer.token_ids]) for prompt, answer in zip(asked, answers, strict=True)]
        rows, positions = np.concatenate(self._rows), np.concatenate(self._positions)
        found = split_by_request(rows, positions, np.arange(len(rows)), len(tokens))
        chosen = np.concatenate(self._on_host)
        fed, experts = [positions[at] for at in found], [chosen[at] for at in found]
        return [replace(a, experts=e) for a, e in zip(answers, whole_routing(fed, experts, tokens), strict=True)]


def whole_routing(
    positions: Sequence[np.ndarray], experts: Sequence[np.ndarray], tokens: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """[P + R - 1, layers, k] per request, whose tokens [P + R] had `experts` at `positions`, ascending.

    With asynchronous scheduling the last token too, or more, may have been fed: the end of an answer is noticed late.
    Where the prefix cache answered, a request lacks its first tokens: they were fed for another one that begins with
    the same tokens, whose keys and values, and so whose experts, it shares. No cache outlives a call.
    Raises EngineError where other tokens are missing, or that other request.
    """
    ends = [int(np.searchsorted(fed, len(t) - 1)) for fed, t in zip(positions, tokens, strict=True)]
    whole = [of_request[:end] for of_request, end in zip(experts, ends, strict=True)]
    missing = np.array([len(t) - 1 - end for t, end in zip(tokens, ends, strict=True)])
    for row, (fed, lacking, end) in enumerate(zip(positions, missing, ends, strict=True)):
        if not np.array_equal(fed[:end], np.arange(lacking, len(tokens[row]) - 1)):
            raise _unknown_schedule(row)
    for length in sorted(set(missing[missing > 0].tolist())):  # who lacks less is whole by now
        sources = {
            of_request[:length].tobytes(): row
            for row, of_request in enumerate(tokens)
            if missing[row] < length < len(of_request)
        }
        for row in np.flatnonzero(missing == length).tolist():
            if (source := sources.get(tokens[row][:length].tobytes())) is None:
                raise _unknown_schedule(row)
            whole[row] = np.concatenate([whole[source][:length], whole[row]])
    return whole


def _unknown_schedule(row: int) -> EngineError:
    return EngineError(
        f"vllm {private.VERSION} was not seen to route all tokens of request {row}: it schedules in a way that "
        "rlhpc/backends/vllm/private.py doesn't know; set actor_rollout_ref.rollout.enable_rollout_routing_replay=false"
    )
