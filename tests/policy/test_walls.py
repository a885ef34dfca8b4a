# The house's walls: each room has all its parts under one stem, and includes run one way. Mutant: including
# "ops/gemm/gemm.cu" or another room's header from a room, or removing a room's bench file, turns these red.
import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
COMMON = REPO / "transformer_engine/common"
CSRC = REPO / "transformer_engine/pytorch/csrc"

ROOMS = re.findall(r"^te_add_op\((\w+)\)", (COMMON / "CMakeLists.txt").read_text(), re.M)

PARTS = [
    "transformer_engine/common/include/transformer_engine/{room}.h",
    "transformer_engine/common/ops/{room}/{room}.cpp",
    "transformer_engine/common/ops/{room}/{room}.cu",
    "transformer_engine/pytorch/csrc/{room}.cpp",
    "transformer_engine/pytorch/functional/{room}.py",
    "tests/cpp/test_{room}.cpp",
    "tests/pytorch/{room}/test_{room}.py",
    "benchmarks/bench_{room}.py",
]

# Rooms whose results may leave through the quantize room's porch: its header for kernels, its header for the host, how
# numbers become FP8, and the structs of its plans.
PORCH = {"ops/quantize/store.cuh", "ops/quantize/store.h", "ops/quantize/fp8.h", "transformer_engine/quantize.h"}
PORCH_GUESTS = {"activation", "normalization", "optimizer", "permute", "stash"}
# A room's C API may be in more than one header.
FURTHER_HEADERS = {
    "comm": {"transformer_engine/comm_peer.h"},
    "gemm": {"transformer_engine/grouped_gemm.h"},
    "quantize": {"transformer_engine/grouped_quantize.h", "transformer_engine/quantize_list.h"},
}
# comm calls gemm through its C API.
C_API_GUESTS = {"comm": {"transformer_engine/gemm.h"}}


def sources(folder):
    return sorted(p for p in folder.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})


def includes(path):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.M)


def in_project(include):
    return include.startswith(("core/", "ops/", "transformer_engine/"))


def test_there_are_rooms():
    assert "activation" in ROOMS


@pytest.mark.parametrize("room", ROOMS)
def test_room_has_every_part_under_its_stem(room):
    missing = [part.format(room=room) for part in PARTS if not (REPO / part.format(room=room)).exists()]
    assert not missing, f"room {room!r} lacks {missing}"
    assert f"  X({room})" in (CSRC / "module.cpp").read_text()


def test_every_op_folder_with_an_entry_point_is_a_room():
    folders = {p.parent.name for p in (COMMON / "ops").glob("*/*.cpp")}
    assert folders == set(ROOMS)


def allowed(path):
    """What a file of the engine may include from the project: a predicate on the include's path."""
    parts = path.relative_to(COMMON).parts
    common = {"transformer_engine/transformer_engine.h", "transformer_engine/scaling.h"}
    if parts[0] == "include":
        return lambda include: include in common
    if parts[0] == "core":
        return lambda include: include.startswith("core/") or include in common
    room = parts[1]
    named = common | {f"transformer_engine/{room}.h"} | FURTHER_HEADERS.get(room, set()) | C_API_GUESTS.get(room, set())
    if room in PORCH_GUESTS:
        named |= PORCH
    return lambda include: include.startswith(("core/", f"ops/{room}/")) or include in named


@pytest.mark.parametrize("path", sources(COMMON), ids=lambda p: str(p.relative_to(COMMON)))
def test_engine_includes_run_one_way(path):
    permitted = allowed(path)
    wrong = [i for i in includes(path) if in_project(i) and not permitted(i)]
    assert not wrong, f"{path.relative_to(REPO)} may not include {wrong}"
    torch = [i for i in includes(path) if i.startswith(("torch/", "ATen/", "c10/", "pybind11/"))]
    assert not torch, f"the engine is torch-free, but {path.relative_to(REPO)} includes {torch}"


@pytest.mark.parametrize("path", sources(CSRC), ids=lambda p: p.name)
def test_binding_sees_only_the_c_api(path):
    inside = [i for i in includes(path) if i.startswith(("core/", "ops/"))]
    assert not inside, f"{path.relative_to(REPO)} reaches behind the C API: {inside}"
