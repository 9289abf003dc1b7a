"""Both ways of weights into a real vLLM, in every split of four ranks: byte-equal parameters, equal samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.distributed import vllm_ranks
from tests.distributed.ranks import run_ranks
from tests.distributed.vllm_reference import Logits, expected, transformers_logits
from tests.tiny_model import write_tiny_model

# vLLM pads 90 tokens to 128: 38 rows of padding at TP=1; at TP=4 rank 2 has 6 and rank 3 nothing else.
VOCAB, PADDED = 90, 128
SPLITS = {1: "direct", 2: "reference", 4: "direct"}  # 4, 2 and 1 replicas; the sink that each engine starts with
SPECS = {
    "greedy": vllm_ranks.spec(temperature=0.0, max_response_length=12),
    "sampled": vllm_ranks.spec(n=2, max_response_length=8),
    "short": vllm_ranks.spec(max_response_length=3),
}


def prompts() -> list[tuple[int, list[int]]]:
    rng = np.random.default_rng(3)
    return [(10 + i, rng.integers(5, VOCAB, length).tolist()) for i, length in enumerate((1, 9, 30, 131))]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=2, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Logits:
    return transformers_logits(model_dir)


@pytest.fixture(scope="module")
def published(model_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """What the four ranks report, by tensor-parallel size."""
    ranks = run_ranks(
        "tests.distributed.sink_ranks:every_split",
        4, timeout_s=600, model_dir=str(model_dir), splits=SPLITS, prompts=prompts(), specs=SPECS,
    )  # fmt: skip
    return {tp: [rank[tp] for rank in ranks] for tp in SPLITS}


@pytest.mark.parametrize("tp", SPLITS)
def test_parameters_are_equal_byte_for_byte(tp: int, published: dict[int, Any], model_dir: Path) -> None:
    embedding = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"]
    table = np.concatenate([embedding, np.zeros((PADDED - VOCAB, embedding.shape[1]), embedding.dtype)])
    for rank, result in enumerate(published[tp]):
        assert result["names"][0] == result["names"][1]
        assert result["unequal"] == result["never written"] == []
        np.testing.assert_array_equal(result["vocabulary"], np.split(table, tp)[rank % tp])  # padding is zero


@pytest.mark.parametrize("tp", SPLITS)
def test_what_is_sampled_is_equal_and_is_transformers(tp: int, published: dict[int, Any], reference: Logits) -> None:
    asked = dict(prompts())
    for result in published[tp]:
        for name in ("greedy", "sampled"):
            direct, through_loader = result["direct"][name], result["reference"][name]
            for a, b in zip(direct, through_loader, strict=True):
                np.testing.assert_array_equal(a.token_ids, b.token_ids)
                np.testing.assert_array_equal(a.logprobs, b.logprobs)
                wanted = expected(reference, asked[a.prompt_id], a.token_ids, SPECS[name])
                np.testing.assert_allclose(a.logprobs, wanted, atol=1e-4)


def test_every_split_gives_the_same_greedy_tokens(published: dict[int, Any]) -> None:
    ranks = [result for results in published.values() for result in results]
    assert [result["replica"] for result in ranks] == [0, 1, 2, 3, 0, 0, 1, 1, 0, 0, 0, 0]
    tokens = [[a.token_ids.tolist() for a in result["direct"]["greedy"]] for result in ranks]
    assert all(each == tokens[0] for each in tokens)
    assert len({tuple(answer) for answer in tokens[0]}) == len(prompts())


def test_the_configured_sink_is_used_and_frees_its_buffers(published: dict[int, Any]) -> None:
    names = {"direct": "DirectSink", "reference": "ReferenceSink"}
    for tp, sink in SPLITS.items():
        for result in published[tp]:
            assert result["started with"] == names[sink]
            assert result["still held"] == 0
            assert result["direct negated"] == result["reference negated"]  # both publishes did change the weights
