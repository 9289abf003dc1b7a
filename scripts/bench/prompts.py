"""Prompts of a wanted length, and a tokenizer of whole words for a model that has none."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlhpc.data.word_problems import split
from scripts.make_tiny_model import BOS, CHAT_TEMPLATE, EOS, EOS_ID, IM_END, IM_START, PAD

SPECIAL = [PAD, BOS, EOS, IM_START, IM_END, "<|unknown|>"]
CHAT_TOKENS = 6  # what the chat template adds
_WORDS = re.compile(r"\w+|[^\w\s]+")  # as the tokenizers library's Whitespace cuts


def write_problems(path: Path, count: int, shortest: int, longest: int, seed: int = 0) -> None:
    """`count` rows {prompt, ground_truth, data_source}: arithmetic word problems, each with so many solved ones before
    it that the whole has a length drawn from shortest..longest words and marks, or up to a problem less."""
    problems, _ = split(1, seed)
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        asked, *solved = (problems[i] for i in rng.choice(len(problems), 64, replace=False))
        parts, length = [asked.row()["prompt"]], int(rng.integers(shortest, longest + 1))
        for example in solved:
            longer = [f"{example.text} {example.answer}", *parts]
            if len(_WORDS.findall(" ".join(longer))) > length:
                break
            parts = longer
        rows.append(asked.row() | {"prompt": " ".join(parts)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_tokenizer(directory: Path, texts: Sequence[str], vocab_size: int, more: Sequence[str] = ()) -> None:
    """A token for each word of `texts`, the most frequent ones where they don't fit, `more` special ones, and words of
    its own up to `vocab_size`, so that whatever a model samples can be decoded. Also says in config.json which token
    ends an answer.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    counted = Counter(word for text in [*texts, "user assistant"] for word in _WORDS.findall(text))
    words = [word for word, _ in counted.most_common((vocab_size - len(SPECIAL)) // 2)]
    own = [f"word{i}" for i in range(vocab_size - len(SPECIAL) - len(words) - len(more))]
    vocab = {token: index for index, token in enumerate([*SPECIAL, *words, *own, *more])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*SPECIAL, *more])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "bos_token": BOS, "eos_token": EOS,
        "unk_token": SPECIAL[-1], "chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"bos_token_id": 1, "eos_token_id": EOS_ID}))
