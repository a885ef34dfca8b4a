#!/usr/bin/env bash
# The same suites with device=cuda, from an installed build; nothing is built here. The build may come from another
# machine: TE_PYTHON is the interpreter (default .venv/bin/python), TE_PACKAGE the folder that holds transformer_engine/
# where it is not that interpreter's own, TE_CPP_TESTS the folder of the C++ binaries (default build/test).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONSAFEPATH=1 PYTHONPATH="${TE_PACKAGE:-}" TE_TEST_DEVICE=cuda
python=${TE_PYTHON:-$PWD/.venv/bin/python}
package=$(cd / && "$python" -c 'import transformer_engine as te; print(te.__path__[0])')
# The C++ binaries have no torch in their process: cuBLASLt is found where torch keeps its copy.
libraries=$(cd / && "$python" -c 'import pathlib, torch
print(":".join(str(p) for p in pathlib.Path(torch.__file__).parents[1].glob("nvidia/*/lib")))')
export LD_LIBRARY_PATH="$package/lib:$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
for binary in "${TE_CPP_TESTS:-build/test}"/test_*; do
  "$binary"
  if command -v compute-sanitizer >/dev/null; then
    compute-sanitizer --tool memcheck --error-exitcode 1 "$binary" --gtest_filter='*/cuda*:-*Large*'
    compute-sanitizer --tool racecheck --error-exitcode 1 "$binary" --gtest_filter='*/cuda*:-*Large*'
  fi
done
"$python" -m pytest -q tests/pytorch "$@"
