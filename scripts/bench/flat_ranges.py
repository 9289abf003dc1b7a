"""Which part of the optimizer's state each rank holds under Megatron's distributed optimizer, worked out without it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import lcm, prod
from operator import add, sub

from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import Shards, ShardSpec
from rlhpc.reshard.flat import FlatRange, flat_specs

PARAM_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128  # elements; Megatron-core 0.16.1, param_and_grad_buffer.py

Grid = tuple[str, tuple[int, ...]]  # "experts" and (etp, ep, pp), or "dense" and (tp, pp)


def distributed_ranges(specs: Iterable[ShardSpec], layout: ParallelLayout) -> Iterator[FlatRange]:
    """The parameters of a place in the model-parallel grids lie one after the other, the last first, in one buffer, of
    which each of the place's data-parallel ranks updates an equal part."""
    for (grid, place), parameters in _parameters(specs, layout).items():
        axes = ("etp", "ep", "pp") if grid == "experts" else ("tp", "pp")
        ranks = layout.ranks(**dict(zip(axes, place, strict=True)))
        begins, end = {}, 0
        for name, shape in reversed(parameters.items()):
            begins[name] = _padded(end, PARAM_ALIGNMENT)
            end = begins[name] + prod(shape)
        part = _padded(end, lcm(len(ranks), BUCKET_ALIGNMENT)) // len(ranks)
        for name, begin in begins.items():
            size = prod(parameters[name])
            for index in range(begin // part, -(-(begin + size) // part)):
                start, stop = max(index * part - begin, 0), min((index + 1) * part - begin, size)
                yield FlatRange(ranks[index], name, parameters[name], start, stop)


def held_specs(specs: Iterable[ShardSpec], ranges: Iterable[FlatRange], rank: int) -> list[ShardSpec]:
    """Of one rank alone: what `ranges` say that it holds of each tensor."""
    own = (ShardSpec(spec.name, spec.shape, spec.dtype, tuple(spec.on(rank))) for spec in specs)
    return flat_specs(own, [held for held in ranges if held.rank == rank])


def _parameters(specs: Iterable[ShardSpec], layout: ParallelLayout) -> dict[Grid, dict[str, tuple[int, ...]]]:
    """Local shapes by parameter, in the model's order, at each place."""
    coords = [layout.coords(rank) for rank in range(layout.world_size)]
    places: dict[tuple[str, tuple[int, ...]], list[tuple[int, ...]]] = {}
    found: dict[Grid, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for spec in specs:
        shards = Shards.of(spec.shards)
        for ranks, start, stop, buffer, offset in shards.replicas:
            name = shards.prefix + buffer
            grid = "experts" if ".experts." in name else "dense"
            if (key := (grid, ranks)) not in places:
                at = [coords[rank] for rank in ranks]
                places[key] = sorted({(c.etp, c.ep, c.pp) if grid == "experts" else (c.tp, c.pp) for c in at})
            extent = (1,) * (len(offset) - len(start)) + tuple(map(sub, stop, start))
            end = tuple(map(add, offset, extent))
            for place in places[key]:
                held = found[grid, place]
                held[name] = tuple(map(max, held.get(name, end), end))
    return found


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
