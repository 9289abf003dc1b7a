"""What a cluster would refuse, or let wait for ever, told before anything is submitted: value, limit, fix.

sbatch itself takes jobs that can never start (more nodes than the partition has, a longer time than it allows), and its
--test-only does too (22.05). Standard library only.
"""

from __future__ import annotations

import getpass
import grp
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from rlhpc.cluster import slurm
from rlhpc.config.schema import RunConfig

OLDEST_SLURM = (20, 11)  # the first with srun --overlap
DEFAULT_MAX_ARRAY_SIZE = 1001
AWAY = {"DOWN", "DRAIN", "FAIL", "FAILING", "FUTURE", "NOT_RESPONDING", "POWERED_DOWN", "UNKNOWN"}  # states of nodes

Fields = Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """What the controller says of itself, by Slurm's own names; `associations` None: not asked, or no accounting."""

    config: Fields
    partitions: Mapping[str, Fields]
    nodes: Mapping[str, Fields]
    reservations: Mapping[str, Fields] = field(default_factory=dict)
    associations: list[dict[str, str]] | None = None
    groups: frozenset[str] | None = None  # of the user; None: root, whom every partition lets in

    @classmethod
    def ask(cls) -> Cluster:
        """Raises SlurmError when the controller doesn't answer, or Slurm's commands aren't here."""
        config = slurm.config()
        enforced = "associations" in config.get("AccountingStorageEnforce", "")
        return cls(
            config=config,
            partitions=slurm.partitions(),
            nodes=slurm.nodes(),
            reservations=slurm.reservations(),
            associations=slurm.associations(getpass.getuser(), config["ClusterName"]) if enforced else None,
            groups=frozenset(_group_names()) if os.getuid() else None,
        )

    @property
    def max_array_size(self) -> int:
        """How many tasks an array may have: their numbers stay below MaxArraySize."""
        return max(1, int(self.config.get("MaxArraySize", DEFAULT_MAX_ARRAY_SIZE)) - 1)

    @property
    def elsewhere(self) -> bool:
        """Whether jobs may run on another machine than this."""
        here = {socket.gethostname(), socket.gethostname().partition(".")[0]}
        return any(node.get("NodeHostName") not in here for node in self.nodes.values())

    def default_partition(self) -> str | None:
        return next((name for name, fields in self.partitions.items() if fields.get("Default") == "YES"), None)

    def members(self, partition: Fields) -> dict[str, Fields]:
        """A partition's nodes, by name."""
        names = slurm.expand_nodelist(partition.get("Nodes", "")) if partition.get("Nodes") != "(null)" else []
        return {name: self.nodes[name] for name in names if name in self.nodes}


def limits(cfg: RunConfig, cluster: Cluster, cpus_per_node: int) -> list[str]:
    """Everything in `cfg` that the cluster can't give. Of several partitions (a,b) one must be able to."""
    problems = [*too_old(cluster), *_account(cfg, cluster), *_reservation(cfg, cluster)]
    names = cfg.cluster.partition.split(",") if cfg.cluster.partition else [cluster.default_partition()]
    refusals = [list(_partition(cfg, cluster, name, cpus_per_node)) for name in names]
    return problems if [] in refusals else problems + [line for lines in refusals for line in lines]


def cautions(cfg: RunConfig, cluster: Cluster) -> Iterator[str]:
    """What may go wrong or take long without being wrong."""
    tracking = cluster.config.get("ProctrackType", "")
    if tracking and tracking != "proctrack/cgroup":
        yield f"ProctrackType={tracking}: processes that detach themselves outlive their job on this cluster"
    names = cfg.cluster.partition.split(",") if cfg.cluster.partition else [cluster.default_partition() or ""]
    for name in names:
        partition = cluster.partitions.get(name, {})
        members = cluster.members(partition)
        up = [node for node in members.values() if not AWAY & states(node)]
        if len(up) < cfg.trainer.nnodes <= len(members):
            yield f"partition {name}: {len(up)} of its {len(members)} nodes are up, the job waits for more"
        if partition.get("State") == "DOWN":
            yield f"partition {name} is down, the job waits until it comes up"
        if "SUSPEND" in partition.get("PreemptMode", ""):
            yield f"partition {name} suspends preempted jobs, whose GPU memory stays allocated meanwhile"


