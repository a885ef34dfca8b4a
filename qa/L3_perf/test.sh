#!/usr/bin/env bash
# Every benchmark on this machine's device, appended to benchmarks/results/, then each case beside its target.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. .venv/te-env.sh
for bench in benchmarks/bench_*.py; do python "$bench"; done
python benchmarks/report.py
