#!/usr/bin/env bash
# Makes .venv in the repository's root with the package and all that its tests and examples need; safe to run again,
# and quick when nothing changed. Installs system packages only through apt, and only as root or with passwordless sudo.
# Environment it reads (docs/reference/environment.md): PYTHON, MAX_JOBS, CUDACXX, CMAKE_ARGS, CI.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=$root/.venv

say() { echo "setup: $*"; }
fail() {
  echo "setup: $*" >&2
  exit 1
}

# ---- what the system must have ----

# A Python that can make a virtual environment and compile extensions.
python_works() {
  "$1" - >/dev/null 2>&1 <<'PY'
import ensurepip, os, sys, sysconfig, venv
headers = os.path.join(sysconfig.get_path("include"), "Python.h")
sys.exit(not (sys.version_info >= (3, 10) and os.path.exists(headers)))
PY
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.13 python3.14 python3.11 python3.10 /usr/bin/python3; do
    if command -v "$candidate" >/dev/null && python_works "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
}

have_gxx() { command -v g++ >/dev/null && [ "$(g++ -dumpversion | cut -d. -f1)" -ge 11 ]; }

have_gtest() {
  [ -e /usr/src/googletest/CMakeLists.txt ] ||
    echo '#include <gtest/gtest.h>' | g++ -std=c++20 -x c++ -fsyntax-only - 2>/dev/null
}

missing_packages() {
  [ -n "$(find_python)" ] || echo python3 python3-venv python3-dev
  have_gxx || echo g++
  have_gtest || echo libgtest-dev
}

# A word list on purpose: package names have no spaces.
# shellcheck disable=SC2046
packages=$(echo $(missing_packages))
if [ -n "$packages" ]; then
  as_root=""
  if [ "$(id -u)" != 0 ]; then as_root="sudo -n"; fi
  if ! command -v apt-get >/dev/null || ! $as_root true 2>/dev/null; then
    fail "missing: $packages (Debian's names; Python must be 3.10 or newer, g++ 11 or newer)." \
      "Install them, for example with: sudo apt-get install $packages"
  fi
  say "installing through apt: $packages"
  $as_root apt-get -qq update
  # shellcheck disable=SC2086
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $packages >/dev/null
  # shellcheck disable=SC2046
  packages=$(echo $(missing_packages))
  [ -z "$packages" ] || fail "apt installed what it has, but this is still missing or too old: $packages" \
    "(wanted Python >= 3.10 with venv and headers, g++ >= 11, GoogleTest)"
fi
python=$(find_python)
say "$("$python" --version) ($python), g++ $(g++ -dumpfullversion)"

# ---- the virtual environment ----

# Which Python it was made from, and where: a moved repository or an upgraded Python starts afresh.
identity() { "$1" -c 'import sys; print(*sys.version_info[:3], sys.base_prefix)' 2>/dev/null; }
wanted="$(identity "$python") $venv"
if [ "$(cat "$venv/.te-python" 2>/dev/null)" != "$wanted" ] || [ "$(identity "$venv/bin/python") $venv" != "$wanted" ] ||
  ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  say "making .venv"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  echo "$wanted" >"$venv/.te-python"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# ---- pinned requirements ----

