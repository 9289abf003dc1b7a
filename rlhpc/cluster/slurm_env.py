"""What a process learns from Slurm's variables, and an environment without them. Standard library only."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from rlhpc.errors import ConfigError


@dataclass(frozen=True)
class SlurmEnv:
    """What a process learns from the variables that Slurm gives it."""

    job_id: str  # as scontrol takes it: A_a for an array's task
    raw_job_id: str  # SLURM_JOB_ID, for names of files and ports
    restart: int  # 0 for the first try
    node_id: int  # 0 for the batch script's node
    node_name: str | None  # None in an salloc shell outside the nodes
    num_nodes: int
    nodelist: str
    cpus_per_task: int | None
    array_task: int | None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> SlurmEnv:
        """Raises ConfigError outside a job."""
        if not (raw := environ.get("SLURM_JOB_ID")):
            raise ConfigError(
                "SLURM_JOB_ID is not set, so this is no Slurm job; submit one with launch=slurm, or run inside salloc"
            )
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
        return cls(
            job_id=f"{array}_{task}" if array and task else raw,
            raw_job_id=raw,
            restart=int(environ.get("SLURM_RESTART_COUNT", "0")),
            node_id=int(environ.get("SLURM_NODEID", "0")),
            node_name=environ.get("SLURMD_NODENAME"),
            num_nodes=int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1),
            nodelist=nodelist,
            cpus_per_task=int(cpus) if (cpus := environ.get("SLURM_CPUS_PER_TASK")) else None,
            array_task=int(task) if array and task else None,
        )

    @property
    def nodes(self) -> list[str]:
        """Names by SLURM_NODEID."""
        return expand_nodelist(self.nodelist)


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an enclosing job left in it, which would bind or place the next one's processes; the
    variable that says where Slurm is configured stays."""
    foreign = re.compile(r"(SLURM|SLURMD|SBATCH|SALLOC|SRUN|PMI|PMI2|PMIX)_")
    return {key: value for key, value in environ.items() if key == "SLURM_CONF" or not foreign.match(key)}


def expand_nodelist(nodelist: str) -> list[str]:
    """Names in Slurm's order: "n[1-2,08],m2" is n1, n2, n08, m2; several brackets multiply."""
    names: list[str] = []
    for item in filter(None, re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)):
        parts = re.split(r"\[([^\]]*)\]", item)
        choices = [_expand_range(part) if index % 2 else [part] for index, part in enumerate(parts)]
        names.extend("".join(choice) for choice in itertools.product(*choices))
    return names


def _expand_range(ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1))
    return numbers
