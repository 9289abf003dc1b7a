"""The norm that is compiled for CUDA against torch's own."""

import torch

from rlhpc.backends.megatron.norm import rms_norm


def test_equals_torchs() -> None:
    x, weight = (
        torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float(),
        torch.rand(32),
    )
    torch.testing.assert_close(rms_norm(x, weight, 1e-2), torch.nn.functional.rms_norm(x, (32,), weight, 1e-2))
