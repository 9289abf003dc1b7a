"""The driver's view of all ranks: data goes out balanced over ranks and replicas, results come back in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlhpc.checkpoint.manifest import FileEntry
from rlhpc.data.packing import TokenSequence, pack, split_by_sequence, split_experts
from rlhpc.data.types import Completion, PackedBatch, Prompt
from rlhpc.train.protocols import LossSpec, SamplingSpec, ValueLossSpec


class Caller(Protocol):
    """Calls a method on every rank together; `per_rank` gives each rank its positional arguments. `waiting` is called a
    few times a second meanwhile, and may raise to give up; the ranks can't be called any more then. Under `phase` the
    ranks keep what the method cost them."""

    world_size: int

    def call(
        self,
        method: str,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        *,
        phase: str = "",
        waiting: Callable[[], None] | None = None,
        **common: Any,
    ) -> list[Any]: ...

    def interrupt(self) -> None:
        """Has ranks that generate leave it with no completions, for good."""
        ...

    def reports(self, save_id: str) -> list[str] | None:
        """What the ranks' threads told of a save in the background, in rank order; None until all have. For one thread,
        also while ranks are called. Raises RankLostError where the ranks' store gives no answer."""
        ...


class Ranks:
    """Trainer and engine of the whole world as one object. Arrays in, arrays out, in the caller's order.

    `phase` is the step's at the moment, by the timers' names; what the ranks do meanwhile counts as its `usage`."""

    def __init__(self, caller: Caller, stopping: Callable[[], bool]) -> None:
        """`stopping` says whether the run is to stop: then nobody waits for the end of a generation."""
        self._caller, self._stopping, self._interrupted = caller, stopping, False
        self.phase = ""
        places = caller.call("describe")
        self._dp_ranks = [int(place["dp_rank"]) for place in places]
        self._replicas = [int(place["replica_rank"]) for place in places]
        self.data_parallel_size = int(places[0]["dp_size"])
        self.num_replicas = int(places[0]["num_replicas"])
        self.start_s = max(float(place["start_s"]) for place in places)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSpec,
        *,
        seed: int,
        chunk_prompts: int,
        between_chunks: Callable[[float], None],
    ) -> list[Completion]:
        """n completions per prompt, prompt-major. `chunk_prompts` 0: all at once. `between_chunks(fraction done)` must
        raise once the run is to stop: what an interrupted chunk leaves is no result."""
        size = chunk_prompts or len(prompts)
        completions: list[Completion] = []
        for begin in range(0, len(prompts), size):
            between_chunks(begin / len(prompts))
            chunk = [(prompt.prompt_id, prompt.token_ids) for prompt in prompts[begin : begin + size]]
            bounds = np.linspace(0, len(chunk), self.num_replicas + 1).astype(int)
            shares = [chunk[bounds[r] : bounds[r + 1]] for r in range(self.num_replicas)]
            results = self._caller.call(
                "generate",
                [(shares[r], sampling, seed) for r in self._replicas],
                phase=self.phase,
                waiting=self._interrupt_when_stopping,
            )
            completions += [completion for result in results for completion in result]
        between_chunks(1.0)
        return completions

    def _interrupt_when_stopping(self) -> None:
        if self._stopping() and not self._interrupted:
            self._interrupted = True
            self._caller.interrupt()

    def begin_update(self) -> None:
        self._caller.call("begin_update", phase=self.phase)

    def logprobs(
        self,
        sequences: Sequence[TokenSequence],
        *,
        temperature: float,
        model: str,
        max_tokens: int,
        max_sequences: int | None,
    ) -> list[np.ndarray]:
        """float32 [R] per sequence, of its response tokens. `sequence_id`s must be 0..len-1."""
        return self._per_token("logprobs", sequences, (temperature, model), max_tokens, max_sequences)

    def routed_logprobs(
        self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int, max_sequences: int | None
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """As `logprobs`, the policy's, and of each sequence the experts that it chose, [P + R - 1, layers, k]."""
        shares = self._shares(sequences, max_tokens, max_sequences)
        results = self._of_shares("routed_logprobs", shares, temperature)
        logprobs = self._in_order(sequences, shares, [values for values, _ in results], split_by_sequence)
        return logprobs, self._in_order(sequences, shares, [experts for _, experts in results], split_experts)

    def values(
        self, sequences: Sequence[TokenSequence], *, max_tokens: int, max_sequences: int | None
    ) -> list[np.ndarray]:
        """As `logprobs`, the critic's values."""
        return self._per_token("values", sequences, (), max_tokens, max_sequences)

    def _per_token(
        self,
        method: str,
        sequences: Sequence[TokenSequence],
        arguments: tuple[Any, ...],
        max_tokens: int,
        max_sequences: int | None,
    ) -> list[np.ndarray]:
        shares = self._shares(sequences, max_tokens, max_sequences)
        return self._in_order(sequences, shares, self._of_shares(method, shares, *arguments), split_by_sequence)

    def _shares(
        self, sequences: Sequence[TokenSequence], max_tokens: int, max_sequences: int | None
    ) -> list[list[PackedBatch]]:
        """Microbatches by data-parallel rank."""
        return pack(sequences, dp_size=self.data_parallel_size, max_tokens=max_tokens, max_sequences=max_sequences)

    def _of_shares(self, method: str, shares: Sequence[list[PackedBatch]], *arguments: Any) -> list[Any]:
        """What every rank makes of its microbatches, in rank order."""
        return self._caller.call(method, [(shares[d], *arguments) for d in self._dp_ranks], phase=self.phase)

    def _in_order(
        self,
        sequences: Sequence[TokenSequence],
        shares: Sequence[list[PackedBatch]],
        results: Sequence[Sequence[Any]],
        split: Callable[[Any, PackedBatch], Mapping[int, Any]],
    ) -> list[Any]:
        """Of each sequence its part of `results`, which every rank has for each of its microbatches, or for none."""
        found: dict[int, Any] = {}
        for dp_rank, of_rank in zip(self._dp_ranks, results, strict=True):
            for batch, of_tokens in zip(shares[dp_rank] if of_rank else (), of_rank, strict=True):
                found.update(split(of_tokens, batch))
        return [found[sequence.sequence_id] for sequence in sequences]

    def step(
        self,
        sequences: Sequence[TokenSequence],
        loss: LossSpec | ValueLossSpec,
        *,
        max_tokens: int,
        max_sequences: int | None,
    ) -> dict[str, float]:
        """One optimizer step on all sequences, of the model that the loss is of; metrics over the whole mini-batch."""
        results = self._of_shares("step", self._shares(sequences, max_tokens, max_sequences), loss)
        one_per_dp = {dp: result for dp, result in zip(self._dp_ranks, results, strict=True)}
        same_everywhere = ("/grad_norm", "/lr")
        return {
            name: value if name.endswith(same_everywhere) else sum(result[name] for result in one_per_dp.values())
            for name, value in one_per_dp[0].items()
        }

    def publish(self, policy_version: int) -> float:
        """Weights to the engine; returns the bytes that crossed ranks."""
        results = self._caller.call("publish", phase=self.phase, policy_version=policy_version)
        return float(sum(result["received_bytes"] for result in results))

    def save(self, directory: Path, *, read_back: bool) -> list[FileEntry]:
        """Has every rank write its files into a pending checkpoint, all before this returns."""
        results = self._caller.call("save", directory=str(directory), read_back=read_back)
        return [entry for entries in results for entry in entries]

    def begin_save(self, directory: Path, save_id: str, *, read_back: bool) -> None:
        """Has every rank copy its state and write the copy while it does other things; `save_reports` tells the end."""
        self._caller.call(
            "begin_save", phase=self.phase, directory=str(directory), save_id=save_id, read_back=read_back
        )

    def save_reports(self, save_id: str) -> list[str] | None:
        return self._caller.reports(save_id)

    def settle(self) -> None:
        """Waits until no rank is at anything: after one failed, others may still be writing."""
        self._caller.call("describe")

    def load(self, directory: Path, waiting: Callable[[], None]) -> None:
        """The whole state of a committed checkpoint, whose manifest every rank reads by itself."""
        self._caller.call("load", waiting=waiting, directory=str(directory))

    def load_weights(self, source: Path, waiting: Callable[[], None]) -> None:
        """From an HF directory or a committed checkpoint; the rest of the trainer stays as at the start."""
        self._caller.call("load_weights", waiting=waiting, source=str(source))

    def save_hf(self, directory: Path) -> None:
        self._caller.call("save_hf", directory=str(directory))

    def usage(self) -> dict[str, float]:
        """Metrics of the phases since the last call, and peaks of memory: of each the largest among the ranks."""
        results = self._caller.call("usage")
        return {name: max(result[name] for result in results) for name in results[0]}
