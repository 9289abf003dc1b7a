"""Pieces: what a checkpoint stores, named by canonical (Hugging Face) tensors and nothing of the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from operator import sub
from typing import NamedTuple

Index = tuple[int, ...]

CRITIC_PREFIX = "critic."  # of the names of a critic's tensors, which lie beside the policy's

TRAINED_KINDS = ("master", "exp_avg", "exp_avg_sq")  # of every parameter that the optimizer updates
FROZEN_KIND = "weight"  # of every other one
KINDS = (*TRAINED_KINDS, FROZEN_KIND)
ITEM_BYTES = {
    "float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "bfloat16": 2, "float16": 2,
    "int16": 2, "uint16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of an element by dtype, in PyTorch's names."""


def kind_order(kind: str) -> tuple[int, str]:
    """Sorts kinds: those of KINDS in their order, then others by name."""
    return KINDS.index(kind) if kind in KINDS else len(KINDS), kind


class Box(NamedTuple):
    """`start[d] <= index[d] < stop[d]` of the canonical tensor `name`; both empty for a scalar."""

    name: str
    start: Index
    stop: Index

    @property
    def extent(self) -> Index:
        return tuple(map(sub, self.stop, self.start))

    @property
    def num_elements(self) -> int:
        return prod(map(sub, self.stop, self.start))


class Piece(NamedTuple):
    """A box of a canonical tensor, of a kind: `master` (fp32 weights, in fp32 runs the parameters themselves),
    `exp_avg`, `exp_avg_sq` (Adam's moments) or `weight` (a frozen parameter)."""

    kind: str
    name: str
    start: Index
    stop: Index

    @property
    def box(self) -> Box:
        return Box(self.name, self.start, self.stop)

    @property
    def extent(self) -> Index:
        return tuple(map(sub, self.stop, self.start))

    @property
    def key(self) -> str:
        """The tensor's name in a shard file: `master/model.norm.weight[0:2048]`."""
        return f"{self.kind}/{self.name}[{','.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


class StoredPiece(NamedTuple):
    """A piece in a shard file: from byte `begin` of `file` its elements, row-major, little-endian, without gaps."""

    kind: str
    name: str
    start: Index
    stop: Index
    dtype: str  # PyTorch's name
    rank: int  # that wrote it
    file: str  # name within the checkpoint's directory
    begin: int

    @property
    def piece(self) -> Piece:
        return Piece(self.kind, self.name, self.start, self.stop)

    @property
    def extent(self) -> Index:
        return tuple(map(sub, self.stop, self.start))

    @property
    def num_elements(self) -> int:
        return prod(map(sub, self.stop, self.start))

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes


class Section(NamedTuple):
    """All boxes of a run in one kind, one after the other from byte `begin` of the file."""

    kind: str
    dtype: str
    begin: int


class Run(NamedTuple):
    """Boxes that a file stores in each of several kinds: masters and moments have the same ones, listed once."""

    boxes: tuple[Box, ...]
    sections: tuple[Section, ...]

    def places(self, section: Section) -> Iterator[tuple[Box, int]]:
        """Each box of a section with the byte of the file at which it begins."""
        begin, item_bytes = section.begin, ITEM_BYTES[section.dtype]
        for box in self.boxes:
            yield box, begin
            begin += prod(map(sub, box.stop, box.start)) * item_bytes
