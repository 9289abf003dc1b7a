#!/usr/bin/env bash
# rlhpc, TRL and verl one after the other on the GPU of this machine, without a network; then the table of the three.
# usage: scripts/bench/peers/all.sh WHEELS OUT [rlhpc] [trl] [trl-bf16] [trl-transformers] [verl]
# Python is one that runs rlhpc on the GPU; WHEELS is what wheels.sh wrote. Each system is killed after LIMIT seconds (400), most
# of which is the start: engines compile. OUT gets each one's log, and its rows as they come; a second call goes on with
# what the first left out. Printed: the ends of the logs, and seconds since the beginning.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
usage="usage: all.sh WHEELS OUT [rlhpc] [trl] [trl-bf16] [trl-transformers] [verl]"
wheels=$(realpath "${1:?$usage}"); out=$(realpath -m "${2:?$usage}"); shift 2
mkdir -p "$out"
export HF_HUB_OFFLINE=1 HF_DATASETS_CACHE="$out/datasets" VLLM_NO_USAGE_STATS=1
export PYTHONPATH="$here/../../..${PYTHONPATH:+:$PYTHONPATH}"

site() { # trl | verl: prints where its wheels lie unpacked
    ls "$wheels/$1"/"$1"-*.whl >/dev/null || exit 1
    [ -d "$out/site-$1" ] || python3 -m pip install -q --no-index --no-deps --no-compile --target "$out/site-$1" \
        "$wheels/$1"/*.whl >&2 || exit 1
    echo "$out/site-$1"
}
limited() { # SYSTEM COMMAND...
    local name=$1 status
    shift
    timeout -k 20 "${LIMIT:-400}" "$@" >"$out/$name.log" 2>&1
    status=$?
    grep -avE 'it/s\]|WARNING|^$' "$out/$name.log" | tail -n "${LINES_OF_LOG:-25}" | cut -c1-240
    if [ "$status" != 0 ] && [ -f "$out/$name/logs/rank-00000.log" ]; then
        tail -n 25 "$out/$name/logs/rank-00000.log" | cut -c1-240
    fi
    echo "== $name ended with $status, $SECONDS s"
}
trl() { # NAME OPTION...
    local name=$1 path
    shift
    path=$(site trl) || return
    PYTHONPATH="$path:$PYTHONPATH" limited "$name" \
        python3 "$here/grpo_trl.py" "$out/inputs" "$out/$name.jsonl" --check-engine "$@"
}
verl() {
    local path
    path=$(site verl) || return
    PYTHONPATH="$path:$PYTHONPATH" limited verl "$here/verl.sh" "$out/inputs" "$out/verl"
}

[ -d "$out/inputs" ] || python3 -m scripts.bench.peers.inputs "$out/inputs" ${SHAPE:+--shape "$SHAPE"} || exit 1
for system in "${@:-rlhpc}"; do
    case $system in
    rlhpc) limited rlhpc "$here/rlhpc.sh" "$out/inputs" "$out/rlhpc" trainer.device=cuda ;;
    trl) trl trl ;;
    trl-bf16) trl trl-bf16 --dtype bfloat16 ;;
    trl-transformers) trl trl-transformers --model-impl transformers ;;
    verl) verl ;;
    *) echo "$system: not one of rlhpc, trl, trl-bf16, trl-transformers, verl" >&2 ;;
    esac
done
rows=()
for pair in rlhpc=rlhpc/metrics TRL=trl TRL-bf16=trl-bf16 TRL-transformers=trl-transformers verl=verl/metrics; do
    [ -s "$out/${pair#*=}.jsonl" ] && rows+=("${pair%%=*}=$out/${pair#*=}.jsonl")
done
[ ${#rows[@]} -gt 0 ] || exit 1
read -ra versions < <(python3 -c 'from importlib.metadata import version
print(*(f"{name}={version(name)}" for name in ("torch", "vllm", "transformers", "accelerate", "megatron-core")))')
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)
python3 -m scripts.bench.peers.compare against-peers "${rows[@]}" --out "$out" --hardware "1 x $gpu" --versions "${versions[@]}" \
    trl=1.16.0 verl=0.9.1
