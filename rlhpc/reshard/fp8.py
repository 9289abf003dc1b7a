"""Matrices kept as fp8 (e4m3) with a float32 scale for each block of rows and columns.

An element is float32(e4m3) * scale: DeepSeek's inference/kernel.py (weight_dequant), Transformers' Fp8Dequantize. That
product is rounded once, to what is filled. So bfloat16 parameters are, bit by bit, those of the published conversion
(DeepSeek's fp8_cast_bf16.py), and float32 ones keep what bfloat16 would cut off.
"""

from __future__ import annotations

import torch

from rlhpc.reshard.families.quantised import Block
from rlhpc.reshard.plan import Index


def dequantise(values: torch.Tensor, scales: torch.Tensor, block: Block, start: Index, target: torch.Tensor) -> None:
    """Fills `target` [R, C] with the box `values` [R, C] of a matrix, which begins there at `start`; `scales` are those
    of the blocks that it touches. On the target's device, row of blocks by row of blocks, so that nothing of the box's
    size is made in float32."""
    values, scales = values.to(target.device), scales.to(target.device)
    (top, left), (rows, columns) = (offset % size for offset, size in zip(start, block, strict=True)), values.shape
    of_column = torch.arange(left, left + columns, device=scales.device) // block[1]
    by_column = scales.index_select(1, of_column)
    for i, scale in enumerate(by_column):
        begin, end = max(0, i * block[0] - top), min(rows, (i + 1) * block[0] - top)
        target[begin:end].copy_(values[begin:end].float().mul_(scale))
