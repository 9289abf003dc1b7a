"""Which quantised files can be read, by config.json's `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhpc.errors import ModelError

KEY = "quantization_config"
Block = tuple[int, int]

# What is read and what may be said of it. `activation_scheme` is for layers that compute in fp8; `scale_fmt` tells that
# scales are powers of two, which float32 holds like any other.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": (None, "e4m3"),
    "activation_scheme": (None, "dynamic"),
    "scale_fmt": (None, "float", "ue8m0"),
}


def fp8_block(hf_config: Mapping[str, Any]) -> Block | None:
    """Rows and columns of a matrix that share a scale, the last ones of a matrix perhaps fewer; None where config.json
    says that nothing is quantised.

    So are DeepSeek-V3 and R1 published and models that call themselves FP8 after them. Raises ModelError, naming it,
    for any other quantisation.
    """
    if (other := hf_config.get("compression_config")) is not None:
        raise ModelError(f"config.json: compression_config={other!r} is not supported; {_taken()}")
    if (given := hf_config.get(KEY)) is None:
        return None
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: {KEY}={given!r} must be an object; {_taken()}")
    for key, allowed in _SUPPORTED.items():
        if (value := given.get(key)) not in allowed:
            raise ModelError(f"config.json: {KEY} with {key}={value!r} is not supported; {_taken()}")
    block = given.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ModelError(
            f"config.json: {KEY} with weight_block_size={block!r} is not supported: it must be two whole numbers, the "
            f"rows and columns that share a scale; {_taken()}"
        )
    return block[0], block[1]


def _taken() -> str:
    return (
        "readable are quant_method 'fp8' (e4m3) with weight_block_size, as DeepSeek-V3 is published, and files that "
        f"aren't quantised; convert these to bfloat16 and remove {KEY}"
    )
