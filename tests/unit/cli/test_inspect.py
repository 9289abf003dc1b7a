"""`rlhpc inspect` on checkpoints whose sizes and boxes were worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlhpc.cli.main import main
from tests.saved_runs import flip_byte, write_checkpoint

# 24 + 6 + 4 = 34 elements; vectors are stored by every rank.
WEIGHTS = {"model.a.weight": torch.ones(4, 6), "model.a.gate": torch.ones(2, 3), "model.norm.weight": torch.ones(4)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text('{"config": {}, "model": {}}')
    layout = {"tp": 2, "pp": 1, "cp": 1, "ep": 2, "etp": 1, "world_size": 4}
    for step in (5, 10):
        record = {"val-core/gsm8k/acc/mean@1": step / 20, "critic/score/mean": 0.5}
        write_checkpoint(
            tmp_path, step, WEIGHTS, num_ranks=4, frozen=["model.a.gate"], record=record, layout=layout
        )  # fmt: skip
    return tmp_path


def test_all_steps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_byte(run / "checkpoints/step-000010/manifest.json", 100)
    (run / "checkpoints/step-000005/rank-00002-0000.safetensors").write_bytes(b"short")
    assert main(["inspect", str(run)]) == 0
    header, five, ten = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "age", "size", "ranks", "layout", "validation", "state"]
    assert five.split()[0] == "5" and " 4  tp=2 dp=2 ep=2 edp=2  0.25 " in five
    assert five.rstrip().endswith("DAMAGED: rank-00002-0000.safetensors missing or of another size")
    assert ten.split()[:6] == ["10", "-", "-", "-", "-", "-"] and "step-000010/manifest.json: " in ten


def test_one_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run), "--step", "10", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["step"], one["world_size"], one["files"], one["problem"], one["missing"]) == (10, 4, 4, None, [])
    assert (one["parameters"], one["tensors"], one["config_digest"]) == (34, 3, "0123abcd")
    stored = 4 * (24 + 4 * 4)  # bytes: each element of the matrix once, the norm on all four ranks
    assert one["bytes_by_kind"] == {"master": stored, "exp_avg": stored, "exp_avg_sq": stored, "weight": 2 * 6}
    assert one["validation"] == {"val-core/gsm8k/acc/mean@1": 0.5}
    files = (run / "checkpoints/step-000010").glob("*.safetensors")
    assert one["size_bytes"] == sum(file.stat().st_size for file in files)
    assert main(["inspect", str(run / "checkpoints/step-000010")]) == 0
    said = capsys.readouterr().out
    for line in (
        "  layout      4 ranks: tp=2 dp=2 ep=2 edp=2",
        "  model       34 parameters in 3 tensors",
        "    master         160 B",
        "    weight          12 B",
        "  config      0123abcd",
        "  validation  val-core/gsm8k/acc/mean@1 0.5",
        "  state       complete by its sizes; rlhpc verify compares the checksums",
    ):
        assert line in said.splitlines(), said


def test_a_critic_is_told_apart(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    critic = {"critic.model.a.weight": torch.ones(4, 6), "critic.score.weight": torch.ones(1, 4)}
    write_checkpoint(run, 15, WEIGHTS | critic, num_ranks=4)
    assert main(["inspect", str(run), "--step", "15", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["parameters"], one["critic_parameters"], one["tensors"]) == (34, 28, 5)
    assert main(["inspect", str(run), "--step", "15"]) == 0
    said = capsys.readouterr().out
    assert "  model       34 parameters, and a critic's 28, in 5 tensors" in said.splitlines()


def test_tensors(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run), "--tensors", "*norm*", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "name": "model.norm.weight",
            "shape": [4],
            "dtypes": dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), "float32"),
            "pieces": 12,
            "ranks": 4,
            "size_bytes": 12 * 16,
        }
    ]
    assert main(["inspect", str(run), "--tensors"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[1:-1]] == sorted(WEIGHTS)
    assert lines[1][:3] == ["model.a.gate", "2x3", "weight"] and lines[1][3] == "(bfloat16)"
    assert lines[-1][:4] == ["3", "tensors,", "34", "elements"]
    assert main(["inspect", str(run), "--tensors", "no.such"]) == 2
    assert "no tensor of " in (said := capsys.readouterr().err) and "step-000010 matches 'no.such'" in said
