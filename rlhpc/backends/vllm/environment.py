"""The environment that vLLM reads on import: import this module before it. What the user has set stays."""

from __future__ import annotations

import os

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
for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
