"""What Slurm says and what it is told: the only place that runs or parses its commands. Standard library only.

Text of `scontrol -o` is read by key: order, number and names of fields differ between versions (22.05 to 25.x), and not
every site has the JSON output. Jobs are named as scontrol takes them: the id, or A_a for an array's task. The raw id in
SLURM_JOB_ID would mean the whole array when it is the last task's.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from rlhpc.cluster.attempt import StopNotice
from rlhpc.cluster.slurm_env import SlurmEnv as SlurmEnv
from rlhpc.cluster.slurm_env import expand_nodelist as expand_nodelist
from rlhpc.cluster.slurm_env import scrubbed as scrubbed
from rlhpc.errors import SlurmError

COMMAND_TIMEOUT_S = 20.0
DEFAULT_KILL_WAIT_S = 30.0  # Slurm's own default of KillWait
MAX_SINGLE_QUESTIONS = 16
LIMIT_WARNING_SLACK_S = 60.0  # --signal=USR2@N comes up to a minute early (sbatch's manual)
_RESERVED_STATES = {"REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING"}  # flags over a base state
PENDING_STATES = {"PENDING", "SUSPENDED"} | _RESERVED_STATES
LIVE_STATES = PENDING_STATES | {"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING"}


@dataclass(frozen=True)
class JobRecord:
    """A job as `scontrol show job -o` prints it; `fields` holds every field by Slurm's own name."""

    fields: Mapping[str, str]

    def text(self, name: str) -> str | None:
        """A field, None where Slurm has nothing to say."""
        value = self.fields.get(name, "")
        return None if value in ("", "(null)", "None", "none", "N/A", "Unknown", "UNKNOWN") else value

    def time(self, name: str) -> float | None:
        """A time in seconds since the epoch."""
        value = self.text(name)
        if value is None:
            return None
        try:
            return float(value) if value.isdigit() else datetime.fromisoformat(value).timestamp()
        except ValueError:
            return None  # such as Time=INVALID; no deadline is better than a crash in a signal's wake

    @property
    def job_id(self) -> str:
        """As scontrol takes it."""
        array, task = self.text("ArrayJobId"), self.text("ArrayTaskId")
        return f"{array}_{task}" if array and task else self.fields["JobId"]

    def covers(self, job_id: str) -> bool:
        """Whether this is the record of a job, or of a task of its array: those that still wait share one."""
        array, _, task = job_id.partition("_")
        if job_id == self.job_id or array != self.text("ArrayJobId"):
            return job_id == self.job_id
        tasks = (self.text("ArrayTaskId") or "").partition("%")[0]  # such as 0-3,7,10-20:2%4
        parts = re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", tasks)
        return not task or any(int(task) in range(int(a), int(b or a) + 1, int(step or 1)) for a, b, step in parts)

    @property
    def states(self) -> set[str]:
        """JobState's parts: newer versions add flags to a base state."""
        return set(re.split(r"[,+|\s]+", self.fields.get("JobState", "")))

    @property
    def state(self) -> str:
        return self.fields.get("JobState", "")

    @property
    def pending(self) -> bool:
        return bool(self.states & PENDING_STATES) and not self.completing

    @property
    def running(self) -> bool:
        # SIGNALING: for a moment, while slurmctld passes a warning on.
        return bool(self.states & {"RUNNING", "SIGNALING"}) and not self.completing

    @property
    def completing(self) -> bool:
        return "COMPLETING" in self.states

    @property
    def live(self) -> bool:
        """Waiting, running or on its way out; False: it will never run again by itself."""
        return bool(self.states & LIVE_STATES)

    @property
    def held(self) -> bool:
        """Waits until somebody releases it."""
        return self.pending and (self.fields.get("Priority") == "0" or "held" in (self.reason or "").lower())

    @property
    def reason(self) -> str | None:
        return self.text("Reason")

    @property
    def restarts(self) -> int:
        return int(self.text("Restarts") or 0)

    @property
    def requeue(self) -> bool:
        """Whether Slurm may requeue it."""
        return self.fields.get("Requeue") == "1"

    @property
    def batch(self) -> bool:
        """Whether it has a script to start again; salloc's jobs have none."""
        return self.fields.get("BatchFlag") != "0"

    @property
    def end_time(self) -> float | None:
        return self.time("EndTime")

    @property
    def preempt_time(self) -> float | None:
        return self.time("PreemptTime")

    @property
    def nodes(self) -> list[str]:
        return expand_nodelist(self.text("NodeList") or "")


