"""Trainer on megatron-core. Importing it imports megatron-core, whose chatter about optional packages is left out."""

import warnings

# Without Transformer Engine and Apex, Megatron warns on every rank of what it falls back to: here that is by design.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
