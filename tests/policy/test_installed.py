# The installed package on disk: what the libraries export and need, which modules an import brings.
# Mutants: dropping the version script, or linking libtorch_cuda, turn these red.
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import transformer_engine

REPO = Path(__file__).parents[2]
PACKAGE = Path(transformer_engine.__file__).parent
HEADERS = REPO / "transformer_engine/common/include/transformer_engine"

SYSTEM = re.compile(r"^(lib(stdc\+\+|gcc_s|m|c|dl|rt|pthread)\.so\.\d+|ld-linux.*)$")


def is_editable():
    text = importlib.metadata.distribution("transformer_engine").read_text("direct_url.json")
    return bool(text) and json.loads(text).get("dir_info", {}).get("editable", False)


def library(pattern):
    # In an editable install the compiled parts are in site-packages, the Python in the source tree.
    roots = [PACKAGE, *(Path(p) / "transformer_engine" for p in sys.path)]
    found = next((f for root in roots for f in root.glob(pattern)), None)
    assert found is not None, f"{pattern} is not installed beside {PACKAGE}"
    return found


def dynamic(path, tag):
    out = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    return re.findall(rf"\({tag}\).*\[(.*)\]", out)


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_tests_import_the_installed_package():
    assert is_editable() or PACKAGE != REPO / "transformer_engine"


def test_one_version_everywhere():
    cmake = re.search(r"VERSION (\d+\.\d+\.\d+)", (REPO / "CMakeLists.txt").read_text().split("project(")[1])
    metadata = re.search(r'^version = "(.*)"', (REPO / "pyproject.toml").read_text(), re.M)
    versions = {
        "package": transformer_engine.__version__,
        "metadata": importlib.metadata.version("transformer_engine"),
        "pyproject": metadata[1],
        "cmake": cmake[1],
        "engine": transformer_engine.pytorch._C.version,
    }
    assert len(set(versions.values())) == 1, versions


def test_engine_exports_its_c_api_and_nothing_else():
    out = subprocess.run(
        ["nm", "-D", "--defined-only", library("lib/libtransformer_engine.so")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    exported = {line.split()[-1] for line in out.splitlines()}
    declared = set()
    for header in HEADERS.glob("*.h"):
        declared |= set(re.findall(r"TE_API\b[^;(]*?\b(te_\w+)\s*\(", header.read_text()))
    assert exported == declared


def test_engine_needs_only_the_system():
    needed = dynamic(library("lib/libtransformer_engine.so"), "NEEDED")
    assert needed and all(SYSTEM.match(name) for name in needed), needed


def test_extension_needs_the_engine_and_three_libraries_of_torch():
    needed = set(dynamic(library("pytorch/_C.*.so"), "NEEDED"))
    ours = {"libc10.so", "libtorch_cpu.so", "libtorch_python.so", "libtransformer_engine.so"}
    assert ours <= needed
    assert all(SYSTEM.match(name) for name in needed - ours), needed


@pytest.mark.parametrize("pattern", ["lib/libtransformer_engine.so", "pytorch/_C.*.so"])
def test_library_search_paths_are_relative(pattern):
    path = library(pattern)
    for entry in dynamic(path, "RUNPATH") + dynamic(path, "RPATH"):
        assert all(part.startswith("$ORIGIN") for part in entry.split(":")), entry


def test_no_sources_are_installed():
    if is_editable():
        pytest.skip("an editable install is the source tree")
    left = [p for p in PACKAGE.rglob("*") if p.suffix in {".cpp", ".cu", ".cuh", ".h", ".map", ".cmake", ".md"}]
    assert not left
    assert (PACKAGE / "py.typed").exists()


def test_import_is_lean():
    seen = run(
        "import json, sys, torch\n"
        "before = set(sys.modules)\n"
        "import transformer_engine.pytorch\n"
        "print(json.dumps([sorted(set(sys.modules) - before), torch.cuda.is_initialized()]))"
    )
    modules, cuda_initialised = seen
    assert not cuda_initialised
    foreign = {m.split(".")[0] for m in modules} - {"transformer_engine", "torch"} - set(sys.stdlib_module_names)
    assert not foreign, f"importing brings {sorted(foreign)}"
    heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed._functional_collectives")
    heavy = [m for m in modules if m.startswith(heavy)]
    assert not heavy, f"importing brings {heavy[:5]}"


def test_package_alone_imports_neither_torch_nor_the_extension_until_touched():
    before, after = run(
        "import json, sys, transformer_engine as te\n"
        "before = 'torch' in sys.modules\n"
        "te.pytorch.Linear, te.common\n"
        "print(json.dumps([before, 'torch' in sys.modules]))"
    )
    assert (before, after) == (False, True)
