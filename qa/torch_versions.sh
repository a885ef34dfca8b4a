#!/usr/bin/env bash
# The package under other versions of PyTorch, on the CPU: for each a virtual environment of its own, with PyPI's torch of
# that version, the extension compiled against it (the engine once for all), imported, and a smoke set. Prints a line for
# each version at the end, and fails where one does. docs/guide/install.md has the table of results.
#
# usage: qa/torch_versions.sh VERSION...        as in 2.9.1 2.15.0
# SUITE='tests/pytorch' runs in place of the smoke set; the environments are kept in build/torch_versions, so
# that a second run is quick, and may be removed.
# Environment it reads: PYTHON, MAX_JOBS (docs/reference/environment.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
[ $# -gt 0 ] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2 && exit 2; }
cores=$(nproc)
export CMAKE_ARGS="${CMAKE_ARGS:-} -DTE_WITH_CUDA=OFF" PYTHONSAFEPATH=1
# Modules, autograd, saved tensors, the graph recorder, torch.compile, FP8, tensor subclasses, an optimizer.
smoke="tests/pytorch/module/test_linear.py tests/pytorch/module/test_layernorm_mlp.py
tests/pytorch/module/test_main_grad_compile.py tests/pytorch/saved tests/pytorch/graph/test_graph.py
tests/pytorch/quantization/test_compile.py tests/pytorch/layer/test_fp8.py tests/pytorch/tensor/test_subclass.py
tests/pytorch/optimizer/test_fused_adam.py"
read -ra suite <<<"$(echo ${SUITE:-$smoke})"
# The pins of the tests, without those of one version of torch.
needed="numpy pytest pytest-xdist hypothesis expecttest safetensors accelerate lightning peft transformers"
mkdir -p build/torch_versions
pins=$root/build/torch_versions/constraints.txt
grep -vE '^(torch|triton|nvidia-.*|cuda-.*|sympy|fsspec|setuptools)[=<>]' qa/constraints.txt >"$pins"

# Says what has happened, in the words of the table.
one() {
  local version=$1 venv=$root/build/torch_versions/$1 log=$root/build/torch_versions/$1.log
  if [ ! -x "$venv/bin/python" ]; then "${PYTHON:-python3}" -m venv "$venv" || return; fi
  # shellcheck disable=SC2086
  "$venv/bin/python" -m pip install -q -c "$pins" "torch==$version" $needed >"$log" 2>&1 || { echo "no such torch, see $log" && return; }
  PIP_CONSTRAINT=$pins PIP_BUILD_CONSTRAINT=$pins "$venv/bin/python" -m pip install -q --no-deps --force-reinstall \
    --config-settings build-dir=build/torch_versions/build . >>"$log" 2>&1 || { echo "does not build, see $log" && return; }
  (cd / && "$venv/bin/python" -c 'import transformer_engine.pytorch') >>"$log" 2>&1 || { echo "does not import, see $log" && return; }
  OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -q -n "$cores" "${suite[@]}" >>"$log" 2>&1 || true
  tail -n 1 "$log"
}

failed=0
lines=()
for version in "$@"; do
  said=$(one "$version")
  case $said in *" passed"*) ;; *) failed=1 ;; esac
  case $said in *" failed"* | *" error"*) failed=1 ;; esac
  lines+=("torch $version: $said")
  echo "${lines[-1]}"
done
[ ${#lines[@]} = 1 ] || printf '%s\n' '' "${lines[@]}"
exit $failed
