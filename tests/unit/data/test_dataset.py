import json
import time
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rlhpc.config.schema import DataConfig
from rlhpc.data.dataset import PromptDataset, load_prompts
from rlhpc.errors import DataError

GSM8K = Path(__file__).parents[2] / "data" / "gsm8k.jsonl"
CHAT = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
)
ASK = ' Let\'s think step by step and output the final answer after "####".'


@pytest.fixture(scope="module")
def tokenizer():
    """One token a word, numbered by first use below, and a bos that the tokenizer adds by itself."""
    words = [
        "<bos>",
        "<unk>",
        "[user]",
        "[system]",
        "[bot]",
        "1+1=",
        "2+2=",
        "3+3=",
        "be",
        "brief",
        "[assistant]",
        "hello",
    ]
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    model.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<bos>", chat_template=CHAT)


@pytest.fixture
def cfg():
    return DataConfig(train_files="unused", max_prompt_length=10)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def plain(*prompts):
    return [{"prompt": prompt, "ground_truth": "2", "data_source": "arithmetic"} for prompt in prompts]


def test_gsm8k_rows(tokenizer, cfg):
    prompts = load_prompts(str(GSM8K), tokenizer, replace(cfg, max_prompt_length=100))
    assert [prompt.ground_truth for prompt in prompts] == ["22", "900", "1200", "-5"]
    assert [prompt.prompt_id for prompt in prompts] == [0, 1, 2, 3]
    assert {prompt.data_source for prompt in prompts} == {"openai/gsm8k"}
    question = json.loads(GSM8K.read_text().splitlines()[0])["question"]
    assert prompts[0].text == f"[user] {question}{ASK} [bot]"
    # 18 words of the question and 12 of the instruction between two markers
    assert prompts[0].token_ids.tolist() == [2, *[1] * 30, 4]


def test_chat_template_system_prompt_and_no_second_bos(tokenizer, cfg, tmp_path):
    path = write(tmp_path / "a.jsonl", plain("1+1=", "2+2="))
    prompts = load_prompts(path, tokenizer, cfg)
    assert [prompt.text for prompt in prompts] == ["[user] 1+1= [bot]", "[user] 2+2= [bot]"]
    assert [prompt.token_ids.tolist() for prompt in prompts] == [[2, 5, 4], [2, 6, 4]]
    prompts = load_prompts(path, tokenizer, replace(cfg, system_prompt="be brief"))
    assert prompts[0].token_ids.tolist() == [3, 8, 9, 2, 5, 4]


def test_plain_prompts_get_the_tokenizers_own_bos(tokenizer, cfg, tmp_path):
    path = write(tmp_path / "a.jsonl", plain("1+1="))
    prompt = load_prompts(path, tokenizer, replace(cfg, chat_template=False))[0]
    assert (prompt.text, prompt.token_ids.tolist()) == ("1+1=", [0, 5])


def verl_row(messages, truth="4", **columns):
    reward_model = {"style": "rule", "ground_truth": truth}
    return {
        "data_source": "openai/gsm8k",
        "prompt": messages,
        "ability": "math",
        "reward_model": reward_model,
    } | columns


def user(content):
    return {"role": "user", "content": content}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_verl_rows(tokenizer, cfg, tmp_path, kind):
    rows = [
        verl_row([user("2+2=")], extra_info={"split": "train", "index": 7}),
        verl_row([{"role": "system", "content": "be"}, user("3+3="), {"role": "assistant", "content": "hello"}]),
    ]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write(path, rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    prompts = load_prompts([path], tokenizer, replace(cfg, system_prompt="brief"))
    assert prompts[0].token_ids.tolist() == [3, 9, 2, 6, 4]
    assert prompts[1].token_ids.tolist() == [3, 8, 2, 7, 10, 11, 4]  # its own system message stays alone
    assert prompts[0].extra == {"split": "train", "index": 7} and prompts[1].extra == {}
    assert [prompt.ground_truth for prompt in prompts] == ["4", "4"]
    assert prompts.data_sources == ("openai/gsm8k",)


def test_prompt_key_and_data_source_for_rows_without(tokenizer, cfg, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"problem": "1+1=", "answer": 2}, {"problem": "2+2=", "answer": [4, "four"]}])
    prompts = load_prompts(path, tokenizer, replace(cfg, prompt_key="problem", data_source="arithmetic"))
    assert [(p.ground_truth, p.data_source) for p in prompts] == [
        ("2", "arithmetic"),
        ('[4, "four"]', "arithmetic"),
    ]


