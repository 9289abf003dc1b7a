"""Coordinates against hand-worked grids and against Megatron's own rank generator."""

import itertools

import pytest

from rlhpc.errors import ConfigError
from rlhpc.layout.parallel import Coords, ParallelLayout


def test_coords_of_a_hand_worked_grid() -> None:
    # 16 ranks in two stages of 8: dense grid tp2 x cp1 x dp4, expert grid etp1 x ep4 x edp2.
    layout = ParallelLayout(tp=2, pp=2, cp=1, ep=4, etp=1, world_size=16)
    assert (layout.dp, layout.edp) == (4, 2)
    assert layout.coords(0) == Coords(tp=0, cp=0, dp=0, pp=0, etp=0, ep=0, edp=0)
    assert layout.coords(7) == Coords(tp=1, cp=0, dp=3, pp=0, etp=0, ep=3, edp=1)
    assert layout.coords(13) == Coords(tp=1, cp=0, dp=2, pp=1, etp=0, ep=1, edp=1)
    assert layout.ranks(pp=1, ep=1) == (9, 13)
    assert layout.ranks(tp=0, dp=3) == (6, 14)
    assert layout.ranks() == tuple(range(16))


@pytest.mark.parametrize(
    "sizes",
    [
        sizes
        for sizes in itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2, 4), (1, 2))
        if 16 % (sizes[0] * sizes[1] * sizes[2]) == 0 and 16 % (sizes[3] * sizes[4] * sizes[1]) == 0
    ],
)
def test_groups_equal_megatrons(sizes: tuple[int, ...]) -> None:
    from megatron.core.parallel_state import RankGenerator

    tp, pp, cp, ep, etp = sizes
    layout = ParallelLayout(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, world_size=16)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=tp, ep=1, dp=layout.dp, pp=pp, cp=cp, order=order)
    expert = RankGenerator(tp=etp, ep=ep, dp=layout.edp, pp=pp, cp=1, order=order)
    for generator, renamed in (
        (dense, {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}),
        (expert, {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}),
    ):
        for theirs, ours in renamed.items():
            others = [axis for axis in renamed.values() if axis != ours]
            for group in generator.get_ranks(theirs):
                first = layout.coords(group[0])
                assert layout.ranks(**{axis: getattr(first, axis) for axis in others}) == tuple(group)
                assert [getattr(layout.coords(rank), ours) for rank in group] == list(range(len(group)))


def test_indivisible_world_names_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"tp=3 \* cp=1 \* pp=2 = 6 must divide the 8 ranks; choose tp from 1, 2, 4"):
        ParallelLayout(tp=3, pp=2, cp=1, ep=1, etp=1, world_size=8)
    with pytest.raises(ConfigError, match=r"etp=2 \* ep=8 .* = 16 must divide the 8 ranks; .* ep from 1, 2, 4$"):
        ParallelLayout(tp=1, pp=1, cp=1, ep=8, etp=2, world_size=8)
    with pytest.raises(ConfigError, match="ep=0 must be at least 1"):
        ParallelLayout(tp=1, pp=1, cp=1, ep=0, etp=1, world_size=8)
