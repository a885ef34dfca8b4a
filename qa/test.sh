#!/usr/bin/env bash
# From a clean clone to the last test: sets up .venv, builds the C++ suites against the installed engine, runs them,
# then the Python suites over the installed package. Everything this machine can run; GPU tests where there is a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash qa/setup.sh
. .venv/te-env.sh
root=$PWD
package=$(cd / && "$root/.venv/bin/python" -c 'import transformer_engine as te; print(te.__path__[0])')
case $package in
"$root/.venv/"*) ;;
*) echo "test: the package under test is not the one in .venv: $package" >&2 && exit 1 ;;
esac
kernels=$([ -n "${CUDACXX:-}" ] && echo ON || echo OFF) # as qa/setup.sh built them
configure() {
  cmake "$@" -G Ninja -S tests/cpp -B build/test -DTE_ENGINE="$package/lib/libtransformer_engine.so" \
    -DTE_LAYER_POLICIES=ON -DTE_WITH_CUDA="$kernels" -DPython_EXECUTABLE="$root/.venv/bin/python" \
    ${CI:+-DTE_WERROR=ON} ${CMAKE_ARGS:-} >build/test-configure.log 2>&1
}
mkdir -p build
configure || configure --fresh || { cat build/test-configure.log >&2 && exit 1; }  # a moved folder needs a fresh cache
cmake --build build/test
exec bash qa/L0_unittest/test.sh
