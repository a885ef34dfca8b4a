# An environment in which the package cannot be built ends the build with one sentence that names the cause and the
# command.
import os
import shutil
import subprocess
import sys

import pytest

from . import build_targets
from .build_targets import ASK, FIND, METADATA, REPO, Build, compiled, install_torch, refused


@pytest.fixture
def build(tmp_path):
    return Build(tmp_path)


def test_a_torch_that_is_not_served(build):
    for version in ("2.8.1", "2.12.0"):
        install_torch(build.site, version)
        for hook in (ASK, METADATA, "te_build.build_wheel('out')"):
            for answer in (build.pip(hook), build.plain(hook)):
                refused(answer, version, f"`{build.python} -m pip install 'torch>=2.9,<2.12'`")
        shutil.rmtree(build.site)


def test_a_torch_without_headers_or_libraries(build):
    torch = install_torch(build.site)
    for name in ("include/torch/library.h", build_targets.LIBRARY):
        (torch / name).unlink()
        for hook in (ASK, "te_build.build_wheel('out')"):
            refused(build.pip(hook), torch / name, "install PyPI's torch again")
        (torch / name).touch()


def test_two_torches_on_the_path(build):
    first = install_torch(build.folder / "more", "2.9.1")
    install_torch(build.site)
    for hook in (ASK, "te_build.build_wheel('out')"):
        refused(build.plain(hook, path=[build.folder / "more"]), f"2.9.1 from {first}", "2.11.0 too", "uninstall one")


def test_an_empty_folder_of_that_name_is_no_torch(build):
    (build.site / "torch").mkdir()
    status, out, error = build.pip(FIND)
    assert (status, out) == (0, "None\n"), error


def test_no_compiler(build):
    install_torch(build.site)
    (build.folder / "empty").mkdir()
    refused(build.pip(PATH=str(build.folder / "empty")), "no C++ compiler on PATH", "`apt-get install g++`", "CXX")
    refused(build.pip(CXX="no-such-ccache g++"), "CXX=no-such-ccache is no command", "`apt-get install g++`")


def test_an_old_compiler(build):
    install_torch(build.site)
    old = build.folder / "g++"
    old.write_text("#!/bin/sh\necho 'g++ (Debian 10.2.1-6) 10.2.1 20210110'\necho 'Free Software Foundation, Inc.'\n")
    old.chmod(0o755)
    refused(build.pip(CXX=str(old)), old, "10.2.1", "wanted 11", "`apt-get install g++-12`")


FULL = (
    "import shutil, collections; shutil.disk_usage = lambda path: collections.namedtuple('U', 'free')({free} << 20)\n"
)


def test_no_room_on_the_disk(build):
    install_torch(build.site)
    for hook in (ASK, "te_build.build_wheel('out')"):
        refused(build.pip(FULL.format(free=100) + hook), build.project / "build", "100 MiB", "`df -h ")


def test_a_disk_that_became_full(build):
    """The compiler has said so, in its words, somewhere above."""
    install_torch(build.site)
    fails = (
        "from scikit_build_core import build\ndef fails(*given):\n"
        + "".join("    " + line + "\n" for line in FULL.format(free=1).splitlines())
        + "    raise SystemExit(1)\nbuild.build_wheel = fails\nte_build.build_wheel('out')"
    )
    refused(build.pip(fails), build.project / "build", "1 MiB left", "`df -h ")


@pytest.mark.parametrize("name", ["CMakeCache.txt", "build.ninja", "core.dir/core.cpp.o"])
def test_a_half_written_build_folder(build, name):
    install_torch(build.site)
    folder = compiled(build.project)
    status, _, error = build.pip()
    assert status == 0, error
    whole = (folder / name).read_bytes()
    for part in (b"", whole[: len(whole) // 2]):
        (folder / name).write_bytes(part)
        refused(build.pip(), folder / name, "half written", f"`rm {folder / name}`")


def test_an_object_that_ninja_makes_again_is_not_refused(build):
    """An interrupted build has not entered it in its log."""
    install_torch(build.site)
    folder = compiled(build.project)
    (folder / ".ninja_log").write_text("# ninja log v6\n")
    (folder / "core.dir/core.cpp.o").write_bytes(b"")
    status, _, error = build.pip()
    assert status == 0, error


def test_build_folders_of_other_pythons_are_not_looked_at(build):
    install_torch(build.site)
    folder = compiled(build.project)
    (folder / "CMakeCache.txt").write_text("")
    folder.rename(folder.with_name("cp30-cp30-linux_x86_64"))
    status, _, error = build.pip()
    assert status == 0, error


def configured(folder, *options, **variables):
    """CMake's answer where cmake/cuda.cmake is all of the project."""
    (folder / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.25)\nproject(x LANGUAGES NONE)\ninclude({REPO}/cmake/cuda.cmake)\n"
    )
    done = subprocess.run(
        ["cmake", "-G", "Ninja", "-S", folder, "-B", folder / "b", *options],
        capture_output=True,
        text=True,
        env={n: v for n, v in os.environ.items() if n != "CUDACXX"} | variables,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def nvcc(folder, code):
    (folder / "nvcc").write_text(f"#!/bin/sh\n{code}\n")
    (folder / "nvcc").chmod(0o755)
    return folder / "nvcc"


@pytest.mark.parametrize("named", [True, False])
def test_an_nvcc_that_is_too_old_is_an_error(tmp_path, named):
    """A build without kernels instead would hide the reason."""
    made = nvcc(tmp_path, "echo 'Cuda compilation tools, release 12.4, V12.4.131'")
    path = os.pathsep.join((str(tmp_path), *os.get_exec_path()))
    status, said = configured(tmp_path, **({"CUDACXX": str(made)} if named else {"PATH": path}))
    assert status == 1
    assert f"{made} is CUDA 12.4, wanted 12.9 or newer" in said and "CMAKE_ARGS=-DTE_WITH_CUDA=OFF" in said
    assert configured(tmp_path, "-DTE_WITH_CUDA=OFF", CUDACXX=str(made))[0] == 0


def test_an_nvcc_that_does_not_run_is_an_error(tmp_path):
    status, said = configured(tmp_path, CUDACXX=str(nvcc(tmp_path, "exit 3")))
    assert status == 1
    assert "does not run (3)" in said and "CMAKE_ARGS=-DTE_WITH_CUDA=OFF" in said


def test_a_frontend_shows_the_sentence_and_fails(build):
    """The real pip, without a network."""
    (install_torch(build.site) / "include/torch/library.h").unlink()
    command = [sys.executable, "-m", "pip", "--python", build.python, "install", "--no-build-isolation", "--no-deps"]
    done = subprocess.run(
        [*command, build.project],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(build.needed)},
        timeout=300,
    )
    assert done.returncode == 1
    assert "include/torch/library.h, so nothing can be built with it" in done.stdout + done.stderr, (
        done.stdout + done.stderr
    )
