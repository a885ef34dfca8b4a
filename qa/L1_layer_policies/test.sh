#!/usr/bin/env bash
# The modules' suites under other policies of layers (tests/layer): rows that arrive in runs, two weights, nothing saved.
# L0_unittest runs tests/pytorch/layer/test_policies.py, which is about the policies alone. Needs what qa/test.sh built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cores=$(nproc)  # before OMP_NUM_THREADS, which it answers
export PYTHONSAFEPATH=1 OMP_NUM_THREADS=1
. .venv/te-env.sh
modules=(tests/pytorch/{functional/test_linear,layer/test_fp8,quantization/test_modules,quantization/test_cached_weights}.py)
modules+=(tests/pytorch/module/test_{linear,linear_parameters,layernorm_linear,layernorm_mlp,main_grad,weight_grad}.py)
for policy in tp_comm_in_chunks two_weights recomputed; do
  pytest -q -n "$cores" --layer-policy "$policy" "${modules[@]}" "$@"
done
