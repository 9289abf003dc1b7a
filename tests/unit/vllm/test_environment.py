import os
from pathlib import Path

import pytest

from rlhpc.backends.vllm.environment import CACHES, keep_compiled
from rlhpc.errors import ConfigError


def test_what_is_compiled_is_kept_in_a_private_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/the/users/own")
    directory = tmp_path / "compiled"
    keep_compiled(directory)
    keep_compiled(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {name: os.environ[name] for name in CACHES} == {
        "VLLM_CACHE_ROOT": f"{directory}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{directory}/inductor",
        "TRITON_CACHE_DIR": "/the/users/own",
    }


def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    theirs = Path("/usr")
    if os.getuid() == 0:
        theirs = tmp_path
        os.chown(theirs, 65534, -1)
    with pytest.raises(ConfigError, match=r"belongs to user id \d+, not to \d+; have it removed, or set cluster.ray_t"):
        keep_compiled(theirs)
