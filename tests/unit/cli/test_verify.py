"""`rlhpc verify` on files that really are damaged, and its exit codes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from rlhpc.checkpoint.manifest import read_manifest
from rlhpc.cli.main import main
from tests.saved_runs import flip_byte, write_checkpoint

CHUNK = 2**16
WEIGHTS = {f"layer.{i}.weight": torch.arange(3000.0).view(30, 100) + i for i in range(30)}  # 1 MB with moments


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text('{"config": {}, "model": {}}')
    for step in (3, 7, 9):
        write_checkpoint(tmp_path, step, WEIGHTS, num_ranks=2, max_file_bytes=200_000, chunk_bytes=CHUNK)
    return tmp_path


def test_whole_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    said = capsys.readouterr().out.splitlines()
    manifest = read_manifest(run / "checkpoints/step-000003")
    size = f"{manifest.size_bytes / 2**20:.4g} MiB in {len(manifest.files)} files"
    assert len(manifest.files) > 4
    assert said[:3] == [f"step {step}: ok, {size}" for step in (3, 7, 9)]
    assert said[3].startswith(f"{3 * manifest.size_bytes / 2**20:.4g} MiB in ") and said[3].endswith(" GB/s")


def test_every_damaged_file_and_chunk_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run / "checkpoints"
    names = [entry.name for entry in read_manifest(root / "step-000007").files]
    flipped, cut, gone = (root / "step-000007" / names[i] for i in (0, 2, 3))
    size = cut.stat().st_size
    flip_byte(flipped, 10)  # the header
    flip_byte(flipped, CHUNK + 5)
    flip_byte(flipped, flipped.stat().st_size - 1)
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    flip_byte(root / "step-000009/manifest.json", 200)
    last = (flipped.stat().st_size - 1) // CHUNK
    assert last > 1
    assert main(["verify", str(run)]) == 1
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [line.partition(" has xxh3")[0].strip() for line in lines[2:7]] == [
        f"{flipped}: chunk 0", f"{flipped}: chunk 1", f"{flipped}: chunk {last}",
        f"{cut}: {size - 1} bytes, the manifest says {size}", f"{gone}: No such file or directory",
    ]  # fmt: skip
    assert lines[0].startswith("step 3: ok") and lines[1].startswith("step 7: DAMAGED")
    assert lines[7] == "step 9: UNREADABLE" and "step-000009/manifest.json: " in lines[8]
    assert said.err == (
        "error: 2 of 3 checkpoints can't be used: step 7, 9; the run goes on from the newest that can: "
        f"rlhpc resume {run}\n"
    )


def test_one_step_and_a_copy(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_byte(run / "checkpoints/step-000007/rank-00001-0000.safetensors", 10)
    assert main(["verify", str(run), "--step", "3"]) == 0
    assert main(["verify", str(run), "--step", "7"]) == 1
    copy = shutil.copytree(run / "checkpoints/step-000007", tmp_path / "kept")
    assert main(["verify", str(run / "checkpoints")]) == 1
    assert main(["verify", str(copy)]) == 1
    said = capsys.readouterr()
    assert f"{copy}/rank-00001-0000.safetensors: chunk 0 has xxh3" in said.out
    assert said.err.endswith("error: 1 of 1 checkpoints can't be used: step 7\n")
    assert main(["verify", str(run), "--step", "8"]) == 2
    assert f"no checkpoint of step 8 in {run}/checkpoints; committed steps: 3, 7, 9" in capsys.readouterr().err
    assert main(["verify", str(run / "checkpoints/step-000008")]) == 2
    assert "step-000008 is no directory; steps beside it: 3, 7, 9" in capsys.readouterr().err
    shutil.copytree(run / "checkpoints/step-000003", run / "checkpoints/step-000008")
    assert main(["verify", str(run), "--step", "8"]) == 1
    assert "step-000008 is a copy of step 3 under another name" in capsys.readouterr().out


def test_a_run_that_has_saved_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text('{"config": {}, "model": {}}')
    assert main(["verify", str(tmp_path)]) == 2
    assert f"{tmp_path}/checkpoints holds no checkpoint (yet); see how the run is" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert f"{tmp_path}/nowhere does not exist; give a run directory" in capsys.readouterr().err