def classify(
    record: JobRecord | None,
    own_restart: int,
    signal: str,
    at: float,
    kill_wait_s: float,
    stop_lead_s: float = 0.0,
) -> StopNotice:
    """Why a signal came, which it does not tell itself, and until when there is time.

    `record` is what scontrol says now, None when it says nothing; `at` the time of the signal; `stop_lead_s` how long
    before the limit the job asked to be warned.
    """

    def notice(cause: str, deadline: float | None) -> StopNotice:
        return StopNotice(cause, signal, at, deadline)

    killed_at = at + kill_wait_s
    if record is None:
        return notice("signal", killed_at)
    if record.running:
        if record.preempt_time is not None:
            return notice("preempted", record.end_time)
        left = None if record.end_time is None else record.end_time - at
        warned = signal != "SIGTERM" and left is not None and left <= stop_lead_s + LIMIT_WARNING_SLACK_S
        return notice("time_limit" if warned else "signal", record.end_time)
    if record.restarts > own_restart:
        return notice("preempted" if record.preempt_time is not None else "requeued", killed_at)
    if record.reason == "TimeLimit" or "TIMEOUT" in record.states:
        return notice("time_limit", killed_at)
    if record.fields.get("ExitCode", "0:0") != "0:0":
        return notice("signal", killed_at)  # the batch script died, and Slurm ends the rest
    return notice("cancelled", killed_at)


