"""Flat ranges: what a rank of a distributed optimizer holds of a parameter, in the planner's terms.

Masters and moments are one-dimensional tensors of the elements [start, stop) of the rank's flattened parameter
(Megatron-core 0.16.1, distrib_optimizer.py). Such a range is a few boxes, each of which is a view of that tensor and,
through the parameter's own shards, parts of canonical tensors. So the state saved under one layout is planned onto any
other like weights: `plan(flat_specs(specs_a, ranges_a), flat_specs(specs_b, ranges_b))`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from operator import add, sub
from typing import NamedTuple

import torch

from rlhpc.layout.spec import Shard, ShardSpec
from rlhpc.reshard.plan import Box, Index


def flat_boxes(shape: Index, start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a row-major tensor of `shape`, as boxes (start, stop), in the order of the elements
    and each consecutive itself. At most 2n - 1 for n dimensions: a part of the first row, whole rows, a part of the
    last."""
    if start >= stop:
        return []
    if len(shape) < 2:
        return [((start,), (stop,))] if shape else [((), ())]
    row = prod(shape[1:])
    boxes: list[Box] = []
    while start < stop:
        i = start // row
        if start % row == 0 and stop - start >= row:
            end = stop - stop % row
            zeros = (0,) * (len(shape) - 1)
            boxes.append(((i, *zeros), (end // row, *shape[1:])))
        else:
            end = min(stop, (i + 1) * row)
            inner = flat_boxes(shape[1:], start - i * row, end - i * row)
            boxes += (((i, *low), (i + 1, *high)) for low, high in inner)
        start = end
    return boxes


class FlatView(NamedTuple):
    """Elements [begin, end) of a state tensor, which are the box [start, stop) of its parameter."""

    name: str
    begin: int
    end: int
    start: Index
    stop: Index

    def of(self, state: torch.Tensor) -> torch.Tensor:
        return state[self.begin : self.end].view(tuple(map(sub, self.stop, self.start)))


@dataclass(frozen=True)
class FlatRange:
    """Elements [start, stop) of `rank`'s local tensor `parameter`, which has `shape` (padding included)."""

    rank: int
    parameter: str
    shape: Index
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= prod(self.shape):
            raise ValueError(f"{self.parameter} {self.shape} has no elements {self.start}..{self.stop}")

    def views(self) -> list[FlatView]:
        """The boxes as views of the state tensor, whose element 0 is the parameter's `start`. A view's name is that of
        a buffer in `flat_specs`."""
        views: list[FlatView] = []
        begin = 0
        for start, stop in flat_boxes(self.shape, self.start, self.stop):
            end = begin + prod(map(sub, stop, start))
            name = f"{self.parameter}[{self.start + begin}:{self.start + end}]"
            views.append(FlatView(name, begin, end, start, stop))
            begin = end
        return views


def flat_specs(specs: Iterable[ShardSpec], ranges: Iterable[FlatRange], dtype: str = "float32") -> list[ShardSpec]:
    """`specs` of whole parameters, cut down to what the ranges hold of them, in the buffers of `flat_buffers`.

    `ranges` are those of all ranks. Padding belongs to no canonical tensor and appears nowhere; tensors of which no
    range holds anything (frozen parameters) are left out.
    """
    views: dict[tuple[int, str], list[FlatView]] = defaultdict(list)
    for held in ranges:
        views[held.rank, held.parameter] += held.views()
    result = []
    for spec in specs:
        shards = tuple(
            part
            for shard in spec.shards
            for view in views.get((shard.rank, shard.buffer), ())
            for part in _within(shard, view)
        )
        if shards:
            result.append(ShardSpec(spec.name, spec.shape, dtype, shards))
    return result


def flat_buffers(ranges: Iterable[FlatRange], states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One rank's state tensors (by parameter, each [stop - start]) as the buffers that `flat_specs` names: views, so
    that what is written to them is written to the state."""
    return {view.name: view.of(states[held.parameter]) for held in ranges for view in held.views()}


def _within(shard: Shard, view: FlatView) -> list[Shard]:
    """The part of the shard that lies in the view's box, if any."""
    lead = len(shard.offset) - len(shard.start)
    low = tuple(map(max, shard.offset, view.start))
    high = tuple(map(min, shard.end, view.stop))
    if not all(a < b for a, b in zip(low, high, strict=True)):
        return []
    begin, length = tuple(map(sub, low, shard.offset))[lead:], tuple(map(sub, high, low))[lead:]
    start = tuple(map(add, shard.start, begin))
    stop = tuple(map(add, start, length))
    return [Shard(shard.rank, start, stop, view.name, tuple(map(sub, low, view.start)))]
