#!/usr/bin/env bash
# Pairs of losses over 100 steps: the example's model divided over processes and whole. Prints how far they are apart.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONSAFEPATH=1 OMP_NUM_THREADS=1
. .venv/te-env.sh
pytest -q -s qa/L2_convergence "$@"
