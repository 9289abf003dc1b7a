#!/usr/bin/env bash
# What TRL and verl need beside rlhpc's GPU environment (requirements/gpu.txt), as wheels for a machine without a network.
# usage: scripts/bench/peers/wheels.sh WHEELS     18 MB: WHEELS/trl and WHEELS/verl, for Python 3.12 on x86-64
# verl 0.9.1 wants Transformers below 5.11 and says 5.9.0 for vLLM 0.24; its tokenizers come with it.
set -euo pipefail
wheels=${1:?usage: wheels.sh WHEELS}
shared=(datasets==5.2.0 multiprocess==0.70.19 dill==0.4.1)
trl=(trl==1.16.0)
verl=(
    verl==0.9.1 transformers==5.9.0 tokenizers==0.22.2 tensordict==0.10.0 pyvers==0.1.0 importlib_metadata==10.2.0
    orjson==3.13.0 TransferQueue==0.1.11 codetiming==1.4.0 torchdata==0.11.0 pylatexenc==2.11
)
get() {
    local out=$1
    shift
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d "$out" "$@"
}
get "$wheels/trl" "${shared[@]}" "${trl[@]}"
get "$wheels/verl" "${shared[@]}" "${verl[@]}"
du -sh "$wheels"/*
