#!/usr/bin/env bash
# Slurm's Epilog: after a job, removes what its runs of rlhpc left on this node; other jobs' are not touched.
#
#   slurm.conf:  Epilog=/path/to/rlhpc/slurm/epilog.sh
#   RLHPC_TEMP_ROOTS   where users put cluster.ray_temp_root, divided by blanks (default /tmp); see prolog.sh for how
#
# Where it can't, the node is drained with the reason; the job's end is not held up. It takes well under a second.
set -uo pipefail
: "${SLURM_JOB_ID:?is set by slurmd: this is an Epilog}" "${SLURM_JOB_UID:?}"
here=$(dirname "$(readlink -f "$0")")
options=()
for root in ${RLHPC_TEMP_ROOTS:-/tmp}; do options+=(--temp-root "$root"); done

if ! said=$(timeout 30 "$here/admin/cleanup.sh" --job "$SLURM_JOB_ID" --user "$SLURM_JOB_UID" "${options[@]}" 2>&1); then
    "$here/admin/drain.sh" "${SLURMD_NODENAME:?}" "rlhpc epilog: job $SLURM_JOB_ID: ${said##*$'\n'}"
fi
[[ -z $said ]] || logger -t rlhpc-epilog "job $SLURM_JOB_ID: $said" 2>/dev/null
exit 0 # any other code would drain the node without a reason that helps
