"""The direct sink's check of a layout against vLLM's parameters, on a layout small enough to see whole."""

from dataclasses import replace

import pytest

from rlhpc.backends.vllm.sinks import check_parameters, whole_tensors
from rlhpc.errors import EngineError
from rlhpc.layout.spec import Shard, ShardSpec
from rlhpc.reshard.plan import plan

# Two ranks: five tokens padded to eight, so that rank 1 has one row and three of padding; two stacked experts of
# 4 x 2, each split by rows.
EMBED = ShardSpec(
    "model.embed_tokens.weight", (5, 2), "float32",
    (Shard(0, (0, 0), (4, 2), "embed", (0, 0)), Shard(1, (4, 0), (5, 2), "embed", (0, 0))),
)  # fmt: skip
ROWS = [((2 * rank, 0), (2 * rank + 2, 2)) for rank in (0, 1)]
EXPERTS = [
    ShardSpec(
        f"experts.{e}", (4, 2), "float32",
        tuple(Shard(rank, start, stop, "w", (e, 0, 0)) for rank, (start, stop) in enumerate(ROWS)),
    )
    for e in (0, 1)
]  # fmt: skip
SHAPES = {"embed": (4, 2), "w": (2, 2, 2)}


def test_a_layout_that_fits_names_the_padded_parameters() -> None:
    assert check_parameters([EMBED, *EXPERTS], 0, SHAPES) == []
    assert check_parameters([EMBED, *EXPERTS], 1, SHAPES) == ["embed"]


def test_a_rank_may_hold_nothing_but_padding() -> None:
    short = replace(EMBED, shape=(4, 2), shards=EMBED.shards[:1])
    assert check_parameters([short, *EXPERTS], 1, SHAPES) == ["embed"]


@pytest.mark.parametrize(
    ("specs", "shapes", "message"),
    [
        ([EMBED], SHAPES, r"different parameters: only in the layout \[\], only in vLLM \['w'\]"),
        ([EMBED, *EXPERTS], {"embed": (4, 2)}, r"only in the layout \['w'\], only in vLLM \[\]"),
        ([EMBED, *EXPERTS], SHAPES | {"w": (2, 2, 1)}, r"w has shape \(2, 2, 1\); experts.0 ends at \(1, 2, 2\) in it"),
        ([EMBED, *EXPERTS], SHAPES | {"w": (4, 2)}, r"w has shape \(4, 2\); experts.0 ends at \(1, 2, 2\)"),
        ([EMBED, EXPERTS[0]], SHAPES, r"fills 4 of the 8 elements of vLLM's parameter w \(2, 2, 2\) on rank 0"),
    ],
    ids=["unknown to the layout", "unknown to vLLM", "outside", "dimensions", "an expert left over"],
)
def test_a_layout_that_does_not_fit_is_refused(specs: list[ShardSpec], shapes: dict, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        check_parameters(specs, 0, shapes)


def test_whole_tensors_reach_every_rank() -> None:
    whole = whole_tensors({"model.embed_tokens.weight": (5, 2), "experts.1": (4, 2)}, "float32", 2)
    copies = plan([EMBED, *EXPERTS], whole).copies
    moved = {(c.tensor, c.src_rank, c.dst_rank, c.start, c.stop, c.dst_offset) for c in copies}
    assert moved == {
        (name, src, dst, start, stop, start)
        for name, parts in {
            "model.embed_tokens.weight": [((0, 0), (4, 2)), ((4, 0), (5, 2))],
            "experts.1": [((0, 0), (2, 2)), ((2, 0), (4, 2))],
        }.items()
        for src, (start, stop) in enumerate(parts)
        for dst in (0, 1)
    }
    assert {c.dst_buffer for c in copies} == {"model.embed_tokens.weight", "experts.1"}
