# The machine code of the tensor core kernels: no serialised wgmma, no spills, no memory barrier for the whole GPU in a
# loop over K. Mutants: `.release.cluster` in barrier_arrive(), or a product's sums read before wgmma_wait() in
# sm90/mainloop_bf16.cuh, turn these red; six blocks per SM in quantize's source.cuh (spills). Skips where nvcc or
# cuobjdump is not there.
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
    """The log of ptxas for a source, and the instructions of each of its kernels."""
    cuobjdump = tool("cuobjdump")
    cubin = tmp_path_factory.mktemp("sass") / "kernels.cubin"
    log = ptxas(request.param, cubin)
    sass = subprocess.run([cuobjdump, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    kernels = {}
    for part in re.split(r"^\s*Function : ", sass, flags=re.M)[1:]:
        name, body = part.split("\n", 1)
        # "/*0a30*/  @!P0 SYNCS.ARRIVE.TRANS64 RZ, [UR4], RZ ;": the instruction's name
        found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", body)
        kernels[name] = [instruction for instruction in found if instruction != "NOP"]
    return log, kernels


def test_wgmma_is_not_serialised_and_nothing_is_spilled(compiled):
    log, kernels = compiled
    assert kernels and log.count("bytes spill stores") == len(kernels)
    assert not NOTES.findall(log)
    found = [int(size) for size in re.findall(r"(\d+) bytes (?:stack frame|spill \w+)", log)]
    assert max(found) == 0, log


def test_loops_over_k_have_no_other_barrier(compiled):
    _, kernels = compiled
    for name, instructions in kernels.items():
        kinds = [i.split(".")[0] for i in instructions]
        fp8 = "Fp8" in name
        assert kinds.count("QGMMA" if fp8 else "HGMMA") >= 4, f"{name}: where is the loop?"
        assert kinds.count("UTMALDG") >= 2, f"{name}: where are the copies?"
        assert not {"LDL", "STL"} & set(kinds), f"{name} has local memory"
        # Clusters meet before their first and after their last tile. One more barrier, of the block alone, follows the
        # clearing of lines that do not belong to a weight gradient's last block.
        text = re.sub(r"(?:MEMBAR\S* )+(?:\S*ERRBAR )*UCGABAR_ARV", "MEETING", " ".join(instructions))
        barriers = re.findall(r"MEMBAR\S*", text)
        assert text.count("MEETING") == 2, f"{name}: {text.count('MEETING')} meetings of the cluster"
        clears = "WgradKernelTraits" in name and not fp8
        assert barriers == (["MEMBAR.ALL.CTA"] if clears else []), f"{name}: {barriers}"


@pytest.mark.parametrize("source", ["grouped_quantize", "quantize_list"])
def test_quantizing_many_spills_nothing(source, tmp_path):
    log = ptxas(COMMON / f"ops/quantize/{source}.cu", tmp_path / "kernels.cubin")
    found = [int(size) for size in re.findall(r"(\d+) bytes (?:stack frame|spill \w+)", log)]
    assert found and max(found) == 0, log
