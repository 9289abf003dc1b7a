"""The prompt dataset: files to tokenised prompts, filtered by length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlhpc.config.schema import DataConfig
from rlhpc.data.readers import Problem, data_files, parse, read_rows
from rlhpc.data.types import Prompt
from rlhpc.errors import DataError

_TOKENIZE_BATCH = 4096  # texts per tokenizer call: fast tokenizers work in parallel inside one


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any

    def __call__(self, text: list[str], **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


@dataclass(frozen=True)
class PromptDataset:
    """Prompts in file order; `dataset[i].prompt_id == i`. The same files and settings give the same ids."""

    prompts: tuple[Prompt, ...]
    num_overlong: int = 0  # rows dropped by the length filter

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    @property
    def data_sources(self) -> tuple[str, ...]:
        return tuple(sorted({prompt.data_source for prompt in self.prompts}))

    def head(self, count: int) -> PromptDataset:
        """The first `count` prompts; all for a negative count."""
        return self if count < 0 else PromptDataset(self.prompts[:count], self.num_overlong)

    def check_tokens(self, vocab_size: int) -> None:
        """Raises DataError for a prompt that a model of this vocabulary can't continue, before a rank has to."""
        for prompt in self.prompts:
            if not len(prompt.token_ids):
                raise DataError(
                    f"prompt {prompt.prompt_id} has no tokens; remove the row, or set data.chat_template=true"
                )
            if (high := int(prompt.token_ids.max())) >= vocab_size:
                raise DataError(
                    f"prompt {prompt.prompt_id} ({prompt.text[:40]!r}) has token {high}, the model's vocabulary is "
                    f"0 to {vocab_size - 1}: the tokenizer in model.path isn't this model's; copy the directory again"
                )


def load_prompts(
    files: str | Path | Sequence[str | Path] | None, tokenizer: Tokenizer, cfg: DataConfig
) -> PromptDataset:
    """Reads, templates and tokenises the problems of `files`, concatenated in the order given.

    `readers.FORMS` lists the forms of a row. With `cfg.chat_template` the tokenizer's template renders the
    messages, `cfg.system_prompt` first where a row has no system message; without, a row's one message is the
    prompt, with the special tokens that the tokenizer adds by itself. Prompts above `cfg.max_prompt_length`
    tokens are dropped and counted; without `cfg.filter_overlong_prompts` they are an error, as in verl.

    Raises DataError for missing or malformed files and rows, a tokenizer without template, an empty result.
    """
    paths = data_files(files)
    problems = [parse(row, cfg) for path in paths for row in read_rows(path)]
    if not problems:
        raise DataError(f"no rows in {', '.join(map(str, paths))}; each line holds one problem")
    texts = _render(problems, tokenizer, cfg)
    token_ids = _tokenize(texts, tokenizer, add_special_tokens=not cfg.chat_template)
    prompts: list[Prompt] = []
    for problem, text, tokens in zip(problems, texts, token_ids, strict=True):
        if len(tokens) > cfg.max_prompt_length:
            if cfg.filter_overlong_prompts:
                continue
            raise DataError(
                f"{problem.where}: the prompt has {len(tokens)} tokens, data.max_prompt_length is "
                f"{cfg.max_prompt_length}; raise it to {max(map(len, token_ids))} to admit all rows, or set "
                "data.filter_overlong_prompts=true to drop those above"
            )
        prompt = Prompt(len(prompts), text, tokens, problem.ground_truth, problem.data_source, problem.extra)
        prompts.append(prompt)
    if not prompts:
        raise DataError(
            f"all {len(problems)} prompts exceed data.max_prompt_length={cfg.max_prompt_length} tokens: the "
            f"shortest has {min(map(len, token_ids))}, the longest {max(map(len, token_ids))}; raise it"
        )
    return PromptDataset(tuple(prompts), num_overlong=len(problems) - len(prompts))


def _render(problems: Sequence[Problem], tokenizer: Tokenizer, cfg: DataConfig) -> list[str]:
    if not cfg.chat_template:
        if cfg.system_prompt is not None:
            raise DataError("data.system_prompt needs a chat; set data.chat_template=true or drop it")
        return [_only_message(problem) for problem in problems]
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            "the tokenizer has no chat template, but data.chat_template=true asks for one; set "
            "data.chat_template=false to send plain prompts, or use an instruction-tuned model's tokenizer"
        )
    system = [{"role": "system", "content": cfg.system_prompt}] if cfg.system_prompt is not None else []
    return [
        tokenizer.apply_chat_template(
            [*(system if problem.messages[0]["role"] != "system" else []), *problem.messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        for problem in problems
    ]


def _only_message(problem: Problem) -> str:
    if len(problem.messages) != 1:
        raise DataError(
            f"{problem.where}: {len(problem.messages)} messages can't be one plain prompt; "
            "set data.chat_template=true, or give one message"
        )
    return problem.messages[0]["content"]


def _tokenize(texts: Sequence[str], tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[np.ndarray]:
    """int32 [P] per text. A chat template writes its special tokens: adding them again doubles the bos."""
    rows: list[np.ndarray] = []
    for start in range(0, len(texts), _TOKENIZE_BATCH):
        encoded = tokenizer(
            list(texts[start : start + _TOKENIZE_BATCH]),
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            verbose=False,
        )
        rows += [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]
    return rows
