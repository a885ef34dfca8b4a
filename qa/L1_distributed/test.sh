#!/usr/bin/env bash
# The suites that start several processes, over the package installed in .venv. L0_unittest runs them too, among all.
# With TE_TEST_DEVICE=cuda over NCCL, each rank on a CUDA device of its own; tests of more ranks than devices are
# skipped, and all of them with fewer than two. TE_TEST_BACKEND=gloo beside it: every rank on the first device, over
# gloo, and what is captured in graphs is skipped. The build may come from another machine then: TE_PYTHON and
# TE_PACKAGE as in L0_gpu.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONSAFEPATH=1 OMP_NUM_THREADS=1
if [ -z "${TE_PYTHON:-}" ]; then . .venv/te-env.sh; fi
if [ -n "${TE_PACKAGE:-}" ]; then export PYTHONPATH=$TE_PACKAGE; fi
if [ "${TE_TEST_DEVICE:-}" = cuda ] && [ "${TE_TEST_BACKEND:-nccl}" != gloo ]; then
  found=$("${TE_PYTHON:-python}" -c 'import torch; print(torch.cuda.device_count())')
  if [ "$found" -lt 2 ]; then
    echo "L1_distributed: skipped: needs 2 CUDA devices, one for each rank; there are $found; or TE_TEST_BACKEND=gloo"
    exit 0
  fi
fi
"${TE_PYTHON:-python}" -m pytest -q -m dist "$@"
