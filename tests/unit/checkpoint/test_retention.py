"""Which checkpoints stay, by hand."""

from math import nan
from pathlib import Path

import pytest
import torch

from rlhpc.checkpoint.manifest import CheckpointManifest
from rlhpc.checkpoint.retention import retained
from rlhpc.checkpoint.store import CheckpointStore

STEPS = range(10, 100, 10)  # 10 to 90
SCORES = {20: 0.5, 30: 0.9, 40: nan, 50: 0.5, 60: 0.1, 80: 0.3}


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"newest": 1}, {90}),
        ({"newest": 3}, {70, 80, 90}),
        ({"newest": 9}, set(STEPS)),
        ({"newest": 20}, set(STEPS)),
        ({"newest": 2, "every": 30}, {30, 60, 80, 90}),
        ({"newest": 1, "every": 7}, {70, 90}),
        ({"newest": 1, "best": 1}, {30, 90}),
        ({"newest": 1, "best": 2}, {30, 50, 90}),  # 20 is as good, 50 is newer
        ({"newest": 2, "best": 3}, {20, 30, 50, 80, 90}),
        ({"newest": 1, "best": 1, "mode": "min"}, {60, 90}),
        ({"newest": 1, "best": 50}, {*SCORES, 90} - {40}),
        ({"newest": 1, "every": 40, "best": 1}, {30, 40, 80, 90}),
    ],
)
def test_what_stays(policy, kept) -> None:
    assert retained(STEPS, STEPS, SCORES, **policy) == kept


def test_damaged_ones_count_for_nothing() -> None:
    whole = {10, 20, 50, 60}  # 90 to 70 are damaged, and 40 and 30
    assert retained(STEPS, whole, {}, newest=2) == {50, 60, 70, 80, 90}
    assert retained(STEPS, whole, {}, newest=3) == {20, 30, 40, 50, 60, 70, 80, 90}
    assert retained(STEPS, whole, {}, newest=5) == set(STEPS)
    assert retained(STEPS, set(), {}, newest=1) == set(STEPS)
    with pytest.raises(ValueError, match="newest=0 would delete the only checkpoint"):
        retained(STEPS, whole, {}, newest=0)


def save(root: Path, step: int, value: float | None) -> None:
    record = {} if value is None else {"val": value}
    CheckpointStore(root).save(step, [({"weight": torch.full((3,), float(step))}, {})], {"record": record})


def of_record(manifest: CheckpointManifest) -> float | None:
    return manifest.state["record"].get("val")


def test_the_store_asks_every_step_for_its_score(tmp_path: Path) -> None:
    for step, value in enumerate([0.7, 0.2, None, 0.9, 0.8, 0.1]):
        save(tmp_path, step, value)
    (tmp_path / "step-000003" / "rank-00000-0000.safetensors").write_bytes(b"")  # the best one is damaged
    store = CheckpointStore(tmp_path)
    assert store.retain(1, best=2, score=of_record) == [3, 2, 1]
    assert store.steps() == [0, 4, 5]
    save(tmp_path, 6, 0.75)
    (tmp_path / "step-000006" / "rank-00000-0000.safetensors").unlink()
    assert store.retain(1, best=2, score=of_record) == []  # the newest is of no use: what is older stays
    assert store.retain(1, every=5) == [4]
    assert store.steps() == [0, 5, 6]
