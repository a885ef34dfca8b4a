#!/usr/bin/env bash
# Pairs of losses over many steps, and how far they are apart: the example's model divided over processes and whole;
# our modules under megatron-core's own data parallelism, where it is installed, and in one process without it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONSAFEPATH=1 OMP_NUM_THREADS=1
. .venv/te-env.sh
pytest -q -s qa/L2_convergence "$@"
