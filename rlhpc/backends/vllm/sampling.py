"""Between rlhpc's prompts and completions and vLLM's requests and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from vllm import RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError

from rlhpc.backends.vllm import private
from rlhpc.backends.vllm.rng import hash64
from rlhpc.data.types import Completion
from rlhpc.errors import ConfigError, EngineError
from rlhpc.train.protocols import SamplingSpec

Prompts = Sequence[tuple[int, Sequence[int]]]


def check_prompts(prompts: Prompts, sampling: SamplingSpec, max_model_len: int, vocab_size: int) -> None:
    """Raises EngineError naming the first prompt that the engine can't answer in full."""
    allowed = max_model_len - sampling.max_response_length
    for prompt_id, token_ids in prompts:
        if not 0 < len(token_ids) <= allowed:
            raise EngineError(
                f"prompt {prompt_id} has {len(token_ids)} tokens; with max_response_length="
                f"{sampling.max_response_length} and max_model_len={max_model_len} it may have 1 to "
                f"{allowed}; filter longer prompts or raise actor_rollout_ref.rollout.max_model_len"
            )
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= vocab_size:
            raise EngineError(
                f"prompt {prompt_id} has token {low if low < 0 else high}; the model's vocabulary is 0 to "
                f"{vocab_size - 1}: tokenizer and model don't belong together"
            )


def request_seeds(prompts: Prompts, n: int, seed: int) -> np.ndarray:
    """One 63-bit seed per sample, prompt-major, that depends on nothing but (seed, prompt_id, sample_idx)."""
    return np.array([hash64(seed, prompt_id, sample) for prompt_id, _ in prompts for sample in range(n)], np.int64)


def request_params(prompts: Prompts, sampling: SamplingSpec, stop_token_ids: list[int]) -> list[SamplingParams]:
    """One request per sample, prompt-major, numbered; `Samples` gives it its seed and keeps its logprobs.

    Raises ConfigError for values out of vLLM's range.
    """
    common: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_response_length,
        "stop_token_ids": [] if sampling.ignore_eos else stop_token_ids,
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
        "detokenize": bool(sampling.stop),
    }
    try:
        return [SamplingParams(extra_args={private.ROW: row}, **common) for row in range(len(prompts) * sampling.n)]
    except (ValueError, VLLMValidationError) as error:  # the latter is no ValueError since 0.32
        raise ConfigError(f"vLLM refuses {sampling}: {error}") from error


def completions(
    outputs: Sequence[RequestOutput], samples: Sequence[tuple[np.ndarray, np.ndarray]], prompts: Prompts, n: int
) -> list[Completion]:
    """vLLM's outputs, which it returns in the order of the requests, with the logprobs of what `samples` recorded.

    Raises EngineError where vLLM answers with other tokens than it was seen to sample.
    """
    keys = [(prompt_id, sample) for prompt_id, _ in prompts for sample in range(n)]
    result = []
    for (prompt_id, sample), output, (sampled, logprobs) in zip(keys, outputs, samples, strict=True):
        answer = output.outputs[0]
        tokens = np.asarray(answer.token_ids, dtype=np.int32)
        if not np.array_equal(tokens, sampled[: len(tokens)]):
            raise EngineError(
                f"vllm {private.VERSION} answers prompt {prompt_id} with {len(tokens)} tokens that are not the first "
                f"of the {len(sampled)} it was seen to sample: it schedules in a way that "
                "rlhpc/backends/vllm/private.py doesn't know"
            )
        reason = answer.finish_reason or "abort"
        result.append(Completion(prompt_id, sample, tokens, logprobs[: len(tokens)], reason))
    return result


def token_digest(answers: Sequence[Completion]) -> int:
    """63 bits of xxh3 over who was asked and every token of the answers."""
    digest = xxhash.xxh3_64()
    for answer in answers:
        digest.update(np.array([answer.prompt_id, answer.sample_idx, len(answer.token_ids)], "<i8").tobytes())
        digest.update(answer.token_ids.astype("<i4").tobytes())
    return digest.intdigest() & ((1 << 63) - 1)
