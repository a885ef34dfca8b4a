#!/usr/bin/env bash
# Style: ruff over the Python, clang-format over the C++, at the versions qa/setup.sh pins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. .venv/te-env.sh
ruff check .
ruff format --check .
find transformer_engine tests -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' | sort | xargs -d '\n' clang-format --dry-run -Werror
