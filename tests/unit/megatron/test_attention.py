"""Packed attention against attention written out, one sequence, head and position at a time."""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from megatron.core.transformer import TransformerConfig

from rlhpc.backends.megatron.attention import PackedAttention, PackedSequences
from rlhpc.backends.megatron.attention_backend import Heads, attention_backend
from rlhpc.data.packing import TokenSequence, pack
from rlhpc.data.types import PackedBatch
from rlhpc.errors import ConfigError

LENGTHS = (3, 1, 5, 3, 1)
HEADS, KV_HEADS, DIM, THETA = 4, 2, 8, 100.0


def packed_batch() -> PackedBatch:
    """Tokens 0, 1, 2, ... so that a token's id is its place in the batch."""
    starts = np.cumsum((0, *LENGTHS))
    spans = [np.arange(start, start + length, dtype=np.int32) for start, length in zip(starts, LENGTHS, strict=False)]
    ((batch,),) = pack([TokenSequence(i, s, 1) for i, s in enumerate(spans)], dp_size=1, max_tokens=99)
    assert batch.input_ids.tolist() == list(range(13))
    return batch


def packed(**settings: int) -> PackedSequences:
    frequencies = THETA ** (-torch.arange(0, DIM, 2) / DIM)
    return PackedSequences.of(packed_batch(), frequencies=frequencies, dtype=torch.float32, **settings)


def test_sequences_are_sorted_by_length() -> None:
    sequences = packed()
    assert sequences.order.tolist() == [3, 12, 0, 1, 2, 9, 10, 11, 4, 5, 6, 7, 8]
    assert sequences.runs == ((1, 2), (3, 2), (5, 1))
    assert sequences.cu_seqlens_q.tolist() == [0, 1, 2, 5, 8, 13]
    assert sequences.position_ids.tolist() == [[0, 0, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4]]


def test_filler_makes_tokens_divisible_and_is_a_sequence_of_its_own() -> None:
    sequences = packed(multiple=4)
    assert sequences.input_ids.shape == (1, 16) and len(sequences.order) == 13
    assert sequences.runs == ((1, 2), (3, 2), (5, 1), (3, 1))
    assert sequences.position_ids[0, -3:].tolist() == [0, 1, 2]


def rotated(x: np.ndarray, position: int) -> np.ndarray:
    """Rotary embedding as a complex rotation of the pairs (i, i + DIM / 2)."""
    pairs = x[: DIM // 2] + 1j * x[DIM // 2 :]
    turned = pairs * np.exp(1j * position * THETA ** (-np.arange(0, DIM, 2) / DIM))
    return np.concatenate([turned.real, turned.imag])


def written_out(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    output = np.zeros((sum(LENGTHS), HEADS, DIM))
    for start, length in zip(np.cumsum((0, *sorted(LENGTHS))), sorted(LENGTHS), strict=False):
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            for i in range(length):
                q = rotated(query[start + i, head], i)
                scores = [q @ rotated(key[start + j, kv], j) / np.sqrt(DIM) for j in range(i + 1)]
                weights = np.exp(scores) / np.exp(scores).sum()
                output[start + i, head] = weights @ value[start : start + i + 1, kv]
    return output.reshape(sum(LENGTHS), -1)


def test_equals_attention_written_out() -> None:
    generator = np.random.default_rng(0)
    query = generator.standard_normal((sum(LENGTHS), HEADS, DIM))
    key, value = generator.standard_normal((2, sum(LENGTHS), KV_HEADS, DIM))
    config = TransformerConfig(num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS)
    tensors = (torch.from_numpy(x.astype(np.float32)) for x in (query, key, value))
    output = PackedAttention(config)(*tensors, None, packed_seq_params=packed())
    np.testing.assert_allclose(output.numpy(), written_out(query, key, value), atol=2e-6)


@pytest.mark.parametrize("changed", range(sum(LENGTHS)))
def test_no_token_sees_another_sequence_or_the_future(changed: int) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS)
    query, key, value = torch.randn(3, sum(LENGTHS), HEADS, DIM, generator=torch.Generator().manual_seed(0))
    attention, sequences = PackedAttention(config), packed()
    before = attention(query, key, value, None, packed_seq_params=sequences)
    key, value = key.clone(), value.clone()
    key[changed] += 1
    value[changed] += 1
    moved = (attention(query, key, value, None, packed_seq_params=sequences) != before).any(-1)
    bounds = sequences.cu_seqlens_q.tolist()
    end = next(bound for bound in bounds if bound > changed)
    assert moved.nonzero()[:, 0].tolist() == list(range(changed, end))


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="is about a machine without it")
@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "told"),
    [
        (CPU, torch.bfloat16, 128, "local; fused needs a CUDA device; flash needs a CUDA device"),
        (CUDA, torch.float32, 128, "local; fused needs a 16-bit model.dtype, not float32; flash needs a 16-bit"),
        (CUDA, torch.bfloat16, 100, "local; fused needs head_dim=100 to be a multiple of 8 up to 128; flash needs"),
        (CUDA, torch.bfloat16, 256, "flash; fused needs head_dim=256 to be a multiple of 8 up to 128"),
        (CUDA, torch.bfloat16, 64, "flash; fused needs Transformer Engine, which isn't installed"),
    ],
)
def test_the_fastest_backend_that_runs_is_taken(
    device: torch.device, dtype: torch.dtype, head_dim: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = Heads(8, 2, head_dim)
    assert attention_backend("auto", device, dtype, heads).name == told.split(";")[0]
    assert capsys.readouterr().out.startswith(f"attention: {told}")
    assert attention_backend("local", device, dtype, heads).name == "local"
    assert capsys.readouterr().out == "attention: local\n"


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "head_dim", "why"),
    [
        ("flash", CPU, torch.bfloat16, 64, "=flash needs a CUDA device; set auto, which takes local here"),
        (
            "fused",
            CUDA,
            torch.float32,
            64,
            "=fused needs a 16-bit model.dtype, not float32; set auto, which takes local",
        ),
        ("flash", CUDA, torch.bfloat16, 12, "=flash needs head_dim=12 to be a multiple of 8 up to 256; set auto"),
        (
            "fused",
            CUDA,
            torch.bfloat16,
            192,
            "=fused needs head_dim=192 to be a multiple of 8 up to 128; .* flash here",
        ),
    ],
)
def test_a_backend_that_cannot_run_is_refused(
    wanted: str, device: torch.device, dtype: torch.dtype, head_dim: int, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"actor.megatron.attention_backend{why}"):
        attention_backend(wanted, device, dtype, Heads(8, 2, head_dim))


def test_a_second_trainer_in_a_process_is_free_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")  # what Megatron leaves there for local, and takes no flash beside
    attention_backend("local", CPU, torch.float32, Heads(8, 2, 64))
    assert "NVTE_FLASH_ATTN" not in os.environ
