import json

import pytest

from rlhpc.config.schema import DataConfig
from rlhpc.data.arithmetic import Addition, split, write_jsonl
from rlhpc.data.dataset import load_prompts
from rlhpc.errors import DataError
from rlhpc.rewards.rules import REWARDS, reward_of_source


@pytest.mark.parametrize(
    ("left", "right", "answer", "carryless"),
    [
        (12, 34, "46", "46"),  # nothing to carry
        (47, 85, "132", "22"),  # both columns carry
        (27, 35, "62", "52"),  # only the units do
        (61, 72, "133", "33"),  # only the tens do
        (55, 55, "110", "0"),  # both columns come to ten
        (99, 99, "198", "88"),
    ],
)
def test_answers_by_hand(left, right, answer, carryless):
    problem = Addition(left, right)
    assert problem.prompt == f"{left}+{right}="
    assert (problem.answer, problem.carryless_answer) == (answer, carryless)


def test_forgetting_to_carry_is_right_for_under_a_quarter_of_the_problems():
    train, val = split(num_val_pairs=200, seed=0)
    harmless = sum(p.answer == p.carryless_answer for p in train + val)
    # Tens from 1 to 9 that sum to at most 9: 36 pairs. Units from 0 to 9: 55 pairs.
    assert harmless == 36 * 55
    assert harmless / 8100 < 0.25


@pytest.mark.parametrize("seed", range(5))
def test_split_covers_all_problems_and_keeps_swapped_operands_together(seed):
    train, val = split(num_val_pairs=200, seed=seed)
    assert {(p.left, p.right) for p in train + val} == {(a, b) for a in range(10, 100) for b in range(10, 100)}
    assert len(train) + len(val) == 90 * 90
    val_pairs = {frozenset((p.left, p.right)) for p in val}
    assert len(val_pairs) == 200
    assert val_pairs.isdisjoint(frozenset((p.left, p.right)) for p in train)
    # A double (a+a) is one problem, any other pair two.
    assert len(val) == 400 - sum(len(pair) == 1 for pair in val_pairs)


def test_split_depends_on_the_seed_alone():
    assert split(50, seed=3) == split(50, seed=3)
    train, val = split(50, seed=3)
    other_train, other_val = split(50, seed=4)
    assert val != other_val and train != other_train
    assert train != sorted(train, key=lambda p: (p.left, p.right))


@pytest.mark.parametrize("num_val_pairs", [0, -1, 4095, 9999])
def test_split_refuses_an_empty_side(num_val_pairs):
    with pytest.raises(DataError, match=rf"num_val_pairs={num_val_pairs} must be between 1 and 4094"):
        split(num_val_pairs, seed=0)


def test_rows_are_read_as_prompts_and_rewarded(tmp_path, tiny_tokenizer):
    problems = [Addition(47, 85), Addition(10, 10)]
    path = tmp_path / "train.jsonl"
    write_jsonl(path, problems)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"prompt": "47+85=", "ground_truth": "132", "data_source": "arithmetic"},
        {"prompt": "10+10=", "ground_truth": "20", "data_source": "arithmetic"},
    ]
    cfg = DataConfig(train_files=str(path), chat_template=False, max_prompt_length=6)
    prompts = load_prompts([str(path)], tiny_tokenizer, cfg)
    assert [prompt.text for prompt in prompts] == ["47+85=", "10+10="]
    for prompt, problem in zip(prompts, problems, strict=True):
        reward = REWARDS[reward_of_source(prompt.data_source)]
        assert len(prompt.token_ids) == 6
        assert reward(problem.answer, prompt.ground_truth) == 1.0
    assert REWARDS["arithmetic"](problems[0].carryless_answer, prompts[0].ground_truth) == 0.0


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    from scripts.make_tiny_model import write_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)
