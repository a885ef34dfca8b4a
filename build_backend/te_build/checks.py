"""Requirements of the build beside PyTorch: a C++ compiler, room on the disk, and a build folder that is whole. Each
that is missing ends the build in one sentence, before anything is compiled."""

import os
import pathlib
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile

from te_build.target import refuse

_MIB = 1 << 20
_ROOM = 1024 * _MIB  # of the build folder, and of temporary files beside it
_FULL = 16 * _MIB  # less is left where a compiler stopped for want of it
_OLDEST_GXX = 11


def compiler() -> None:
    """The one that CMake takes: CXX, else the first of these."""
    named = shlex.split(os.environ.get("CXX", ""))
    candidates = named[:1] or ["c++", "CC", "g++", "clang++"]
    found = next(filter(None, map(shutil.which, candidates)), None)
    if found is None:
        what = f"CXX={named[0]} is no command" if named else "there is no C++ compiler on PATH"
        raise refuse(f"{what}: install one, `apt-get install g++`, or set CXX to it")
    said = subprocess.run([found, *named[1:], "--version"], capture_output=True, text=True).stdout
    version = re.search(r"\b(\d+)\.\d+\.\d+\b", said)
    if "Free Software Foundation" in said and version and int(version[1]) < _OLDEST_GXX:
        raise refuse(
            f"{found} is g++ {version[0]}, wanted {_OLDEST_GXX} or newer: install one, `apt-get install g++-12`, "
            "and set CXX=g++-12"
        )


def _free(folder: pathlib.Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _places() -> list[pathlib.Path]:
    return [pathlib.Path("build").absolute(), pathlib.Path(tempfile.gettempdir())]


def room() -> None:
    """Before the build; what it needs is known from builds with the kernels."""
    for folder in _places():
        if _free(folder) < _ROOM:
            raise refuse(
                f"{_free(folder) // _MIB} MiB are free for {folder}, wanted {_ROOM // _MIB}: free some "
                f"(`df -h {folder}`)" + ("" if folder.name == "build" else ", or set TMPDIR to another folder")
            )


def full() -> None:
    """After a build that failed: whether there was no room for it."""
    for folder in _places():
        if _free(folder) < _FULL:
            raise refuse(f"the build failed, and {folder} has {_free(folder) // _MIB} MiB left: `df -h {folder}`")


def _is_whole(path: pathlib.Path) -> bool:
    """Whether an object or a library has the length of its ELF header: the table of its sections comes last."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return False
    (table,) = struct.unpack_from("<Q", header, 40)
    entry, entries = struct.unpack_from("<HH", header, 58)
    return table + entry * entries <= size


def _halves(folder: pathlib.Path):
    """Files that a full disk or a copy left half written, which CMake and Ninja take for whole. Files of an interrupted
    build are not among them: they are not in Ninja's log, so they are built again."""
    for name, last in (("CMakeCache.txt", "CMAKE_HOME_DIRECTORY:INTERNAL="), ("build.ninja", "\ndefault all\n")):
        path = folder / name
        if path.exists() and last not in path.read_text(errors="replace"):
            yield path
    log = folder / ".ninja_log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    outputs = {line.split("\t")[3] for line in lines if line.count("\t") == 4}
    for path in sorted(folder / output for output in outputs if output.endswith((".o", ".so"))):
        if path.exists() and not _is_whole(path):
            yield path


def build_folder() -> None:
    """Of this Python; those of others are not touched."""
    for folder in pathlib.Path("build").glob(f"{sys.implementation.cache_tag.replace('cpython-', 'cp')}-*"):
        half = next(_halves(folder), None)
        if half is not None:
            raise refuse(f"{half.absolute()} is half written: remove it, `rm {half.absolute()}`")


def all_of_them() -> None:
    compiler()
    room()
    build_folder()
