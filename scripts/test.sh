#!/usr/bin/env bash
# Sets up the environment, then lints, type-checks and runs the tests. The last line is pytest's.
#
# usage: bash scripts/test.sh [--quick] [pytest's arguments]        --quick: unit tests only, on all cores: two minutes with two
# Without arguments it takes some 25 minutes and 8 GiB on two cores that do nothing else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
bin=$(realpath "${RLHPC_VENV:-.venv}")/bin

suites=(tests/unit tests/distributed tests/e2e tests/slurm)
if [[ ${1:-} == --quick ]]; then
    suites=(-n logical --dist worksteal tests/unit)
    shift
else
    bash scripts/minislurm.sh install  # refuses, with the reason, where Slurm can't run
fi
"$bin/ruff" check --quiet .
"$bin/ruff" format --check --quiet .
"$bin/mypy"
git ls-files -z "*.sh" "*.sbatch" | xargs -0 "$bin/shellcheck"
if [[ $# == 0 && ${#suites[@]} == 4 ]]; then  # what needs no processes of its own can share the cores
    "$bin/python" -m pytest --durations=5 -n logical --dist worksteal tests/unit
    # The rest waits more than it computes, above all for Slurm: one of two workers begins with that, the other with e2e.
    suites=(-n 2 --dist loadscope --no-loadscope-reorder tests/slurm tests/e2e tests/distributed)
fi
exec "$bin/python" -m pytest --durations=10 "${suites[@]}" "$@"
