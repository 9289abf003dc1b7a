"""Whether a node has room for what all of its ranks will keep in host memory. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rlhpc.memory.state import readable


@dataclass(frozen=True)
class HostNeed:
    """Bytes that a rank is going to take of its node's memory, and how many were free there before any rank did."""

    node: str
    offloaded: int  # the trainer's state while the engine generates
    copies: int  # of what a save in the background hasn't written yet
    free: int


def too_little_free(needs: Sequence[HostNeed]) -> str | None:
    """What is wrong with the first node that has too little for its ranks together, and the fix; None where all have
    enough. Ranks take theirs at different times, so that each alone would find room until the last ones don't."""
    nodes: dict[str, list[HostNeed]] = defaultdict(list)
    for need in needs:
        nodes[need.node].append(need)
    for node, ranks in nodes.items():
        offloaded, copies = sum(rank.offloaded for rank in ranks), sum(rank.copies for rank in ranks)
        free = min(rank.free for rank in ranks)
        if offloaded + copies <= free:
            continue
        parts, fixes = [], ["give the job more (cluster.memory_gib_per_node)"]
        if offloaded:
            parts.append(f"{readable(offloaded)} for the trainer's state while the engine generates")
            fixes.append("let parts stay on the GPU (actor_rollout_ref.actor.megatron.{param,optimizer}_offload=false)")
        if copies:
            parts.append(f"{readable(copies)} for copies of what a save has not written yet")
            fixes.append("set checkpoint.async_save=false")
        together = f"{len(ranks)} ranks together take" if len(ranks) > 1 else "its rank takes"
        told = f"{together} {' and '.join(parts)}, {readable(free)} are free"
        return f"host memory of {node}: {told}; {', or '.join(fixes)}"
    return None
