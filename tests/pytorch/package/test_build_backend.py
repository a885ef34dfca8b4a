# The build backend: whose PyTorch it takes under pip, uv and `build`, what it requests where there is none, what the
# wheel and the sdist require.
import os
import re
import subprocess
import tarfile

import pytest

from .build_targets import (
    ASK,
    BY_HAND,
    FIND,
    METADATA,
    REPO,
    Build,
    call,
    cmake_without_python,
    environment,
    install_torch,
    refused,
    requirements,
    took,
)


@pytest.fixture
def build(tmp_path):
    return Build(tmp_path)


# ---- whose PyTorch ----


def test_pip_builds_against_the_torch_of_its_environment(build):
    """Which isolation hides: it is no requirement of the build then."""
    folder = install_torch(build.site, "2.11.0+cpu")
    took(build.pip(FIND), folder)
    status, out, error = build.pip()
    assert status == 0, error
    assert "torch" not in out


def test_without_isolation_it_is_the_torch_that_is_there(build):
    folder = install_torch(build.site)
    took(build.plain(FIND), folder)


def test_a_torch_beside_the_backend_comes_first(build):
    """One that a frontend has brought, as the backend asked for it or as its user did."""
    install_torch(build.site, "2.9.1")
    folder = install_torch(build.overlay, "2.10.0")
    took(build.pip(FIND), folder)


def test_without_a_torch_pip_is_asked_for_the_newest_that_is_served(build):
    status, out, error = build.pip()
    assert status == 0, error
    assert "'torch<2.12,>=2.9'" in out


def uv(build, given, *words, code=FIND, **variables):
    """uv gives the build an environment of its own and runs in it; VIRTUAL_ENV names the given environment."""
    its = environment(build.folder / "uv/builds-v0/.tmp1")
    script = f'VIRTUAL_ENV={its} UV=uv PYTHONPATH={build.needed} "$0" -c "$CODE"; exit $?'
    code = f"import sys; sys.path.insert(0, 'build_backend')\nimport te_build\n{code}"
    kept = {n: v for n, v in os.environ.items() if n not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONSAFEPATH")}
    kept |= {"CODE": code, **({"VIRTUAL_ENV": str(given)} if given else {}), **variables}
    command = ["bash", "-c", script, str(its / "bin/python"), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=build.project, env=kept, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("relative", [False, True])
def test_uv_builds_against_the_torch_of_virtual_env(build, relative):
    folder = install_torch(build.site)
    took(uv(build, os.path.relpath(build.venv, build.project) if relative else build.venv), folder)


def test_uv_is_asked_for_a_torch_where_virtual_env_has_none(build):
    status, out, error = uv(build, build.venv, code=ASK)
    assert status == 0, error
    assert "'torch" in out


@pytest.mark.parametrize("words", [("--python", "x"), ("--python=x",), ("-p", "x"), ("--system",)])
def test_uv_with_other_options_names_the_way_by_hand(build, words):
    install_torch(build.site)
    refused(uv(build, build.venv, *words), words[0].split("=")[0], BY_HAND)


def test_uv_with_a_variable_names_the_way_by_hand(build):
    install_torch(build.site)
    refused(uv(build, build.venv, UV_PYTHON="x"), "UV_PYTHON", BY_HAND)


def test_uv_without_virtual_env_names_the_way_by_hand(build):
    refused(uv(build, None), "VIRTUAL_ENV is not set", BY_HAND)


def test_an_environment_made_for_the_build_takes_virtual_env(build):
    """`python -m build`: its environment is in the folder of temporary files."""
    folder = install_torch(build.site)
    its = environment(build.folder / "tmp/build-env-1") / "bin/python"
    common = {"TMPDIR": str(build.folder / "tmp")}
    took(call(its, FIND, build.project, [build.needed], VIRTUAL_ENV=str(build.venv), **common), folder)
    refused(call(its, FIND, build.project, [build.needed], **common), "VIRTUAL_ENV is not set", BY_HAND)
    refused(
        call(its, FIND, build.project, [build.needed], VIRTUAL_ENV="/nowhere", **common),
        "VIRTUAL_ENV=/nowhere",
        BY_HAND,
    )


def test_another_python_in_virtual_env_is_no_target(build):
    (build.venv / "bin/python").unlink()
    (build.venv / "bin/python").write_text("#!/bin/sh\necho 3.1\n")
    (build.venv / "bin/python").chmod(0o755)
    refused(uv(build, build.venv), "has Python 3.1", BY_HAND)


def test_an_environment_without_torch_and_without_isolation(build):
    refused(build.plain(TMPDIR=str(build.project)), f"{build.venv}", "has no PyTorch", BY_HAND)


# ---- what the wheel and the sdist say ----


def requires(out):
    return [r for r in re.findall(r"^Requires-Dist: (.*)$", out, re.M) if "extra" not in r]


def test_a_wheel_requires_the_minor_it_was_built_with(build):
    install_torch(build.site, "2.11.0+cu130")
    path = cmake_without_python(build.folder / "bin")
    for hook in (METADATA, METADATA.replace("wheel", "editable").replace("out", "editable")):
        status, out, error = build.pip(hook, PATH=path)
        assert status == 0, error
        assert sorted(requires(out)) == ["numpy", "torch<2.12,>=2.9", "torch==2.11.*"]


def test_an_sdist_is_small_and_requires_the_range(tmp_path):
    """It is made without a torch, from the whole repository but its pictures."""
    code = f"import sys; sys.modules['torch'] = None\nprint(te_build.build_sdist({str(tmp_path)!r}))"
    needed = requirements(tmp_path / "needed")
    status, out, error = call(environment(tmp_path / "venv") / "bin/python", code, REPO, [needed])
    assert status == 0, error
    made = tmp_path / out.split()[-1]
    assert made.stat().st_size < 3e6
    with tarfile.open(made) as archive:
        root = made.name.removesuffix(".tar.gz")
        names = set(archive.getnames())
        text = archive.extractfile(f"{root}/PKG-INFO").read().decode()
    assert sorted(re.split("[<>]", r)[0] for r in requires(text)) == ["numpy", "torch"]
    assert "Dynamic: Requires-Dist" in text
    parts = ("build_backend/te_build/__init__.py", "cmake/torch.cmake", "transformer_engine/pytorch/csrc/module.cpp")
    assert not {f"{root}/{part}" for part in parts} - names


def test_cmake_gets_the_chosen_torch(build):
    """Beside what the caller has set. A wheel is compiled in groups of files, an editable install file by file."""
    folder = install_torch(build.site, "2.11.0+cpu")
    code = (
        "from scikit_build_core import build\n"
        "build.build_wheel = build.build_editable = lambda folder, settings, metadata: print(settings)\n"
        "te_build.build_wheel('out', {'cmake.define.TE_WITH_CUDA': 'OFF'})\n"
        "te_build.build_wheel('out', {'cmake.define.TE_UNITY': 'OFF'})\n"
        "te_build.build_editable('out')"
    )
    status, out, error = build.pip(code)
    assert status == 0, error
    include = folder / "include"
    facts = f"2.11.0;1;{folder}/lib;{include};{include}/torch/csrc/api/include"
    told = [eval(line) for line in out.splitlines()]
    shared = {"cmake.define.TE_TORCH": facts}
    assert told == [
        {"cmake.define.TE_WITH_CUDA": "OFF", "cmake.define.TE_UNITY": "ON", **shared},
        {"cmake.define.TE_UNITY": "OFF", **shared},
        {"cmake.define.TE_UNITY": "OFF", **shared},
    ]
