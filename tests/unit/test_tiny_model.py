import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhpc.data.arithmetic import Addition, split
from rlhpc.errors import DataError
from scripts.make_tiny_model import WarmUp, accuracy, build_model, encode, make, tiny_config, warm_up
from tests.tiny_model import write_tiny_model

NEVER_CARRY = [Addition(a, b) for a, b in [(12, 34), (51, 27), (20, 30), (44, 55)]]
CARRY = [Addition(a, b) for a, b in [(47, 85), (99, 99), (27, 35), (61, 72), (55, 55), (18, 18), (90, 19), (86, 77)]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory)


def test_tokenizer_has_one_token_a_byte(tokenizer):
    digits = tokenizer("0123456789").input_ids
    assert len(set(digits)) == 10
    text = "47+85=132\n Näïve 数 🙂  <b>"
    assert len(tokenizer(text).input_ids) == len(text.encode())
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == 320 == tiny_config()["vocab_size"]


def test_special_tokens_are_single_and_left_out_of_decoded_text(tokenizer):
    assert tokenizer("<|pad|><|bos|><|endoftext|><|im_start|><|im_end|>").input_ids == [0, 1, 2, 3, 4]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    answer = tokenizer("132").input_ids
    assert tokenizer.decode([3, *answer, 4, 2, 319], skip_special_tokens=True) == "132"


def test_chat_template(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_training_rows_are_the_tokenizer_s(tokenizer):
    problems = NEVER_CARRY + CARRY
    rows = encode(problems, [p.answer for p in problems])
    for row, problem in zip(rows.tolist(), problems, strict=True):
        expected = tokenizer(f"{problem.prompt}{problem.answer}<|endoftext|>").input_ids
        assert row == expected + [0] * (10 - len(expected))


def test_random_model_loads_completely_and_depends_on_its_seed(directory, tmp_path):
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 5_000_000
    assert sorted(model.generation_config.eos_token_id) == [2, 4]
    weights = (directory / "model.safetensors").read_bytes()
    assert (write_tiny_model(tmp_path / "again") / "model.safetensors").read_bytes() == weights
    ours = load_file(directory / "model.safetensors")
    other = load_file(write_tiny_model(tmp_path / "other", seed=1) / "model.safetensors")
    assert not [name for name in ours if torch.equal(ours[name], other[name])]


def test_config_overrides_reach_the_model(tmp_path):
    path = write_tiny_model(tmp_path, num_hidden_layers=3, num_experts=4, moe_intermediate_size=32)
    config = json.loads((path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_experts"], config["moe_intermediate_size"]) == (3, 4, 32)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert len(model.model.layers) == 3
    assert model.config.num_experts == 4


@pytest.mark.parametrize(
    ("right_share", "greedy_accuracy"), [(1.0, 1.0), (0.0, len(NEVER_CARRY) / len(NEVER_CARRY + CARRY))]
)
def test_warm_up_teaches_the_procedure_that_it_shows(tokenizer, right_share, greedy_accuracy):
    problems = NEVER_CARRY + CARRY
    model = build_model(0, tiny_config())
    recipe = WarmUp(right_share=right_share, steps=60, batch_size=48, lr_warmup_steps=5)
    warm_up(model, problems, recipe, seed=0)
    greedy, sampled = accuracy(model, problems)
    assert greedy == pytest.approx(greedy_accuracy)
    assert sampled == pytest.approx(greedy_accuracy, abs=0.05)
    # The same through Transformers' own generation and decoding.
    prompts = torch.tensor([tokenizer(p.prompt).input_ids for p in problems])
    tokens = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=4, eos_token_id=2
    )
    texts = tokenizer.batch_decode(tokens[:, 6:], skip_special_tokens=True)
    assert texts == [p.answer if right_share else p.carryless_answer for p in problems]


def test_make_is_reproducible_atomic_and_skipped_when_up_to_date(tmp_path, capsys):
    recipe = WarmUp(steps=2, batch_size=8)
    out = tmp_path / "assets" / "tiny"
    make(out, 0, recipe)
    assert sorted(p.name for p in out.iterdir()) == ["made_by.json", "model", "train.jsonl", "val.jsonl"]
    assert [p.name for p in out.parent.iterdir()] == ["tiny"]
    train, val = split(recipe.num_val_pairs, 0)
    rows = [json.loads(line) for line in (out / "val.jsonl").read_text().splitlines()]
    assert rows == [p.row() for p in val] and len(rows) >= 200
    assert len((out / "train.jsonl").read_text().splitlines()) == len(train)

    weights = (out / "model" / "model.safetensors").read_bytes()
    (out / "model" / "model.safetensors").write_bytes(b"touched")
    capsys.readouterr()
    make(out, 0, recipe)
    assert "up to date" in capsys.readouterr().out
    assert (out / "model" / "model.safetensors").read_bytes() == b"touched"

    for seed, changed in [(1, recipe), (0, replace(recipe, steps=1)), (0, recipe)]:
        make(out, seed, changed)
        made = (out / "model" / "model.safetensors").read_bytes()
        assert (made == weights) == (seed == 0 and changed == recipe)


def test_make_never_replaces_files_that_it_did_not_write(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="has other files in it; choose a new or empty directory"):
        make(tmp_path, 0, WarmUp(steps=1))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
