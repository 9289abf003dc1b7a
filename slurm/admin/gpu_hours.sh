#!/usr/bin/env bash
# What jobs have used, by sacct: GPU-hours and CPU-hours of every attempt, requeued ones included.
#
# usage: gpu_hours.sh [--by user|job|account] [--start TIME] [--end TIME] [SACCT OPTION ...]
#        gpu_hours.sh --by job --start now-7days --user alice        --start and --end as sacct takes them
#
# sacct -D: without it, only the last attempt of a requeued job is counted. -X: the job, not its steps again.
# `cut short` is what attempts used that did not end by themselves (preempted, requeued, lost nodes): how much of it was
# repeated depends on the checkpoints; `rlhpc status RUN` has each attempt's steps.
set -euo pipefail

by=user start=now-30days end=now
while (($#)); do
    case $1 in
    --by) by=$2 && shift 2 ;;
    --start) start=$2 && shift 2 ;;
    --end) end=$2 && shift 2 ;;
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" && exit ;;
    *) break ;;
    esac
done
case $by in
user) key=User ;;
job) key=JobID ;;
account) key=Account ;;
*) echo "--by $by: choose user, job or account" >&2 && exit 2 ;;
esac
everybody=()
[[ " $* " == *" -u "* || " $* " == *" --user"* || " $* " == *" -j "* ]] || everybody=(--allusers)

sacct -D -X -P -n -S "$start" -E "$end" ${everybody[@]+"${everybody[@]}"} "$@" -o "$key,JobID,State,ElapsedRaw,AllocTRES,AllocCPUS" |
    awk -F'|' -v by="$by" '
        {
            gpus = 0
            if (match($5, /gres\/gpu=[0-9]+/)) gpus = substr($5, RSTART + 9, RLENGTH - 9)
            gpu_s[$1] += gpus * $4; cpu_s[$1] += $6 * $4; attempts[$1]++
            if (!(($1, $2) in seen)) { seen[$1, $2] = 1; jobs[$1]++ }
            if ($3 ~ /PREEMPTED|REQUEUED|NODE_FAIL|BOOT_FAIL/) short[$1] += gpus ? gpus * $4 : $6 * $4
            all_gpu += gpus * $4; all_cpu += $6 * $4
        }
        function line(name, jobs, attempts, gpu, cpu, short) {
            return sprintf("%-20s %6s %9s %12s %12s %12s", name, jobs, attempts, gpu, cpu, short)
        }
        function hours(seconds) { return sprintf("%.2f", seconds / 3600) }
        END {
            print line(by, "jobs", "attempts", "GPU-hours", "CPU-hours", "cut short")
            fflush()
            sort = "sort -k4,4gr -k5,5gr"
            for (k in attempts)
                print line(k, jobs[k], attempts[k], hours(gpu_s[k]), hours(cpu_s[k]), hours(short[k])) | sort
            close(sort)
            print line("total", "", "", hours(all_gpu), hours(all_cpu), "")
        }'
