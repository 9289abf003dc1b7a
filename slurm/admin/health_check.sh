#!/usr/bin/env bash
# Whether this node can take a job: under ten seconds, every command under a time limit, nothing changed.
#
# usage: health_check.sh [--gpus N] [--mount DIR]... [--hca-gbps RATE] [--min-shm-gib N] [--min-tmp-gib N] [--json] [--drain]
#   --gpus N         as many GPUs must answer; default: as many as Slurm believes the node has; 0: none, and none is checked
#   --mount DIR      must be a mounted file system that answers; repeatable
#   --hca-gbps RATE  every InfiniBand port must be active at this rate or more
#   --min-shm-gib, --min-tmp-gib    free space in /dev/shm and /tmp (default 1 and 2)
#   --drain          on CRITICAL drain the node with the reason, as a HealthCheckProgram should. Slurm gives that neither
#                    arguments nor an environment, so put two lines in front of it, and these into slurm.conf:
#                      exec /path/to/rlhpc/slurm/admin/health_check.sh --drain --gpus 8
#                      HealthCheckProgram=/etc/slurm/health_check.sh  HealthCheckInterval=300  HealthCheckNodeState=IDLE
# One line a check: OK, WARNING, CRITICAL or UNKNOWN, and what was found. Exit code 0, 1, 2 or 3: the worst of them, which
# CRITICAL is. A HealthCheckProgram or a prolog takes a node out of service for CRITICAL alone.
set -uo pipefail
here=$(dirname "$(readlink -f "$0")")

gpus='' mounts=() hca_gbps='' min_shm=1 min_tmp=2 json='' drain=''
while (($#)); do
    case $1 in
    --gpus) gpus=$2 && shift ;;
    --mount) mounts+=("$2") && shift ;;
    --hca-gbps) hca_gbps=$2 && shift ;;
    --min-shm-gib) min_shm=$2 && shift ;;
    --min-tmp-gib) min_tmp=$2 && shift ;;
    --json) json=1 ;;
    --drain) drain=1 ;;
    *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2 && exit 3 ;;
    esac
    shift
done

names=(OK WARNING CRITICAL UNKNOWN) severity=(0 1 3 2) checks=() levels=() texts=()
found() { checks+=("$1") levels+=("$2") texts+=("$3"); } # CHECK LEVEL TEXT
query() { timeout 5 nvidia-smi "$@" 2>/dev/null; }

slurms_gpus() {
    local node=${SLURMD_NODENAME:-$(hostname -s)}
    timeout 3 scontrol show node -o "$node" 2>/dev/null | grep -oE ' Gres=\S*' | grep -oE 'gpu(:[A-Za-z0-9_.-]+)?:[0-9]+' |
        awk -F: '{ n += $NF } END { print n + 0 }'
}

# shellcheck disable=SC2016 # the programs are awk's
check_gpus() {
    local expected=${gpus:-$(slurms_gpus)} listed count bad
    if [[ ${expected:-0} == 0 ]] && { [[ $gpus ]] || ! command -v nvidia-smi >/dev/null; }; then
        found gpu 0 "no GPU, and none is expected"
        return
    fi
    if ! command -v nvidia-smi >/dev/null; then
        found gpu 2 "no GPU: nvidia-smi is not installed, and $expected are expected (--gpus 0 where that is right)"
        return
    fi
    if ! listed=$(query -L); then
        found gpu 2 "nvidia-smi does not answer; the driver hangs or is not loaded"
        return
    fi
    count=$(grep -c '^GPU ' <<<"$listed")
    if ((expected > 0 && count < expected)); then
        found gpu 2 "$count of $expected GPUs answer; one has fallen off the bus"
    else
        found gpu 0 "$count GPUs answer"
    fi
    check_query ecc 2 '$2 + 0 > 0 { print "GPU " $1 ": " $2 }' "uncorrected errors since the driver loaded" \
        --query-gpu=index,ecc.errors.uncorrected.volatile.total
    check_query remap 2 '$2 ~ /^(Yes|[1-9])/ || $3 ~ /^(Yes|[1-9])/ { print $1 }' "rows wait for a reset to be remapped, or can't be" \
        --query-remapped-rows=gpu_bus_id,remapped_rows.pending,remapped_rows.failure
    check_query throttle 1 '$2 == "Active" { print "GPU " $1 }' "slowed down by heat or power" \
        --query-gpu=index,clocks_throttle_reasons.hw_slowdown
    bad=$(query nvlink -s | awk '/^GPU/ { gpu = $2 } /inactive/ { print "GPU " gpu " link " $2 }' | head -n 3)
    if [[ $bad ]]; then found nvlink 1 "inactive: ${bad//$'\n'/, }"; else found nvlink 0 "no inactive link"; fi
    check_gpu_processes
}

