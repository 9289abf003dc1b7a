"""Where the ranks of a world run and where they meet."""

from __future__ import annotations

from dataclasses import dataclass


def node_resource(node_id: int) -> str:
    """The custom resource that only node `node_id` of an attempt offers, one unit a rank."""
    return f"rlhpc_node_{node_id}"


@dataclass(frozen=True)
class Placement:
    """Rank r runs on node r // ranks_per_node. `master` is where rank 0's store listens: an address and a port of node
    0. `num_nodes` 0: everything on this machine, nodes aren't told apart."""

    master: tuple[str, int]
    ranks_per_node: int
    num_nodes: int = 0

    def resources(self, rank: int) -> dict[str, float]:
        """What rank `rank` asks of Ray so that it comes to its node."""
        return {node_resource(rank // self.ranks_per_node): 1.0} if self.num_nodes else {}
