"""Compares what a destination holds with what the source holds, region by region, without moving either."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from rlhpc.errors import EngineError
from rlhpc.reshard.execute import Move, region
from rlhpc.reshard.plan import ReshardPlan, ShardCopy

_CHUNK = 1 << 20
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MULTIPLIER = 0x1E3779B97F4A7C15  # 2**64 / golden ratio, fitted into a positive int64


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """A 64-bit checksum of the bits and their order, as an int64 scalar on the tensor's device: the sum of
    all words, each times an odd number that depends on its place, modulo 2**64."""
    words = values.contiguous().view(_WORDS[values.element_size()]).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for begin in range(0, words.numel(), _CHUNK):  # in chunks: widened words take up to four times the space
        chunk = words[begin : begin + _CHUNK].to(torch.int64)
        places = torch.arange(begin, begin + chunk.numel(), dtype=torch.int64, device=values.device)
        total += (chunk * (places * _MULTIPLIER | 1)).sum()
    return total


def verify(
    plan: ReshardPlan,
    src_buffers: Mapping[str, torch.Tensor],
    dst_buffers: Mapping[str, torch.Tensor],
    rank: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Checks that every destination region holds, bit for bit, its source in the destination's dtype.

    Collective over the plan's ranks; one checksum per copy travels. Raises EngineError on all ranks together,
    naming tensor, rank and region of the first differences.
    """
    peers = range(dist.get_world_size(group) if dist.is_initialized() else 1)
    outgoing: dict[int, list[ShardCopy]] = {r: [] for r in peers}
    incoming: dict[int, list[ShardCopy]] = {r: [] for r in peers}
    for copy in plan.copies_of(rank):
        if copy.src_rank == rank:
            outgoing[copy.dst_rank].append(copy)
        if copy.dst_rank == rank:
            incoming[copy.src_rank].append(copy)
    device = next(iter((*src_buffers.values(), *dst_buffers.values()))).device
    with torch.no_grad():
        sent = _fingerprints(plan, src_buffers, outgoing, device, source=True)
        held = _fingerprints(plan, dst_buffers, incoming, device, source=False)
        expected = sent
        if dist.is_initialized():
            expected = torch.empty_like(held)
            send_sizes, receive_sizes = ([len(c) for c in side.values()] for side in (outgoing, incoming))
            dist.all_to_all_single(expected, sent, receive_sizes, send_sizes, group=group)
        copies = [copy for peer in peers for copy in incoming[peer]]
        lines = [_describe(copies[i]) for i in torch.nonzero(expected != held).flatten().tolist()]
    report = lines[:4] + [f"and {len(lines) - 4} more regions of rank {rank}"] * (len(lines) > 4)
    if dist.is_initialized():
        reports: list[list[str]] = [[] for _ in peers]
        dist.all_gather_object(reports, report, group=group)
        report = [line for each in reports for line in each]
    if report:
        raise EngineError("weights differ from the trainer's after a publish: " + "; ".join(report))


def _fingerprints(
    plan: ReshardPlan,
    buffers: Mapping[str, torch.Tensor],
    copies: Mapping[int, list[ShardCopy]],
    device: torch.device,
    *,
    source: bool,
) -> torch.Tensor:
    marks = []
    for copy in (copy for peer in copies.values() for copy in peer):
        move = Move.of(copy)
        if source:
            values = region(buffers[move.src_buffer], move.src_offset, move.src_extent)
            values = values.to(getattr(torch, plan.dst_dtypes[copy.tensor]))
        else:
            values = region(buffers[move.dst_buffer], move.dst_offset, move.dst_extent)
        marks.append(fingerprint(values))
    return torch.stack(marks) if marks else torch.empty(0, dtype=torch.int64, device=device)


def _describe(copy: ShardCopy) -> str:
    box = ", ".join(f"{a}:{b}" for a, b in zip(copy.start, copy.stop, strict=True))
    return f"{copy.tensor}[{box}] in {copy.dst_buffer} of rank {copy.dst_rank} (from rank {copy.src_rank})"
