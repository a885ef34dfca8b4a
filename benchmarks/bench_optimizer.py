"""A step of AdamW over flat parameters and over ten thousand tensors, and norms, against torch's fused AdamW
(targets.py case 26).

Bytes a parameter: every list that is read or written once. float32: gradient 4, weight, exp_avg, exp_avg_sq 8 each: 28.
With a bfloat16 weight and its master 2 more; with a remainder instead of the master 28; bfloat16 moments 20; E4M3
moments 16 (they are read twice: the rate shows the cost of their scale). Norm: 4. `_capturable`: lr and the number of
the step are read from the device, as in a captured step, beside numbers of the host. `_many` are as many parameters in
10^4 tensors, in a graph; `_host` the host's time of an eager step of these, a tensor."""

import time

import torch
from common import TORCH_DTYPES, Bench, Case

from transformer_engine.pytorch import functional
from transformer_engine.pytorch.optimizers import FusedAdam

PARAMETERS, TENSORS = 2**28, 10_000
CPU_PARAMETERS, CPU_TENSORS, CPU_SIZE = 20_000_000, 10_000, 512
OPTIONS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
HOST_ROUNDS = 7

# op: (dtype column, weight, moments, master, bytes a parameter)
LAYOUTS = {
    "adamw": ("fp32", "fp32", "fp32", None, 28),
    "adamw_master": ("bf16", "bf16", "fp32", torch.float32, 30),
    "adamw_remainder": ("bf16", "bf16", "fp32", torch.int16, 28),
    "adamw_bf16_moments": ("fp32", "fp32", "bf16", None, 20),
}


def lists(bench, n, weight, moments, master):
    """Gradient, weight, moments and master of n parameters."""
    grad, moment = bench.randn(n, dtype="fp32"), TORCH_DTYPES[moments]
    param = bench.randn(n, dtype=weight)
    state = [torch.zeros(n, dtype=moment, device=bench.device) for _ in range(2)]
    if master is torch.int16:
        state.append(torch.zeros(n, dtype=torch.int16, device=bench.device))
    elif master is not None:
        state.append(param.float())
    return grad, param, *state


def stepper():
    """A step over lists of tensors, with a step count."""
    count = 0

    def step(grads, params, exp_avgs, exp_avg_sqs, masters=()):
        nonlocal count
        count += 1
        functional.optimizer_adam(grads, params, exp_avgs, exp_avg_sqs, masters, step=count, **OPTIONS)

    return step


def capturable(bench, n):
    """lr and the step's number on the device, and ours and torch's with them; the number is increased there."""
    case = Case("26", "adamw_capturable", "fp32", (n,), "step", bytes=28 * n)
    if not bench.selects(case):
        return
    given, plain = lists(bench, n, "fp32", "fp32", None), stepper()
    options = OPTIONS | {
        "lr": torch.full((1,), OPTIONS["lr"], device=bench.device),
        "step": torch.zeros(1, dtype=torch.int32, device=bench.device),
    }

    def step(*tensors):
        options["step"].add_(1)
        functional.optimizer_adam(*([t] for t in tensors), **options)

    fused = torch_fused(given[:1], capturable=bench.cuda)  # torch has it on a GPU alone
    contenders = {"ours": step, "own by numbers": lambda *tensors: plain(*([t] for t in tensors))}
    bench.compare(case, contenders | {"torch fused": lambda *_: fused()}, lambda: given)


def step_of(optimizer, grads, **options):
    """A step of an optimizer over its own parameters with these gradients."""
    parameters = [torch.nn.Parameter(torch.randn_like(g)) for g in grads]
    for parameter, grad in zip(parameters, grads):
        parameter.grad = grad
    options |= {"betas": (OPTIONS["beta1"], OPTIONS["beta2"]), "eps": OPTIONS["eps"]}
    return optimizer(parameters, lr=OPTIONS["lr"], weight_decay=OPTIONS["weight_decay"], **options).step


def torch_fused(grads, **options):
    return step_of(torch.optim.AdamW, grads, fused=True, **options)


