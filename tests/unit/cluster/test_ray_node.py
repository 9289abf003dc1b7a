"""What a node is told, and what it refuses before Ray starts."""

import json
from pathlib import Path

import pytest

from rlhpc.cluster.limits import Limits
from rlhpc.cluster.placement import Placement
from rlhpc.cluster.ray_node import RaySpec, object_store_bytes
from rlhpc.errors import ConfigError

MIB = 1024**2
SPEC = RaySpec(
    num_nodes=2,
    ranks_per_node=4,
    cpus_per_rank=2,
    gpus_per_node=4,
    object_store_bytes=256 * MIB,
    start_timeout_s=300.0,
    network_interface="10.1.0.0/16",
    temp_root="/tmp",
    stop_lead_s=120.0,
)


def test_the_spec_comes_back_as_it_was_written(tmp_path: Path) -> None:
    SPEC.write(tmp_path)
    assert RaySpec.read(tmp_path) == SPEC


def test_a_missing_or_foreign_spec_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.json is missing; start the run with launch/run\.py"):
        RaySpec.read(tmp_path)
    (tmp_path / "cluster.json").write_text(json.dumps({"num_nodes": 2, "hosts": 3}))
    with pytest.raises(ConfigError, match=r"another version of rlhpc .*'hosts'.*submit the run again"):
        RaySpec.read(tmp_path)


@pytest.mark.parametrize(
    ("memory_mib", "shm_mib", "expected_mib"),
    [
        (64000, 32000, 256),  # as asked
        (800, 32000, 240),  # 30 % of the memory limit
        (64000, 300, 90),  # 30 % of what /dev/shm has
    ],
)
def test_the_object_store_fits_the_node(memory_mib: int, shm_mib: int, expected_mib: int) -> None:
    assert object_store_bytes(SPEC, Limits(8, memory_mib * MIB, shm_mib * MIB)) == expected_mib * MIB


def test_a_node_without_room_for_an_object_store_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.2 GiB of memory .*needs 80 MiB: raise cluster\.memory_gib_per_node"):
        object_store_bytes(SPEC, Limits(8, 200 * MIB, 32000 * MIB))


def test_ranks_fill_the_nodes_in_order() -> None:
    placement = Placement(("10.1.0.3", 10009), ranks_per_node=4, num_nodes=2)
    names = [f"rlhpc_node_{node_id}" for node_id in (0, 0, 0, 0, 1, 1, 1, 1)]
    assert [placement.resources(rank) for rank in range(8)] == [{name: 1.0} for name in names]
    assert Placement(("127.0.0.1", 4711), ranks_per_node=8).resources(5) == {}
