#!/usr/bin/env bash
# A real Slurm on this machine, as root and without systemd: one controller, several nodes, fake GPUs, preemption, accounting.
#
# usage: scripts/minislurm.sh up|down|status|env          eval "$(scripts/minislurm.sh env)" points this shell at it
#   MINISLURM_DIR    where it lives (default /tmp/minislurm)     MINISLURM_PORT   first of its 40 ports (default 27800)
#   MINISLURM_NODES  how many nodes (default 4)                  MINISLURM_PREFIX of node names (default n): two instances differ
# partitions: low (preempted by requeue at once), grace (with GraceTime), high (preempts both)
set -euo pipefail
dir=${MINISLURM_DIR:-/tmp/minislurm} port=${MINISLURM_PORT:-27800} nodes=${MINISLURM_NODES:-4} prefix=${MINISLURM_PREFIX:-n}

write_config() {
    local host
    host=$(hostname -s)
    cat >"$dir/slurm.conf" <<END
ClusterName=mini
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MaxArraySize=1001
FirstJobId=$((port / 10 % 1000 * 100 + 1))
GresTypes=gpu
NodeName=$prefix[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 11))-$((port + 10 + nodes))] CPUs=8 RealMemory=20000 Gres=gpu:4 State=UNKNOWN
PartitionName=low Nodes=ALL PriorityTier=1 Default=YES MaxTime=60 PreemptMode=REQUEUE State=UP
PartitionName=grace Nodes=ALL PriorityTier=1 GraceTime=40 MaxTime=60 PreemptMode=REQUEUE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 MaxTime=60 PreemptMode=OFF State=UP
END
    echo "NodeName=$prefix[1-$nodes] Name=gpu Count=4 File=/dev/tty[1-4]" >"$dir/gres.conf"
    printf 'CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n' >"$dir/cgroup.conf"
}

up() {
    mkdir -p "$dir"/{state,spool,log,run}
    write_config
    export SLURM_CONF=$dir/slurm.conf
    [[ -f $dir/munge.key ]] || { (umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key"); }
    munged --key-file="$dir/munge.key" --socket="$dir/run/munge.sock" --pid-file="$dir/run/munged.pid" \
        --log-file="$dir/log/munged.log" --seed-file="$dir/run/munge.seed" --force
    slurmctld -f "$SLURM_CONF"
    local node
    for ((node = 1; node <= nodes; node++)); do slurmd -f "$SLURM_CONF" -N "$prefix$node"; done
    until [[ $(sinfo -h -o %T -p low 2>/dev/null | sort -u) == idle ]]; do sleep 0.2; done
}

down() {
    local file
    for file in "$dir"/run/slurmctld.pid "$dir"/run/slurmd-*.pid "$dir"/run/munged.pid; do
        [[ -f $file ]] && kill "$(<"$file")" 2>/dev/null || true
    done
}

case ${1:-} in
up) up ;;
down) down ;;
status) SLURM_CONF=$dir/slurm.conf sinfo ;;
env) echo "export SLURM_CONF=$dir/slurm.conf" ;;
*) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
