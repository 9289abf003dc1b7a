"""What `rlhpc export` makes of a checkpoint: bits against Transformers, files against their limits, errors in words."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rlhpc.checkpoint.manifest import read_manifest
from rlhpc.cli.main import main
from rlhpc.cli.parser import num_bytes
from tests.hf_files import read_tensors
from tests.saved_runs import flip_byte, write_checkpoint, write_run
from tests.tiny_family import write_tiny_family
from tests.tiny_model import write_tiny_model

TOKENS = torch.arange(48).view(2, 24) * 7 % 300


def write_model(directory: Path, family: str, seed: int) -> Path:
    if family == "qwen3_moe":
        return write_tiny_model(directory, seed)
    return write_tiny_family(directory, family, seed, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of Qwen3-MoE with the checkpoints of two steps, and a directory with the weights of the second."""
    root = tmp_path_factory.mktemp("trained")
    run = write_run(root / "run", write_tiny_model(root / "start", 0))
    for step in (10, 20):
        write_checkpoint(run, step, read_tensors(write_tiny_model(root / f"after-{step}", step)))
    return run, root / "after-20"


def logits(directory: Path, dtype: torch.dtype | str) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)(TOKENS).logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2"])
def test_transformers_computes_what_the_masters_say(tmp_path: Path, family: str, dtype: str) -> None:
    """Loaded as the exported config says, equal bit by bit to the trained weights loaded in that dtype. The frozen
    router was stored in bfloat16."""
    start, after = (write_model(tmp_path / name, family, seed) for seed, name in enumerate(("start", "after")))
    weights = read_tensors(after)
    frozen = [name for name in weights if name.endswith("layers.0.mlp.gate.weight")]
    weights |= {name: weights[name].bfloat16().float() for name in frozen}
    save_file(weights, after / "model.safetensors", metadata={"format": "pt"})
    run = write_run(tmp_path / "run", start, dtype)
    write_checkpoint(run, 7, weights, frozen=frozen)
    assert main(["export", str(run), str(tmp_path / "out"), "--shard-size", "100KB"]) == 0
    got = logits(tmp_path / "out", "auto")
    assert got.dtype == getattr(torch, dtype)
    assert torch.equal(got, logits(after, getattr(torch, dtype)))
    assert not torch.equal(got, logits(start, getattr(torch, dtype)))
    exported = read_tensors(tmp_path / "out")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name].to(getattr(torch, dtype))) for name in weights)


def test_files_are_as_large_as_asked_and_indexed(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, after = trained
    assert main(["export", str(run), "--step", "20", "--shard-size", "0.1 MB", str(tmp_path / "many")]) == 0
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    said = capsys.readouterr().out
    assert said.endswith(f"parameters in float32, {said.split(', ')[-1].split(' in ')[0]} in {len(files)} files\n")
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    total = sum(tensor.nbytes for tensor in read_tensors(after).values())
    assert index["metadata"]["total_size"] == total and len(files) > total / 100_000
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    for file in files:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 100_000 or len(tensors) == 1
        assert {name for name, held_by in index["weight_map"].items() if held_by == file.name} == tensors.keys()
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert main(["export", str(run), str(tmp_path / "one")]) == 0  # the newest step; all fits into one file
    assert [file.name for file in (tmp_path / "one").glob("*.safetensors*")] == ["model.safetensors"]
    one, many = read_tensors(tmp_path / "one"), read_tensors(tmp_path / "many")
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)


