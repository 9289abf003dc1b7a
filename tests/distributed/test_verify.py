"""Every kind of damage to published weights is caught, on all ranks, with the tensor, region and rank by name."""

from __future__ import annotations

import re

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.verify_ranks import DAMAGES

REGION = re.compile(r"(\S+)\[([\d:, ]+)\] in (\S+) of rank (\d)")
EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
# 8 heads of 4 over 4 ranks, 2 KV heads, 8 experts of width 8: two rows of gate and of up a rank, hidden size 16.
EXPECTED = {
    "expert swapped": [(EXPERT.format(1, e, x), "2:4, 0:16", 1) for e in (2, 5) for x in ("gate", "up")],
    "gate and up exchanged": [(EXPERT.format(0, 6, x), "0:2, 0:16", 0) for x in ("gate", "up")],
    "rows exchanged": [(EXPERT.format(2, 4, "down"), "0:16, 0:2", 0)],
    "bit flipped": [("lm_head.weight", "64:70, 0:16", 2)],
    "shard missing": [("model.layers.2.self_attn.o_proj.weight", "0:16, 24:32", 3)],
    "wrong KV head": [("model.layers.3.self_attn.k_proj.weight", "0:4, 0:16", 1)],
    "truncated instead of rounded": [("model.norm.weight", "0:16", 3)],
    "layers exchanged": [("model.layers.1.mlp.gate.weight", "0:8, 0:16", 2)],
}


@pytest.fixture(scope="module")
def reports() -> list[dict[str, str]]:
    return run_ranks("tests.distributed.verify_ranks:damage_and_verify", 4)


def regions(message: str) -> list[tuple[str, str, int]]:
    return sorted((tensor, box, int(rank)) for tensor, box, _, rank in REGION.findall(message))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str, reports: list[dict[str, str]]) -> None:
    for report in reports:
        assert report[damage].startswith("weights differ from the trainer's after a publish: ")
        assert regions(report[damage]) == sorted(EXPECTED[damage]), report[damage]


def test_a_late_bucket_is_caught(reports: list[dict[str, str]]) -> None:
    late = reports[2]["late regions"]
    assert late and not any(report["late regions"] for rank, report in enumerate(reports) if rank != 2)
    for report in reports:
        named = {(buffer, rank) for _, _, buffer, rank in REGION.findall(report["bucket late"])}
        assert named and named <= {(buffer, "2") for buffer in late}


def test_nothing_published_and_old_weights_are_caught_on_every_rank(reports: list[dict[str, str]]) -> None:
    for report in reports:
        for stage in ("before anything", "old against new"):
            assert {rank for _, _, rank in regions(report[stage])} == {0, 1, 2, 3}


def test_what_is_right_passes(reports: list[dict[str, str]]) -> None:
    for report in reports:
        assert report["first"] == report["second"] == report["mended"] == ""
