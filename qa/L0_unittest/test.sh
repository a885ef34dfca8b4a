#!/usr/bin/env bash
# The C++ suites that qa/test.sh built, then the Python suites, over the package installed in .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cores=$(nproc)  # which would answer OMP_NUM_THREADS once that is set
export PYTHONSAFEPATH=1 OMP_NUM_THREADS=1
. .venv/te-env.sh
ctest --test-dir build/test --output-on-failure --parallel "$cores"
pytest -q -n "$cores" "$@"