def test_an_older_step_and_what_lies_beside_the_weights(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run, after = trained
    step_dir = run / "checkpoints/step-000010"
    assert main(["export", str(step_dir), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    old = read_tensors(after.parent / "after-10")
    assert all(torch.equal(t, old[name].bfloat16()) for name, t in read_tensors(tmp_path / "out").items())
    start = after.parent / "start"
    beside = {path.name for path in start.iterdir()} - {"model.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == beside | {"model.safetensors"}
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # whoever reads one reads all
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= beside
    for name in beside - {"config.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (start / name).read_bytes()
    before, now = (json.loads((where / "config.json").read_text()) for where in (start, tmp_path / "out"))
    assert now == before | {"torch_dtype": "bfloat16"}


def test_config_is_what_was_trained_whatever_became_of_the_model_directory(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    start = shutil.copytree(trained[1].parent / "start", tmp_path / "start")
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "tf_model.h5"):
        (start / name).write_text("weights from before")
    (start / "chat_template.jinja").write_text("{{ messages }}")
    run = write_run(tmp_path / "run", start, "bfloat16")
    write_checkpoint(run, 1, read_tensors(trained[1]))
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    exported = json.loads((tmp_path / "out/config.json").read_text())
    assert exported == config | {"torch_dtype": "bfloat16"}  # the dtype that the run trained in
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"
    assert not {path.name for path in (tmp_path / "out").iterdir()} & {"tf_model.h5", "pytorch_model.bin.index.json"}


def test_a_checkpoint_without_its_run_needs_a_model(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, after = trained
    copied = shutil.copytree(run / "checkpoints/step-000020", tmp_path / "kept")
    assert main(["export", str(copied), str(tmp_path / "out")]) == 2
    assert "lies in no run directory, which would name the model; give a directory with its config and tokenizer: " in (
        capsys.readouterr().err
    )
    other = write_tiny_model(tmp_path / "other", moe_intermediate_size=32)
    assert main(["export", str(copied), str(tmp_path / "out"), "--model", str(other)]) == 2
    said = capsys.readouterr().err
    assert "is of another model than" in said and "model.layers.0.mlp.experts.0.down_proj.weight has shape (" in said
    assert main(["export", str(copied), str(tmp_path / "out"), "--model", str(after)]) == 0
    assert torch.equal(logits(tmp_path / "out", "auto"), logits(after, torch.float32))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "other", "out"]


def test_nothing_of_the_users_is_overwritten(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = trained
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        assert main(["export", str(run), str(tmp_path / name)]) == 2
        assert f"{name} exists and is no empty directory; choose another, or remove it" in capsys.readouterr().err
    (newest,) = sorted(run.glob("checkpoints/step-*"))[-1:]
    assert main(["export", str(run), str(newest / "model")]) == 2
    assert f"would be in the checkpoint {newest}, and be deleted with it" in capsys.readouterr().err
    (tmp_path / "late.partial").mkdir()
    (tmp_path / "late.partial/notes.txt").write_text("mine")
    assert main(["export", str(run), str(tmp_path / "late")]) == 2
    assert "late.partial exists: of an export that is under way, or was killed; then" in capsys.readouterr().err
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "file", "full/notes.txt", "late.partial/notes.txt",
    ]  # fmt: skip
    (tmp_path / "empty").mkdir()
    assert main(["export", str(run), str(tmp_path / "empty")]) == 0
    assert (tmp_path / "empty/model.safetensors").exists()


def test_damage_is_named_and_nothing_is_left(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained[0], tmp_path / "run")
    manifest = read_manifest(run / "checkpoints/step-000020")
    piece = next(piece for piece in manifest.pieces("master") if piece.rank == 1)
    file = run / "checkpoints/step-000020" / piece.file
    size = file.stat().st_size
    flip_byte(file, piece.begin + 2)
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    assert f"{file}: chunk {(piece.begin + 2) // 2**16} has xxh3 " in capsys.readouterr().err
    with file.open("r+b") as opened:
        opened.truncate(1000)
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    assert f"{file}: 1000 bytes, the manifest says {size}" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "out"), "--step", "15"]) == 2
    assert "no checkpoint of step 15 in" in (said := capsys.readouterr().err) and "committed steps: 10, 20" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


EXPORT_IN_LITTLE_MEMORY = """
import sys
from pathlib import Path
import torch
from rlhpc.cli.export import export

def peak():  # of this program; getrusage would count what the parent had when it forked
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

torch.ones(8).bfloat16()
before = peak()
print(export(sys.argv[1], Path(sys.argv[2]), file_bytes=4 * 2**20))
print((peak() - before) * 1024)
"""


def test_memory_holds_one_file_at_a_time(tmp_path: Path) -> None:
    """A model of 73 MiB in files of 4 MiB, from chunks of 1 MiB."""
    start = write_tiny_family(tmp_path / "start", "llama", hidden_size=512, num_hidden_layers=8, intermediate_size=1024)
    weights = read_tensors(start)
    run = write_run(tmp_path / "run", start)
    write_checkpoint(run, 1, weights, max_file_bytes=2**28, chunk_bytes=2**20)
    command = [sys.executable, "-c", EXPORT_IN_LITTLE_MEMORY, str(run), str(tmp_path / "out")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "float32, 73.28 MiB in 21 files" in said[0]
    assert int(said[-1]) < 24 * 2**20
    exported = read_tensors(tmp_path / "out")
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root; CI has it")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "rlhpc-test", disk], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_disk_without_room_is_left_as_it_was(
    trained: tuple[Path, Path], small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, after = trained
    assert main(["export", str(run), str(small_disk)]) == 2
    assert f"is where a file system is mounted; choose a directory in it: {small_disk}/model" in capsys.readouterr().err
    (small_disk / "ballast").write_bytes(bytes(3 * 2**20))
    assert main(["export", str(run), str(small_disk / "out")]) == 2
    assert f"{small_disk} has 3 MiB free; free some space" in capsys.readouterr().err
    (small_disk / "ballast").write_bytes(bytes(2**20))
    start = shutil.copytree(after.parent / "start", small_disk.parent / "start")
    (start / "LICENSE").write_bytes(bytes(2**20))  # it isn't counted
    assert main(["export", str(run), str(small_disk / "out"), "--model", str(start)]) == 2
    assert "out can't be written" in (said := capsys.readouterr().err) and "No space left on device" in said
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5_000_000_000), ("1.5 GiB", 1_610_612_736), ("700", 700), ("20mb", 20_000_000)]
)
def test_sizes(text: str, size: int) -> None:
    assert num_bytes(text) == size


@pytest.mark.parametrize("text", ["0", "5 furlongs", "-1GB", ""])
def test_what_is_no_size(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "run", "out", f"--shard-size={text}"])
    assert f"{text!r} is no size; write 500MB, 5GB, 4GiB or a number of bytes" in capsys.readouterr().err
