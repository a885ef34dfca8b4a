#!/usr/bin/env bash
# Writes every generated document again: the compatibility table, the API pages (which read it), the tables of
# docs/develop/architecture.md, docs/reference/results.md and the README's charts. Then runs the tests that are given, if
# any. Needs the installed package of qa/setup.sh.
# usage: bash qa/regenerate.sh [TEST...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. .venv/te-env.sh
export PYTHONSAFEPATH=1
python tests/pytorch/package/compatibility.py
python tests/pytorch/package/api_pages.py
env -u PYTHONSAFEPATH python tests/policy/house.py --write  # it imports its neighbours
results=$(env -u PYTHONSAFEPATH python benchmarks/report.py --markdown)
printf '%s\n' "$results" > docs/reference/results.md
env -u PYTHONSAFEPATH python benchmarks/charts.py  # these two import their neighbours
git --no-pager diff --stat -- docs README.md
if [ $# -gt 0 ]; then pytest -n 2 "$@"; fi
