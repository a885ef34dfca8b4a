#!/usr/bin/env bash
# The suites that start several processes, over the package installed in .venv. L0_unittest runs them too, among all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONSAFEPATH=1 OMP_NUM_THREADS=1
. .venv/te-env.sh
pytest -q -m dist "$@"
