# Every name of the API under every path that clients write (api_names.py): hasattr, getattr and `from ... import`
# agree, and a name without a body is one that a client's `try: ... except ImportError` sees.
import importlib.util
import inspect
import pickle
import subprocess
import sys

import pytest
import torch
from api_names import GUARDED, LATER, SUBMODULES, TE, TOP_LEVEL
from support import refused

from transformer_engine.pytorch._internal.absent import names_without_a_body

from .compatibility import absent

NAMES = [(TE, name) for group in TOP_LEVEL.values() for name in group.split()]
# One name for two things: the module and the operation that is not here yet.
OTHERS = {(name, f"{TE}.ops") for name in SUBMODULES[f"{TE}.ops"].split()}
NAMES += [(module, name) for module, names in SUBMODULES.items() for name in names.split()]


def as_a_client(module, name):
    """The object that a client's guarded import gets; None: the client takes its fallback."""
    scope = {}
    exec(f"try:\n    from {module} import {name} as found\nexcept ImportError:\n    found = None", scope)
    return scope["found"]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=str)
def test_all_ways_to_a_name_agree(module, name):
    found = as_a_client(module, name)
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as error:  # which clients guard against too
        assert found is None and error.name == module
        return
    assert getattr(home, name, None) is found and hasattr(home, name) == (found is not None)
    if found is None:
        with refused(ImportError, f"{module}.{name}: ", "not available in this version"):
            exec(f"from {module} import {name}")
        with refused(AttributeError, f"{module}.{name}: ", "not available in this version"):
            getattr(home, name)


@pytest.mark.parametrize("module", GUARDED)
def test_where_clients_have_a_fallback_no_name_is_without_a_body(module):
    """It works, or it is not there: one that could be imported and raised at its use would end their training."""
    found = {name: as_a_client(module, name) for name in GUARDED[module].split()}
    assert found and not [name for name, target in found.items() if absent(target)]


@pytest.mark.parametrize("module", [TE, *SUBMODULES])
def test_every_other_name_is_there(module):
    names = [name for place, name in NAMES if place == module]
    missing = [name for name in names if as_a_client(module, name) is None]
    assert names and not set(missing) - set(LATER.get(module, "").split())


def test_an_absent_name_among_others(tmp_path, monkeypatch):
    """As frameworks import: several names at once, a package's, in a function, by a path with a typo."""
    (tmp_path / "some_names.py").write_text("here = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = importlib.import_module("some_names")
    names.__getattr__ = names_without_a_body("some_names", {"flying": ("wings are", "walk"), "*": ("that is", "")})
    with refused(ImportError, "some_names.flying: wings are not available in this version; walk."):
        from some_names import flying, here  # noqa: F401
    with refused(AttributeError, "some_names.flying: wings are not available in this version; walk."):
        names.flying  # noqa: B018
    with refused(AttributeError, "some_names.other: that is not available in this version."):
        names.other  # noqa: B018
    assert not hasattr(names, "flying") and not hasattr(names, "_other") and names.here == 1
    with refused(AttributeError, "module 'some_names' has no attribute '_other'"):
        names._other  # noqa: B018
    names.__getattr__ = names_without_a_body("some_names", {})
    with refused(AttributeError, "module 'some_names' has no attribute 'flying'"):
        names.flying  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'flying' from 'some_names'"):
        from some_names import flying  # noqa: F401


@pytest.mark.parametrize("path", ["ops.basic", "ops.fused", "ops.op"])
def test_modules_that_come_with_their_capability(path):
    """An ImportError by whichever way, and no attribute."""
    package, _, name = f"{TE}.{path}".rpartition(".")
    with pytest.raises(ImportError):
        importlib.import_module(f"{TE}.{path}")
    with refused(ImportError, f"{TE}.{path}: ", "not available in this version"):
        exec(f"from {package} import {name}")
    with pytest.raises(ImportError):
        exec(f"from {TE}.{path} import Anything")
    assert not hasattr(importlib.import_module(package), name)


def test_one_name_is_one_object():
    """Under whatever path: isinstance, and pickles, ask for it."""
    found = {}
    for module, name in NAMES:
        target = as_a_client(module, name)
        if target is not None and not inspect.ismodule(target) and (name, module) not in OTHERS:
            assert found.setdefault(name, target) is target, f"{module}.{name}"


def test_the_older_path_of_quantization_has_all_of_it():
    here, there = importlib.import_module(f"{TE}.quantization"), importlib.import_module(f"{TE}.fp8")
    public = {name for name, value in vars(here).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert len(public) > 20 and {name: getattr(here, name) for name in public} == {n: getattr(there, n) for n in public}


def test_every_path_is_reached_by_attributes():
    """From `import transformer_engine.pytorch as te` alone, with nothing else imported, as clients write it."""
    paths = [m for m in SUBMODULES if m.startswith(TE) and importlib.util.find_spec(m) is not None]
    code = "import json, functools, transformer_engine.pytorch as te\n"
    code += f"paths = {paths!r}\n"
    code += "for path in paths: functools.reduce(getattr, path.split('.')[2:], te)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=300)
    assert len(paths) > 25 and done.returncode == 0, done.stderr


OUTSIDE = ("transformer_engine_torch.", "transformer_engine.debug.pytorch.")


def classes():
    """Of all paths, those that can be pickled by name."""
    targets = {target for module, name in NAMES if isinstance(target := as_a_client(module, name), type)}
    targets.discard(torch.distributed.ProcessGroup)  # which dist_group_type is
    return sorted(targets, key=lambda target: target.__qualname__)


@pytest.mark.parametrize("target", classes(), ids=lambda target: target.__qualname__)
def test_a_class_has_its_public_path(target):
    assert target.__module__.startswith((f"{TE}.", "transformer_engine.common.recipe", *OUTSIDE))
    assert pickle.loads(pickle.dumps(target)) is target
