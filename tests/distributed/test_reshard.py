"""Publishing, verifying, saving and loading on real ranks over gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.ranks import run_ranks
from tests.hf_files import read_tensors
from tests.tiny_model import write_tiny_model

EP2 = {"ep": 2}
CASES = {
    "ep2-to-tp2": (2, EP2, 2, ("float32", "float32"), 512 * 1024**2),
    "small-buckets": (2, EP2, 2, ("float32", "float32"), 600),
    "float32-to-bfloat16": (2, EP2, 2, ("float32", "bfloat16"), 4096),
    "to-two-replicas": (2, EP2, 1, ("bfloat16", "bfloat16"), 4096),
    "tp2-pp2-ep2-to-tp4": (4, {"tp": 2, "pp": 2, "ep": 2}, 4, ("float32", "float32"), 4096),
    "etp2-ep2-to-tp2": (4, {"tp": 4, "ep": 2, "etp": 2}, 2, ("float32", "float32"), 4096),
}


@pytest.mark.parametrize("case", CASES)
def test_publish(case: str) -> None:
    world_size, sizes, tp, dtypes, bucket_bytes = CASES[case]
    reports = run_ranks(
        "tests.distributed.reshard_ranks:publish",
        world_size, sizes=sizes, tp=tp, dtypes=dtypes, bucket_bytes=bucket_bytes,
    )  # fmt: skip
    assert len({report["digest"] for report in reports}) == 1
    for report in reports:
        assert report["wrong-0"] == report["wrong-1"] == []
        assert report["planned"] > 0
        assert report["received"] == [report["planned"]] * 2  # what the rank lacks and nothing else


def test_verify_names_the_region_on_all_ranks() -> None:
    reports = run_ranks(
        "tests.distributed.reshard_ranks:publish",
        2, sizes=EP2, tp=2, dtypes=("float32", "float32"), bucket_bytes=4096, tamper=1,
    )  # fmt: skip
    for report in reports:
        assert "model.layers.3.mlp.experts.6.down_proj.weight[0:16, 4:8]" in report["error"]
        assert "of rank 1" in report["error"]
        assert report["error"].count("model.layers.3.mlp.experts") == 2  # the canonical name and the buffer's


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (1, {}),
        (2, EP2),
        (2, {"tp": 2, "etp": 2}),
        (2, {"pp": 2}),
    ],
    ids=["single", "ep2", "tp2", "pp2"],
)
def test_hf_round_trip_is_bitwise(tmp_path: Path, world_size: int, sizes: dict[str, int]) -> None:
    source, target = write_tiny_model(tmp_path / "source"), tmp_path / "target"
    config = json.loads((source / "config.json").read_text())
    # A save over an earlier one: its files must neither remain nor be read.
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"stale")
    (target / "model.safetensors.index.json").write_text("stale")
    run_ranks(
        "tests.distributed.reshard_ranks:save_and_load",
        world_size, source=str(source), directory=str(target), config=config, sizes=sizes, dtype="float32",
    )  # fmt: skip
    expected, got = read_tensors(source), read_tensors(target)
    files = sorted(target.glob("*.safetensors"))
    assert len(files) >= world_size
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert not list(target.glob(".*"))
    others = {p.name for p in source.iterdir()} - {"model.safetensors"}
    assert others <= {p.name for p in target.iterdir()}
    if world_size == 1:
        assert files == [target / "model.safetensors"] and not (target / "model.safetensors.index.json").exists()
        return
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert {name: target / file for name, file in index["weight_map"].items()} == {
        name: file for file in files for name in load_file(file)
    }
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in expected.values())


def test_transformers_reads_what_two_ranks_saved(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, target = write_tiny_model(tmp_path / "source"), tmp_path / "target"
    config = json.loads((source / "config.json").read_text())
    run_ranks(
        "tests.distributed.reshard_ranks:save_and_load",
        2, source=str(source), directory=str(target), config=config, sizes=EP2, dtype="bfloat16",
    )  # fmt: skip
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    got = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(got(ids).logits, expected(ids).logits)


def test_a_rank_that_cannot_write_stops_all(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "model-00002-of-00003.safetensors").mkdir(parents=True)
    errors = run_ranks(
        "tests.distributed.reshard_ranks:save_where_one_rank_fails", 2, source=str(tmp_path), directory=str(target)
    )
    assert errors[0] == errors[1]
    assert "model-00002-of-00003.safetensors can't be written" in errors[0]
    assert not (target / "model.safetensors.index.json").exists()
    assert not list(target.glob(".*"))
