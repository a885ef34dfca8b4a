# Two walks through the source, counted by following calls: the body of each function names the next one, so none
# between them is left out. A helper that runs a function which its caller names is no stop: each_chunk, c_guard,
# TE_ON_DEVICE_OF, DispatchMode::call. test_walks.py checks the calls, and that Python runs these functions. For people:
# `python tests/policy/walks.py` prints both.
import functools
import itertools
import re
from pathlib import Path

import functions

REPO = Path(__file__).parents[2]
PYTORCH, CSRC, ENGINE = "transformer_engine/pytorch", "transformer_engine/pytorch/csrc", "transformer_engine/common/ops"

NODE = [  # what every chain of layers runs first, and is called by its registration
    (f"{CSRC}/layer/op_registration.h", "eager", "with autograd or without"),
    (f"{CSRC}/autograd/autograd.h", "run", "an autograd node"),
    (f"{CSRC}/autograd/autograd.h", "forward", "what is saved, below autograd"),
    (f"{CSRC}/layer/forward.cpp", "LayerChain::forward", "layer by layer"),
    (f"{CSRC}/layer/forward.cpp", "layer_forward", "prologue, then GEMM"),
]

# (file or folder, function, what it decides).
WALKS = {
    # From a module to the SwiGLU formula, an eager training step on a CPU.
    "swiglu": [
        (f"{PYTORCH}/module/layernorm_mlp.py", "forward", "options, kept weights, accumulators"),
        (f"{PYTORCH}/functional/linear.py", "layernorm_mlp", "eager or compiled"),
        (f"{CSRC}/layer/layernorm_mlp.cpp", "TE_OP_REGISTRATION", "the op's schema, its function for Python"),
        *NODE,
        (f"{CSRC}/layer/prologue_activation.cpp", "forward", "plain, or straight to FP8"),
        (f"{CSRC}/ops/activation.cpp", "activation_fwd", "allocate, view, stream"),
        (f"{ENGINE}/activation", "te_activation_forward", "contract"),
        (f"{ENGINE}/activation/activation.cpp", "forward", "rows, in chunks"),
        (f"{ENGINE}/activation/activation_math.h", "forward", "the formula"),
    ],
    # From a GroupedLinear whose splits are on the device to the launch of its kernel.
    "grouped": [
        (f"{PYTORCH}/module/grouped_linear.py", "forward", "splits, kept weights, buffers"),
        (f"{PYTORCH}/functional/grouped_linear.py", "grouped_linear", "eager or compiled"),
        (f"{CSRC}/layer/grouped_linear.cpp", "TE_OP_REGISTRATION", "the op's schema, its function for Python"),
        *NODE,
        (f"{CSRC}/layer/gemm_policy_device.cpp", "fprop", "plain or FP8, a new output or a given one"),
        (f"{CSRC}/gemm/grouped_gemm.cpp", "grouped_rows", "the output; CPU or CUDA; the problem of the C API"),
        (f"{ENGINE}/gemm", "te_grouped_gemm", "contract"),
        (f"{ENGINE}/gemm", "run", "plain or FP8, rows or weight gradients"),
        (f"{ENGINE}/gemm", "launch_rows", "groups of a launch, tensor maps, the kernel"),
        (f"{ENGINE}/gemm/grouped/start.cuh", "Gpu::start", "shared memory; <<<>>>"),
    ],
}

# (function, next one): what the body of the first has in place of the second's name.
NAMED_BY = {
    ("layernorm_mlp", "TE_OP_REGISTRATION"): r"_C\.layernorm_mlp\(",
    ("grouped_linear", "TE_OP_REGISTRATION"): r"_C\.grouped_linear\(",
    ("TE_OP_REGISTRATION", "eager"): r"\.python\(Mlp::python\(\)\)|\beager\(",  # python(): its address, with types
    ("run", "forward"): r"\bapply\b",  # of torch's Function, which calls forward
}


@functools.cache
def functions_in(place):
    path = REPO / place
    files = sorted(p for p in path.rglob("*") if p.suffix in functions.CPP) if path.is_dir() else [path]
    return [f for p in files for f in functions.functions(p, REPO)]


def steps(name):
    """[(file, function, what it decides)] of a walk. Raises AssertionError at a function that calls no next one."""
    found = []
    for (place, caller, does), (_, called, _) in itertools.pairwise([*WALKS[name], ("", "", "")]):
        pattern = NAMED_BY.get((caller, called), rf"\b{called.rpartition('::')[2]}\b" if called else "")
        fits = [f for f in functions_in(place) if f.name == caller and re.search(pattern, f.body)]
        assert fits, f"{caller} in {place} does not call {called}"
        found.append((fits[0].path, caller, does))
    return found


def figures(name):
    """(names, files)"""
    found = steps(name)
    return len(found), len({file for file, *_ in found})


def as_text(name):
    names, files = figures(name)
    rows = ["| file | stop | what it decides |", "|---|---|---|"]
    rows += [f"| `{file}` | `{function}` | {does} |" for file, function, does in steps(name)]
    return "\n".join([*rows, "", f"{names} names in {files} files."])


if __name__ == "__main__":
    for walk in WALKS:
        print(as_text(walk), end="\n\n")
