"""The grouped products of the gemm op alone, through the C API: fprop, dgrad and wgrad (to float32, = and +=)
of 8 and of 128 experts, even and skewed, bf16 and FP8 in blocks, against F.grouped_mm and a captured loop of torch's
products. Prints their rates, and the host time of one call.

Flops: 2 rows N K; shapes are experts x rows x N x K. Splits are on the device and never come to the host, except for
the loop, which needs them. FP8 data and scales are random; the peer is our own bf16. Rows `_alone` time FP8 kernels
without a peer in turn: a device at its limit of power lowers its clocks for earlier work. Host time is that of small
groups."""

import ctypes
import dataclasses
import pathlib

import torch
import torch.nn.functional as F
from common import Bench, Case

import transformer_engine

GPU = ((8, 16384, 28672, 4096), (128, 65536, 1536, 2048))
CPU = ((3, 48, 24, 40),)
HOST_WIDTH = 256  # groups whose products end before the host has launched the next call
FPROP, DGRAD, WGRAD = range(3)
TENSOR_SCALING, BLOCK_SCALING = range(2)  # te_scaling
CODES = {torch.float32: 3, torch.bfloat16: 5, torch.float8_e4m3fn: 6}  # te_dtype


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("rows", "cols", "row_pitch")]
    _fields_ += [("dtype", ctypes.c_int32), ("device", ctypes.c_int32)]

    @classmethod
    def of(cls, t):
        return cls(t.data_ptr(), *t.shape, t.stride(0), CODES[t.dtype], t.device.index if t.is_cuda else -1)


