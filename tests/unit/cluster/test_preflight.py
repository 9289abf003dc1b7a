"""What a cluster would refuse, judged by what a real Slurm 22.05.8 said of itself (recorded/preflight_*.txt)."""

from pathlib import Path

import pytest

from rlhpc.cluster.preflight import Cluster, cautions, gpus, limits, minutes
from rlhpc.cluster.slurm import records
from rlhpc.config.schema import RunConfig

RECORDED = Path(__file__).parent / "recorded"


def recorded(name, key):
    return {
        fields[key]: fields for fields in records((RECORDED / f"preflight_{name}.txt").read_text()) if key in fields
    }


def cluster(enforce="", groups=None, **changed):
    """d1 to d4: 8 CPUs, 20000 MB, 4 GPUs each; d1 has a100 and ib, d2 h200 and ib, d4 is drained. Partitions: low,
    grace, high with all four and an hour; typed with d1, d2 and limits of its own; closed (inactive); asleep (down)."""
    lines = (line.partition("=") for line in (RECORDED / "preflight_config.txt").read_text().splitlines())
    config = {key.strip(): value.strip() for key, _, value in lines} | changed
    columns = ("Account", "Partition", "QOS", "DefaultQOS")
    rows = (RECORDED / "preflight_associations.txt").read_text().splitlines()
    return Cluster(
        config=config | {"AccountingStorageEnforce": enforce},
        partitions=recorded("partitions", "PartitionName"),
        nodes=recorded("nodes", "NodeName"),
        reservations=recorded("reservations", "ReservationName"),
        associations=[dict(zip(columns, row.split("|"), strict=True)) for row in rows] if enforce else None,
        groups=groups,
    )


def config(**changes):
    cfg = RunConfig()
    cfg.trainer.device = "cpu"
    for key, value in changes.items():
        section, _, name = key.partition("_")
        setattr(getattr(cfg, section), name, value)
    return cfg


