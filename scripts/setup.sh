#!/usr/bin/env bash
# Makes the virtual environment with everything rlhpc needs on a CPU machine. Safe to repeat: nothing to do takes no time.
#
# usage: bash scripts/setup.sh        RLHPC_VENV=DIR puts it elsewhere than .venv; pip's own variables are honoured
# needs: Debian or Ubuntu on x86-64, or Python 3.11 (with venv) and libnuma installed by other means
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${RLHPC_VENV:-.venv}
stamp=$venv/rlhpc-requirements
wanted=$({ realpath -m "$venv"; sed "/^\[tool.ruff\]/,\$d" pyproject.toml; cat requirements/{cpu,dev}.txt; } | sha256sum)
exec 9<scripts/setup.sh
flock 9 # two set-ups at once would clear each other's environment; the second waits, and finds it made
[[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]] && exit 0

log=$(mktemp "${TMPDIR:-/tmp}/rlhpc-setup.XXXXXX")

phase() {  # phase TITLE COMMAND...: runs it quietly and tells how long it took, or how it failed
    local title=$1 start=$SECONDS
    shift
    printf 'setup: %-46s ' "$title"
    if ! "$@" >>"$log" 2>&1 </dev/null; then
        printf 'failed\n'
        tail -n 25 "$log" >&2
        printf 'setup: failed while: %s; all output is in %s\n' "$title" "$log" >&2
        exit 1
    fi
    printf '%4d s\n' $((SECONDS - start))
}

is_python311() { [[ $("$1" -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null) == "3 11" ]]; }

find_python() {
    local candidate
    for candidate in python3.11 python3; do
        is_python311 "$candidate" && command -v "$candidate" && return
    done
    return 1
}

missing_packages() {  # Debian package names of what this machine lacks
    local python
    if ! python=$(find_python); then
        printf 'python3.11 python3.11-venv '
    elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        printf 'python3.11-venv '
    fi
    /sbin/ldconfig -p 2>/dev/null | grep -q 'libnuma\.so\.1' || printf 'libnuma1 '  # vLLM's CPU kernels link it
    command -v g++ >/dev/null || printf 'g++ '  # torch.compile builds CPU kernels with it
}

install_packages() {
    local as_root=()
    [[ $EUID -eq 0 ]] || as_root=(sudo)
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

read -ra packages <<<"$(missing_packages)"
if ((${#packages[@]})); then
    if ! command -v apt-get >/dev/null || { [[ $EUID -ne 0 ]] && ! command -v sudo >/dev/null; }; then
        echo "setup: this machine lacks ${packages[*]} (Debian's names), and can't be given them from here: needs" \
            "apt-get, as root or with sudo. Install them, then run this again." >&2
        exit 1
    fi
    phase "system packages: ${packages[*]}" install_packages "${packages[@]}"
fi
python=$(find_python) || { echo "setup: still no Python 3.11; install it, then run this again" >&2; exit 1; }

[[ -x $venv/bin/python && -f $stamp ]] || phase "virtual environment in $venv" "$python" -m venv --clear "$venv"  # no stamp: half installed
rm -f "$stamp"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input)
phase "PyTorch" "${pip[@]}" --constraint requirements/cpu.txt torch==2.13.0
phase "vLLM, Megatron-core, Ray and the rest" "${pip[@]}" --no-deps -r requirements/cpu.txt -r requirements/dev.txt
phase "rlhpc itself" "${pip[@]}" --no-deps --no-build-isolation --editable .
phase "does everything load" "$venv/bin/python" -c \
    'import hydra, megatron.core, ray, safetensors.torch, submitit, torch, transformers, vllm, wandb, rlhpc'
printf '%s' "$wanted" >"$stamp"
rm -f "$log"
echo "setup: ready; activate with: source $venv/bin/activate"