check_query() { # CHECK LEVEL AWK-PROGRAM TEXT NVIDIA-SMI-OPTION: what the program prints of the answer is what is wrong
    local check=$1 level=$2 program=$3 text=$4 answer bad
    if ! answer=$(query "$5" --format=csv,noheader,nounits); then
        found "$check" 3 "nvidia-smi does not tell"
        return
    fi
    bad=$(awk -F', ' "$program" <<<"$answer" | paste -sd, -)
    if [[ $bad ]]; then found "$check" "$level" "$text: $bad"; else found "$check" 0 "none found"; fi
}

check_gpu_processes() {
    local pid foreign=''
    for pid in $(query --query-compute-apps=pid --format=csv,noheader,nounits); do
        [[ -r /proc/$pid/cgroup ]] && ! grep -q '/job_[0-9]' "/proc/$pid/cgroup" && foreign+=" $pid"
    done
    if [[ $foreign ]]; then found gpu_processes 1 "outside every Slurm job:$foreign"; else found gpu_processes 0 "none outside Slurm's jobs"; fi
}

check_xid() { # NVIDIA's Xid catalogue: those after which the GPU needs a reset or a replacement
    local log fatal
    [[ ${checks[*]} == *ecc* ]] || return
    if ! log=$(timeout 5 dmesg 2>/dev/null); then
        found xid 1 "the kernel's log can't be read (run as root)"
        return
    fi
    fatal=$(grep -oE 'NVRM: Xid \(PCI:[^)]*\): (48|62|64|74|79|92|95|110|119|120|136|140|143),' <<<"$log" | tail -n 1)
    if [[ $fatal ]]; then found xid 2 "since boot: $fatal"; else found xid 0 "none that needs a reset"; fi
}

check_hca() {
    local port state rate number=0
    for port in /sys/class/infiniband/*/ports/*; do
        [[ -r $port/state ]] || continue
        number=$((number + 1)) state=$(<"$port/state") rate=$(<"$port/rate")
        if [[ $state != *ACTIVE* ]]; then
            found hca "$([[ $hca_gbps ]] && echo 2 || echo 1)" "${port#/sys/class/infiniband/} is ${state#*: }"
        elif [[ $hca_gbps ]] && ((${rate%% *} < hca_gbps)); then
            found hca 2 "${port#/sys/class/infiniband/} runs at ${rate%% *} of $hca_gbps Gb/s"
        fi
    done
    if [[ $hca_gbps ]] && ((number == 0)); then found hca 2 "no InfiniBand port"; fi
    [[ ${checks[*]} == *hca* ]] || found hca 0 "$number InfiniBand ports"
}

check_space() { # CHECK DIR GIB
    local free
    if ! free=$(timeout 5 df --output=avail -B1M "$2" 2>/dev/null | tail -n 1); then
        found "$1" 2 "$2 does not answer"
    elif ((free < $3 * 1024)); then
        found "$1" 2 "$((free)) MiB free in $2, less than $3 GiB"
    else
        found "$1" 0 "$((free / 1024)) GiB free in $2"
    fi
}

check_mounts() {
    local directory
    for directory in ${mounts[@]+"${mounts[@]}"}; do
        if ! timeout 5 mountpoint -q "$directory"; then
            found mount 2 "$directory is not mounted, or hangs"
        elif ! timeout 5 stat -f "$directory" >/dev/null 2>&1; then
            found mount 2 "$directory does not answer"
        else
            found mount 0 "$directory answers"
        fi
    done
}

check_gpus
check_xid
check_hca
check_mounts
check_space shm /dev/shm "$min_shm"
check_space tmp /tmp "$min_tmp"

worst=0 first=''
for ((i = 0; i < ${#checks[@]}; i++)); do
    ((severity[levels[i]] > severity[worst])) && worst=${levels[i]} first="${checks[i]}: ${texts[i]}"
    [[ $json ]] || printf '%-8s  %-14s %s\n' "${names[levels[i]]}" "${checks[i]}" "${texts[i]}"
done
if [[ $json ]]; then
    for ((i = 0; i < ${#checks[@]}; i++)); do
        text=${texts[i]//\\/\\\\} && text=${text//\"/\\\"}
        printf '%s{"check": "%s", "level": "%s", "text": "%s"}' "$( ((i)) && echo ', ' || echo '[')" "${checks[i]}" "${names[levels[i]]}" "$text"
    done
    echo ']'
fi
if [[ $drain ]] && ((worst == 2)); then
    "$here/drain.sh" "${SLURMD_NODENAME:-$(hostname -s)}" "rlhpc health check: $first"
fi
exit "$worst"
