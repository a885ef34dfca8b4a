#!/usr/bin/env bash
# The same suites with device=cuda, from an installed build; nothing is built here. The build may come from another
# machine: TE_PYTHON is the interpreter (default .venv/bin/python), TE_PACKAGE the folder that holds transformer_engine/
# where it is not that interpreter's own, TE_CPP_TESTS the folder of the C++ binaries (default build/test).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONSAFEPATH=1 PYTHONPATH="${TE_PACKAGE:-}" TE_TEST_DEVICE=cuda OMP_NUM_THREADS=1
python=${TE_PYTHON:-$PWD/.venv/bin/python}
package=$(cd / && "$python" -c 'import transformer_engine as te; print(te.__path__[0])')
# The C++ binaries have no torch in their process: cuBLASLt is found where torch keeps its copy.
libraries=$(cd / && "$python" -c 'import pathlib, torch
print(":".join(str(p) for p in pathlib.Path(torch.__file__).parents[1].glob("nvidia/*/lib")))')
export LD_LIBRARY_PATH="$package/lib:$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
[ -x "$sanitizer" ] || echo "L0_gpu: no compute-sanitizer on PATH: memcheck and racecheck are not run"
for binary in "${TE_CPP_TESTS:-build/test}"/test_*; do
  [ -x "$binary" ] && [ -f "$binary" ] || continue
  "$binary" --gtest_brief=1
  # Tests named Large are left to the plain run; a suite without device tests (test_core) has nothing to sanitize.
  small='*/cuda*:-*Large*'
  if [ -x "$sanitizer" ] && "$binary" --gtest_list_tests --gtest_filter="$small" | grep -q '^  '; then
    for tool in memcheck racecheck; do
      "$sanitizer" --tool "$tool" --error-exitcode 1 "$binary" --gtest_brief=1 --gtest_filter="$small"
    done
  fi
done
"$python" -m pytest -q tests/pytorch "$@"
