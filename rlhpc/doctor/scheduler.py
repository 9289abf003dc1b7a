"""Slurm as rlhpc needs it: commands, version, partitions, whether a job is told before it ends and comes back. Standard
library only."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress

from rlhpc.cluster import preflight, slurm
from rlhpc.cluster.preflight import Cluster, Fields
from rlhpc.doctor.finding import Finding, judged, refusal
from rlhpc.errors import SlurmError

COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel")
SHORT_KILL_WAIT_S = 30.0  # Slurm's default; what larger models need to save is more
MAX_SKEW_S = 5.0
EXITS = {  # exit codes of runs that a site must not give a meaning of its own, and what would become of the runs
    "RequeueExit": ({"1", "2"}, "a run that failed would be started again and again"),
    "RequeueExitHold": ({"75"}, "a run that was stopped would be held"),
}
CONSTRAINED = {"ConstrainCores": "CPUs", "ConstrainRAMSpace": "memory", "ConstrainDevices": "GPUs"}


def scheduler(*, wanted: bool) -> Iterator[Finding]:
    """All that a user may ask of Slurm; nothing is submitted. `wanted`: it has to be here."""
    if missing := [command for command in COMMANDS if shutil.which(command) is None]:
        fix = "run this where Slurm's commands are on the PATH, or train without it (launch=local)"
        yield judged("Slurm", f"no {', '.join(missing)}", fix, failed=wanted)
        return
    try:
        cluster, offset = Cluster.ask(), slurm.clock_offset_s()
    except SlurmError as error:
        found, _, fix = str(error).splitlines()[-1].partition("; ")
        fix = fix or "scontrol ping tells whether the controller is up"
        yield judged("Slurm", found, fix, failed=wanted, warning="SLURM_CONF" in os.environ)
        return
    config = cluster.config
    yield from (refusal("Slurm", line) for line in preflight.too_old(cluster))
    yield Finding("Slurm", "ok", f"{config.get('SLURM_VERSION')}, cluster {config.get('ClusterName')}")
    if offset is not None:
        fix = "deadlines would be misjudged; have both follow one time server"
        yield judged(
            "controller's clock", f"{abs(offset):.0f} s from this machine's", fix, warning=abs(offset) > MAX_SKEW_S
        )
    default = cluster.default_partition()
    for name, fields in cluster.partitions.items():
        yield _partition(f"partition {name}{' (default)' if name == default else ''}", fields, cluster)
    yield from _ending(config)
    yield _constraints(config)
    yield _gpus(cluster)
    yield from _accounting(cluster)
    if "SLURM_JOB_ID" in os.environ:
        yield _this_job(slurm.SlurmEnv.from_environ(os.environ))


def _partition(title: str, fields: Fields, cluster: Cluster) -> Finding:
    mode = (fields.get("PreemptMode") or cluster.config.get("PreemptMode", "OFF")).split(",")[0]
    members = cluster.members(fields)
    up = sum(not preflight.AWAY & preflight.states(node) for node in members.values())
    found = f"{up} of {len(members)} nodes up, MaxTime {fields.get('MaxTime')}"
    if mode != "OFF":
        found += f", PreemptMode {mode}, GraceTime {fields.get('GraceTime', 0)} s"
    fix = ""
    if (state := fields.get("State")) != "UP":
        fix = f"it is {str(state).lower()} and starts nothing; set another cluster.partition"
    elif up == 0:
        fix = "no node is up; sinfo -R says why"
    elif "SUSPEND" in mode:
        fix = "a suspended job keeps its GPUs' memory; administrators: PreemptMode=REQUEUE"
    elif mode == "CANCEL":
        fix = "a preempted run saves, but doesn't come back by itself; rlhpc resume goes on with it"
    return judged(title, found, fix, warning=bool(fix))


def _ending(config: Mapping[str, str]) -> Iterator[Finding]:
    """What a job is told before it ends, what is left of it, and whether it comes back."""
    wait = slurm.kill_wait_s_of(config)
    found = f"KillWait {wait:g} s from SIGTERM to SIGKILL, where a partition gives no grace"
    fix = "larger models save for longer; administrators: KillWait=60"
    yield judged("time to save", found, fix, warning=wait < SHORT_KILL_WAIT_S)
    tracking = config.get("ProctrackType", "")
    fix = "what detaches itself outlives its job; administrators: proctrack/cgroup, and slurm/epilog.sh as Epilog"
    yield judged("what is left", f"ProctrackType={tracking}", fix, warning=tracking != "proctrack/cgroup")
    wrong = {
        f"{key}={config[key]}": meaning
        for key, (codes, meaning) in EXITS.items()
        if codes & set(re.findall(r"\d+", config.get(key, "").partition("(")[0]))
    }
    found = "; ".join([f"JobRequeue={config.get('JobRequeue')}, and runs ask for it (--requeue)", *wrong])
    yield judged("requeue", found, "; ".join(wrong.values()), warning=bool(wrong))
    held = "nohold_on_prolog_fail" not in config.get("SchedulerParameters", "")
    then = "held until scontrol release (nohold_on_prolog_fail of SchedulerParameters requeues it)"
    yield Finding("bad nodes", "ok", f"a job that a prolog turns away is {then if held else 'requeued'}")


def _constraints(config: Mapping[str, str]) -> Finding:
    """The task plugin and cgroup.conf, of which newer versions tell."""
    told = {key: config[key] for key in CONSTRAINED if key in config}
    loose = [CONSTRAINED[key] for key, value in told.items() if value != "yes"]
    if "cgroup" not in config.get("TaskPlugin", ""):
        loose = [*CONSTRAINED.values()]
    found = ", ".join([f"TaskPlugin={config.get('TaskPlugin')}", *(f"{key}={value}" for key, value in told.items())])
    fix = f"jobs on a node can take each other's {', '.join(loose)}: have it whole with cluster.exclusive=true"
    return judged("kept apart", found, fix, warning=bool(loose))


def _gpus(cluster: Cluster) -> Finding:
    kinds = Counter(
        kind for node in cluster.nodes.values() for kind in re.findall(r"gpu(?::[^,:(]+)?:\d+", node.get("Gres", ""))
    )
    if not kinds:
        return Finding("GPUs", "ok", "no node's Gres has any; runs with trainer.device=cpu go")
    typed = next((kind for kind in kinds if kind.count(":") == 2), None)
    named = f"; for one kind: cluster.sbatch.gres={typed}" if len(kinds) > 1 and typed else ""
    return Finding("GPUs", "ok", ", ".join(f"{kind} on {count} nodes" for kind, count in kinds.items()) + named)


def _accounting(cluster: Cluster) -> Iterator[Finding]:
    storage = cluster.config.get("AccountingStorageType", "none")
    none = storage.endswith("none") or storage == "(null)"
    fix = "rlhpc status knows ended jobs by their run directories alone"
    yield judged("accounting", storage, fix, warning=none)
    if cluster.associations is not None:
        accounts = ", ".join(sorted({row["Account"] for row in cluster.associations}))
        yield judged("accounts", accounts or "none is yours", "ask the administrators for one", failed=not accounts)


def _this_job(env: slurm.SlurmEnv) -> Finding:
    record = None
    with suppress(SlurmError):
        record = slurm.show_job(env.job_id)
    if record is None:
        return Finding("this job", "warning", f"{env.job_id}: the controller doesn't tell of it", "scontrol ping")
    left = f", {(record.end_time - time.time()) / 60:.0f} min left" if record.end_time else ""
    stays = record.batch and not record.requeue
    fix = "preempted, it wouldn't come back; submit it with sbatch --requeue"
    return judged("this job", f"{env.job_id} on {', '.join(record.nodes)}{left}", fix, warning=stays)
