"""The same critic on CUDA. What its offloading does is in test_megatron_gpu.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.distributed.test_critic import check_near, check_step, reference, tied_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_equals_transformers_on_a_cpu(tmp_path: Path) -> None:
    """In float32, and nearly in bfloat16."""
    case = {"model_dir": tied_model(tmp_path), "sizes": {}, "max_tokens": 40, "device": "cuda"}
    calls = [("one_step", case | {"model__dtype": dtype}) for dtype in ("float32", "bfloat16")]
    ((exact, near),) = run_ranks("tests.distributed.critic_ranks:in_turn", 1, calls=calls)
    expected = reference(tmp_path)
    check_step([exact], expected, atol=1e-4)
    check_near([near], expected)
