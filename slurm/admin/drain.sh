#!/usr/bin/env bash
# Takes nodes out of service, with a reason, and back. What runs there goes on until it ends.
#
# usage: drain.sh NODES REASON...      drain.sh n[3,7] GPU 2 fell off the bus
#        drain.sh --undo NODES         back into service; refuses where the reason isn't rlhpc's, unless --force precedes
#        drain.sh --list               drained and down nodes: since when, by whom, why
set -euo pipefail

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2 && exit 2; }

undo() {
    local force='' node reason
    [[ ${1:-} == --force ]] && force=1 && shift
    (($# == 1)) || usage
    for node in $(scontrol show hostnames "$1"); do
        reason=$(scontrol show node -o "$node" | sed -nE 's/.* Reason=(.*) \[[^]]*\].*/\1/p')
        if [[ $reason && $reason != rlhpc* && ! $force ]]; then
            echo "$node was drained for '$reason', not by rlhpc; see that it is mended, then: $0 --undo --force $node" >&2
            exit 1
        fi
        scontrol update "NodeName=$node" State=RESUME
    done
}

case ${1:-} in
--list) sinfo --list-reasons --long ;;
--undo) shift && undo "$@" ;;
-* | '') usage ;;
*)
    (($# > 1)) || usage
    scontrol update "NodeName=$1" State=DRAIN "Reason=${*:2}"
    ;;
esac
