"""Finds the PyTorch that the running Python imports, without importing it: prints its version, its C++ ABI, its folder
of libraries and its folders of headers, a line each. Fails with one sentence where no extension can be built with it.

usage: find_torch.py FIRST END    minor versions FIRST <= torch < END are served, as in 2.9 2.16
"""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path


def pair(version):
    return tuple(int(part) for part in version.split(".")[:2])


def find(first, end):
    served = f"torch>={first},<{end}"
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            f"{sys.executable} has no torch: run `{sys.executable} -m pip install '{served}'` first, and build with "
            "--no-build-isolation"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    text = (folder / "version.py").read_text() if (folder / "version.py").exists() else ""
    found = re.search(r"__version__ = ['\"](\d+\.\d+[^'\"]*)['\"]", text)
    if found is None:
        sys.exit(f"{folder} is no installed torch, its version.py is missing: remove it, or install torch again")
    version = found[1]
    others = {d.version for d in importlib.metadata.distributions(name="torch")} - {version, version.split("+")[0]}
    if others:
        sys.exit(
            f"two torches are on the path of {sys.executable}: it imports {version} from {folder}, and there is "
            f"{', '.join(sorted(others))} too; uninstall one of them, or unset PYTHONPATH"
        )
    if not pair(first) <= pair(version) < pair(end):
        sys.exit(
            f"torch {version} is not served, torch {first} or newer and older than {end} is: "
            f"run `{sys.executable} -m pip install '{served}'`"
        )
    headers = [folder / "include", folder / "include/torch/csrc/api/include"]
    for needed in (headers[0] / "torch/library.h", headers[1] / "torch/version.h", folder / "lib/libtorch_python.so"):
        if not needed.exists():
            sys.exit(f"torch {version} lacks {needed}, so nothing can be built with it: install PyPI's torch again")
    config = folder / "share/cmake/Torch/TorchConfig.cmake"
    abi = re.search(r"_GLIBCXX_USE_CXX11_ABI=(\d)", config.read_text()) if config.exists() else None
    return [version.split("+")[0], abi[1] if abi else "1", folder / "lib", ";".join(map(str, headers))]


if __name__ == "__main__":
    print(*find(*sys.argv[1:]), sep="\n")
