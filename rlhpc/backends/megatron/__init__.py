"""Trainer on megatron-core. Importing it imports megatron-core, whose chatter about optional packages is left out."""

import os
import warnings
from importlib.util import find_spec
from pathlib import Path

# Without Transformer Engine and Apex, Megatron warns on every rank of what it falls back to: here that is by design.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)

# Megatron imports Transformer Engine where it is installed, and that loads a CUDA toolkit's cuDNN beside the one that
# came with torch, unless told of torch's: two versions in a process fail at the first call.
if (torch := find_spec("torch")) and torch.origin:
    cudnn = Path(torch.origin).parents[1] / "nvidia" / "cudnn"
    if cudnn.is_dir():
        os.environ.setdefault("CUDNN_HOME", str(cudnn))
