import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlhpc.backends.vllm.rng import hash64
from rlhpc.backends.vllm.samples import mix64, split_by_request
from rlhpc.backends.vllm.sampling import check_prompts, request_params, request_seeds, token_digest
from rlhpc.config.model_dir import eos_token_ids
from rlhpc.data.types import Completion
from rlhpc.errors import ConfigError, EngineError, ModelError
from rlhpc.train.protocols import SamplingSpec

SAMPLING = SamplingSpec(n=2, temperature=0.7, top_p=0.9, top_k=5, max_response_length=12)


def test_eos_prefers_the_generation_config(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path, {"eos_token_id": 2}) == [2]
    (tmp_path / "generation_config.json").write_text(json.dumps({"pad_token_id": 0}))
    assert eos_token_ids(tmp_path, {"eos_token_id": [7, 3]}) == [3, 7]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    assert eos_token_ids(tmp_path, {"eos_token_id": 2}) == [4, 9]
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="generation_config.json can.t be read as JSON.*; copy it again, or remove"):
        eos_token_ids(tmp_path, {"eos_token_id": 2})
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(ModelError, match="has an eos_token_id; add one"):
        eos_token_ids(tmp_path, {"eos_token_id": None})


def test_one_request_per_sample_and_a_seed_for_each() -> None:
    prompts = [(5, [1]), (6, [1])]
    params = request_params(prompts, SAMPLING, [2, 4])
    assert request_seeds(prompts, 2, 99).tolist() == [hash64(99, i, s) for i in (5, 6) for s in (0, 1)]
    assert [p.extra_args for p in params] == [{"row": row} for row in range(4)]
    for p in params:
        assert (p.n, p.temperature, p.top_p, p.top_k, p.max_tokens) == (1, 0.7, 0.9, 5, 12)
        assert p.stop_token_ids == [2, 4] and not p.detokenize
        assert p.seed is None and p.logprobs is None  # vLLM's ways, which cost half the throughput
    ignoring = SamplingSpec(1, 1.0, 1.0, -1, 4, stop=("x",), ignore_eos=True)
    [p] = request_params([(5, [1])], ignoring, [2, 4])
    assert p.stop_token_ids == [] and p.ignore_eos and p.stop == ["x"] and p.detokenize
    with pytest.raises(ConfigError, match=r"temperature must be in \[0, 2\], got 2.5"):
        request_params([(5, [1])], replace(SAMPLING, temperature=2.5), [2])


def test_mix64_is_splitmix64() -> None:
    """The first numbers from the seeds 0 and 1234567, as the published reference implementation gives them."""
    from_zero = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    from_seed = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    found = mix64(np.array([0] * 3 + [1234567] * 4), np.array([0, 1, 2, 0, 1, 2, 3]))
    assert found.view(np.uint64).tolist() == from_zero + from_seed


def test_samples_are_split_by_request_and_a_repeated_position_keeps_the_last() -> None:
    """Three batches of three requests; 1 is drawn in two chunks, so that its first draw is void."""
    batches = [[(0, 0, 3), (1, 0, 7)], [(2, 0, 4), (1, 0, 5), (0, 1, 6)], [(0, 2, 1), (2, 1, 2)]]
    rows, positions, drawn = np.concatenate(batches).T
    assert [part.tolist() for part in split_by_request(rows, positions, drawn, 3)] == [[3, 6, 1], [5], [4, 2]]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([1] * 9, "prompt 3 has 9 tokens.*1 to 8"), ([], "0 tokens"), ([-1], "token -1"), ([320], "token 320")],
)
def test_prompts_are_refused_by_name(tokens: list[int], message: str) -> None:
    check_prompts([(2, [0] * 8), (4, [319])], SAMPLING, max_model_len=20, vocab_size=320)
    with pytest.raises(EngineError, match=message):
        check_prompts([(2, [0]), (3, tokens)], SAMPLING, max_model_len=20, vocab_size=320)


def test_digest_covers_tokens_owners_and_boundaries() -> None:
    def digest(*answers: tuple[int, int, list[int]]) -> int:
        empty = np.zeros(0, np.float32)
        return token_digest([Completion(p, s, np.array(t, np.int32), empty, "stop") for p, s, t in answers])

    base = digest((1, 0, [5, 6]), (1, 1, [7]))
    assert base == digest((1, 0, [5, 6]), (1, 1, [7])) and 0 <= base < 2**63
    tampered = [
        digest((1, 0, [5, 6]), (1, 1, [8])),
        digest((1, 0, [5]), (1, 1, [6, 7])),
        digest((1, 0, [5, 6]), (2, 1, [7])),
        digest((1, 1, [5, 6]), (1, 0, [7])),
    ]
    assert base not in tampered
