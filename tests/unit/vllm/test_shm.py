import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.backends.vllm.shm import SHM, cleanup_shm


def test_removes_the_segments_of_one_ident_alone() -> None:
    mine = [SHM / f"rlhpcunit-tp:0-[0-1]-cpushm_{rank}" for rank in (0, 1)]
    others = [SHM / "rlhpcunit2-tp:0-[0-1]-cpushm_0", SHM / "other-rlhpcunit-tp:0"]
    for path in [*mine, *others]:
        path.touch()
    try:
        assert cleanup_shm("rlhpcunit") == [path.name for path in mine]
        assert not any(path.exists() for path in mine) and all(path.exists() for path in others)
        assert cleanup_shm("rlhpcunit") == []
    finally:
        for path in [*mine, *others]:
            path.unlink(missing_ok=True)


@pytest.mark.parametrize("ident", ["", "/", "../tmp/x", "-", "*", "a[b", "a?"])
def test_refuses_an_ident_that_could_reach_other_files(ident: str) -> None:
    with pytest.raises(ValueError, match="ident="):
        cleanup_shm(ident)


def test_needs_the_standard_library_alone() -> None:
    """A reaper imports it in a bare interpreter: no vllm, torch or numpy comes with it."""
    code = (
        "import sys, rlhpc.backends.vllm.shm\n"
        "print(sorted(sys.modules.keys() & {'vllm', 'torch', 'numpy', 'transformers', 'ray'}))"
    )
    root = Path(__file__).resolve().parents[3]
    output = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "[]"
