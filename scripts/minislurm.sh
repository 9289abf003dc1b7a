#!/usr/bin/env bash
# A real Slurm on this machine without systemd: one controller, several nodes, fake GPUs, preemption, accounting.
#
# usage: scripts/minislurm.sh up | down | status | env | install | off NODE
#   up       installs Debian's packages where missing, and starts what isn't running
#   down     ends the jobs and all daemons, whatever state they are in; the accounting stays
#   env      eval "$(scripts/minislurm.sh env)" points this shell at it
#   install  only looks whether this machine can run it, and installs what it lacks
#   off      a power failure of a node; `up` brings it back
#
#   MINISLURM_DIR        where it lives (default /tmp/minislurm)
#   MINISLURM_PORT       the first of its 40 ports (default 27800)
#   MINISLURM_PREFIX     of its nodes' names (default n); instances that differ in these three don't meet
#   MINISLURM_NODES      how many nodes (default 4)
#   MINISLURM_EXTRA      a file with further lines for slurm.conf
#   MINISLURM_PROCTRACK  linuxproc works without root and cgroups, but daemons of a job may then outlive it
#
# partitions: low (preempted by requeue at once), grace (preempted with GraceTime 40 s), high (preempts both)
# needs: Debian or Ubuntu, and root: a virtual machine, or a container with --privileged
set -euo pipefail
script=$(realpath "$0")
dir=$(realpath -m "${MINISLURM_DIR:-/tmp/minislurm}")
port=${MINISLURM_PORT:-27800} nodes=${MINISLURM_NODES:-4} prefix=${MINISLURM_PREFIX:-n}
proctrack=${MINISLURM_PROCTRACK:-cgroup} extra=${MINISLURM_EXTRA:-}
export PATH=$PATH:/usr/sbin:/sbin SLURM_CONF=$dir/slurm.conf

refuse() { printf 'minislurm: %s\n' "$*" >&2; exit 1; }

# --- what is asked for, and what this machine can do