def test_files_are_concatenated_and_overlong_rows_counted(tokenizer, cfg, tmp_path):
    first = write(tmp_path / "a.jsonl", plain("1+1=", "hello " * 9))
    second = write(tmp_path / "b.jsonl", plain("hello " * 8, "2+2="))
    prompts = load_prompts([first, second], tokenizer, cfg)
    assert [len(prompt.token_ids) for prompt in prompts] == [3, 10, 3]  # 10 is the limit, 11 too many
    assert [prompt.prompt_id for prompt in prompts] == [0, 1, 2] and prompts.num_overlong == 1
    assert len(prompts.head(2)) == 2 and len(prompts.head(-1)) == 3
    with pytest.raises(DataError, match=r"a.jsonl:2: the prompt has 11 tokens.*is 10; raise it to 11"):
        load_prompts([first, second], tokenizer, replace(cfg, filter_overlong_prompts=False))
    with pytest.raises(DataError, match=r"all 4 prompts exceed data.max_prompt_length=2.*shortest has 3.*longest 11"):
        load_prompts([first, second], tokenizer, replace(cfg, max_prompt_length=2))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"text": "1+1="},
            r"bad.jsonl:2: columns \['text'\] are of no known form; allowed: GSM8K.*verl.*plain",
        ),
        ({"prompt": "1+1="}, r"columns \['prompt'\] are of no known form"),
        ({"question": "1+1=?", "answer": "2"}, r"bad.jsonl:2: answer doesn't end in '#### <number>': '2'"),
        ({"question": None, "answer": "#### 2"}, r"columns \['answer'\]"),
        ({"question": 5, "answer": "#### 2"}, r"question must be non-empty text, got 5"),
        ({"prompt": "  ", "answer": "2"}, r"prompt must be non-empty text"),
        (
            {"prompt": [], "answer": "2"},
            r"prompt must be text or a list of \{role, content\} messages, got \[\]",
        ),
        ({"prompt": [{"role": "user"}], "answer": "2"}, r"prompt must be text or a list of"),
        ({"prompt": "1+1=", "answer": "2"}, r"bad.jsonl:2: no data_source among.*set data.data_source"),
        (verl_row([user("1+1=")], truth=None), r"reward_model must hold ground_truth"),
        (
            verl_row([user("1+1=")], truth=True),
            r"ground truth must be text, a number, a list or an object, got True",
        ),
        ([1, 2], r"bad.jsonl:2: each line must be a JSON object, got list"),
    ],
)
def test_a_bad_row_is_named(tokenizer, cfg, tmp_path, row, message):
    path = write(tmp_path / "bad.jsonl", [*plain("1+1="), row])
    with pytest.raises(DataError, match=message):
        load_prompts(path, tokenizer, cfg)


def test_bad_files_are_named(tokenizer, cfg, tmp_path):
    torn = write(tmp_path / "torn.jsonl", plain("1+1="))
    torn.write_text(torn.read_text() + '\n{"prompt": "2+2=", "ans')
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    (tmp_path / "text.parquet").write_text("not parquet")
    (tmp_path / "none.jsonl").write_text("\n\n")
    for name, message in [
        ("torn.jsonl", r"torn.jsonl:3: not a JSON object on one line \(Unterminated string"),
        ("latin.jsonl", r"latin.jsonl:1: not a JSON object on one line \('utf-8'"),
        ("text.parquet", r"text.parquet: not readable as parquet after row 0"),
        ("none.jsonl", r"no rows in .*none.jsonl"),
        ("missing.jsonl", r"missing.jsonl: no such file"),
        ("data.csv", r"unknown kind of file '.csv'; use one of .jsonl, .parquet"),
    ]:
        with pytest.raises(DataError, match=message):
            load_prompts(tmp_path / name, tokenizer, cfg)
    with pytest.raises(DataError, match="no data files given"):
        load_prompts(None, tokenizer, cfg)


def test_parquet_cut_in_the_middle(tokenizer, cfg, tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(plain(*["1+1="] * 100)), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="a.parquet: not readable as parquet"):
        load_prompts(path, tokenizer, cfg)


def test_chat_settings_that_contradict(tokenizer, cfg, tmp_path):
    path = write(tmp_path / "a.jsonl", [*plain("1+1="), verl_row([user("1+1="), user("2+2=")])])
    without = replace(cfg, chat_template=False)
    with pytest.raises(
        DataError, match=r"a.jsonl:2: 2 messages can't be one plain prompt; set data.chat_template=true"
    ):
        load_prompts(path, tokenizer, without)
    with pytest.raises(DataError, match="data.system_prompt needs a chat"):
        load_prompts(path, tokenizer, replace(without, system_prompt="be brief"))
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(DataError, match="no chat template.*data.chat_template=false"):
        load_prompts(path, bare, cfg)


def test_seven_thousand_rows_load_in_seconds(tokenizer, cfg, tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text(GSM8K.read_text() * 1868)
    start = time.process_time()
    assert len(load_prompts(path, tokenizer, replace(cfg, max_prompt_length=100))) == 7472
    assert time.process_time() - start < 5.0


def test_prompts_that_the_model_cannot_continue(tmp_path, tokenizer, cfg):
    path = write(tmp_path / "a.jsonl", plain("1+1=", "hello"))
    dataset = load_prompts(path, tokenizer, cfg)  # [user] 1+1= [bot] is 2 5 4, hello is 11
    dataset.check_tokens(12)
    with pytest.raises(DataError, match=r"prompt 1 \('\[user\] hello \[bot\]'\) has token 11, .* 0 to 10: the tok"):
        dataset.check_tokens(11)
    empty = PromptDataset((replace(dataset[0], token_ids=dataset[0].token_ids[:0]),))
    with pytest.raises(DataError, match="prompt 0 has no tokens; remove the row"):
        empty.check_tokens(12)