def show_job(job_id: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> JobRecord | None:
    """One job, None when the controller no longer knows it. Raises SlurmError when it doesn't answer."""
    try:
        text = _run("scontrol", "show", "job", "-o", job_id, timeout_s=timeout_s)
    except SlurmError as error:
        if _unknown(error):
            return None
        raise
    return next((record for record in map(JobRecord, records(text)) if record.covers(job_id)), None)


def _unknown(error: SlurmError) -> bool:
    """Whether the controller answered, but not with a job."""
    return bool(re.search(r"Invalid job id|Job \S+ not found", str(error)))


def queue(
    job_ids: Iterable[str] = (), *, user: str | None = None, ask_again_after_s: float = 1.0
) -> dict[str, JobRecord]:
    """Jobs that the controller knows, by id: those asked for (an array's id means its tasks), else all that wait or
    run, a user's if one is given. A job is missing only where two answers lacked it: a controller that has just started
    knows none."""
    wanted = set(job_ids)
    found: dict[str, JobRecord] = {}
    for asked in range(2):
        if asked:
            time.sleep(ask_again_after_s)
        found |= _known(wanted or _in_queue(user))
        arrays = {str(record.fields.get("ArrayJobId")) for record in found.values()}
        if found and wanted <= found.keys() | arrays:
            break
    return found


def _in_queue(user: str | None) -> set[str]:
    """Ids of what waits or runs, an array's once."""
    return set(_run("squeue", "-h", "-o", "%F", *(["--user", user] if user else [])).split())


def _known(job_ids: set[str]) -> dict[str, JobRecord]:
    """One question for few jobs each, one for all jobs of the cluster when they are many."""
    found: list[JobRecord] = []
    for question in job_ids if len(job_ids) <= MAX_SINGLE_QUESTIONS else [""]:
        try:
            text = _run("scontrol", "show", "job", "-o", *filter(None, [question]))
        except SlurmError as error:
            if _unknown(error):
                continue
            raise
        found += map(JobRecord, records(text))
    # A task's own id leads to its record, also while it shares one; an array's id leads to all its records.
    named = {job_id: job for job_id in job_ids if "_" in job_id for job in found if job.covers(job_id)}
    return {job.job_id: job for job in found if any(job.covers(job_id) for job_id in job_ids)} | named


def accounting(job_id: str) -> list[dict[str, str]] | None:
    """Every try of a job as sacct keeps it, oldest first; None where the cluster has no accounting."""
    columns = ("JobID", "State", "ExitCode", "Submit", "Start", "End", "ElapsedRaw", "AllocTRES", "NodeList", "Reason")
    try:
        text = _run("sacct", "-D", "-X", "-P", "-n", "-j", job_id, "-o", ",".join(columns))
    except SlurmError as error:
        if "accounting" in str(error).lower() or "sacct: not found" in str(error):
            return None
        raise
    return [dict(zip(columns, line.split("|"), strict=True)) for line in text.splitlines() if line.count("|") == 9]


def partitions() -> dict[str, dict[str, str]]:
    """`scontrol show partition`, by name; hidden ones too, and those that are for other groups."""
    return {fields["PartitionName"]: fields for fields in records(_run("scontrol", "--all", "show", "partition", "-o"))}


def nodes() -> dict[str, dict[str, str]]:
    """`scontrol show node`, by name."""
    return {fields["NodeName"]: fields for fields in records(_run("scontrol", "--all", "show", "node", "-o"))}


def reservations() -> dict[str, dict[str, str]]:
    """`scontrol show reservation`, by name."""
    found = records(_run("scontrol", "show", "reservation", "-o"))  # or the line that there are none
    return {fields["ReservationName"]: fields for fields in found if "ReservationName" in fields}


def associations(user: str, cluster: str) -> list[dict[str, str]] | None:
    """The accounts that a user may charge and the QOS of each; None where the cluster has no accounting."""
    columns = ("Account", "Partition", "QOS", "DefaultQOS")
    question = ("sacctmgr", "-nP", "show", "association", f"user={user}", f"cluster={cluster}")
    try:
        text = _run(*question, f"format={','.join(columns)}")
    except SlurmError as error:
        if "accounting" in str(error).lower() or "slurmdbd" in str(error).lower() or "not found" in str(error):
            return None
        raise
    return [dict(zip(columns, line.split("|"), strict=True)) for line in text.splitlines() if line.count("|") == 3]


def config(*, timeout_s: float = COMMAND_TIMEOUT_S) -> dict[str, str]:
    """`scontrol show config`, by Slurm's names; SLURM_VERSION among them."""
    lines = (line.partition("=") for line in _run("scontrol", "show", "config", timeout_s=timeout_s).splitlines())
    return {key.strip(): value.strip() for key, equals, value in lines if equals}


def clock_offset_s() -> float | None:
    """Seconds by which the controller's clock is ahead of this machine's, to half a second; None where it doesn't
    tell."""
    found = re.match(r"Configuration data as of (\d+)$", _run("scontrol", "show", "config").partition("\n")[0])
    return float(found[1]) + 0.5 - time.time() if found else None  # it tells whole seconds, rounded down


def kill_wait_s(*, timeout_s: float = COMMAND_TIMEOUT_S) -> float:
    """Seconds between SIGTERM and SIGKILL."""
    return kill_wait_s_of(config(timeout_s=timeout_s))


def kill_wait_s_of(config: Mapping[str, str]) -> float:
    """The same, of a configuration that was asked for already."""
    found = re.match(r"(\d+)", config.get("KillWait", ""))
    return float(found[1]) if found else DEFAULT_KILL_WAIT_S


def requeue(job_id: str) -> None:
    """Puts a job back in the queue; nothing happens to one that waits there already."""
    _requeue("requeue", job_id)


def requeue_hold(job_id: str, reason: str) -> None:
    """Puts a job back in the queue, held until `scontrol release`; the reason goes into its comment where the site lets
    users write one."""
    with suppress(SlurmError):  # sites may forbid it; the reason is in attempts.jsonl and in the log
        _run("scontrol", "update", f"JobId={job_id}", f"Comment={reason}")
    _requeue("requeuehold", job_id)


def _requeue(command: str, job_id: str) -> None:
    try:
        _run("scontrol", command, job_id)
    except SlurmError as error:
        if "pending execution" not in str(error):
            raise


def cancel(job_id: str, *, signal: str | None = None) -> None:
    """Ends a job, or sends its steps a signal such as KILL. No error when it is gone already."""
    _run("scancel", "--quiet", *([f"--signal={signal}"] if signal else []), job_id)


def records(text: str) -> list[dict[str, str]]:
    """Lines of KEY=VALUE with blanks inside values. The first of two equal keys counts, so that a comment which looks
    like a field can't pose as one; a job's name, which comes before the others, is taken out first."""
    found = []
    for line in text.splitlines():
        fields: dict[str, str] = {}
        if name := re.search(r" JobName=(.*?) UserId=", line):
            fields["JobName"] = name[1]
            line = line[: name.start()] + line[name.end(1) :]
        parts = re.split(r"(?:^|\s)([A-Z][\w:/.]*)=", line)
        for key, value in zip(parts[1::2], parts[2::2], strict=True):
            fields.setdefault(key, value.strip())
        if fields:
            found.append(fields)
    return found


def _run(*command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Standard output of a Slurm command. Raises SlurmError for a nonzero exit, no answer, no such program."""
    # Seconds since the epoch wherever a time is printed: neither time zones nor daylight saving can shift a deadline.
    environ = {**os.environ, "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}  # nor are tasks' numbers cut off
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as error:
        raise SlurmError(
            f"{shown}: {command[0]}: not found; run this where Slurm's commands are installed and on the PATH"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(
            f"{shown}: no answer in {timeout_s:g} s; see whether the controller is up: scontrol ping"
        ) from error
    if done.returncode and "configuration source" in done.stderr:
        raise SlurmError(
            f"{shown}: Slurm doesn't know its cluster here; set SLURM_CONF, or run this on one of its nodes"
        )
    if done.returncode:
        raise SlurmError(f"{shown}: exit code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
