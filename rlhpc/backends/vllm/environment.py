"""The environment that vLLM reads on import: import this module before it. What the user has set stays."""

from __future__ import annotations

import os
from pathlib import Path

from rlhpc.errors import ConfigError

DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the rank's own process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several ranks may share cores
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # one runner for all families: it samples with per-request generators
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # that sampler returns no processed logprobs and takes no seeds
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings speak to those who serve models
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
CACHES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)


def keep_compiled(directory: Path) -> None:
    """Keeps what vLLM, Inductor and Triton compile in `directory`, which is the node's own, for the next start there.
    Each finds it again by a hash of model, settings and versions. Call it before vLLM is imported.

    Raises ConfigError for a directory of another user, who could put in it what is executed here.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (owner := directory.lstat().st_uid) != os.getuid():
        raise ConfigError(
            f"{directory} belongs to user id {owner}, not to {os.getuid()}; have it removed, or set "
            "cluster.ray_temp_root to another node-local directory"
        )
    for name, folder in CACHES.items():
        os.environ.setdefault(name, str(directory / folder))