def refused(cpus=4, on=None, **changes):
    return limits(config(**changes), on or cluster(), cpus)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cluster_partition": "high", "launch_time_min": 60, "trainer_nnodes": 4},
        {"cluster_memory_gib_per_node": 19.5, "trainer_device": "cuda", "trainer_n_gpus_per_node": 4},
        {"cluster_partition": "typed", "trainer_nnodes": 2, "cluster_account": "chem", "launch_time_min": 36 * 60},
        {"cluster_partition": "typed,low"},  # low will do
        {"cluster_constraint": "ib&h200"},
        {"cluster_constraint": "[a100*1&h200*1]", "trainer_nnodes": 2},  # alternatives are Slurm's to weigh
        {"cluster_nodelist": "d[1,3]", "trainer_nnodes": 2},
        {"cluster_reservation": "course"},
        {"cluster_account": "anything"},  # where nothing is enforced
    ],
    ids=str,
)
def test_accepted(changes):
    assert refused(**changes) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"cluster_partition": "hihg"},
            "cluster.partition=hihg is unknown; did you mean high? choose asleep, closed, grace, high, low, typed",
        ),
        (
            {"cluster_partition": "closed"},
            "cluster.partition=closed is in state INACTIVE and takes no jobs; "
            "choose another of asleep, closed, grace, high, low, typed",
        ),
        (
            {"launch_time_min": 61},
            "launch.time_min=61 exceeds MaxTime=60 min of partition low, where it would wait for ever; set at most 60: "
            "a run that reaches its limit saves and goes on in the next attempt",
        ),
        (
            {"launch_stop_lead_s": 3600},
            "launch.stop_lead_s=3600 leaves nothing of partition low's default time limit of 60 min; set "
            "launch.time_min, or a shorter lead",
        ),
        (
            {"trainer_nnodes": 9},
            "trainer.nnodes=9 exceeds the 4 nodes of partition low; set at most 4, or choose another partition",
        ),
        (
            {"cluster_partition": "typed", "trainer_nnodes": 3, "launch_time_min": 60},
            "trainer.nnodes=3 is outside MaxNodes=2 of partition typed; set 2",
        ),
        (
            {"cluster_partition": "typed", "launch_time_min": 60},
            "trainer.nnodes=1 is outside MinNodes=2 of partition typed; set 2",
        ),
        (
            {"cluster_partition": "typed", "trainer_nnodes": 2, "launch_time_min": 60, "cluster_account": "art"},
            "cluster.account=art may not use partition typed; choose chem, physics",
        ),
        (
            {"cluster_partition": "typed", "trainer_nnodes": 2},
            "launch.stop_lead_s=300 leaves nothing of partition typed's default time limit of 5 min; set "
            "launch.time_min, or a shorter lead",
        ),
        (
            {"cluster_memory_gib_per_node": 20},
            "cluster.memory_gib_per_node=20 exceeds what a node has: nodes of partition low have at most 19.5 GiB; "
            "set at most 19.5, or choose another partition",
        ),
        (
            {"cluster_partition": "typed", "trainer_nnodes": 2, "launch_time_min": 9, "cluster_memory_gib_per_node": 9},
            "cluster.memory_gib_per_node=9 exceeds what a node has: nodes of partition typed have at most 8 GiB; "
            "set at most 8, or choose another partition",
        ),
        (
            {"trainer_device": "cuda", "trainer_n_gpus_per_node": 8},
            "trainer.n_gpus_per_node=8 with trainer.device=cuda exceeds what a node has: nodes of partition low have "
            "at most 4 GPUs; set at most 4, or choose another partition",
        ),
        (
            {"cluster_constraint": "h100"},
            "cluster.constraint=h100: no node of partition low has h100; choose a100, h200, ib",
        ),
        (
            {"cluster_constraint": "ib", "trainer_nnodes": 3},
            "trainer.nnodes=3 exceeds the 2 nodes of partition low that nodelist, exclude and constraint leave of its "
            "4; set at most 2, or choose another partition (grace, high would do)",
        ),
        (
            {"cluster_exclude": "d[1-2]", "trainer_nnodes": 3},
            "trainer.nnodes=3 exceeds the 2 nodes of partition low that nodelist, exclude and constraint leave of its "
            "4; set at most 2, or choose another partition (grace, high would do)",
        ),
        (
            {"cluster_nodelist": "d[4-5]", "trainer_nnodes": 2},
            "cluster.nodelist=d[4-5]: not in partition low: d5; choose among d1, d2, d3, d4",
        ),
        (
            {"cluster_nodelist": "d[1-2]"},
            "cluster.nodelist=d[1-2] names 2 nodes, all of which Slurm would give, but trainer.nnodes=1; set "
            "cluster.nodes=2, or name fewer",
        ),
        (
            {"cluster_nodelist": "d1", "cluster_exclude": "d[1-2]"},
            "cluster.exclude=d[1-2] excludes d1 of cluster.nodelist",
        ),
        ({"cluster_reservation": "cours"}, "cluster.reservation=cours is unknown; choose course, others"),
        (
            {"cluster_reservation": "course", "trainer_nnodes": 2},
            "trainer.nnodes=2 exceeds the 1 nodes of reservation course; set at most 1",
        ),
    ],
    ids=str,
)
def test_refused_alone(changes, line):
    assert refused(**changes) == [line]


def test_cpus_are_named_as_they_were_asked_for():
    assert refused(cpus=9, cluster_cpus_per_node=9) == [
        "cluster.cpus_per_node=9 exceeds what a node has: nodes of partition low have at most 8 CPUs; set at most 8, "
        "or choose another partition"
    ]
    [line] = refused(cpus=10, trainer_n_gpus_per_node=8)
    assert line.startswith(
        "cluster.cpus_per_node=null asks for 10 CPUs (8 ranks * cpus_per_rank, and 2), which exceeds"
    )
    typed = {"cluster_partition": "typed", "trainer_nnodes": 2, "launch_time_min": 60}
    assert refused(cpus=6, **typed) == []
    assert "nodes of partition typed have at most 6 CPUs" in refused(cpus=7, **typed)[0]  # MaxCPUsPerNode