def fp8_moments(bench, n):
    case = Case("26", "adamw_fp8_moments", "fp32", (n,), "step", bytes=16 * n)
    if bench.selects(case):
        grads = [bench.randn(n, dtype="fp32")]
        step = step_of(FusedAdam, grads, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8)
        bench.compare(case, {"ours": lambda *_: step()}, lambda: grads)


def flat(bench, n, op):
    column, weight, moments, master, size = LAYOUTS[op]
    case = Case("26", op, column, (n,), "step", bytes=size * n)
    if not bench.selects(case):
        return
    given, step = lists(bench, n, weight, moments, master), stepper()
    contenders = {"ours": lambda *tensors: step(*([t] for t in tensors))}
    if op == "adamw":
        fused = torch_fused(given[:1])
        contenders["torch fused"] = lambda *_: fused()
    bench.compare(case, contenders, lambda: given)


def norm(bench, n):
    case = Case("26", "l2norm", "fp32", (n,), "step", bytes=4 * n)
    if bench.selects(case):
        flag = torch.zeros(1, dtype=torch.int32, device=bench.device)
        ours = {"ours": lambda x: functional.optimizer_l2norm([x], noop=flag)}
        bench.compare(
            case,
            ours | {"torch eager": lambda x: torch.nn.utils.get_total_norm([x])},
            lambda: (bench.randn(n, dtype="fp32"),),
        )


def captured(run):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return lambda *_: graph.replay()


def many(bench, n, tensors):
    """The same elements as one tensor, and as many, both in a graph."""
    case = Case("26", "adamw_many", "fp32", (n, tensors), "step", bytes=28 * n)
    if not bench.selects(case):
        return
    given, step = lists(bench, n, "fp32", "fp32", None), stepper()
    pieces = [list(t.split(-(-n // tensors))) for t in given]
    contenders = {
        "ours": captured(lambda: step(*pieces)),
        "own one tensor": captured(lambda: step(*([t] for t in given))),
    }
    bench.compare(case, contenders, lambda: given)


def host(bench, tensors, size):
    """Microseconds of the host a tensor, in an eager step of the optimizer."""
    case = Case("26", "adamw_many_host", "fp32", (tensors, size), "step", bytes=28 * size)
    if not bench.selects(case):
        return
    grads = list(bench.randn(tensors * size, dtype="fp32").split(size))
    contenders = {"ours": step_of(FusedAdam, grads), "torch fused": torch_fused(grads)}
    times = {name: [] for name in contenders}
    for _ in range(HOST_ROUNDS):
        for name, run in contenders.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            times[name].append(1e6 * (time.perf_counter() - start) / tensors)
    torch.cuda.synchronize()
    bench.record(case, {name: sorted(each)[HOST_ROUNDS // 2] for name, each in times.items()}, "us")


def on_cpu(bench):
    flat(bench, CPU_PARAMETERS, "adamw")
    capturable(bench, CPU_PARAMETERS)
    norm(bench, CPU_PARAMETERS)
    case = Case("26", "adamw_many", "fp32", (CPU_TENSORS, CPU_SIZE), "step", bytes=28 * CPU_TENSORS * CPU_SIZE)
    if bench.selects(case):
        whole, step = lists(bench, CPU_TENSORS * CPU_SIZE, "fp32", "fp32", None), stepper()
        given = [[t.clone() for t in each.split(CPU_SIZE)] for each in whole]
        fused = torch_fused(given[0])
        bench.compare(case, {"ours": lambda *_: step(*given), "torch fused": lambda *_: fused()}, lambda: whole)


def main():
    bench = Bench(__doc__)
    if not bench.cuda:
        on_cpu(bench)
        return bench.finish()
    for op in LAYOUTS:
        flat(bench, PARAMETERS, op)
    capturable(bench, PARAMETERS)
    fp8_moments(bench, PARAMETERS)
    norm(bench, PARAMETERS)
    many(bench, PARAMETERS, TENSORS)
    host(bench, TENSORS, CPU_SIZE)
    bench.finish()


if __name__ == "__main__":
    main()
