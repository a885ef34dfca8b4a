# Each op has all its files under one stem, and includes run one way: in the engine to core and an op's own headers, in
# the binding to the C API and to lower folders.
import re
from pathlib import Path

import house
import pytest

REPO = Path(__file__).parents[2]
COMMON = REPO / "transformer_engine/common"
CSRC = REPO / "transformer_engine/pytorch/csrc"

OPS = re.findall(r"^te_add_op\((\w+)\)", (COMMON / "CMakeLists.txt").read_text(), re.M)

PARTS = [
    "transformer_engine/common/include/transformer_engine/{op}.h",
    "transformer_engine/common/ops/{op}/{op}.cpp",
    "transformer_engine/common/ops/{op}/{op}.cu",
    "transformer_engine/pytorch/csrc/*/{op}.cpp",
    "transformer_engine/pytorch/functional/{op}.py",
    "tests/cpp/test_{op}.cpp",
    "tests/pytorch/{op}/test_{op}.py",
    "benchmarks/bench_{op}.py",
]

# Ops that may quantize their results: the fused-store headers of quantize for kernels and for the host, the conversion
# to FP8, and the structs of its plans.
FUSED_STORE = {"ops/quantize/store.cuh", "ops/quantize/store.h", "ops/quantize/fp8.h", "transformer_engine/quantize.h"}
STORE_CLIENTS = {"activation", "normalization", "optimizer", "permute", "stash"}
# Ops whose C API has more than one header.
FURTHER_HEADERS = {
    "comm": {"transformer_engine/comm_peer.h"},
    "gemm": {"transformer_engine/grouped_gemm.h"},
    "quantize": {"transformer_engine/grouped_quantize.h", "transformer_engine/quantize_list.h"},
}
# comm calls gemm through its C API.
C_API_CLIENTS = {"comm": {"transformer_engine/gemm.h"}}


def sources(folder):
    return sorted(p for p in folder.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})


def includes(path):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.M)


def in_project(include):
    return include.startswith(("core/", "ops/", "transformer_engine/"))


def registered():
    """{folder: the names that module.cpp registers of it}."""
    lists = re.findall(r"^#define TE_(\w+)\(X\) *\\\n((?:  X\(\w+\) *\\?\n)+)", (CSRC / "module.cpp").read_text(), re.M)
    return {folder.lower(): re.findall(r"X\((\w+)\)", names) for folder, names in lists}


def test_there_are_ops():
    assert "activation" in OPS


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_every_file_under_its_stem(op):
    missing = [part.format(op=op) for part in PARTS if not list(REPO.glob(part.format(op=op)))]
    assert not missing, f"op {op!r} lacks {missing}"
    assert op in {name for names in registered().values() for name in names}


def test_every_op_folder_with_an_entry_point_is_an_op():
    folders = {p.parent.name for p in (COMMON / "ops").glob("*/*.cpp")}
    assert folders == set(OPS)


def allowed(path):
    """A predicate on an include's path: whether this file of the engine may include it."""
    parts = path.relative_to(COMMON).parts
    common = {"transformer_engine/transformer_engine.h", "transformer_engine/scaling.h"}
    if parts[0] == "include":
        return lambda include: include in common
    if parts[0] == "core":
        return lambda include: include.startswith("core/") or include in common
    op = parts[1]
    named = common | {f"transformer_engine/{op}.h"} | FURTHER_HEADERS.get(op, set()) | C_API_CLIENTS.get(op, set())
    if op in STORE_CLIENTS:
        named |= FUSED_STORE
    return lambda include: include.startswith(("core/", f"ops/{op}/")) or include in named


@pytest.mark.parametrize("path", sources(COMMON), ids=lambda p: str(p.relative_to(COMMON)))
def test_engine_includes_run_one_way(path):
    permitted = allowed(path)
    wrong = [i for i in includes(path) if in_project(i) and not permitted(i)]
    assert not wrong, f"{path.relative_to(REPO)} may not include {wrong}"
    torch = [i for i in includes(path) if i.startswith(("torch/", "ATen/", "c10/", "pybind11/"))]
    assert not torch, f"the engine is torch-free, but {path.relative_to(REPO)} includes {torch}"