def _partition(cfg: RunConfig, cluster: Cluster, name: str | None, cpus: int) -> Iterator[str]:
    known = ", ".join(sorted(cluster.partitions))
    if name is None:
        yield f"cluster.partition=null, but this cluster has no default partition; choose {known}"
        return
    if (partition := cluster.partitions.get(name)) is None:
        near = get_close_matches(name, cluster.partitions, n=1)
        yield f"cluster.partition={name} is unknown; {f'did you mean {near[0]}? ' if near else ''}choose {known}"
        return
    if (state := partition.get("State", "UP")) not in ("UP", "DOWN"):
        yield f"cluster.partition={name} is in state {state} and takes no jobs; choose another of {known}"
    yield from _allowed(cfg, cluster, name, partition)
    yield from _time(cfg, name, partition)
    yield from _nodes(cfg, cluster, name, partition, cpus)


def _allowed(cfg: RunConfig, cluster: Cluster, name: str, partition: Fields) -> Iterator[str]:
    groups = _listed(partition.get("AllowGroups"))
    if groups and cluster.groups is not None and not groups & cluster.groups:
        yield f"cluster.partition={name} is for the groups {', '.join(sorted(groups))}, none of which is yours"
    for key, value, allow, deny in (
        ("account", cfg.cluster.account, "AllowAccounts", "DenyAccounts"),
        ("qos", cfg.cluster.qos, "AllowQos", "DenyQos"),
    ):
        allowed, denied = _listed(partition.get(allow)), _listed(partition.get(deny))
        if value and (value in denied or (allowed and value not in allowed)):
            fix = f"choose {', '.join(sorted(allowed))}" if allowed else "choose another"
            yield f"cluster.{key}={value} may not use partition {name}; {fix}"


def _time(cfg: RunConfig, name: str, partition: Fields) -> Iterator[str]:
    asked, lead_min = cfg.launch.time_min, cfg.launch.stop_lead_s / 60
    longest = minutes(partition.get("MaxTime", "UNLIMITED"))
    if asked and longest is not None and asked > longest:
        yield (
            f"launch.time_min={asked} exceeds MaxTime={longest:g} min of partition {name}, where it would wait for "
            f"ever; set at most {longest:g}: a run that reaches its limit saves and goes on in the next attempt"
        )
    default = minutes(partition.get("DefaultTime", "NONE")) or longest
    if not asked and default is not None and lead_min >= default:
        yield (
            f"launch.stop_lead_s={cfg.launch.stop_lead_s} leaves nothing of partition {name}'s default time limit of "
            f"{default:g} min; set launch.time_min, or a shorter lead"
        )


def _nodes(cfg: RunConfig, cluster: Cluster, name: str, partition: Fields, cpus: int) -> Iterator[str]:
    nodes, members = cfg.trainer.nnodes, cluster.members(partition)
    for key, sign in (("MaxNodes", 1), ("MinNodes", -1)):
        if (limit := _number(partition.get(key))) is not None and sign * nodes > sign * limit:
            yield f"trainer.nnodes={nodes} is outside {key}={limit} of partition {name}; set {limit}"
            return
    eligible, problems = _chosen(cfg, name, members)
    yield from problems
    if problems:
        return
    if len(eligible) < nodes:
        left = f" that nodelist, exclude and constraint leave of its {len(members)}" * (len(eligible) < len(members))
        yield (
            f"trainer.nnodes={nodes} exceeds the {len(eligible)} nodes of partition {name}{left}; set at most "
            f"{len(eligible)}, or choose another partition{_larger(cluster, nodes, name)}"
        )
        return
    for key, value, of_node, unit, most in _sizes(cfg, partition, cpus):
        able = [of_node(fields) for fields in eligible.values()]
        if most is not None:
            able = [min(size, most) for size in able]
        if value and sum(size >= value for size in able) < nodes:
            reach = sorted(able, reverse=True)[nodes - 1]
            have = f"nodes of partition {name} have at most {max(able):g}{unit}"
            if reach < max(able):
                have += f", and {nodes} of them no more than {reach:g}{unit}"
            yield f"{key} exceeds what a node has: {have}; set at most {reach:g}, or choose another partition"


