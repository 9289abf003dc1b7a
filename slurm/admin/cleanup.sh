#!/usr/bin/env bash
# Removes what runs of rlhpc left on this node: processes, shared memory, temporary directories.
#
# usage: cleanup.sh                  sessions whose owner is dead, and shared memory without a session
#        cleanup.sh --job ID         all sessions of a Slurm job on this node, whatever lives of them (the epilog)
#   --user UID         only this user's; root without it: everybody's
#   --temp-root DIR    where sessions lie (cluster.ray_temp_root); repeatable, default /tmp
#   --dry-run          only say what would be removed
#
# Safe on shared nodes: a session is known by its token, and root works as the user whose session it is, so that no
# link or name which a user makes leads root anywhere else. Exit code 1: a process survived SIGKILL.
set -euo pipefail
unset RLHPC_SESSION

job='' user='' dry_run='' roots=()
while (($#)); do
    case $1 in
    --job) job=$2 && shift ;;
    --user) user=$2 && shift ;;
    --temp-root) roots+=("$2") && shift ;;
    --dry-run) dry_run=1 ;;
    *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2 && exit 2 ;;
    esac
    shift
done
((${#roots[@]})) || roots=(/tmp)

if ((EUID == 0)) && [[ $user != 0 ]]; then
    options=(${job:+--job "$job"} ${dry_run:+--dry-run})
    for root in "${roots[@]}"; do options+=(--temp-root "$root"); done
    if [[ $user ]]; then
        users=("$user")
    else # whoever has sessions, or shared memory with a session's name
        mapfile -t users < <({ for root in "${roots[@]}"; do
            find "$root" -maxdepth 1 -type d -name 'rlhpc-*' -printf '%U\n'
        done && find /dev/shm -maxdepth 1 -name '*rlhpc*' -printf '%U\n'; } | sort -un)
    fi
    code=0
    for uid in ${users[@]+"${users[@]}"}; do
        group=$(id -g "$uid") || continue # a user who was removed
        if ((uid == 0)); then
            "$0" --user 0 "${options[@]}" || code=1
        else
            setpriv --reuid="$uid" --regid="$group" --clear-groups -- bash -s -- --user "$uid" "${options[@]}" <"$0" || code=1
        fi
    done
    exit "$code"
fi

# Pids whose environment holds a variable of this value, as an extended regular expression.
carrying() { { grep -lzsE "^$1=$2\$" /proc/[0-9]*/environ || true; } | cut -d/ -f3; } # grep counts the unreadable as errors

tokens_of_job() {
    local root owner pid
    for root in "${roots[@]}"; do
        for owner in "$root/rlhpc-$EUID"/*/owner.json; do
            grep -qs "\"job\": \"$job\"" "$owner" || continue
            [[ -z ${SLURMD_NODENAME:-} ]] || grep -qs "\"node\": \"$SLURMD_NODENAME\"" "$owner" || continue
            basename "$(dirname "$owner")"
        done
    done
    for pid in $(carrying SLURM_JOB_ID "$job"); do # also those whose directory is gone
        [[ -z ${SLURMD_NODENAME:-} ]] || grep -qzs "^SLURMD_NODENAME=$SLURMD_NODENAME\$" "/proc/$pid/environ" || continue
        sed -zn 's/^RLHPC_SESSION=//p' "/proc/$pid/environ" 2>/dev/null | tr '\0' '\n'
    done
}

tokens_of_the_dead() {
    local root directory
    for root in "${roots[@]}"; do
        for directory in "$root/rlhpc-$EUID"/*/; do
            [[ -d $directory && ! -L ${directory%/} ]] || continue
            if [[ -f $directory/owner.json ]]; then
                flock --shared --nonblock "$directory/owner.json" true || continue # its owner lives
            else
                [[ $(find "$directory" -maxdepth 0 -mmin +1) ]] || continue # perhaps in the making
            fi
            basename "$directory"
        done
    done
    local segment token
    for segment in /dev/shm/*rlhpc*; do
        token=$(grep -oE 'rlhpc[0-9a-f]{8}' <<<"$segment" | cut -c6-) || continue
        [[ $(compgen -G "/*/rlhpc-$EUID/$token") || $(carrying RLHPC_SESSION "$token") ]] && continue
        for root in "${roots[@]}"; do [[ ! -d $root/rlhpc-$EUID/$token ]] || continue 2; done
        echo "$token"
    done
}

remove() {
    local token=$1 pids root path code=0
    for _ in {1..40}; do
        pids=$(carrying RLHPC_SESSION "$token")
        [[ $pids ]] || break
        if [[ $dry_run ]]; then
            echo "session $token: would kill $(tr '\n' ' ' <<<"$pids")"
            break
        fi
        # shellcheck disable=SC2086
        kill -KILL $pids 2>/dev/null || true
        sleep 0.25
    done
    if [[ ! $dry_run && $(carrying RLHPC_SESSION "$token") ]]; then
        echo "session $token: $(tr '\n' ' ' <<<"$pids")survived SIGKILL" >&2
        code=1
    fi
    for path in /dev/shm/*"rlhpc$token"* $(printf "%s/rlhpc-$EUID/$token " "${roots[@]}"); do
        [[ -e $path && -O $path ]] || continue
        if [[ $dry_run ]]; then
            echo "session $token: would remove $path"
        else
            rm -rf --one-file-system -- "$path" && echo "session $token: removed $path"
        fi
    done
    return "$code"
}

code=0
mapfile -t tokens < <(if [[ $job ]]; then tokens_of_job; else tokens_of_the_dead; fi | grep -xE '[0-9a-f]{8}' | sort -u)
for token in ${tokens[@]+"${tokens[@]}"}; do
    remove "$token" || code=1
done
exit "$code"
