import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.config.schema import DataConfig
from rlhpc.data.readers import parse, read_rows
from rlhpc.data.word_problems import TEMPLATES, WordProblem, split
from rlhpc.errors import DataError
from rlhpc.rewards.rules import gsm8k


@pytest.mark.parametrize(
    ("template", "text", "answer"),
    [
        (0, "Ada has 12 books and gets 5 more. How many books does Ada have now?", 17),
        (3, "Ada has 12 books and gives 5 of them away. How many books are left?", 7),
        (7, "12 children bring 5 books each. How many books do they bring together?", 60),
    ],
)
def test_text_and_answer_by_hand(template, text, answer):
    problem = WordProblem(template, 12, 5, "Ada", "books")
    assert (problem.text, problem.answer) == (text, answer)


def test_split_keeps_operands_apart_in_every_order():
    train, val = split(num_val_pairs=40, seed=3)
    pairs = [{frozenset((p.a, p.b)) for p in side} for side in (train, val)]
    assert pairs[0].isdisjoint(pairs[1]) and len(pairs[1]) == 40 and len(pairs[0] | pairs[1]) == 190
    assert {p.template for p in val} == set(range(len(TEMPLATES)))
    assert all(p.answer >= 0 for p in train + val)
    assert len(set(train + val)) == len(train + val) == 5 * 19 * 19 + 3 * 190  # by hand: sums and products, both orders


def test_split_is_a_function_of_the_seed():
    assert split(40, seed=1) == split(40, seed=1) != split(40, seed=2)


@pytest.mark.parametrize("num", [0, 190])
def test_split_refuses_an_empty_side(num):
    with pytest.raises(DataError, match=f"num_val_pairs={num} must be between 1 and 189"):
        split(num, seed=0)


def test_written_rows_are_read_and_rewarded(tmp_path):
    script = Path(__file__).parents[3] / "scripts/make_word_problems.py"
    subprocess.run([sys.executable, script, "--out", tmp_path], check=True, capture_output=True, cwd=script.parents[1])
    rows = list(read_rows(tmp_path / "val.jsonl"))
    _, val = split(40, seed=0)
    assert len(rows) == len(val)
    for row, made in zip(rows, val, strict=True):
        problem = parse(row, DataConfig())
        assert problem.messages[0]["content"].startswith(made.text)
        said = f"It is {made.a} and {made.b}: {made.answer}."
        assert gsm8k(said, problem.ground_truth, method="flexible") == 1.0
        assert gsm8k(f"{said} Or {made.answer + 1}", problem.ground_truth, method="flexible") == 0.0