def _sizes(
    cfg: RunConfig, partition: Fields, cpus: int
) -> tuple[tuple[str, float, Callable[[Fields], float], str, float | None], ...]:
    """What is asked of a node: name, value, what a node has, unit, the partition's own limit."""
    ranks, memory = cfg.trainer.n_gpus_per_node, cfg.cluster.memory_gib_per_node
    told = f"cluster.cpus_per_node={cpus}"
    if cfg.cluster.cpus_per_node is None:
        told = f"cluster.cpus_per_node=null asks for {cpus} CPUs ({ranks} ranks * cpus_per_rank, and 2), which"
    most_memory = _number(partition.get("MaxMemPerNode"))
    return (
        (told, cpus, lambda node: int(node.get("CPUTot", 0)), " CPUs", _number(partition.get("MaxCPUsPerNode"))),
        (
            f"cluster.memory_gib_per_node={memory}",
            memory or 0,
            lambda node: _gib(int(node.get("RealMemory", 0)) - int(node.get("MemSpecLimit", 0))),
            " GiB",
            None if most_memory is None else _gib(most_memory),
        ),
        (
            f"trainer.n_gpus_per_node={ranks} with trainer.device=cuda",
            ranks if cfg.trainer.device == "cuda" else 0,
            lambda node: gpus(node.get("Gres", "")),
            " GPUs",
            None,
        ),
    )


def _chosen(cfg: RunConfig, name: str, members: Mapping[str, Fields]) -> tuple[Mapping[str, Fields], list[str]]:
    """The nodes that nodelist, exclude and constraint leave, and what is wrong with these three."""
    problems = []
    only, without = (slurm.expand_nodelist(v or "") for v in (cfg.cluster.nodelist, cfg.cluster.exclude))
    if unknown := [node for node in only if node not in members]:
        what = f"cluster.nodelist={cfg.cluster.nodelist}: not in partition {name}: {', '.join(unknown)}"
        problems.append(f"{what}; choose among {', '.join(list(members)[:8])}{', ...' * (len(members) > 8)}")
    if len(only) > cfg.trainer.nnodes:
        problems.append(
            f"cluster.nodelist={cfg.cluster.nodelist} names {len(only)} nodes, all of which Slurm would give, but "
            f"trainer.nnodes={cfg.trainer.nnodes}; set cluster.nodes={len(only)}, or name fewer"
        )
    if both := sorted(set(only) & set(without)):
        problems.append(f"cluster.exclude={cfg.cluster.exclude} excludes {', '.join(both)} of cluster.nodelist")
    wanted = set(re.findall(r"[A-Za-z][\w.-]*", re.sub(r"\*\d+", "", cfg.cluster.constraint or "")))
    offered = {feature for node in members.values() for feature in _listed(node.get("AvailableFeatures"))}
    if missing := sorted(wanted - offered):
        problems.append(
            f"cluster.constraint={cfg.cluster.constraint}: no node of partition {name} has {', '.join(missing)}; "
            f"choose {', '.join(sorted(offered)) or 'null, they have no features'}"
        )
    left = {node: fields for node, fields in members.items() if node not in without}
    if wanted and not re.search(r"[|\[(]", cfg.cluster.constraint or ""):  # alternatives are left to Slurm
        left = {node: fields for node, fields in left.items() if wanted <= _listed(fields.get("AvailableFeatures"))}
    return left, problems


