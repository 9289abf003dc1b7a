"""Where a rank stands in the trainer's two process grids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from rlhpc.errors import ConfigError


class Coords(NamedTuple):
    """A rank's index along every axis of both grids; `pp` is common to them."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@dataclass(frozen=True)
class ParallelLayout:
    """Two grids over the same ranks, first axis fastest: attention and dense layers use (tp, cp, dp, pp),
    experts use (etp, ep, edp, pp). This is Megatron-core 0.16.1's default order "tp-cp-ep-dp-pp"
    (parallel_state.RankGenerator).

    Raises ConfigError where a grid doesn't divide `world_size`.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    world_size: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp", "ep", "etp", "world_size"):
            if (size := getattr(self, axis)) < 1:
                raise ConfigError(f"{axis}={size} must be at least 1")
        for axes in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
            sizes = {axis: getattr(self, axis) for axis in axes}
            if self.world_size % prod(sizes.values()):
                raise ConfigError(self._indivisible(sizes))

    def _indivisible(self, sizes: Mapping[str, int]) -> str:
        """The first axis that breaks the product is the one to change: the later ones are usually given (pp
        last)."""
        product = " * ".join(f"{axis}={size}" for axis, size in sizes.items())
        fixes = []
        for axis, size in sizes.items():
            rest = prod(sizes.values()) // size
            if size > 1 and self.world_size % rest == 0:
                fixes.append(f"{axis} from {', '.join(map(str, divisors(self.world_size // rest)))}")
        choose = f"choose {' or '.join(fixes)}" if fixes else "lower at least two of them"
        return f"{product} = {prod(sizes.values())} must divide the {self.world_size} ranks; {choose}"

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        return self.world_size // (self.etp * self.ep * self.pp)

    def coords(self, rank: int) -> Coords:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside 0..{self.world_size - 1}")
        per_stage = self.world_size // self.pp
        pp, inner = divmod(rank, per_stage)
        tp, cp, dp = inner % self.tp, inner // self.tp % self.cp, inner // (self.tp * self.cp)
        etp, ep, edp = inner % self.etp, inner // self.etp % self.ep, inner // (self.etp * self.ep)
        return Coords(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, edp=edp)

    def ranks(self, **fixed: int) -> tuple[int, ...]:
        """Ranks, ascending, whose coordinates equal the given ones: `ranks(pp=0, dp=1)`; all ranks if none is
        given."""
        if unknown := set(fixed) - set(Coords._fields):
            raise ValueError(f"unknown axes {sorted(unknown)}; axes are {', '.join(Coords._fields)}")
        return tuple(
            rank
            for rank in range(self.world_size)
            if all(getattr(self.coords(rank), axis) == index for axis, index in fixed.items())
        )
