#!/usr/bin/env bash
# The C++ suites that qa/test.sh built, then the Python suites, over the package installed in .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cores=$(nproc)  # which would answer OMP_NUM_THREADS once that is set
export PYTHONSAFEPATH=1 OMP_NUM_THREADS=1
. .venv/te-env.sh
ctest --test-dir build/test --output-on-failure --parallel "$cores"
# The modules' suites below other policies of layers (tests/layer): rows that arrive in runs, two weights, nothing kept.
modules=(tests/pytorch/{functional/test_linear,layer/test_fp8,quantization/test_modules,quantization/test_cached_weights}.py)
modules+=(tests/pytorch/module/test_{linear,linear_parameters,layernorm_linear,layernorm_mlp,main_grad,weight_grad}.py)
for policy in tp_comm_in_chunks two_weights recomputed; do
  pytest -q -n "$cores" --layer-policy "$policy" "${modules[@]}"
done
pytest -q -n "$cores" "$@"