class Problem(ctypes.Structure):
    _fields_ = [
        ("product", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("offsets", ctypes.c_void_p),
        ("rows", Tensor),
        ("depth_rows", Tensor),
        ("weights", ctypes.POINTER(Tensor)),
        ("biases", ctypes.POINTER(Tensor)),
        ("result", Tensor),
        ("results", ctypes.POINTER(Tensor)),
        ("accumulate", ctypes.c_char_p),
        ("zero_tail", ctypes.c_int),
        ("scaling", ctypes.c_int),
        ("rows_scale_inv", Tensor),
        ("depth_rows_scale_inv", Tensor),
        ("weights_scale_inv", ctypes.POINTER(Tensor)),
    ]


def engine():
    (path,) = pathlib.Path(transformer_engine.__file__).parent.rglob("libtransformer_engine.so")
    library = ctypes.CDLL(str(path))
    library.te_last_error.restype = ctypes.c_char_p
    return library


class Layer:
    """One problem's memory: x [rows, K], dy [rows, N], weights and float32 gradients [N, K] of each expert."""

    def __init__(self, bench, splits, n, k):
        self.library, self.cuda, self.splits = engine(), bench.cuda, splits
        experts, rows = len(splits), sum(splits)
        self.x, self.dy = bench.randn(rows, k, dtype="bf16"), bench.randn(rows, n, dtype="bf16")
        self.weights = bench.randn(experts, n, k, dtype="bf16")
        self.gradients = torch.zeros(experts, n, k, device=bench.device)
        self.y, self.dx = torch.empty_like(self.dy), torch.empty_like(self.x)
        ends = torch.tensor(splits, device=bench.device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.ends, self.offsets = ends, torch.cat([ends.new_zeros(1), ends])
        weights, gradients = ((Tensor * experts)(*map(Tensor.of, ts)) for ts in (self.weights, self.gradients))
        common = {"groups": experts, "offsets": self.offsets.data_ptr()}
        x, dy, y, dx = map(Tensor.of, (self.x, self.dy, self.y, self.dx))
        self.problems = {
            "fprop": Problem(product=FPROP, rows=x, weights=weights, result=y, **common),
            "dgrad": Problem(product=DGRAD, rows=dy, weights=weights, result=dx, **common),
            "wgrad": Problem(product=WGRAD, rows=dy, depth_rows=x, results=gradients, **common),
        }
        add = {"results": gradients, "accumulate": b"\1" * experts}
        self.problems["wgrad_accumulate"] = Problem(product=WGRAD, rows=dy, depth_rows=x, **add, **common)

    def with_fp8(self):
        """The same products of FP8 operands in blocks; data and scales are random."""
        experts, rows = len(self.splits), sum(self.splits)
        (n, k), panels = self.weights.shape[1:], sum(-(-count // 128) for count in self.splits)
        device, held = self.x.device, []

        def data(*shape):
            held.append((torch.randn(shape, device=device) * 64).to(torch.float8_e4m3fn))
            return Tensor.of(held[-1])

        def scales(of, across):
            held.append(torch.rand(of, -(-across // 4) * 4, device=device) + 0.5)
            return Tensor.of(held[-1])

        def each(make):
            return (Tensor * experts)(*(make() for _ in range(experts)))

        blocks = {"scaling": BLOCK_SCALING, "groups": experts, "offsets": self.offsets.data_ptr()}
        by_128 = -(-n // 128), -(-k // 128)
        self.problems = {
            "fprop_block": Problem(
                product=FPROP,
                rows=data(rows, k),
                rows_scale_inv=scales(by_128[1], rows),
                weights=each(lambda: data(n, k)),
                weights_scale_inv=each(lambda: scales(*by_128)),
                result=Tensor.of(self.y),
                **blocks,
            ),
            "dgrad_block": Problem(
                product=DGRAD,
                rows=data(rows, n),
                rows_scale_inv=scales(by_128[0], rows),
                weights=each(lambda: data(k, n)),
                weights_scale_inv=each(lambda: scales(by_128[1], by_128[0])),
                result=Tensor.of(self.dx),
                **blocks,
            ),
            "wgrad_block": Problem(
                product=WGRAD,
                rows=data(panels * n, 128),
                rows_scale_inv=scales(panels, n),
                depth_rows=data(panels * k, 128),
                depth_rows_scale_inv=scales(panels, k),
                results=self.problems["wgrad"].results,
                **blocks,
            ),
        } | {f"own {op}": problem for op, problem in self.problems.items()}
        self.held = held
        return self

    def inputs(self):
        return (self.x,)

    def ours(self, op):
        problem = ctypes.byref(self.problems[op])
        stream = torch.cuda.current_stream().cuda_stream if self.cuda else 0
        if self.library.te_grouped_gemm(problem, ctypes.c_void_p(stream)) != 0:
            raise RuntimeError(self.library.te_last_error().decode())

    def torch(self, op):
        if op == "fprop":
            return F.grouped_mm(self.x, self.weights.transpose(1, 2), offs=self.ends)
        if op == "dgrad":
            return F.grouped_mm(self.dy, self.weights, offs=self.ends)
        return F.grouped_mm(self.dy.t(), self.x, offs=self.ends)  # a bfloat16 result, and no adding

    def loop(self, op):
        """One product of torch's for each expert, in a CUDA graph. Weight gradients are bfloat16, without
        accumulation."""
        x, dy, y, dx = (t.split(self.splits) for t in (self.x, self.dy, self.y, self.dx))
        results = torch.empty_like(self.weights) if op.startswith("wgrad") else None

        def products():
            for e, weight in enumerate(self.weights):
                if op == "fprop":
                    torch.mm(x[e], weight.t(), out=y[e])
                elif op == "dgrad":
                    torch.mm(dy[e], weight, out=dx[e])
                else:
                    torch.mm(dy[e].t(), x[e], out=results[e])

        products()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            products()
        return lambda _: graph.replay()


def zipf(rows, experts):
    shares = 1 / torch.arange(1, experts + 1, dtype=torch.float64)
    splits = (rows * shares / shares.sum()).long().tolist()
    return [rows - sum(splits[1:]), *splits[1:]]


def contender(product, op):
    return lambda _: product(op)


def compare(bench, case, layer, op, rates):
    if not bench.selects(case):
        return
    contenders = {"ours": contender(layer.ours, op)}
    if case.dtype == "fp8":
        contenders["own bf16"] = contender(layer.ours, "own " + op.removesuffix("_block"))
    elif bench.cuda:
        contenders |= {"torch eager": contender(layer.torch, op), "torch graph": layer.loop(op)}
    cases = {case: contenders}
    if case.dtype == "fp8":
        cases[dataclasses.replace(case, op=f"{case.op}_alone")] = {"ours": contenders["ours"]}
    for each, those in cases.items():
        times = bench.compare(each, those, layer.inputs)
        rates[each.op, each.shape] = {who: 1e-6 * each.flops / us for who, us in times.items()}


def run(bench, experts, rows, n, k, rates):
    shape, flops = (experts, rows, n, k), 2 * rows * n * k
    for name, splits in (("even", [rows // experts] * experts), ("zipf", zipf(rows, experts))):
        layer = Layer(bench, splits, n, k)
        plain = list(layer.problems)
        for op in plain + [f"{op}_block" for op in ("fprop", "dgrad", "wgrad")]:
            if op == "fprop_block":
                layer.with_fp8()
            direction, dtype = "forward" if "fprop" in op else "backward", "fp8" if "block" in op else "bf16"
            compare(bench, Case("18", f"grouped_{op}_{name}", dtype, shape, direction, flops=flops), layer, op, rates)


def run_host(bench, experts):
    rows = 8 * experts
    case = Case("18", "grouped_fprop_host", "bf16", (experts, rows, HOST_WIDTH, HOST_WIDTH), "forward",
                flops=2 * rows * HOST_WIDTH**2)  # fmt: skip
    if bench.selects(case):
        layer = Layer(bench, [8] * experts, HOST_WIDTH, HOST_WIDTH)
        bench.compare_host(case, {"ours": contender(layer.ours, "fprop")}, layer.inputs)


def main():
    bench = Bench(__doc__)
    rates = {}
    for shape in GPU if bench.cuda else CPU:
        run(bench, *shape, rates)
        run_host(bench, shape[0])
    print("\nTFLOP/s")
    for (op, shape), by_name in rates.items():
        print(f"{op:32}{'x'.join(map(str, shape)):>24}  ", "  ".join(f"{k} {v:.4g}" for k, v in by_name.items()))
    bench.finish()


if __name__ == "__main__":
    main()
