#!/usr/bin/env bash
# Interrupts a small run N times at random moments, on a real Slurm on this machine, and checks that nothing is lost.
#
# usage: scripts/preemption_drill.sh N [--seed S] [--nodes 3] [--ranks 1] [--json FILE] [--dir DIR]
# Every phase of a step is hit in turn by preemption, with and without grace, SIGUSR2, the time limit, a requeue, and
# kill -9 of the driver, a rank, a node's supervisor and a whole node; N=20 hits each phase twice. Exits with 1 when
# a rule was broken or the end differs from that of an uninterrupted run in a single bit. About a minute an event.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
bash scripts/minislurm.sh install
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
exec "$(realpath "${RLHPC_VENV:-.venv}")/bin/python" -m scripts.drill "$@"
