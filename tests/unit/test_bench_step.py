"""What the step's bench makes of a run's metrics, worked out by hand, and of its own prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlhpc.reshard.families import family_for
from scripts.bench.memory import leaks, memory_of, table
from scripts.bench.prompts import CHAT_TOKENS, write_problems, write_tokenizer
from scripts.bench.step import idle_parts, parts, rates_of
from scripts.bench.sync import QWEN3_30B
from scripts.bench.workload import Workload

ROW = {
    "timing_s/step": 20.0,
    "timing_s/gen": 8.25,
    "timing_s/ranks/gen": 8.0,
    "timing_s/reward": 0.5,
    "timing_s/old_log_prob": 2.5,
    "timing_s/ranks/old_log_prob": 2.25,
    "timing_s/ranks/old_log_prob/engine": 0.125,
    "timing_s/ranks/old_log_prob/offload": 0.125,
    "timing_s/ref": 0.0,
    "timing_s/adv": 0.125,
    "timing_s/update_actor": 7.0,
    "timing_s/ranks/update_actor": 6.75,
    "timing_s/update_weights": 1.0,
    "timing_s/ranks/update_weights": 1.0,
    "timing_s/ranks/update_weights/sync": 0.5,
    "timing_s/ranks/update_weights/engine": 0.125,
    "timing_s/ranks/update_weights/offload": 0.375,
    "timing_s/other": 0.625,
    "perf/total_num_tokens": 1000,
    "perf/mean_context_tokens": 100.0,
    "response_length/mean": 75.0,
    "perf/device_memory_gb/gen": 90.0,
    "perf/host_memory_gb/gen": 4.0,
}


def test_a_step_is_the_sum_of_its_parts() -> None:
    found = parts(ROW)
    assert found == {"generate": 8.0, "score": 0.5, "logprobs": 2.0, "train": 6.75, "sync": 0.5, "idle": 2.25}
    assert sum(found.values()) == 20.0
    idle = idle_parts(ROW)
    assert idle == {
        "offload": 0.5,
        "engine": 0.25,
        "calls": 0.75,
        "advantages": 0.125,
        "between phases": 0.625,
    }
    assert sum(idle.values()) == found["idle"]


def test_rates_of_one_rank() -> None:
    """1,000 tokens in 20 s; each of 10 answers has 75 of them; two layers of Qwen3-30B-A3B, counted as for the training
    bench, on a card of 1 TFLOP/s."""
    facts = family_for(QWEN3_30B).model_facts(QWEN3_30B | {"num_hidden_layers": 2})
    weights = 2048 * (4096 + 2 * 512 + 4096) + 2048 * 128 + 8 * 3 * 2048 * 768
    workload = Workload(
        ranks=1, layers=2, model=None, train_files=[], prompt_tokens=(20, 30), prompts=5, n=2, response=75
    )
    flop = 6 * (2 * 1000 * weights + 2 * 100_000 * 2 * 4096 + 750 * 2048 * 151936)
    found = rates_of([ROW], facts, workload, 1e12)
    assert found["tokens_per_s_per_gpu"]["median"] == 50.0
    assert found["mfu_update"]["median"] == pytest.approx(flop / 1e12 / 6.75)
    assert found["mfu_step"]["median"] == pytest.approx(flop / 1e12 / 20.0)


def test_memory_that_grows_is_told() -> None:
    rows = [ROW | {"perf/device_memory_gb/gen": 90.0 + 0.125 * step} for step in range(5)]
    memory = memory_of(rows)
    assert memory["host"] == {"gen": {"first": 4.0, "last": 4.0, "per step": pytest.approx(0.0)}}
    assert memory["device"] == {"gen": {"first": 90.0, "last": 90.5, "per step": pytest.approx(0.125)}}
    assert leaks(memory, 5) == ["device memory at the end of gen grew by 128.0 MiB a step"]
    assert list(table(memory))[1].split() == ["gen", "90.50", "(+128.0", "MiB)", "4.00", "(+0.0", "MiB)"]
    assert leaks(memory_of(rows[:2]), 2) == []  # too little to tell
    cached = [{name.replace("/gen", "/update_actor"): value for name, value in row.items()} for row in rows]
    assert leaks(memory_of(cached), 5) == []  # torch's cache, by the batches' lengths


def test_prompts_have_the_wanted_length_in_tokens_and_every_token_a_word(tmp_path: Path) -> None:
    write_problems(tmp_path / "problems.jsonl", 30, 100, 200)
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    write_tokenizer(tmp_path, prompts, 2000)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
    encoded = tokenizer(chats, add_special_tokens=False)["input_ids"]
    lengths = [len(tokens) - CHAT_TOKENS for tokens in encoded]
    assert min(lengths) >= 70 and max(lengths) <= 200 and len(set(lengths)) > 10
    assert not any(tokenizer.unk_token_id in tokens for tokens in encoded)
    assert tokenizer.decode([1999, 1000]).split() == [tokenizer.convert_ids_to_tokens(i) for i in (1999, 1000)]
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
