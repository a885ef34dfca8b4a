"""A table of one te.TransformerLayer step at the size of targets.py case 24: the kernels of each op in their order,
their time, and the floor's share of it. Writes benchmarks/results/transformer_layer_<gpu>.md; it has no peers, and
refuses to run without a GPU.

Floors: flops at the best product ever timed on an H200 (792 TFLOP/s bf16, 8192^3) or bytes at its copy rate (4.25
TB/s), whichever takes longer. Times are means over several profiled steps, gaps between kernels not counted."""

import collections
import dataclasses

import rows
import torch
from bench_transformer import GPU, Rotated, ours
from common import TORCH_DTYPES, Bench, training_step

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C

STEPS, WARM = 8, 5
FLOPS, BYTES = 792e12, 4.25e12


@dataclasses.dataclass
class Line:
    op: str
    what: str
    kernels: dict
    us: float
    floor_us: float


def floor_times(size):
    """op -> the (what, floor in us) of its calls in a step, in their order. Elements have 2 bytes."""
    seq, batch, hidden, ffn, heads, groups = size
    tokens, head = seq * batch, hidden // heads
    qkv = (heads + 2 * groups) * head

    def product(n, k):
        return 1e6 * max(2 * tokens * n * k / FLOPS, 2 * (tokens * (n + k) + n * k) / BYTES)

    def moved(elements_per_token):
        return 1e6 * 2 * tokens * elements_per_token / BYTES

    attended = 1e6 * 2 * batch * heads * seq * seq * head / FLOPS  # half of the square: causal
    products = {"qkv": product(qkv, hidden), "proj": product(hidden, hidden)}
    products |= {"fc1": product(2 * ffn, hidden), "fc2": product(hidden, ffn)}
    backwards = [(name, products[name]) for name in ("fc2", "fc1", "proj", "qkv")]
    return {
        "te::normalization_fwd": [("input", moved(2 * hidden)), ("add, MLP", moved(4 * hidden))],
        "te::linear_fwd": [(name, products[name]) for name in ("qkv", "proj", "fc1", "fc2")],
        "te::rope_qkv_fwd": [("q, k, v from the projection", moved(2 * qkv))],
        "te::rope_qkv_bwd": [("into the projection's gradient", moved(2 * qkv))],
        "te::activation_fwd": [("swiglu", moved(3 * ffn))],
        "te::activation_bwd": [("swiglu, written again", moved(6 * ffn))],
        "te::normalization_bwd": [("MLP, residual's gradient", moved(4 * hidden)), ("input", moved(4 * hidden))],
        "te::linear_dgrad": backwards,
        "te::linear_wgrad": backwards,
        "attention forward": [("cuDNN", attended)],
        "attention backward": [("cuDNN", 2.5 * attended)],
        "add": [("residual", moved(3 * hidden))],
    }


def name_of(event):
    if event.name.startswith("te::"):
        return event.name
    if "scaled_dot_product" in event.name or "cudnn_attention" in event.name:
        return "attention backward" if "backward" in event.name else "attention forward"
    return event.name.removeprefix("aten::").removesuffix("_")


def profiled(step):
    """For each step but the first, in which the profiler starts: [(op, {kernel: us})] of ops that launched
    something."""
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        for _ in range(1 + STEPS):
            with torch.profiler.record_function("step"):
                step()
        torch.cuda.synchronize()
    host = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CPU]
    launching = sorted((e for e in host if e.kernels and e.name != "step"), key=lambda e: e.time_range.start)
    ranges = sorted((e.time_range.start, e.time_range.end) for e in host if e.name == "step")
    return [
        [
            (name_of(e), [(k.name, k.duration) for k in e.kernels])
            for e in launching
            if start <= e.time_range.start < end
        ]
        for start, end in ranges[1:]
    ]


def lines(steps, size):
    names = [[op for op, _ in calls] for calls in steps]
    if any(other != names[0] for other in names):
        raise RuntimeError(f"profile: steps differ in what they ran: {names}")
    wanted, seen, found = floor_times(size), collections.Counter(), []
    for at, op in enumerate(names[0]):
        kernels = collections.Counter()
        for calls in steps:
            for name, us in calls[at][1]:
                kernels[name] += us / len(steps)
        known = wanted.get(op, [])
        what, floor = known[seen[op]] if seen[op] < len(known) else ("", 0.0)
        seen[op] += 1
        found.append(Line(op, what, dict(kernels), sum(kernels.values()), floor))
    return found


def short(kernel):
    return kernel.replace("void ", "").replace("(anonymous namespace)::", "").split("<")[0].split("(")[0][-48:]


def written(found, machine, size):
    total, floor = sum(line.us for line in found), sum(line.floor_us for line in found)
    gap = max(found, key=lambda line: line.us - line.floor_us)
    text = [
        "# One TransformerLayer step, kernel by kernel",
        "",
        f"{machine['gpu']}, driver {machine['driver']}, CUDA {machine['cuda']}, torch {machine['torch']}, commit "
        f"{machine['commit']}. Llama-3-8B's layer, x = {list(size[:3])} bf16, forward and backward. Made by "
        "`python benchmarks/profile_transformer.py`, whose first lines define the floors.",
        "",
        "| op | of | kernels | us | of the step | floor us | floor / time |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in found:
        kernels = ", ".join(f"`{short(name)}`" for name in line.kernels)
        share = f"{line.floor_us / line.us:.2f}" if line.floor_us else "-"
        cells = (line.op, line.what, kernels, f"{line.us:.1f}", f"{line.us / total:.1%}", f"{line.floor_us:.1f}", share)
        text.append(f"| {' | '.join(cells)} |")
    text += [
        f"| **all** | | | **{total:.1f}** | | **{floor:.1f}** | **{floor / total:.2f}** |",
        "",
        f"The largest gap: {gap.op} ({gap.what}), {gap.us - gap.floor_us:.0f} us above its floor, "
        f"{(gap.us - gap.floor_us) / total:.1%} of the step.",
    ]
    return "\n".join(text) + "\n"


def main():
    bench = Bench(__doc__)
    if not bench.cuda:
        raise SystemExit("profile_transformer: kernels are profiled on a GPU; wanted --device cuda")
    dtype, size = GPU
    seq, batch, hidden, *_, heads, _ = size
    angles = te.RotaryPositionEmbedding(hidden // heads).to(bench.device)(seq)
    step = training_step(Rotated(ours(size, bench.device, TORCH_DTYPES[dtype]), angles))
    x, dy = bench.randn(seq, batch, hidden, dtype=dtype, grad=True), bench.randn(seq, batch, hidden, dtype=dtype)
    for _ in range(WARM):
        step(x, dy)
    torch.cuda.synchronize()
    _C.start_recording()  # names our ops to the profiler
    try:
        steps = profiled(lambda: step(x, dy))
    finally:
        _C.stop_recording()
    stem, machine = rows.machine(bench.device)
    path = bench.folder / f"transformer_layer_{stem}.md"
    path.write_text(written(lines(steps, size), machine, size))
    print(path.read_text())


if __name__ == "__main__":
    main()
