# A torch that the extension cannot be built with is one sentence, before anything is compiled: it names the thing and
# the command that mends it.
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "cmake/find_torch.py"
FILES = ["include/torch/library.h", "include/torch/csrc/api/include/torch/version.h", "lib/libtorch_python.so"]


def torch_in(folder, version, metadata=None, without=()):
    package = folder / "torch"
    for name in ["__init__.py", *(f for f in FILES if f not in without)]:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    if version:
        (package / "version.py").write_text(f"__all__ = ['__version__']\n__version__ = '{version}'\n")
    info = folder / f"torch-{metadata or version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {metadata or version}\n")
    return folder


def find(*path, first="2.9", end="2.16"):
    # -S: the environment's own torch is not on the path.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-S", SCRIPT, first, end]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("version", "metadata"), [("2.9.0", None), ("2.15.1+cu132", "2.15.1"), ("2.11.0a0+git12", None)]
)
def test_what_is_served_is_found(tmp_path, version, metadata):
    found = find(torch_in(tmp_path, version, metadata))
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0] == version.split("+")[0] and lines[1] == "1" and lines[2] == str(tmp_path / "torch/lib")
    assert lines[3].split(";") == [
        str(tmp_path / "torch/include"),
        str(tmp_path / "torch/include/torch/csrc/api/include"),
    ]


def refused(found, *words):
    assert found.returncode != 0 and not found.stdout
    assert found.stderr.count("\n") == 1, found.stderr
    for word in words:
        assert word in found.stderr


@pytest.mark.parametrize("version", ["2.8.0", "2.16.0", "3.0.0"])
def test_a_minor_that_is_not_served(tmp_path, version):
    refused(find(torch_in(tmp_path, version)), f"torch {version} is not served", "pip install 'torch>=2.9,<2.16'")


def test_no_torch():
    refused(find(), "has no torch", "pip install 'torch>=2.9,<2.16'", "--no-build-isolation")


@pytest.mark.parametrize("missing", FILES)
def test_a_torch_without_headers_or_libraries(tmp_path, missing):
    refused(find(torch_in(tmp_path, "2.11.0", without=[missing])), missing, "install PyPI's torch again")


def test_a_folder_without_a_torch(tmp_path):
    refused(find(torch_in(tmp_path, None, metadata="2.11.0")), "is no installed torch", "install torch again")


def test_two_torches(tmp_path):
    path = [torch_in(tmp_path / "a", "2.11.0"), torch_in(tmp_path / "b", "2.15.0")]
    refused(find(*path), "two torches are on the path", "2.11.0 from", "2.15.0 too", "uninstall one of them")
    assert find(path[0], path[0]).returncode == 0


def test_half_of_another_torch(tmp_path):
    refused(find(torch_in(tmp_path, "2.11.0", metadata="2.10.0")), "two torches", "2.10.0 too")
