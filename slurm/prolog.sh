#!/usr/bin/env bash
# Slurm's Prolog: before a job, removes what dead runs of rlhpc left here, and keeps jobs off a node that is broken.
#
#   slurm.conf:  Prolog=/path/to/rlhpc/slurm/prolog.sh
#                SchedulerParameters=nohold_on_prolog_fail     without it, a job that meets a bad node is held, not requeued
#   RLHPC_CHECK        further options of admin/health_check.sh, such as "--gpus 8 --mount /scratch"
#   RLHPC_TEMP_ROOTS   where users put cluster.ray_temp_root, divided by blanks (default /tmp)
# Slurm gives it no environment of the site's: to set these, name a script of two lines in slurm.conf instead:
#   RLHPC_CHECK="--gpus 8" exec /path/to/rlhpc/slurm/prolog.sh
#
# A node that fails is drained with what was found, and the job goes elsewhere.
set -uo pipefail
: "${SLURMD_NODENAME:?is set by slurmd: this is a Prolog}"
here=$(dirname "$(readlink -f "$0")")
options=()
for root in ${RLHPC_TEMP_ROOTS:-/tmp}; do options+=(--temp-root "$root"); done

timeout 20 "$here/admin/cleanup.sh" "${options[@]}" >/dev/null 2>&1
# shellcheck disable=SC2086
said=$(timeout 30 "$here/admin/health_check.sh" ${RLHPC_CHECK:-} 2>&1)
code=$?
((code == 2 || code == 124)) || exit 0 # critical, or a check that hangs
"$here/admin/drain.sh" "$SLURMD_NODENAME" "rlhpc prolog: $(grep -m1 CRITICAL <<<"$said" || tail -n1 <<<"$said")"
exit 1