def _account(cfg: RunConfig, cluster: Cluster) -> Iterator[str]:
    if (own := cluster.associations) is None:
        return
    accounts = sorted({row["Account"] for row in own})
    if not accounts:
        yield f"user {getpass.getuser()} has no account on this cluster; ask its administrators for one"
    elif cfg.cluster.account and cfg.cluster.account not in accounts:
        yield f"cluster.account={cfg.cluster.account} is not yours on this cluster; choose {', '.join(accounts)}"
    elif cfg.cluster.qos and "qos" in cluster.config.get("AccountingStorageEnforce", ""):
        rows = [row for row in own if cfg.cluster.account in (None, row["Account"])]
        offered = sorted({qos for row in rows for qos in row["QOS"].split(",") if qos})
        if cfg.cluster.qos not in offered:
            yield f"cluster.qos={cfg.cluster.qos} is not yours; choose {', '.join(offered) or 'null, you have none'}"


def _reservation(cfg: RunConfig, cluster: Cluster) -> Iterator[str]:
    if (name := cfg.cluster.reservation) is None:
        return
    if (found := cluster.reservations.get(name)) is None:
        known = ", ".join(sorted(cluster.reservations))
        yield f"cluster.reservation={name} is unknown; {f'choose {known}' if known else 'there are none, set null'}"
        return
    users, size = _listed(found.get("Users")), int(found.get("NodeCnt", 0))
    if users and getpass.getuser() not in users and not _listed(found.get("Accounts")):
        yield f"cluster.reservation={name} is for {', '.join(sorted(users))}, not for {getpass.getuser()}"
    if size and cfg.trainer.nnodes > size:
        yield f"trainer.nnodes={cfg.trainer.nnodes} exceeds the {size} nodes of reservation {name}; set at most {size}"


def too_old(cluster: Cluster) -> Iterator[str]:
    """Whether the cluster is too old for rlhpc."""
    known = cluster.config.get("SLURM_VERSION", "")
    if (found := re.match(r"(\d+)\.(\d+)", known)) and (int(found[1]), int(found[2])) < OLDEST_SLURM:
        yield f"Slurm {known} is too old: srun --overlap came with 20.11; run without Slurm (launch=local)"


def minutes(limit: str) -> float | None:
    """A limit as Slurm prints it (1-12:00:00, 01:30:00); None for UNLIMITED and NONE."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", limit)
    if not found:
        return None
    days, hours, mins, seconds = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + mins + seconds / 60


def gpus(gres: str) -> int:
    """GPUs of a node by its Gres: gpu:4, gpu:h100:8(S:0-1), several types added up."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^,:(]+)?:(\d+)", gres))


def _larger(cluster: Cluster, nodes: int, besides: str) -> str:
    others = {name: len(cluster.members(fields)) for name, fields in cluster.partitions.items() if name != besides}
    fit = [name for name, size in others.items() if size >= nodes]
    return f" ({', '.join(sorted(fit))} would do)" if fit else ""


def states(node: Fields) -> set[str]:
    """A node's, such as IDLE and DRAIN."""
    state = node.get("State", "")
    return set(re.findall(r"[A-Z_]+", state)) | ({"NOT_RESPONDING"} if "*" in state else set())


def _listed(value: str | None) -> set[str]:
    """A list as Slurm prints it; nothing for ALL, (null) and the like."""
    return set() if value in (None, "", "ALL", "(null)", "N/A", "none") else set(re.split(r"[,&|]", value))


def _gib(mib: int) -> float:
    """In tenths, rounded down, so that what is advised fits."""
    return mib * 10 // 1024 / 10


def _number(value: str | None) -> int | None:
    return int(value) if value and value.isdigit() else None


def _group_names() -> Iterator[str]:
    for group in os.getgroups():
        try:
            yield grp.getgrgid(group).gr_name
        except KeyError:
            continue  # a group without a name can't be in Slurm's list
