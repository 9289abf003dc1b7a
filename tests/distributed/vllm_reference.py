"""What vLLM must sample from, by other means: Transformers' logits, made a distribution with numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rlhpc.train.protocols import SamplingSpec

Logits = Callable[[Sequence[int]], np.ndarray]  # token ids [T] -> float64 [T, V]


def transformers_logits(model_dir: Path, dtype: str = "float32") -> Logits:
    """In float64, with the file's weights rounded to `dtype`."""
    import torch
    from transformers import AutoModelForCausalLM

    # Loaded in `dtype`, not converted to it afterwards, which would round the rotary frequencies as well.
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype), experts_implementation="eager"
    ).double()

    def logits(token_ids: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([list(token_ids)])).logits[0].numpy()

    return logits


def assert_routed(model_dir: Path, sequences: Sequence[tuple[Sequence[int], np.ndarray]]) -> None:
    """Experts [T - 1, layers, k] of token ids [T] are those that Transformers' routers choose in float64, wherever they
    are decided by more than the rounding of float32: nearly everywhere."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, experts_implementation="eager"
    ).double()
    decided = []
    for token_ids, experts in sequences:
        with torch.no_grad():
            found = model(torch.tensor([list(token_ids)]), output_router_logits=True).router_logits
        logits, k = torch.stack(list(found), dim=1)[:-1].numpy(), experts.shape[-1]
        assert experts.shape == (*logits.shape[:2], k)
        order = np.argsort(-logits, axis=-1)
        ranked = np.take_along_axis(logits, order, -1)
        clear = ranked[..., k - 1] - ranked[..., k] > 1e-5
        np.testing.assert_array_equal(np.sort(experts)[clear], np.sort(order[..., :k])[clear])
        decided.append(clear.ravel())
    assert np.concatenate(decided).mean() > 0.999


def processed_logprobs(logits: np.ndarray, sampling: SamplingSpec) -> np.ndarray:
    """The distribution that is sampled from: tempered, cut to the top k, then to the smallest set of mass top_p."""
    scaled = logits / (sampling.temperature or 1.0)
    if sampling.top_k > 0:
        threshold = np.sort(scaled, axis=-1)[:, -sampling.top_k][:, None]
        scaled = np.where(scaled < threshold, -np.inf, scaled)
    probs = np.exp(scaled - scaled.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    order = np.argsort(-probs, axis=-1)
    descending = np.take_along_axis(probs, order, -1)
    keep = np.cumsum(descending, -1) - descending < sampling.top_p
    np.put_along_axis(probs, order, np.where(keep, descending, 0.0), -1)
    with np.errstate(divide="ignore"):
        return np.log(probs / probs.sum(-1, keepdims=True))


def expected(logits: Logits, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingSpec) -> np.ndarray:
    """Logprobs of the sampled tokens, float64 [len(tokens)]."""
    rows = logits([*prompt, *tokens])[len(prompt) - 1 : -1]
    return processed_logprobs(rows, sampling)[np.arange(len(tokens)), np.asarray(tokens)]
