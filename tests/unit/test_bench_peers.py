"""What scripts/bench/peers reads off rlhpc, verl and TRL, and the reward that the three call in their own ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench.peers.compare import medians, rows_of, table
from scripts.bench.peers.reward import share_of_digits, trl_scores, verl_score


def step(number: int, gen_s: float, step_s: float, num_tokens: int) -> dict[str, float]:
    seconds = {"timing_s/gen": gen_s, "timing_s/update_actor": 2.0, "timing_s/step": step_s}
    return {"step": number, **seconds, "perf/total_num_tokens": num_tokens}


def test_what_counts_is_the_median_after_the_first_steps(tmp_path: Path) -> None:
    rows = [step(1, 90.0, 99.0, 10), step(2, 1.0, 4.0, 100), step(3, 3.0, 10.0, 100), step(4, 2.0, 5.0, 200)]
    before = {"step": 0, "timing_s/update_weights": 1.0}  # rlhpc's row of the initial policy: not a training step
    flat, nested = tmp_path / "rlhpc.jsonl", tmp_path / "verl.jsonl"
    flat.write_text("".join(json.dumps(row) + "\n" for row in [before, *rows]))
    nested.write_text("".join(json.dumps({"step": row["step"], "data": row}) + "\n" for row in rows))
    assert rows_of(flat) == rows_of(nested) == rows
    result = medians(rows, skip=1)
    assert result["steps"] == 3
    assert (result["gen"], result["update_actor"], result["step"]) == (2.0, 2.0, 5.0)
    assert result["other"] == 1.0  # of 1, 5 and 1
    assert result["tokens/s"] == 25.0  # of 25, 10 and 40; not the tokens' median over the steps'
    assert table({"TRL": result}).splitlines()[-1].startswith("| TRL | 3 | 0k | 2.00 s |")


def test_a_run_without_a_step_is_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n')
    with pytest.raises(SystemExit, match=r"metrics.jsonl: no row has timing_s/gen"):
        rows_of(file)


def test_the_three_get_the_same_reward() -> None:
    texts = ["7 apples", "", "12"]
    scores = [share_of_digits(text, ground_truth="7") for text in texts]
    assert scores == [1 / 8, 0.0, 1.0]
    assert [verl_score("word_problems", text, "7", {"index": 0}) for text in texts] == scores
    assert trl_scores([[{"role": "assistant", "content": text}] for text in texts], prompts=[]) == scores
