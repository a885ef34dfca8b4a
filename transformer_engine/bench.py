"""This machine in one minute: the modules and plain PyTorch in a table. ``python -m transformer_engine.bench``.

A step is forward and backward; both run in turn in one process, and a cell is a median. It writes nothing, judges
nothing, and is no benchmark of record: the sources' benchmarks/ is."""

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import transformer_engine
import transformer_engine.pytorch as te
from transformer_engine.common import recipe

WARM_CALLS = 2
LEAST_ROUNDS = 3
BATCH_S = 0.02  # of calls that are timed together
SEED = 0

# dtype, tokens, hidden, ffn_hidden, elements of the optimizer's step
SIZES = {
    "cuda": (torch.bfloat16, 8192, 4096, 14336, 1 << 28),
    "cpu": (torch.float32, 512, 512, 1408, 1 << 22),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A measurement: two modules called with x, or if `modules` is empty two functions without arguments."""

    name: str
    modules: tuple[torch.nn.Module, torch.nn.Module] | None
    steps: tuple[Callable[[], object], Callable[[], object]]
    x: torch.Tensor | None = None


class Swiglu(torch.nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class FusedSwiglu(torch.nn.Module):
    def forward(self, x):
        return te.functional.activation(x, "swiglu")


class Mlp(torch.nn.Module):
    """RMSNorm, gate and up projection, SwiGLU, down projection, from torch's parts."""

    def __init__(self, hidden, ffn_hidden, **options):
        super().__init__()
        self.norm = torch.nn.RMSNorm(hidden, eps=1e-5, **options)
        self.fc1 = torch.nn.Linear(hidden, 2 * ffn_hidden, bias=False, **options)
        self.activation = Swiglu()
        self.fc2 = torch.nn.Linear(ffn_hidden, hidden, bias=False, **options)

    def forward(self, x):
        return self.fc2(self.activation(self.fc1(self.norm(x))))


class Quantized(torch.nn.Module):
    """A module under a recipe."""

    def __init__(self, module, scaling):
        super().__init__()
        self.module, self.scaling = module, scaling

    def forward(self, x):
        with te.autocast(recipe=self.scaling):
            return self.module(x)


def _step(module: torch.nn.Module, x: torch.Tensor) -> Callable[[], None]:
    wanted, gradient = list(module.parameters()), None

    def step():
        nonlocal gradient
        for tensor in (x, *wanted):
            tensor.grad = None  # otherwise the addition of gradients would be timed too
        y = module(x)
        gradient = torch.randn_like(y) if gradient is None else gradient
        y.backward(gradient)

    return step


def cases(device: torch.device):
    """One at a time, so that the next can use its memory."""
    dtype, tokens, hidden, ffn_hidden, elements = SIZES[device.type]
    plain = {"device": device, "dtype": dtype}
    ours = {"device": device, "params_dtype": dtype}
    mlp = dict(normalization="RMSNorm", activation="swiglu", bias=False, **ours)

    def case(name, theirs, mine, width=hidden):
        x = torch.randn(tokens, width, requires_grad=True, **plain)
        return Case(name, (theirs, mine), (_step(theirs, x), _step(mine, x)), x)

    yield case(f"SwiGLU {tokens}x{ffn_hidden}", Swiglu(), FusedSwiglu(), 2 * ffn_hidden)
    yield case(f"RMSNorm {tokens}x{hidden}", torch.nn.RMSNorm(hidden, **plain), te.RMSNorm(hidden, **ours))
    sizes = f"{tokens}x{hidden}x{hidden}"
    linear = torch.nn.Linear(hidden, hidden, bias=False, **plain)
    yield case(f"Linear {sizes}", linear, te.Linear(hidden, hidden, bias=False, **ours))
    sizes = f"{tokens}x{hidden}x{ffn_hidden}"
    theirs = Mlp(hidden, ffn_hidden, **plain)
    yield case(f"LayerNormMLP {sizes}", theirs, te.LayerNormMLP(hidden, ffn_hidden, **mlp))
    if device.type == "cuda":
        for name, scaling in (
            ("delayed", recipe.DelayedScaling()),
            ("current", recipe.Float8CurrentScaling()),
            ("block", recipe.Float8BlockScaling()),
        ):
            mine = Quantized(te.LayerNormMLP(hidden, ffn_hidden, **mlp), scaling)
            yield case(f"LayerNormMLP {sizes}, FP8 {name}", theirs, mine)
    parameters = [torch.nn.Parameter(torch.randn(elements, device=device)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    theirs = torch.optim.AdamW([parameters[0]], lr=1e-4, fused=True)
    mine = te.optimizers.FusedAdam([parameters[1]], lr=1e-4)
    yield Case(f"AdamW step, {elements} weights", None, (theirs.step, mine.step))


def _wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(step, calls, device):
    """Microseconds of one of `calls` calls; the host's enqueueing is hidden if the device is slower."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        step()
    _wait(device)
    return 1e6 * (time.perf_counter() - start) / calls


def measure(case: Case, device: torch.device, seconds: float) -> tuple[float, float]:
    """Median microseconds of both steps, in turn until the time is used up."""
    end = time.perf_counter() + seconds
    calls = []
    for step in case.steps:
        _timed(step, WARM_CALLS, device)
        calls.append(max(1, int(1e6 * min(BATCH_S, seconds / 20) / _timed(step, 1, device))))
    samples = [[], []]
    while time.perf_counter() < end or len(samples[0]) < LEAST_ROUNDS:
        for which in (0, 1) if len(samples[0]) % 2 else (1, 0):
            samples[which].append(_timed(case.steps[which], calls[which], device))
    return statistics.median(samples[0]), statistics.median(samples[1])


def kept_mib(case: Case) -> tuple[str, str]:
    """MiB that each saves for backward besides its input and weights."""
    if case.modules is None:
        return "-", "-"
    return tuple(f"{te.memory_plan(module, case.x).kept_bytes / 2**20:.1f}" for module in case.modules)


def run(device: torch.device, seconds: float) -> None:
    torch.manual_seed(SEED)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    dtype = str(SIZES[device.type][0]).removeprefix("torch.")
    print(f"transformer_engine {transformer_engine.__version__}, torch {torch.__version__}, {name}, {dtype}")
    print("forward and backward; speed: torch's time over ours (above 1 ours is faster); kept: for the backward\n")
    print(f"{'':<44}{'torch us':>12}{'ours us':>12}{'speed':>8}{'torch MiB':>12}{'ours MiB':>11}")
    count = 8 if device.type == "cuda" else 5
    for case in cases(device):
        torch_us, ours_us = measure(case, device, seconds / count)
        kept = kept_mib(case)
        line = f"{torch_us:>12.0f}{ours_us:>12.0f}{torch_us / ours_us:>8.2f}{kept[0]:>12}{kept[1]:>11}"
        print(f"{case.name:<44}{line}", flush=True)


def device_of(text: str | None) -> torch.device:
    """The device to measure; raises with the reason if it cannot be measured."""
    device = torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in SIZES:
        raise ValueError(f"--device is {text!r}, wanted one of {', '.join(SIZES)}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device is 'cuda', but torch sees no GPU; see python -m transformer_engine.doctor")
        if not te._C.built_with_cuda or torch.cuda.get_device_capability(device) != (9, 0):
            raise ValueError(
                "--device is 'cuda', but this build has no CUDA kernels for this GPU (they are for Hopper); "
                "--device cpu measures the CPU"
            )
    return device


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m transformer_engine.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--device", help="cuda or cpu; default CUDA where there is one")
    parser.add_argument("--seconds", type=float, default=45.0, help="for all cases together, beside their set-up")
    args = parser.parse_args()
    if not 0 < args.seconds < math.inf:
        parser.error(f"--seconds is {args.seconds}, wanted a finite number above 0")
    try:
        device = device_of(args.device)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    start = time.perf_counter()
    run(device, args.seconds)
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
