"""Which environment the package goes to, and the PyTorch there, which the extension is compiled against. Downloads
nothing; what cannot be served ends the build in one sentence that names it and the command that mends it."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import tempfile

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # of scikit-build-core

_FINDER = pathlib.Path(__file__).resolve().parents[2] / "cmake/find_torch.py"
_BY_HAND = (
    "install torch and scikit-build-core into the environment that the package goes to, and run there "
    "`python -m pip install --no-build-isolation .`"
)


@dataclasses.dataclass(frozen=True)
class Torch:
    """The PyTorch to compile against."""

    version: str
    facts: str  # a list of CMake's: version, C++ ABI, folder of libraries, folders of headers

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])


def refuse(sentence: str) -> SystemExit:
    """To be raised: a frontend prints the sentence, and ends with an error."""
    return SystemExit(f"transformer_engine: {sentence}")


def served() -> Requirement:
    """The range of torch in pyproject.toml."""
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    return next(r for r in map(Requirement, project["dependencies"]) if r.name == "torch")


# ---- the environment ----


def _uncovered() -> dict[str, str]:
    """The environment variables, less those by which a frontend hides what is installed."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")}


def _of_virtual_env(named: str | None, relative_to: str) -> str:
    """The interpreter of the environment that VIRTUAL_ENV names, which must be of the Python that builds."""
    if not named:
        raise refuse(f"VIRTUAL_ENV is not set, so the environment that this build is for is not known: {_BY_HAND}")
    python = os.path.join(os.path.realpath(os.path.join(relative_to, named)), "bin", "python")
    command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        theirs = subprocess.run(command, capture_output=True, text=True, check=True, env=_uncovered()).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise refuse(f"VIRTUAL_ENV={named} has no bin/python that runs: {_BY_HAND}") from None
    ours = "{}.{}".format(*sys.version_info[:2])
    if theirs != ours:
        raise refuse(f"VIRTUAL_ENV={named} has Python {theirs}, and this build Python {ours}: {_BY_HAND}")
    return python


def _of_uv() -> str:
    """uv gives a build a VIRTUAL_ENV of its own, so uv's is read; where uv has an option for another environment,
    the build cannot find it."""
    process = pathlib.Path("/proc", str(os.getppid()))
    arguments = os.fsdecode((process / "cmdline").read_bytes()).split("\0")
    variables = os.fsdecode((process / "environ").read_bytes()).split("\0")
    given = dict(variable.split("=", 1) for variable in variables if "=" in variable)
    told = [word for word in arguments if word.startswith(("--python", "--system")) or word[:2] == "-p"]
    told += [name for name in ("UV_PYTHON", "UV_SYSTEM_PYTHON") if given.get(name)]
    if told:
        raise refuse(f"uv's {told[0]} names the environment that this build is for to uv alone: {_BY_HAND}")
    return _of_virtual_env(given.get("VIRTUAL_ENV"), str(process / "cwd"))


def _target() -> str:
    """The interpreter of the environment that an isolated build is for: pip runs the build by it; uv and
    `python -m build` make an environment for the build, in which VIRTUAL_ENV names the other one."""
    if "pip-build-env-" in os.environ.get("PYTHONPATH", ""):
        return sys.executable
    if "UV" in os.environ:
        return _of_uv()
    if pathlib.Path(sys.prefix).resolve().is_relative_to(pathlib.Path(tempfile.gettempdir()).resolve()):
        return _of_virtual_env(os.environ.get("VIRTUAL_ENV"), os.getcwd())
    raise refuse(f"{sys.prefix}, which builds this, has no PyTorch: {_BY_HAND}")


# ---- its torch ----


def _has_torch(python: str, environment: dict[str, str]) -> bool:
    """An empty folder of that name is none."""
    code = "import importlib.util, sys; spec = importlib.util.find_spec('torch'); sys.exit(not (spec and spec.origin))"
    return subprocess.run([python, "-c", code], env=environment, cwd="/").returncode == 0


def _found(python: str, environment: dict[str, str]) -> Torch:
    """As cmake/find_torch.py finds it, whose error names a torch that cannot be built with."""
    limits = {limit.operator: limit.version for limit in served().specifier}
    command = [python, _FINDER, limits[">="], limits["<"]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise refuse(done.stderr.strip())
    version, *rest = done.stdout.splitlines()
    return Torch(version, ";".join([version, *rest]))


@functools.cache
def find() -> Torch | None:
    """The PyTorch of the interpreter that builds, as without isolation, or where a frontend has brought it; else the
    one of the environment that the build is for, or None where that has none."""
    here = dict(os.environ)
    if _has_torch(sys.executable, here):
        return _found(sys.executable, here)
    python = _target()
    return _found(python, _uncovered()) if _has_torch(python, _uncovered()) else None


def needed() -> Torch:
    """The PyTorch to compile against, of which a frontend has brought the required one by now."""
    torch = find()
    if torch is None:
        raise refuse(f"there is no PyTorch to compile against: {_BY_HAND}")
    return torch
