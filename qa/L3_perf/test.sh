#!/usr/bin/env bash
# Every benchmark on this machine's device, appended to benchmarks/results/, then each case beside its target.
# In chunks of some minutes: benchmarks/again.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. .venv/te-env.sh
for bench in benchmarks/bench_*.py; do
  if [[ $bench != benchmarks/bench_*parallel.py ]]; then
    python "$bench"
  elif python -c 'import sys, torch; sys.exit(torch.cuda.device_count() == 1)'; then
    python -m torch.distributed.run --nproc-per-node=2 "$bench"
  else
    echo "L3_perf: $bench needs two CUDA devices; there is one"
  fi
done
python benchmarks/report.py
