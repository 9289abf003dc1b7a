"""Which experts of trainer and engine can be the same memory: those that lie alike on every rank. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from rlhpc.errors import ConfigError
from rlhpc.layout.spec import Replicas, Shards, ShardSpec

Index = tuple[int, ...]


class _Place(NamedTuple):
    start: Index
    stop: Index
    offset: Index
    buffer: str

    def told(self, prefix: str) -> str:
        region = ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True))
        return f"[{region}] at {list(self.offset)} of {prefix}{self.buffer}"


def expert_buffers(specs: Iterable[ShardSpec]) -> set[str]:
    """The buffers in which experts are stacked along a leading dimension that the canonical tensors don't have."""
    return {buffer for spec in specs if _stacked(spec) for buffer in spec.buffers}


def in_place(trainer_specs: Iterable[ShardSpec], engine_specs: Iterable[ShardSpec]) -> dict[str, str]:
    """The trainer's buffers of stacked experts, and which of the engine's holds on every rank the same boxes of the
    same tensors at the same places.

    Raises ConfigError, naming tensor and rank, where there is one that doesn't.
    """
    of_trainer = {spec.name: spec for spec in trainer_specs}
    pairs: dict[str, str] = {}
    compared: dict[tuple[int, int], tuple[Shards, Shards, set[tuple[str, str]]]] = {}  # by id of what layers share
    for theirs in filter(_stacked, engine_specs):
        mine = of_trainer[theirs.name]
        if mine.dtype != theirs.dtype:
            raise ConfigError(f"{mine.name}: the trainer's dtype {mine.dtype} is not the engine's {theirs.dtype}")
        held, needed = Shards.of(mine.shards), Shards.of(theirs.shards)
        key = id(held.replicas), id(needed.replicas)
        if key not in compared:
            compared[key] = held, needed, _compare(mine.name, held, needed)
        for a, b in sorted(compared[key][2]):
            pair = held.prefix + a, needed.prefix + b
            if pairs.setdefault(*pair) != pair[1]:
                raise ConfigError(f"{mine.name}: what {pair[0]} holds lies in {pairs[pair[0]]} and in {pair[1]}")
    return pairs


def without(specs: Iterable[ShardSpec], buffers: Collection[str]) -> list[ShardSpec]:
    """The specs of tensors that lie in none of these buffers."""
    return [spec for spec in specs if not spec.buffers.intersection(buffers)]


def _stacked(spec: ShardSpec) -> bool:
    return any(len(same.offset) > len(same.start) for same in Shards.of(spec.shards).replicas)


def _compare(tensor: str, trainer: Shards, engine: Shards) -> set[tuple[str, str]]:
    """The pairs of buffers, without their prefixes, that hold the same on some rank."""
    held, needed = _by_rank(trainer.replicas), _by_rank(engine.replicas)
    pairs: set[tuple[str, str]] = set()
    for rank in sorted(held.keys() | needed.keys()):
        mine, theirs = held[rank], needed[rank]
        if [place[:3] for place in mine] != [place[:3] for place in theirs]:
            sides = (mine, trainer.prefix), (theirs, engine.prefix)
            told = (" and ".join(place.told(prefix) for place in places) or "nothing" for places, prefix in sides)
            raise ConfigError("{} on rank {}: the trainer has {}, the engine {}".format(tensor, rank, *told))
        pairs |= {(a.buffer, b.buffer) for a, b in zip(mine, theirs, strict=True)}
    return pairs


def _by_rank(replicas: Sequence[Replicas]) -> defaultdict[int, list[_Place]]:
    places: defaultdict[int, list[_Place]] = defaultdict(list)
    for same in sorted(replicas, key=lambda same: same[1:]):
        for rank in same.ranks:
            places[rank].append(_Place(same.start, same.stop, same.offset, same.buffer))
    return places