at_least() { [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }
version_of() { "$@" --version 2>/dev/null | grep -oE '[0-9]+(\.[0-9]+)+' | head -n 1; }

requirements="torch numpy scikit-build-core pytest pytest-xdist hypothesis expecttest ruff clang-format
matplotlib tqdm safetensors"
system_cmake=$(PATH=${PATH//"$venv/bin:"/} version_of cmake || true)
system_ninja=$(PATH=${PATH//"$venv/bin:"/} version_of ninja || true)
at_least 3.25 "${system_cmake:-0}" || requirements+=" cmake"
at_least 1.10 "${system_ninja:-0}" || requirements+=" ninja"

# The CUDA compiler: CUDACXX, else the machine's nvcc when new enough, else, where there is a GPU, PyPI's beside the
# CUDA libraries that torch brings. Without nvcc and without a GPU the build is for the CPU, which CMake finds by itself.
nvcc=${CUDACXX:-$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)}
if [ -n "$nvcc" ] && [ -z "${CUDACXX:-}" ] && ! at_least 12.9 "$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')"; then
  say "$nvcc is older than CUDA 12.9: not used"
  nvcc=""
fi
have_gpu() { [ -e /dev/nvidia0 ] || nvidia-smi -L 2>/dev/null | grep -q GPU; }
pypi_nvcc=""
if [ -z "$nvcc" ] && have_gpu; then
  requirements+=" nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-cccl"
  pypi_nvcc=yes
fi

stamp=$({
  cat qa/constraints.txt
  echo "$requirements"
} | sha256sum)
if [ "$(cat "$venv/.te-requirements" 2>/dev/null)" != "$stamp" ]; then
  say "installing the pinned requirements (qa/constraints.txt; torch is a large download)"
  rm -f "$venv/.te-requirements"
  # shellcheck disable=SC2086
  pip install -q -c qa/constraints.txt $requirements
  echo "$stamp" >"$venv/.te-requirements"
fi
# Requirements of examples/with_*.py and of the tests of clients alone: where they cannot be installed, these tests are
# skipped and say so, but for CI, which has to run all.
extras="accelerate lightning peft transformers megatron-core;python_version>='3.12'"
extras_stamp=$(echo "$stamp $extras" | sha256sum)
if [ "$(cat "$venv/.te-extras" 2>/dev/null)" != "$extras_stamp" ]; then
  say "installing what the examples with frameworks and the tests of clients need: $extras"
  rm -f "$venv/.te-extras"
  # shellcheck disable=SC2086
  if pip install -q -c qa/constraints.txt $extras; then
    echo "$extras_stamp" >"$venv/.te-extras"
  elif [ "${CI:-}" = true ]; then
    fail "CI=true, and what the tests of clients need cannot be installed: pip install -c qa/constraints.txt $extras"
  else
    say "not installed, so that their tests are skipped: $extras"
  fi
fi
if [ -n "$pypi_nvcc" ]; then
  toolkit=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib") + "/nvidia/cu13")')
  nvcc=$toolkit/bin/nvcc
  [ -x "$nvcc" ] || fail "the CUDA compiler from PyPI is not where it was expected: $nvcc"
  ln -sfn lib "$toolkit/lib64" # where nvcc looks for the runtime that it links
fi

# The environment of qa/test.sh and of a developer's shell: `. .venv/te-env.sh`.
{
  printf 'export PATH=%q:"$PATH"\n' "$venv/bin"
  if [ -n "$nvcc" ]; then printf 'export CUDACXX=%q\n' "$nvcc"; else echo 'unset CUDACXX'; fi
} >"$venv/te-env.sh"
# shellcheck disable=SC1091
. "$venv/te-env.sh"

# ---- the package ----

say "CUDA compiler: ${nvcc:-none, so the build is for the CPU alone}"
# One that is not used, as it is too old, is on PATH all the same.
case ${CMAKE_ARGS:-} in
*TE_WITH_CUDA*) ;;
*) if [ -z "$nvcc" ]; then export CMAKE_ARGS="${CMAKE_ARGS:-} -DTE_WITH_CUDA=OFF"; fi ;;
esac
# File by file, so that the next build compiles changed files alone; CI builds once.
unity=$([ "${CI:-}" = true ] && echo ON || echo OFF)
sources=$({
  find transformer_engine build_backend cmake CMakeLists.txt pyproject.toml LICENSE -type f ! -name '*.pyc' ! -name '*.md' -print0 |
    sort -z | xargs -0 sha256sum
  echo "$stamp $nvcc ${CMAKE_ARGS:-} $(g++ -dumpfullversion) $unity"
} | sha256sum)
# Elsewhere than in .venv it is an editable install, or none.
installed=$(cd / && "$venv/bin/python" -c 'import transformer_engine as te; print(te.__file__)' 2>/dev/null || true)
if [ "$(cat "$venv/.te-package" 2>/dev/null)" != "$sources" ] || [ "${installed#"$venv/"}" = "$installed" ]; then
  say "building and installing the package"
  rm -f "$venv/.te-package"
  # As the README has it, with the pinned tools: older pips take the first variable for them, newer ones the second.
  PIP_CONSTRAINT=$root/qa/constraints.txt PIP_BUILD_CONSTRAINT=$root/qa/constraints.txt \
    pip install -q --no-deps --config-settings "cmake.define.TE_UNITY=$unity" . ||
    fail "the build failed; its output is above. CMAKE_ARGS=-DTE_WITH_CUDA=OFF builds for the CPU alone."
  echo "$sources" >"$venv/.te-package"
fi
say "done: $(cd / && "$venv/bin/python" -c 'import torch, transformer_engine as te, transformer_engine.pytorch; print("transformer_engine", te.__version__, "with torch", torch.__version__, "in", te.__path__[0])')"
