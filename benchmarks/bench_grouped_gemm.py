"""The grouped products of the gemm room by themselves, through the C API: fprop, dgrad and wgrad (to float32, = and +=)
of 8 and of 128 experts, even and skewed, against F.grouped_mm where torch has it. Prints their rates, and the host time
of one call.

Flops: 2 rows N K; shapes are experts x rows x N x K. Splits lie on the device and never come to the host."""

import ctypes
import pathlib

import torch
import torch.nn.functional as F
from common import Bench, Case

import transformer_engine

GPU = ((8, 16384, 28672, 4096), (128, 65536, 1536, 2048))
CPU = ((3, 48, 24, 40),)
FPROP, DGRAD, WGRAD = range(3)
CODES = {torch.float32: 3, torch.bfloat16: 5}  # te_dtype


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
    ]


def engine():
    (path,) = pathlib.Path(transformer_engine.__file__).parent.rglob("libtransformer_engine.so")
    library = ctypes.CDLL(str(path))
    library.te_last_error.restype = ctypes.c_char_p
    return library


class Layer:
    """One problem's memory: x [rows, K], dy [rows, N], weights and float32 gradients [N, K] of each expert."""

    def __init__(self, bench, splits, n, k):
        self.library, self.cuda = engine(), bench.cuda
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
        self.problems["wgrad_accumulate"] = Problem(
            product=WGRAD, rows=dy, depth_rows=x, results=gradients, accumulate=b"\1" * experts, **common
        )

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


def zipf(rows, experts):
    shares = 1 / torch.arange(1, experts + 1, dtype=torch.float64)
    splits = (rows * shares / shares.sum()).long().tolist()
    return [rows - sum(splits[1:]), *splits[1:]]


def contender(product, op):
    return lambda _: product(op)


def compare(bench, case, layer, op, rates):
    if not bench.wants(case):
        return
    contenders = {"ours": contender(layer.ours, op)}
    if bench.cuda and hasattr(F, "grouped_mm"):
        contenders["torch eager"] = contender(layer.torch, op)
    times = bench.compare(case, contenders, layer.inputs)
    rates[case.op, case.shape] = {who: 1e-6 * case.flops / us for who, us in times.items()}


def run(bench, experts, rows, n, k, rates):
    shape, flops = (experts, rows, n, k), 2 * rows * n * k
    for name, splits in (("even", [rows // experts] * experts), ("zipf", zipf(rows, experts))):
        layer = Layer(bench, splits, n, k)
        for op in layer.problems:
            direction = "forward" if op == "fprop" else "backward"
            compare(bench, Case("18", f"grouped_{op}_{name}", "bf16", shape, direction, flops=flops), layer, op, rates)
        host = Case("18", f"grouped_fprop_{name}_host", "bf16", shape, "forward", flops=flops)
        if bench.wants(host):
            bench.compare_host(host, {"ours": contender(layer.ours, "fprop")}, layer.inputs)


def main():
    bench = Bench(__doc__)
    rates = {}
    for shape in GPU if bench.cuda else CPU:
        run(bench, *shape, rates)
    print("\nTFLOP/s")
    for (op, shape), by_name in rates.items():
        print(f"{op:32}{'x'.join(map(str, shape)):>24}  ", "  ".join(f"{k} {v:.4g}" for k, v in by_name.items()))
    bench.finish()


if __name__ == "__main__":
    main()
