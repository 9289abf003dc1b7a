"""The shim gives Megatron what it needs and leaves torch to everyone else as it was."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_utils
from rlhpc.backends.megatron import cpu_shim

watched = {
    "cuda": dict(vars(torch.cuda)), "Tensor": dict(vars(torch.Tensor)), "random": dict(vars(torch.cuda.random)),
}
functions = {name: getattr(torch, name) for name in ("tensor", "zeros", "empty", "ones", "full", "arange", "cuda")}
cpu_shim.install()
cpu_shim.install()
with cpu_shim.cuda_type_names():
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64

assert torch.zeros(1).type() == "torch.FloatTensor"
assert watched["cuda"] == vars(torch.cuda) and watched["random"] == vars(torch.cuda.random)
assert watched["Tensor"] == dict(vars(torch.Tensor))
assert all(getattr(torch, name) is function for name, function in functions.items())
assert len(torch.overrides._get_current_function_mode_stack()) == 0

assert clip_grads.torch.zeros(2, device="cuda").device.type == "cpu"
assert clip_grads.torch.nn is torch.nn and clip_grads.torch.Tensor is torch.Tensor
assert not hasattr(mappings._gather_along_first_dim.__wrapped__, "__wrapped__")  # replaced once
splits = moe_utils.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
assert splits.tolist() == [1, 2] and not torch.is_tensor(splits)
"""


def test_torch_is_untouched() -> None:
    """In a process of its own, as other tests may already have prepared this one."""
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
