"""docs/checkpoint-format.md is exact: its example is what is written, and its reader reads it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhpc.checkpoint.pieces import Piece
from rlhpc.checkpoint.shards import write_shard
from rlhpc.checkpoint.store import CheckpointStore

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs/checkpoint-format.md").read_text()


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)
    return text


@pytest.fixture
def example(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path)
    pending = store.begin(12)
    entries = []
    for rank in range(2):
        row = torch.arange(3 * rank, 3 * rank + 3, dtype=torch.float32).view(1, 3)
        pieces = [
            (Piece(kind, "lm_head.weight", (rank, 0), (rank + 1, 3)), row + offset)
            for kind, offset in (("master", 0), ("exp_avg", 10), ("exp_avg_sq", 20))
        ]
        generator = {"rng/torch": torch.tensor([7 + rank], dtype=torch.uint8)}
        entries += write_shard(
            pending.directory, rank, pieces, {"lm_head.weight": (2, 3)}, generator, {"optimizer_step": 12}
        )
    state = {"train": {"step": 12}, "wandb": None}
    layout = {"tp": 2, "pp": 1, "cp": 1, "ep": 1, "etp": 1, "world_size": 2}
    return store.commit(pending, entries, state, layout=layout, config_digest="c0ffee").directory


def test_the_example_is_what_is_written(example: Path) -> None:
    assert json.loads((example / "manifest.json").read_bytes()) == json.loads(block("json"))
    data = (example / "rank-00001-0000.safetensors").read_bytes()
    shown = block("hex").splitlines()
    assert bytes.fromhex("".join(line.split("|")[0].partition(" ")[2] for line in shown)) == data
    assert [int(line.split()[0], 16) for line in shown] == list(range(0, len(data), 16))


def test_the_reader_reads_it(example: Path) -> None:
    names: dict = {}
    exec(block("python"), names)
    for kind, offset in (("master", 0), ("exp_avg", 10), ("exp_avg_sq", 20)):
        tensor = names["read_tensor"](example, kind, "lm_head.weight")
        np.testing.assert_array_equal(tensor, np.arange(6, dtype=np.float32).reshape(2, 3) + offset)
    path = example / "rank-00001-0000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(AssertionError):
        names["read_tensor"](example, "master", "lm_head.weight")
