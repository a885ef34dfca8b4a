# PyTorch's private names are used in one file, with the versions that have each of them; differences in C++ are in
# csrc/core/torch_api.h.
import ast
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import mutants

REPO = Path(__file__).parents[2]
FILE = REPO / "transformer_engine/pytorch/_internal/torch_private.py"
PACKAGES = ("transformer_engine", "transformer_engine_torch")
RANGE = re.compile(r"# 2\.(\d+) - 2\.(\d+)")


def is_private(name):
    parts = name.split(".")
    return parts[0] == "torch" and any(p.startswith("_") and not p.startswith("__") for p in parts)


def dotted(node):
    """ "a.b.c" of such an attribute, or ""."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def private_names(source):
    """(line, name) of each private name of torch's that the source uses."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)]
        found.update((node.lineno, name) for name in names if is_private(name))
    return sorted(found)


def files():
    return sorted(p for package in PACKAGES for p in (REPO / package).rglob("*.py") if p != FILE)


@pytest.mark.parametrize(
    "source",
    ["import torch._C", "from torch._C import x", "from torch import _x", "import torch.a._b as c", "torch._C.x()"],
)
def test_each_spelling_is_seen(source):
    assert private_names(source)


def test_no_other_file_uses_private_names():
    wrong = [f"{p.relative_to(REPO)}:{line}: {name}" for p in files() for line, name in private_names(p.read_text())]
    assert not wrong, f"move these to {FILE.relative_to(REPO)}:\n" + "\n".join(wrong)


def test_no_other_cpp_file_depends_on_versions():
    """And no other one uses types that differ between versions: of nodes, of a stream's handle."""
    differs = re.compile(
        r"TORCH_VERSION_|TE_TORCH_AT_LEAST|(shared|intrusive)_ptr<[\w:]*Node>|native_handle\(|grad_dtype\("
    )
    folder = REPO / "transformer_engine/pytorch/csrc"
    found = {p.name for suffix in ("h", "cpp") for p in folder.rglob(f"*.{suffix}") if differs.search(p.read_text())}
    assert found == {"torch_api.h"}


def served():
    """(first, last) minor versions of torch 2 in the metadata: "torch>=2.9,<2.16"."""
    project = mutants.tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    (torch,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "torch")
    bounds = {s.operator: int(s.version.split(".")[1]) for s in torch.specifier}
    return bounds[">="], bounds["<"] - 1


def test_cmake_serves_the_versions_of_the_metadata():
    text = (REPO / "cmake/torch.cmake").read_text()
    first, end = (int(re.search(rf"set\(te_torch_{which} 2\.(\d+)\)", text)[1]) for which in ("first", "end"))
    assert (first, end - 1) == served()


def test_each_name_has_its_versions():
    lines = FILE.read_text().splitlines()
    names = [i for i, text in enumerate(lines) if re.match(r"def |\w+ = ", text)]
    assert len(names) > 15
    first, last = served()
    for i in names:
        known = RANGE.search(lines[i])
        assert known, f"{FILE.name}:{i + 1} lacks '# 2.x - 2.y'"
        assert int(known[1]) <= first and int(known[2]) >= last, (
            f"{FILE.name}:{i + 1}: served are 2.{first} to 2.{last}"
        )


# torch's get_state() and set_state() can lock two threads out of each other (csrc/core/random_state.cpp explains it).
RANDOM = re.compile(r"\b(get_rng_state|set_rng_state|fork_rng)\(|generator\w*(\[\w+\])?\.[gs]et_state\(")


def test_random_states_are_read_and_written_by_ours():
    lines = ((p, *line) for p in files() for line in enumerate(p.read_text().splitlines(), 1))
    wrong = [f"{p.relative_to(REPO)}:{number}: {line.strip()}" for p, number, line in lines if RANDOM.search(line)]
    assert not wrong, "call _C.get_random_state or _C.set_random_state:\n" + "\n".join(wrong)