def stem(path):
    return path.rsplit(".", 1)[0]


def test_units_of_the_engine_have_no_circle():
    """A unit is a header with its sources, x.h, x.cuh, x.cpp and x.cu."""
    found = [(str(p.relative_to(COMMON)), i) for p in sources(COMMON) for i in includes(p) if (COMMON / i).exists()]
    assert len(found) > 200, "the search found hardly anything"
    assert not house.circles({(stem(a), stem(b)) for a, b in found if stem(a) != stem(b)})


@pytest.mark.parametrize("path", sources(CSRC), ids=lambda p: p.name)
def test_binding_sees_only_the_c_api(path):
    # `core` and `ops` are folders of the engine and of the binding: the binding's own files are found in csrc.
    inside = [i for i in includes(path) if i.startswith(("core/", "ops/")) and not (CSRC / i).exists()]
    assert not inside, f"{path.relative_to(REPO)} includes engine files that are not its C API: {inside}"


# ---- the folders of the binding ----

# The lowest layer first. A file includes its own folder and lower layers; folders of one layer include each other in
# one direction.
CSRC_LAYERS = [
    ["core"],
    ["autograd", "quantize", "distributed"],
    ["gemm", "saved_hooks"],
    ["wgrad", "stash"],
    ["ops"],
    ["layer"],
]
CSRC_LAYER = {folder: number for number, layer in enumerate(CSRC_LAYERS) for folder in layer}
# Units (x.h with x.cpp) that include each other. The list may only become shorter.
KNOTS = []


def binding_includes():
    """[(file, included file)] in csrc, as paths below it; without those of C++ and libraries."""
    found = []
    for path in sources(CSRC):
        quoted = re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.M)
        found += [(str(path.relative_to(CSRC)), include) for include in quoted]
    return found


def top(path):
    return path.split("/")[0]


def between_folders():
    arrows = {(top(a), top(b)) for a, b in binding_includes() if "/" in a}
    return {(a, b) for a, b in arrows if a != b}


def test_every_file_of_the_binding_is_in_a_folder_with_a_layer():
    assert len([p for p in CSRC.iterdir() if p.is_file() and p.name != "README.md"]) <= 3
    assert {p.name for p in CSRC.iterdir() if p.is_dir()} == set(CSRC_LAYER)


def test_binding_includes_name_their_folder():
    wrong = [(a, b) for a, b in binding_includes() if "/" not in b or not (CSRC / b).exists()]
    assert len(binding_includes()) > 200, "the search found hardly anything"
    assert not wrong, f'write these from csrc on, as in "gemm/gemm.h": {wrong}'


def test_binding_includes_run_down():
    wrong = [(a, b) for a, b in binding_includes() if "/" in a and CSRC_LAYER[top(a)] < CSRC_LAYER[top(b)]]
    assert not wrong, f"these include a higher layer: {wrong}"


def test_folders_of_the_binding_have_no_circle():
    assert not house.circles(between_folders())


def test_units_of_the_binding_have_no_new_circle():
    stems = {tuple(path.rsplit(".", 1)[0] for path in pair) for pair in binding_includes()}
    found = house.circles({(a, b) for a, b in stems if a != b})
    assert not [circle for circle in found if not any(set(circle) <= set(knot) for knot in KNOTS)]


@pytest.mark.parametrize("folder", CSRC_LAYER)
def test_a_folder_registers_the_names_of_its_own_files(folder):
    text = "\n".join(path.read_text() for path in sorted((CSRC / folder).glob("*.cpp")))
    own = set(re.findall(r"^TE_OP_REGISTRATION\((\w+),", text, re.M)) | set(
        re.findall(r"^void register_(\w+)\(", text, re.M)
    )
    named = registered()[folder]
    assert named and set(named) <= own
    assert f"TE_FOLDER({folder}, TE_{folder.upper()})" in (CSRC / "module.cpp").read_text()
    assert f"  te_torch::register_folder_{folder}(m);" in (CSRC / "module.cpp").read_text()
