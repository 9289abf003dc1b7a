"""What Slurm's codes and an attempt's record mean, in words. Standard library only."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from rlhpc.cluster.slurm import JobRecord

NEVER = "so it will never start; rlhpc cancel it, then rlhpc resume it with"

# Reasons for waiting, from squeue's manual ("JOB REASON CODES"), underscores for blanks.
REASONS = {
    "None": "just submitted; the scheduler has not looked at it yet",
    "Priority": "other jobs go first",
    "Resources": "next in line, as soon as enough nodes are free",
    "Dependency": "waits for the job that it depends on",
    "DependencyNeverSatisfied": f"the job it depends on did not end as it should, {NEVER} no dependency",
    "PartitionTimeLimit": f"asks for more time than the partition allows, {NEVER} a smaller launch.time_min",
    "PartitionNodeLimit": f"asks for more nodes than the partition allows, {NEVER} fewer cluster.nodes",
    "PartitionConfig": f"asks for more than the partition has, {NEVER} fewer nodes or another cluster.partition",
    "PartitionDown": "the partition is down; the administrators know when it comes back",
    "PartitionInactive": "the partition is inactive; the administrators know when it comes back",
    "BadConstraints": f"no node can offer what it asks for, {NEVER} another cluster.constraint",
    "AccountNotAllowed": f"the account may not use the partition, {NEVER} another cluster.account",
    "InvalidAccount": f"the account does not exist, {NEVER} another cluster.account",
    "InvalidQOS": f"the QOS does not exist, {NEVER} another cluster.qos",
    "Reservation": "waits for its reservation to begin",
    "ReservationDeleted": f"its reservation was deleted, {NEVER} another cluster.reservation",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "Licenses": "waits for a licence",
    "JobArrayTaskLimit": "as many tasks of its array run as may at the same time (launch.array_parallelism)",
    "JobHeldUser": "held by its owner",
    "JobHeldAdmin": "held by an administrator, or requeued too often (MaxBatchRequeue)",
    "launch_failed_requeued_held": "held: a node's prolog failed before the job began, and Slurm drained the node",
    "job_requeued_in_held_state": "requeued and held",
    "Prolog": "its nodes' prolog is running",
    "Cleaning": "its last attempt is still being cleaned up",
    "JobLaunchFailure": "could not be launched, perhaps for a broken node",
    "SchedDefer": "the scheduler defers new jobs for now",
}
PREFIXES = {  # whole families of reasons
    "QOS": "a limit of its QOS is used up: {}",
    "Assoc": "a limit of its account is used up: {}",
    "MaxGRES": "a limit on GPUs is used up: {}",
}
CAUSES = {
    "preempted": "preempted by a job of higher priority",
    "time_limit": "stopped by the time limit",
    "requeued": "stopped by scontrol requeue",
    "cancelled": "cancelled",
    "signal": "stopped by a signal",
}


def why_pending(job: JobRecord, job_id: str) -> str:
    """Why a job waits and, where Slurm tells, until when. Waiting tasks of an array share a record, hence `job_id`."""
    reason = (job.reason or "None").replace(" ", "_")
    code, _, detail = reason.partition(",")
    if job.held:
        why = REASONS.get(code, "held")
        if comment := job.text("Comment"):  # where the attempt that held it wrote its reason
            why = f"{why}: {comment}"
        return f"{why}; scontrol release {job_id} lets it run"
    start = job.time("StartTime") or job.time("EligibleTime")
    if code == "BeginTime":
        begun = "requeued" if job.restarts else "deferred"
        return f"{begun}, earliest start {clock(start)}" if start else f"{begun}, waits for its earliest start"
    why = REASONS.get(code) or next(
        (text.format(spaced(code)) for prefix, text in PREFIXES.items() if code.startswith(prefix)),
        f"Slurm's reason is {code}",
    )
    if detail:
        why += f" ({detail.replace('_', ' ').strip()})"
    if code in ("Priority", "Resources") and start and start > time.time():
        why += f"; Slurm expects to start it at {clock(start)}"
    return why


def attempt_end(line: Mapping[str, Any]) -> str:
    """How an attempt ended, from its line of attempts.jsonl."""
    outcome, cause = line.get("outcome"), line.get("cause")
    if outcome == "finished":
        return "finished"
    if outcome == "lost":
        return f"lost: {line.get('reason') or 'killed together with its node or its job'}"
    if outcome == "cancelled":
        return "cancelled"
    if outcome == "failed":
        return (
            f"failed: {reason}" if (reason := line.get("reason")) else f"failed with exit code {line.get('exit_code')}"
        )
    why = CAUSES.get(str(cause), "stopped")
    return f"{why}: {line['reason']}" if line.get("reason") else why


def attempt_details(line: Mapping[str, Any]) -> list[str]:
    """What else is known of an ended attempt, most important first."""
    details = []
    first = line.get("first_failing")
    if first and first.get("node"):
        details.append(f"first on {first['node']}")
    if (signal := line.get("signal")) and line.get("outcome") != "finished":
        details.append(f"{signal} at {clock(line['signal_at'])}" if line.get("signal_at") else str(signal))
    if phase := line.get("phase_at_stop"):
        details.append(f"in {phase}")
    if (last := line.get("last_step")) is not None:
        first = line.get("resumed_from_step") or 0
        details.append(f"steps {first} to {last}" if last > first else f"no step after {first}")
    if line.get("checkpoint_step") is not None:
        save = f", saved in {line['save_s']:.2g} s" if line.get("save_s") is not None else ""
        details.append(f"checkpoint of step {line['checkpoint_step']}{save}")
    if line.get("held"):
        details.append("held")
    elif line.get("requeued"):
        details.append("requeued")
    return details


def spaced(code: str) -> str:
    """ "QOSMaxJobsPerUserLimit" as words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_", " ", code)


def clock(at: float) -> str:
    """The time of day, with the date when it is not today's."""
    then = time.localtime(at)
    return time.strftime("%H:%M:%S" if then[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M:%S", then)
