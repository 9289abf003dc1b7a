"""What a start reads of a model directory, by the headers of its files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

from rlhpc.config.parallel import trainer_layout
from rlhpc.config.schema import RunConfig
from rlhpc.errors import ModelError
from rlhpc.layout.spec import ShardSpec
from rlhpc.memory.state import elements, readable
from rlhpc.reshard.families import family_for
from rlhpc.reshard.families.quantised import fp8_block
from rlhpc.reshard.hf_files import tensor_bytes


def read_bytes(specs: Sequence[ShardSpec], sizes: Mapping[str, int], world_size: int) -> list[int]:
    """Of each rank: `sizes` are the tensors' in the files, of which a part takes its share."""
    groups: dict[Fraction, list[ShardSpec]] = defaultdict(list)
    for spec in specs:
        groups[Fraction(sizes[spec.name], prod(spec.shape))].append(spec)
    parts = [[each * count for count in elements(group, world_size)] for each, group in groups.items()]
    return [int(sum(of_rank)) for of_rank in zip(*parts, strict=True)]


def describe_reads(cfg: RunConfig, model_config: Mapping[str, Any]) -> Iterator[str]:
    """A line on the policy's files, for `rlhpc plan`, or on why they can't be read."""
    family, layout, dtype = family_for(model_config), trainer_layout(cfg), cfg.actor_rollout_ref.model.dtype
    try:
        sizes = tensor_bytes(Path(cfg.actor_rollout_ref.model.path), family.canonical_tensors(model_config))
    except ModelError as error:
        yield f"reads     nothing yet: {error}"
        return
    most = max(read_bytes(family.trainer_specs(model_config, layout, dtype), sizes, layout.world_size))
    block = fp8_block(model_config)
    how = f" in fp8 with blocks of {block[0]} * {block[1]}, dequantised to {dtype}" if block else ""
    yield f"reads     {readable(sum(sizes.values()))} of weights{how}; a rank at most {readable(most)} of them"
