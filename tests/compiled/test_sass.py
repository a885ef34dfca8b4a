# The machine code of the tensor core kernels: no serialised wgmma, no spills and no memory barrier in a loop over K.
# Mutants: `.release.cluster` in barrier_arrive(), a product's sums read before wgmma_wait() in sm90/mainloop_bf16.cuh,
# or a fence_async_proxy() in the loop of consume_fp8() turn these red; six blocks per SM in quantize's source.cuh
# (spills). Skips where nvcc or cuobjdump is not there.
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

COMMON = Path(__file__).parents[2] / "transformer_engine/common"
SOURCES = sorted(p for p in (COMMON / "ops/gemm/grouped").glob("*.cu") if "start.cuh" in p.read_text())

# "Potential Performance Loss": wgmma serialised, in one function or for want of what it needs; setmaxnreg ignored.
NOTES = re.compile(r".*(?:C75\d\d|wgmma.*serializ|setmaxnreg.*ignored).*")


def tool(name):
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    triton = importlib.util.find_spec("triton")  # which torch brings, and which brings the disassembler
    folders = [Path(nvcc).parent]
    folders += [Path(p) / "backends/nvidia/bin" for p in (triton.submodule_search_locations if triton else [])]
    found = next((f / name for f in folders if (f / name).exists()), None) or shutil.which(name)
    if not found:
        pytest.skip(f"no {name} here")
    return str(found)


def ptxas(source, cubin):
    """The log of ptxas for a source, which is compiled into a file."""
    flags = ["-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr", "-Xptxas=-v"]
    paths = [f"-I{COMMON}", f"-I{COMMON / 'include'}", "-DTE_WITH_CUDA"]
    command = [tool("nvcc"), *flags, *paths, "-cubin", "-o", str(cubin), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


assert SOURCES, "no source launches a grouped kernel"


@pytest.fixture(scope="module", params=SOURCES, ids=lambda p: p.stem)
def compiled(request, tmp_path_factory):
    """The log of ptxas for a source, and the instructions of each of its kernels by their addresses."""
    cuobjdump = tool("cuobjdump")
    cubin = tmp_path_factory.mktemp("sass") / "kernels.cubin"
    log = ptxas(request.param, cubin)
    sass = subprocess.run([cuobjdump, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    kernels = {}
    for part in re.split(r"^\s*Function : ", sass, flags=re.M)[1:]:
        name, body = part.split("\n", 1)
        # "/*0a30*/  @!P0 SYNCS.ARRIVE.TRANS64 RZ, [UR4], RZ ;": the address, the instruction's name, its operands
        found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", body)
        kernels[name] = {int(at, 16): (kind, operands) for at, kind, operands in found if kind != "NOP"}
    return log, kernels


def loop_over_k(instructions):
    """The names in the smallest loop (a branch back, and what it jumps over) that multiplies a whole k_block."""
    products = [at for at, (kind, _) in instructions.items() if kind.startswith(("QGMMA", "HGMMA"))]
    targets = {at: re.search(r"0x([0-9a-f]+)", rest) for at, (kind, rest) in instructions.items() if kind == "BRA"}
    loops = [(int(to[1], 16), at) for at, to in targets.items() if to and int(to[1], 16) < at]
    loops = [(first, last) for first, last in loops if sum(first <= at <= last for at in products) >= 4]
    assert loops, "no loop multiplies"
    first, last = min(loops, key=lambda loop: loop[1] - loop[0])
    return [kind for at, (kind, _) in instructions.items() if first <= at <= last]


def test_wgmma_is_not_serialised_and_nothing_is_spilled(compiled):
    log, kernels = compiled
    assert kernels and log.count("bytes spill stores") == len(kernels)
    assert not NOTES.findall(log)
    found = [int(size) for size in re.findall(r"(\d+) bytes (?:stack frame|spill \w+)", log)]
    assert max(found) == 0, log
    for name, instructions in kernels.items():
        local = {kind for kind in loop_over_k(instructions) if kind.startswith(("LDL", "STL"))}
        assert not local, f"{name}: {local} in the loop over K"


def test_loops_over_k_have_no_other_barrier(compiled):
    _, kernels = compiled
    for name, instructions in kernels.items():
        names = [kind for kind, _ in instructions.values()]
        kinds = [i.split(".")[0] for i in names]
        fp8 = "Fp8" in name
        assert kinds.count("QGMMA" if fp8 else "HGMMA") >= 4, f"{name}: where is the loop?"
        assert kinds.count("UTMALDG") >= 2, f"{name}: where are the copies?"
        # One barrier, of the block alone, follows the clearing of lines that do not belong to a weight gradient's last
        # block.
        cleared = ["MEMBAR.ALL.CTA"] if "WgradKernelTraits" in name and not fp8 else []
        inside = [kind for kind in loop_over_k(instructions) if "MEMBAR" in kind]
        assert inside == cleared, f"{name}: {inside} in the loop over K"
        # Beside it, clusters meet before their first and after their last tile; and what is written into a staged box
        # is shown to the copy engine before the box is handed over: a fence of the block and of its proxy.
        text = re.sub(r"(?:MEMBAR\S* )+(?:\S*ERRBAR )*UCGABAR_ARV", "MEETING", " ".join(names))
        if "Staged" in name:
            text = text.replace("MEMBAR.ALL.CTA FENCE.VIEW.ASYNC", "BOX")
            assert "BOX" in text and "UTMASTG" in kinds, f"{name}: where are the staged boxes?"
        barriers = re.findall(r"MEMBAR\S*", text)
        assert text.count("MEETING") == 2, f"{name}: {text.count('MEETING')} meetings of the cluster"
        assert barriers == cleared, f"{name}: {barriers}"


@pytest.mark.parametrize("source", ["grouped_quantize", "quantize_list"])
def test_quantizing_many_spills_nothing(source, tmp_path):
    log = ptxas(COMMON / f"ops/quantize/{source}.cu", tmp_path / "kernels.cubin")
    found = [int(size) for size in re.findall(r"(\d+) bytes (?:stack frame|spill \w+)", log)]
    assert found and max(found) == 0, log
