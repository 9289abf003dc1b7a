"""Files to rows, and rows of the known forms to problems."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.config.schema import DataConfig
from rlhpc.errors import DataError

# verl 0.9, examples/data_preprocess/gsm8k.py: what its parquet files append to each question.
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
GSM8K_SOURCE = "openai/gsm8k"

FORMS = (
    "GSM8K {question, answer ending in '#### <number>'}",
    "verl {prompt: [{role, content}, ...], reward_model: {ground_truth}, data_source}",
    "plain {prompt: text, ground_truth or answer, data_source}",
)


@dataclass(frozen=True)
class Row:
    """One record of a data file. `where` names file and line (row, in parquet) for messages."""

    where: str
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """A row understood: the messages to the model and what the reward needs."""

    where: str
    messages: tuple[dict[str, str], ...]
    ground_truth: str
    data_source: str
    extra: Mapping[str, Any]


def data_files(files: str | Path | Sequence[str | Path] | None) -> list[Path]:
    """Existing data files of one path or several. Raises DataError naming the one that can't be read."""
    listed = [files] if isinstance(files, str | Path) else list(files or [])
    if not listed:
        raise DataError("no data files given; set data.train_files to a .jsonl or .parquet file, or to a list")
    paths = [Path(name).expanduser() for name in listed]
    for path in paths:
        if path.suffix not in _READERS:
            raise DataError(f"{path}: unknown kind of file {path.suffix!r}; use one of {', '.join(_READERS)}")
        if not path.is_file():
            raise DataError(
                f"{path}: no such file (looked in {path.parent.resolve()}); check data.train_files, val_files"
            )
    return paths


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a `.jsonl` or `.parquet` file in order. Raises DataError where the file is malformed."""
    return _READERS[path.suffix](path)


def parse(row: Row, cfg: DataConfig) -> Problem:
    """Recognises the row's form by its columns. Raises DataError naming line, columns and known forms."""
    columns = row.columns
    if cfg.prompt_key in columns and "reward_model" in columns:
        return _verl(row, cfg)
    if "question" in columns and "answer" in columns:
        return _gsm8k(row, cfg)
    if cfg.prompt_key in columns and ("ground_truth" in columns or "answer" in columns):
        return _plain(row, cfg)
    raise DataError(
        f"{row.where}: columns {sorted(columns)} are of no known form; allowed: {'; '.join(FORMS)}. Rename "
        f"the columns, or set data.prompt_key (now {cfg.prompt_key!r}) to the one that holds the prompt"
    )


def _gsm8k(row: Row, cfg: DataConfig) -> Problem:
    question, solution = (_text(row, name) for name in ("question", "answer"))
    found = re.search(r"#### (-?[0-9.,]+)", solution)
    if found is None:
        raise DataError(f"{row.where}: answer doesn't end in '#### <number>': {solution[-60:]!r}")
    return Problem(
        where=row.where,
        messages=({"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"},),
        ground_truth=found.group(1).replace(",", ""),
        data_source=_data_source(row, cfg, default=GSM8K_SOURCE),
        extra=_extra(row),
    )


def _verl(row: Row, cfg: DataConfig) -> Problem:
    reward_model = row.columns["reward_model"]
    if not isinstance(reward_model, Mapping) or reward_model.get("ground_truth") is None:
        raise DataError(f"{row.where}: reward_model must hold ground_truth, got {reward_model!r}")
    return Problem(
        where=row.where,
        messages=_messages(row, cfg.prompt_key),
        ground_truth=_ground_truth(row, reward_model["ground_truth"]),
        data_source=_data_source(row, cfg),
        extra=_extra(row),
    )


def _plain(row: Row, cfg: DataConfig) -> Problem:
    answer = row.columns["ground_truth" if "ground_truth" in row.columns else "answer"]
    return Problem(
        where=row.where,
        messages=_messages(row, cfg.prompt_key),
        ground_truth=_ground_truth(row, answer),
        data_source=_data_source(row, cfg),
        extra=_extra(row),
    )


def _messages(row: Row, key: str) -> tuple[dict[str, str], ...]:
    """Chat messages as they are; a bare text is one user message."""
    prompt = row.columns[key]
    if isinstance(prompt, str):
        return ({"role": "user", "content": _text(row, key)},)
    is_chat = isinstance(prompt, Sequence) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in prompt
    )
    if not is_chat or not prompt:
        raise DataError(f"{row.where}: {key} must be text or a list of {{role, content}} messages, got {prompt!r:.200}")
    return tuple({"role": message["role"], "content": message["content"]} for message in prompt)


def _text(row: Row, key: str) -> str:
    value = row.columns[key]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{row.where}: {key} must be non-empty text, got {value!r:.200}")
    return value


def _ground_truth(row: Row, value: Any) -> str:
    """Text as it is, numbers as Python writes them, lists and objects as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    raise DataError(f"{row.where}: the ground truth must be text, a number, a list or an object, got {value!r}")


def _data_source(row: Row, cfg: DataConfig, default: str | None = None) -> str:
    source = row.columns.get("data_source") or cfg.data_source or default
    if not isinstance(source, str):
        raise DataError(
            f"{row.where}: no data_source among the columns {sorted(row.columns)}, so no reward is known; "
            "set data.data_source for such rows, e.g. data.data_source=gsm8k"
        )
    return source


def _extra(row: Row) -> Mapping[str, Any]:
    extra = row.columns.get("extra_info")
    return extra if isinstance(extra, Mapping) else {}


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                columns = json.loads(line)
            except ValueError as error:  # malformed JSON, or bytes that aren't UTF-8
                raise DataError(f"{where}: not a JSON object on one line ({error}); repair or drop it") from error
            if not isinstance(columns, dict):
                raise DataError(f"{where}: each line must be a JSON object, got {type(columns).__name__}")
            yield Row(where, {name: value for name, value in columns.items() if value is not None})


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise DataError(f"{path}: reading parquet needs pyarrow; run: pip install pyarrow") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for columns in batch.to_pylist():
                    number += 1
                    where = f"{path} row {number}"
                    yield Row(where, {name: value for name, value in columns.items() if value is not None})
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as parquet after row {number} ({error}); write it anew") from error


_READERS = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
