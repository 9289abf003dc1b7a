#!/usr/bin/env bash
# From a fresh clone to a small mixture-of-experts model that has learnt to add, on a CPU, with all the real parts.
#
# usage: bash scripts/quickstart.sh [overrides]        such as trainer.total_training_steps=20 seed=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
python=${RLHPC_VENV:-.venv}/bin/python
"$python" scripts/make_tiny_model.py
exec "$python" launch/run.py experiment=tiny_arithmetic "$@"