check_settings() {
    ((${#dir} <= 70)) ||
        refuse "MINISLURM_DIR=$dir has ${#dir} bytes, sockets under it allow 70; choose a shorter one such as /tmp/ms"
    [[ $nodes =~ ^([1-9]|1[0-9]|2[0-5])$ ]] || refuse "MINISLURM_NODES=$nodes must be 1 to 25"
    { [[ $port =~ ^[1-9][0-9]{3,4}$ ]] && ((port >= 1024 && port <= 65495)); } ||
        refuse "MINISLURM_PORT=$port must be 1024 to 65495: 40 ports from it are taken"
    [[ $prefix =~ ^[a-z]+$ ]] || refuse "MINISLURM_PREFIX=$prefix must be small letters, such as n for n1, n2, ..."
    [[ -z $extra || -r $extra ]] || refuse "MINISLURM_EXTRA=$extra can't be read; name a file with lines for slurm.conf"
    [[ $proctrack =~ ^(cgroup|linuxproc)$ ]] ||
        refuse "MINISLURM_PROCTRACK=$proctrack is unknown; choose cgroup or linuxproc"
}

check_machine() {
    [[ $proctrack == linuxproc || -n $(cgroup_version) ]] ||
        refuse "MINISLURM_PROCTRACK=cgroup needs root and a writable /sys/fs/cgroup (got user $(id -un)," \
            "$(stat -fc %T /sys/fs/cgroup 2>/dev/null || echo none)); run it as root, in a container with" \
            "--privileged, or choose MINISLURM_PROCTRACK=linuxproc, which signals jobs otherwise than clusters do"
}

cgroup_version() {  # v1 or v2; nothing where Slurm could not make groups
    local root=/sys/fs/cgroup controller
    [[ $EUID -eq 0 ]] || return 0
    if [[ $(stat -fc %T $root 2>/dev/null) == cgroup2fs ]]; then
        if [[ " $(<$root/cgroup.controllers) " == *" memory "* ]] && writable $root; then echo v2; fi
    else
        for controller in freezer memory cpuset; do writable $root/$controller || return 0; done
        echo v1
    fi
}

writable() { mkdir "$1/minislurm.$$" 2>/dev/null && rmdir "$1/minislurm.$$"; }

install_packages() {
    local missing=() pair as_root=() log policy=/usr/sbin/policy-rc.d
    for pair in slurmctld:slurm-wlm slurmdbd:slurmdbd munged:munge mariadbd:mariadb-server; do
        command -v "${pair%:*}" >/dev/null || missing+=("${pair#*:}")
    done
    ((${#missing[@]})) || return 0
    [[ $EUID -eq 0 ]] || as_root=(sudo)
    if ! command -v apt-get >/dev/null || { [[ $EUID -ne 0 ]] && ! command -v sudo >/dev/null; }; then
        refuse "this machine lacks ${missing[*]} (Debian's names); installing them needs apt-get, as root or with sudo"
    fi
    echo "minislurm: installing ${missing[*]}"
    log=$(mktemp "${TMPDIR:-/tmp}/minislurm-install.XXXXXX")
    if [[ ! -e $policy ]]; then  # keeps Debian from starting system-wide daemons that nobody asked for
        # shellcheck disable=SC2064
        trap "${as_root[*]} rm -f $policy" EXIT
        printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee $policy >/dev/null
        "${as_root[@]}" chmod 755 $policy
    fi
    if ! { "${as_root[@]}" apt-get update -qq && "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 </dev/null; then
        tail -n 25 "$log" >&2
        refuse "installing ${missing[*]} failed; all output is in $log"
    fi
    rm -f "$log"
}

# --- configuration

write_config() {
    local host user cgroup task=task/none node
    host=$(hostname -s) user=$(id -un) cgroup=$(cgroup_version)
    [[ $proctrack == cgroup ]] && task=task/cgroup
    cat >"$dir/slurm.conf" <<END
ClusterName=$prefix-mini
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser=$user
SlurmdUser=$user
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=proctrack/$proctrack
TaskPlugin=$task
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=10
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((port + 2))
AccountingStoragePass=$dir/run/munge.sock
AccountingStoreFlags=job_comment
AccountingStorageTRES=gres/gpu
MaxArraySize=1001
FirstJobId=$((port / 10 % 1000 * 100 + 1))
GresTypes=gpu
DefMemPerCPU=2000
NodeName=DEFAULT CPUs=8 RealMemory=20000 Gres=gpu:4 State=UNKNOWN
NodeName=${prefix}[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 11))-$((port + 10 + nodes))]
PartitionName=low Nodes=ALL PriorityTier=1 Default=YES MaxTime=60 PreemptMode=REQUEUE State=UP
PartitionName=grace Nodes=ALL PriorityTier=1 GraceTime=40 MaxTime=60 PreemptMode=REQUEUE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 MaxTime=60 PreemptMode=OFF State=UP
END
    [[ -z $extra ]] || cat "$extra" >>"$dir/slurm.conf"
    # The nodes claim more CPUs than the machine has, so that cores can't be bound; memory limits are real.
    printf '%s\n' CgroupAutomount=no "CgroupPlugin=cgroup/${cgroup:-v1}" ConstrainRAMSpace=yes ConstrainCores=no \
        ConstrainDevices=no >"$dir/cgroup.conf"
    [[ $cgroup != v2 ]] || echo IgnoreSystemd=yes >>"$dir/cgroup.conf"
    for node in 0 1 2 3; do ln -sfn /dev/null "$dir/dev/gpu$node"; done  # a GPU has to be a device to Slurm
    echo "NodeName=${prefix}[1-$nodes] Name=gpu Count=4 File=$dir/dev/gpu[0-3]" >"$dir/gres.conf"
    (umask 077 && cat >"$dir/slurmdbd.conf" <<END
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.sock
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=$((port + 2))
SlurmUser=$user
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
LogFile=$dir/log/slurmdbd.log
PidFile=$dir/run/slurmdbd.pid
END
    )
}

# --- processes

ours() {  # ours DAEMON...: pids of this instance's daemons; by how they were started, since a pid file may be stale
    local pid
    for pid in $(pgrep -x "$(IFS='|'; echo "$*")"); do
        # slurmstepd overwrites its environment, and stays where its slurmd is.
        if of_this_instance "$pid" || [[ $(readlink "/proc/$pid/cwd") == "$dir"/* ]]; then echo "$pid"; fi
    done
    return 0
}

of_this_instance() { grep -qszx "SLURM_CONF=$dir/slurm.conf" "/proc/$1/environ"; }

running() { [[ -n $(ours "$1") ]]; }

slurmd_of() {  # slurmd_of NODE
    local pid
    for pid in $(ours slurmd); do grep -qszx -- "$1" "/proc/$pid/cmdline" && echo "$pid"; done
    return 0
}

job_processes() {  # job_processes NODE...: pids of the jobs' processes, by control group, the rest by environment
    local directory node pid
    for node in "$@"; do
        for directory in /sys/fs/cgroup/*/"slurm_$node" /sys/fs/cgroup/system.slice/"${node}_slurmstepd.scope"; do
            [[ -d $directory ]] && find "$directory" -name cgroup.procs -path '*job_*' -exec cat {} + 2>/dev/null
        done
        for pid in $(pgrep .); do
            grep -qszx "SLURMD_NODENAME=$node" "/proc/$pid/environ" && of_this_instance "$pid" && echo "$pid"
        done
    done
    return 0
}

kill_all() { (($# == 0)) || kill -KILL "$@" 2>/dev/null || true; }

start() {  # start COMMAND...: a daemon, with an environment that tells whose it is and none of the caller's open files
    local fd
    (
        for fd in /proc/self/fd/*; do
            fd=${fd##*/}
            ((fd <= 2)) || eval "exec $fd>&-"
        done
        exec env -i PATH="$PATH" LANG=C.UTF-8 SLURM_CONF="$SLURM_CONF" MYSQL_UNIX_PORT="$dir/db/sock" "$@" \
            </dev/null >>"$dir/log/start.log" 2>&1
    )
}

await() {  # await SECONDS WHAT LOG COMMAND...
    local deadline=$((SECONDS + $1)) what=$2 log=$3
    shift 3
    until "$@" >/dev/null 2>&1; do
        if ((SECONDS >= deadline)); then
            tail -n 15 "$dir/log/$log" "$dir/log/start.log" >&2
            refuse "$what; the logs are in $dir/log"
        fi
        sleep 0.1
    done
}

up_database() {
    local user
    user=$(id -un)
    if ! running mariadbd; then
        [[ -d $dir/db/mysql ]] || mariadb-install-db --no-defaults --datadir="$dir/db" --user="$user" --skip-test-db \
            --auth-root-authentication-method=normal >"$dir/log/mariadb-install.log" 2>&1 ||
            { tail "$dir/log/mariadb-install.log" >&2; refuse "mariadb-install-db failed"; }
        start setsid --fork mariadbd --no-defaults --datadir="$dir/db" --socket="$dir/db/sock" --user="$user" \
            --pid-file="$dir/db/pid" --skip-networking --log-error="$dir/log/mariadb.log" \
            --innodb-buffer-pool-size=64M --innodb-flush-log-at-trx-commit=0
    fi
    await 60 "MariaDB did not start" mariadb.log \
        mariadb-admin --no-defaults --socket="$dir/db/sock" --user=root ping
    running slurmdbd || start slurmdbd
    await 60 "slurmdbd did not start" slurmdbd.log sacctmgr -n show cluster
}

all_answer() {  # drained nodes do as well
    local states
    states=$(sinfo -h -o %T -p low) && [[ -n $states && ! $states =~ unknown|down|\* ]]
}

up() {
    check_machine
    install_packages
    mkdir -p "$dir"/{state,spool,log,run,dev}
    chmod 755 "$dir" "$dir"/{state,spool,log,run,dev}
    (umask 077 && mkdir -p "$dir/db")
    local node other
    for other in $(pgrep -x slurmd); do
        grep -qszx -- "${prefix}[0-9]*" "/proc/$other/cmdline" && ! of_this_instance "$other" &&
            refuse "another Slurm here (process $other) has nodes ${prefix}1 ...; choose another MINISLURM_PREFIX"
    done
    running slurmctld || write_config
    [[ -f $dir/munge.key ]] || (umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
    running munged || start munged --key-file="$dir/munge.key" --socket="$dir/run/munge.sock" --force \
        --pid-file="$dir/run/munged.pid" --log-file="$dir/log/munged.log" --seed-file="$dir/run/munge.seed"
    up_database
    running slurmctld || start slurmctld
    for ((node = 1; node <= nodes; node++)); do
        [[ -n $(slurmd_of "$prefix$node") ]] || start slurmd -N "$prefix$node"
    done
    await 60 "the nodes did not come up" slurmctld.log all_answer
    echo "minislurm: $nodes nodes are up; point this shell at them: eval \"\$(${script/#$PWD\//} env)\""
}

off() {  # what a power failure does: nobody says goodbye
    [[ " ${names[*]} " == *" $1 "* ]] || refuse "off ${1:-} needs a node: ${names[*]}"
    # shellcheck disable=SC2046
    kill_all $(slurmd_of "$1") $(job_processes "$1")
}

down() {
    local deadline=$((SECONDS + 15)) name pids
    if running slurmctld; then  # in order: jobs are cancelled, and Slurm hears of the end of each
        for name in low grace high; do timeout 5 scancel --full --quiet --partition="$name" 2>/dev/null || true; done
        # shellcheck disable=SC2046
        kill_all $(job_processes "${names[@]}")
        while [[ -n $(timeout 5 squeue -h 2>/dev/null) ]] && ((SECONDS < deadline)); do sleep 0.2; done
    fi
    for name in slurmd slurmctld slurmdbd mariadbd munged; do
        mapfile -t pids < <(ours "$name")
        ((${#pids[@]})) && kill "${pids[@]}" 2>/dev/null || true
        deadline=$((SECONDS + 15))
        while running "$name" && ((SECONDS < deadline)); do sleep 0.1; done
    done
    deadline=$((SECONDS + 15))
    while mapfile -t pids < <(ours munged mariadbd slurmdbd slurmctld slurmd slurmstepd; job_processes "${names[@]}")
        ((${#pids[@]} && SECONDS < deadline)); do
        kill_all "${pids[@]}"
        sleep 0.1
    done
    ((${#pids[@]} == 0)) || refuse "these processes don't end: ${pids[*]}"
    find /sys/fs/cgroup -depth -type d -path "*/slurm_${prefix}[1-9]*" -exec rmdir {} + 2>/dev/null || true
}

check_settings
names=()
for ((number = 1; number <= nodes; number++)); do names+=("$prefix$number"); done
case ${1:-} in
up | down) "$1" ;;
install) check_machine && install_packages ;;
off) off "${2:-}" ;;
status)
    running slurmctld || { echo "minislurm: not running in $dir"; exit 1; }
    sinfo -o '%.10P %.5a %.10l %.6D %.10T %N'
    ;;
env) echo "export SLURM_CONF=$dir/slurm.conf" ;;
*) sed -n '2,/^set/s/^# \{0,1\}//p' "$script" >&2; exit 2 ;;
esac
