# Environments for the build backend to look at: a virtual environment without pip, with folders in it that look like
# installed PyTorches, and the backend's hooks called there as a frontend calls them. Nothing is compiled.
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

REPO = Path(__file__).parents[3]
ASK = "print(te_build.get_requires_for_build_wheel())"
FIND = "from te_build import target; print(target.find())"
METADATA = """
from pathlib import Path
te_build.prepare_metadata_for_build_wheel('out')
print(next(Path('out').glob('*/METADATA')).read_text())
"""
BY_HAND = "run there `python -m pip install --no-build-isolation .`"
LIBRARY = "lib/libtorch_python.so"


def environment(folder):
    """A virtual environment of this Python; it has neither pip nor torch."""
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def site(venv):
    """Where packages of an environment lie."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))


def install_torch(where, version="2.11.0"):
    """The files of an installed PyTorch that cmake/find_torch.py reads, in a folder of the path."""
    torch = where / "torch"
    for name in ("__init__.py", "include/torch/library.h", "include/torch/csrc/api/include/torch/version.h", LIBRARY):
        (torch / name).parent.mkdir(parents=True, exist_ok=True)
        (torch / name).touch()
    (torch / "version.py").write_text(f"__version__ = {version!r}\n")
    metadata = where / f"torch-{version.partition('+')[0]}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return torch


def requirements(folder):
    """The packages that a frontend installs for the build: scikit-build-core and its requirements, and no torch."""
    folder.mkdir(parents=True)
    for name in ("scikit_build_core", "packaging", "pathspec", "exceptiongroup", "tomli"):
        for path in sysconfig.get_path("purelib"), sysconfig.get_path("platlib"):
            if (Path(path) / name).is_dir() and not (folder / name).exists():
                (folder / name).symlink_to(Path(path) / name)
    return folder


def cmake_without_python(folder):
    """A cmake that PyPI's package has installed is a script, of an environment that an isolated build must not hide."""
    folder.mkdir()
    (folder / "cmake").write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {shutil.which("cmake")} "$@"\n')
    (folder / "cmake").chmod(0o755)
    return os.pathsep.join((str(folder), *os.get_exec_path()))


def hide_what_is_installed(folder):
    """As pip does it in an isolated build: its PYTHONPATH brings a file that Python runs as it starts."""
    code = "import sys\nsys.path[:] = [entry for entry in sys.path if 'site-packages' not in entry]\n"
    (folder / "sitecustomize.py").write_text(code)


def project(folder):
    """As much of the repository as the backend reads, in a folder that a test may spoil, for torch 2.9 to 2.11."""
    folder.mkdir()
    stated = re.sub(r'"torch[<>=][^"]*"', '"torch>=2.9,<2.12"', (REPO / "pyproject.toml").read_text())
    (folder / "pyproject.toml").write_text(stated)
    for name in ("README.md", "LICENSE", "build_backend", "CMakeLists.txt"):
        (folder / name).symlink_to(REPO / name)
    return folder


def call(python, code, project, path, through=(), **variables):
    """Runs `code`, which has `te_build`, as a hook: (exit status, stdout, stderr)."""
    kept = {n: v for n, v in os.environ.items() if n not in ("VIRTUAL_ENV", "UV", "CMAKE_ARGS") and n[:6] != "PYTHON"}
    kept["PYTHONPATH"] = os.pathsep.join(map(str, path))
    code = f"import sys; sys.path.insert(0, 'build_backend')\nimport te_build\n{code}"
    done = subprocess.run(
        [*through, str(python), "-c", code],
        capture_output=True,
        text=True,
        cwd=project,
        env=kept | variables,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def compiled(folder):
    """A build folder for this Python, as far as the backend looks at it, with the lines that the tools write."""
    folder = folder / "build/cp{}{}-cp312-linux_x86_64".format(*sys.version_info[:2])
    (folder / "core.dir").mkdir(parents=True)
    (folder / "CMakeCache.txt").write_text("CMAKE_BUILD_TYPE:STRING=Release\nCMAKE_HOME_DIRECTORY:INTERNAL=/x\n")
    (folder / "build.ninja").write_text("build all: phony core.dir/core.cpp.o\n\ndefault all\n")
    (folder / ".ninja_log").write_text("# ninja log v6\n1\t9\t17\tcore.dir/core.cpp.o\tb8a6\n")
    (folder / "core.cpp").write_text("int core() { return 1; }\n")
    command = ["c++", "-c", folder / "core.cpp", "-o", folder / "core.dir/core.cpp.o"]
    subprocess.run(command, check=True)
    return folder


class Build:
    """A project, the environment that its package goes to, and a call of the backend as pip makes it."""

    def __init__(self, folder):
        self.folder = folder
        self.project = project(folder / "project")
        self.venv = environment(folder / "target")
        self.site = site(self.venv)
        self.python = self.venv / "bin/python"
        self.needed = requirements(folder / "needed")
        self.overlay = requirements(folder / "pip-build-env-1/overlay")
        hide_what_is_installed(self.overlay)

    def pip(self, code=ASK, **variables):
        return call(self.python, code, self.project, [self.overlay], PYTHONNOUSERSITE="1", **variables)

    def plain(self, code=ASK, path=(), **variables):
        """Without isolation: what builds is installed in the environment."""
        return call(self.python, code, self.project, [self.needed, *path], **variables)


def refused(answer, *words):
    """It ended, in one sentence."""
    status, out, error = answer
    assert status == 1, (out, error)
    assert error.startswith("transformer_engine: ") and error.count("\n") == 1, error
    for word in words:
        assert str(word) in error, error


def took(answer, folder):
    status, out, error = answer
    assert status == 0, error
    assert f";{folder}/lib;{folder}/include;" in out, out
