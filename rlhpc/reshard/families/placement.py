"""How canonical tensors lie in a backend's local parameters: the pieces that a family's tables are written
in.

A `Placement` answers, for one position in the model-parallel grids, which boxes of which canonical tensors
make up a local parameter and at which offset each begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from rlhpc.reshard.families.facts import ModelFacts

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """The box [start, stop) of a canonical tensor, found at `offset` of the local parameter."""

    tensor: str
    start: Shape
    stop: Shape
    offset: Shape


@dataclass(frozen=True)
class Position:
    """One rank's place in the grids, with the model's facts and canonical shapes that placements look up."""

    facts: ModelFacts
    shapes: Mapping[str, Shape]
    tp: int
    tp_size: int
    ep: int = 0
    ep_size: int = 1
    etp: int = 0
    etp_size: int = 1


Placement = Callable[[Position], tuple[Piece, ...]]


def replicated(tensor: str) -> Placement:
    """The whole tensor on every rank."""

    def place(at: Position) -> tuple[Piece, ...]:
        shape = at.shapes[tensor]
        origin = (0,) * len(shape)
        return (Piece(tensor, origin, shape, origin),)

    return place


def split(tensor: str, dim: int, padded: Callable[[int, int], int] | None = None) -> Placement:
    """Equal parts along `dim` (0: column parallel, 1: row parallel, of [out, in] weights). `padded(extent,
    tp_size)` is the extent that the backend splits instead, such as a padded vocabulary; the pad belongs to
    no piece."""

    def place(at: Position) -> tuple[Piece, ...]:
        shape = at.shapes[tensor]
        part = (padded(shape[dim], at.tp_size) if padded else shape[dim]) // at.tp_size
        begin, end = min(part * at.tp, shape[dim]), min(part * (at.tp + 1), shape[dim])
        if begin == end:  # nothing but pad
            return ()
        origin = (0,) * len(shape)
        start, stop = origin[:dim] + (begin,) + origin[dim + 1 :], shape[:dim] + (end,) + shape[dim + 1 :]
        return (Piece(tensor, start, stop, origin),)

    return place


def concat(*parts: Placement) -> Placement:
    """Local parts one after the other along dimension 0: gate rows, then up rows."""

    def place(at: Position) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        rows = 0
        for part in parts:
            placed = part(at)
            pieces += (p._replace(offset=(p.offset[0] + rows, *p.offset[1:])) for p in placed)
            rows += sum(p.stop[0] - p.start[0] for p in placed)
        return tuple(pieces)

    return place


def experts(one: Placement) -> Placement:
    """Experts stacked along a leading dimension. `one` places expert "{e}" over the expert-tensor-parallel
    ranks; an expert-parallel rank holds num_experts / ep_size consecutive experts."""

    def place(at: Position) -> tuple[Piece, ...]:
        local = at.facts.num_experts // at.ep_size
        template = one(replace(at, tp=at.etp, tp_size=at.etp_size))
        return tuple(
            Piece(p.tensor.replace("{e}", str(at.ep * local + i)), p.start, p.stop, (i, *p.offset))
            for i in range(local)
            for p in template
        )

    return place


def qkv_blocks(q: str, k: str, v: str) -> Placement:
    """vLLM's QKVParallelLinear (0.32, linear.py): local q rows, k rows, v rows. With more ranks than KV heads
    each KV head is held by tp / num_kv_heads consecutive ranks."""

    def place(at: Position) -> tuple[Piece, ...]:
        facts, pieces, rows = at.facts, list[Piece](), 0
        for tensor, heads in ((q, facts.num_heads), (k, facts.num_kv_heads), (v, facts.num_kv_heads)):
            local = max(heads // at.tp_size, 1)
            first = at.tp * heads // at.tp_size
            start, stop = first * facts.head_dim, (first + local) * facts.head_dim
            pieces.append(_rows(at, tensor, start, stop, rows))
            rows += stop - start
        return tuple(pieces)

    return place


def qkv_groups(q: str, k: str, v: str) -> Placement:
    """Megatron's linear_qkv (core 0.16.1, attention.py): for every query group its q heads, then k, then v;
    the rows of all groups are split equally, through the middle of a group where there are more ranks than
    groups."""

    def place(at: Position) -> tuple[Piece, ...]:
        facts, dim = at.facts, at.facts.head_dim
        q_rows = facts.num_heads // facts.num_kv_heads * dim
        part = (facts.num_heads + 2 * facts.num_kv_heads) * dim // at.tp_size
        begin, end = part * at.tp, part * (at.tp + 1)
        pieces, row = list[Piece](), 0
        for group in range(facts.num_kv_heads):
            for tensor, size in ((q, q_rows), (k, dim), (v, dim)):
                low, high = max(begin, row), min(end, row + size)
                if low < high:
                    first = group * size + low - row
                    pieces.append(_rows(at, tensor, first, first + high - low, low - begin))
                row += size
        return tuple(pieces)

    return place


def _rows(at: Position, tensor: str, start: int, stop: int, offset: int) -> Piece:
    rest = at.shapes[tensor][1:]
    zeros = (0,) * len(rest)
    return Piece(tensor, (start, *zeros), (stop, *rest), (offset, *zeros))