def test_a_cluster_without_reservations():
    bare = cluster()
    bare.reservations.clear()
    unknown = "cluster.reservation=course is unknown; there are none, set null"
    assert refused(on=bare, cluster_reservation="course") == [unknown]


def test_unequal_nodes_limit_by_the_smallest_that_is_needed():
    mixed = cluster()
    mixed.nodes["d2"]["CPUTot"], mixed.nodes["d3"]["CPUTot"], mixed.nodes["d4"]["CPUTot"] = "6", "4", "2"
    assert refused(cpus=6, on=mixed, trainer_nnodes=2) == []
    [line] = refused(cpus=6, on=mixed, trainer_nnodes=3)
    assert "have at most 8 CPUs, and 3 of them no more than 4 CPUs; set at most 4" in line


def test_several_at_once():
    assert len(refused(cpus=20, launch_time_min=100, trainer_device="cuda", trainer_n_gpus_per_node=6)) == 3


def test_accounts_and_qos_are_judged_where_slurm_enforces_them():
    enforcing = cluster(enforce="associations,limits,qos")
    assert refused(on=enforcing, cluster_account="physics", cluster_qos="long") == []
    assert refused(on=enforcing, cluster_account="art") == [
        "cluster.account=art is not yours on this cluster; choose physics, root"
    ]
    assert refused(on=enforcing, cluster_account="root", cluster_qos="long") == [
        "cluster.qos=long is not yours; choose normal"
    ]
    nobody = cluster(enforce="associations")
    nobody.associations.clear()
    [line] = refused(on=nobody)
    assert "has no account on this cluster; ask its administrators" in line


def test_partitions_of_other_groups():
    assert refused(on=cluster(groups=frozenset({"staff"})), cluster_partition="asleep") == [
        "cluster.partition=asleep is for the groups wheel, none of which is yours"
    ]
    assert refused(on=cluster(groups=frozenset({"staff", "wheel"})), cluster_partition="asleep") == []
    assert refused(on=cluster(groups=frozenset())) == []  # low is for all


def test_versions_without_overlapping_steps():
    assert refused(on=cluster(SLURM_VERSION="20.11.0")) == []
    [line] = refused(on=cluster(SLURM_VERSION="20.02.7"))
    assert line.startswith("Slurm 20.02.7 is too old: srun --overlap came with 20.11")


def test_cautions():
    assert list(cautions(config(trainer_nnodes=3), cluster())) == []
    assert list(cautions(config(trainer_nnodes=4), cluster())) == [
        "partition low: 3 of its 4 nodes are up, the job waits for more"
    ]
    assert list(cautions(config(cluster_partition="asleep"), cluster())) == [
        "partition asleep: 0 of its 1 nodes are up, the job waits for more",
        "partition asleep is down, the job waits until it comes up",
        "partition asleep suspends preempted jobs, whose GPU memory stays allocated meanwhile",
    ]
    [line] = cautions(config(), cluster(ProctrackType="proctrack/linuxproc"))
    assert line.startswith("ProctrackType=proctrack/linuxproc: processes that detach themselves outlive their job")


def test_array_sizes():
    assert cluster().max_array_size == 1000  # tasks 0 to 1000 would need a MaxArraySize of 1002
    assert cluster(MaxArraySize="5").max_array_size == 4


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("01:00:00", 60), ("1-12:00:00", 2160), ("00:00:30", 0.5), ("UNLIMITED", None), ("NONE", None)],
)
def test_minutes(limit, expected):
    assert minutes(limit) == expected


@pytest.mark.parametrize(
    ("gres", "expected"),
    [
        ("gpu:4", 4),
        ("gpu:h100:8(S:0-1)", 8),
        ("gpu:a100:4(S:0),gpu:h100:2(S:1),nvme:1", 6),
        ("(null)", 0),
        ("shard:16", 0),
    ],
)
def test_gpus(gres, expected):
    assert gpus(gres) == expected
