"""The engine as a C program calls it (include/transformer_engine/*.h), for calls that no operation of the package makes
alone: plans, and products of some rows by the algorithm of all."""

import ctypes
import pathlib

import torch

import transformer_engine

DTYPES = {torch.float32: 3, torch.float16: 4, torch.bfloat16: 5}
CPU = -1
OPS = {"gather_linear": 0, "linear_scatter": 1}
SCHEDULES = {"auto": 0, "serial": 1, "chunked": 2}
PUSH, WAIT, GEMM, SUM = range(4)


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("rows", "cols", "row_pitch")]
    _fields_ += [("dtype", ctypes.c_int), ("device", ctypes.c_int32)]


class Gemm(ctypes.Structure):
    _fields_ = (
        [(name, Tensor) for name in ("a", "b", "d", "bias", "aux")]
        + [(name, ctypes.c_int) for name in ("layout", "epilogue", "accumulate", "allow_tf32")]
        + [(name, Tensor) for name in ("a_scale_inv", "b_scale_inv")]
        + [(name, ctypes.c_int) for name in ("a_scaling", "b_scaling", "fast_accumulation")]
        + [("whole_rows", ctypes.c_int64)]
    )


class Costs(ctypes.Structure):
    RATES = ("flops_per_us", "link_bytes_per_us", "serial_bytes_per_us", "memory_bytes_per_us")
    RATES += ("launch_us", "hop_us", "beside")
    COUNTS = ("units", "tile_rows", "tile_cols", "least_gathered", "least_scattered")
    _fields_ = [(name, ctypes.c_double) for name in RATES] + [(name, ctypes.c_int32) for name in COUNTS]


class Tile(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("rows", "cols", "units")]


class Problem(ctypes.Structure):
    _fields_ = [("op", ctypes.c_int), ("schedule", ctypes.c_int)]
    _fields_ += [(name, ctypes.c_int64) for name in ("rows", "depth", "cols")]
    _fields_ += [(name, ctypes.c_int32) for name in ("ranks", "rank")] + [("dtype", ctypes.c_int), ("costs", Costs)]
    _fields_ += [("tile", Tile)]


class Step(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("peer", ctypes.c_int32), ("first", ctypes.c_int64), ("last", ctypes.c_int64)]


class PeerOptions(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("ranks", "rank", "device")]
    _fields_ += [("words", ctypes.c_void_p), ("timeout_s", ctypes.c_double)]


def _load():
    (path,) = {
        str(p) for root in transformer_engine.__path__ for p in pathlib.Path(root).rglob("libtransformer_engine.so")
    }
    library = ctypes.CDLL(path)
    library.te_last_error.restype = ctypes.c_char_p
    library.te_comm_costs_h200.restype = Costs
    return library


_library = _load()


def call(name, *arguments):
    if getattr(_library, name)(*arguments):
        raise RuntimeError(_library.te_last_error().decode())


def pointer(stream):
    """None on the CPU."""
    return None if stream is None else ctypes.c_void_p(stream.cuda_stream)


def view(t):
    device = t.device.index or 0 if t.is_cuda else CPU
    return Tensor(t.data_ptr(), *t.shape, t.stride(0), DTYPES[t.dtype], device)


def default_costs():
    return _library.te_comm_costs_h200()


class Prediction(ctypes.Structure):
    _fields_ = [("schedule", ctypes.c_int), ("runs", ctypes.c_int32), ("us", ctypes.c_double)]
    _fields_ += [("serial_us", ctypes.c_double)]


def _problem(op, m, n, k, ranks, rank, schedule, dtype, tile, costs):
    tile, costs = tile or Tile(), costs or default_costs()
    return Problem(OPS[op], SCHEDULES[schedule], m, k, n, ranks, rank, DTYPES[dtype], costs, tile)


def predicted_us(op, m, n, k, ranks, tile, costs):
    """Of a call in chunks, and of its product alone."""
    found, count = [], ctypes.c_int64()
    for number, schedule in ((ranks, "chunked"), (1, "serial")):
        problem, prediction = _problem(op, m, n, k, number, 0, schedule, torch.bfloat16, tile, costs), Prediction()
        call(
            "te_comm_plan",
            ctypes.byref(problem),
            None,
            ctypes.c_int64(0),
            ctypes.byref(count),
            ctypes.byref(prediction),
        )
        found.append(prediction.us)
    return found


def plan(op, m, n, k, ranks, rank=0, schedule="chunked", dtype=torch.bfloat16, tile=None):
    """The steps of a rank for [m, k] x [n, k]^T, n and k the rank's own, by an algorithm of this tile."""
    problem = _problem(op, m, n, k, ranks, rank, schedule, dtype, tile, None)
    count = ctypes.c_int64()
    call("te_comm_plan", ctypes.byref(problem), None, ctypes.c_int64(0), ctypes.byref(count), None)
    steps = (Step * count.value)()
    call("te_comm_plan", ctypes.byref(problem), steps, count, ctypes.byref(count), None)
    return list(steps)


class Product:
    """y = x weight^T, all of it or rows by the algorithm of all."""

    def __init__(self, weight, x, y):
        self.weight, self.x, self.y = weight, x, y

    def _problem(self, first, last):
        x, y = self.x[first:last], self.y[first:last]
        p = Gemm(a=view(self.weight), b=view(x), d=view(y), whole_rows=0 if len(x) == len(self.x) else len(self.x))
        for none in ("bias", "aux", "a_scale_inv", "b_scale_inv"):
            getattr(p, none).device = p.a.device
        return p

    def tile(self):
        """Of the algorithm of all, by which rows have the same bits; None if they have not."""
        does, tile = ctypes.c_int32(), Tile()
        call("te_gemm_takes_runs", ctypes.byref(self._problem(0, len(self.x))), ctypes.byref(does), ctypes.byref(tile))
        return tile if does.value else None

    def prepared(self, first, last):
        """A function that queues rows [first, last) on a stream."""
        problem, size = self._problem(first, last), ctypes.c_size_t()
        call("te_gemm_workspace", ctypes.byref(problem), ctypes.byref(size))
        workspaces = {}  # one for each stream

        def run(stream):
            if stream not in workspaces:
                workspaces[stream] = torch.empty(max(size.value, 1), dtype=torch.uint8, device=self.x.device)
            memory = ctypes.c_void_p(workspaces[stream].data_ptr())
            call("te_gemm", ctypes.byref(problem), memory, size, pointer(stream))

        return run


class Peer:
    """A rank of a channel without its own product: the caller chooses what it pushes, and which rank it waits for."""

    def __init__(self, ranks, rank, words, device, timeout_s=60.0):
        self.made = ctypes.c_void_p()
        number = device.index or 0 if device.type == "cuda" else CPU
        options = PeerOptions(ranks, rank, number, words.data_ptr(), timeout_s)
        call("te_comm_peer_create", ctypes.byref(options), ctypes.byref(self.made))
        self.rank = rank

    def slot(self, number, addresses, size):
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        call("te_comm_peer_slot", self.made, number, pointers, ctypes.c_size_t(size))

    def begin(self, slot, text):
        call("te_comm_peer_begin", self.made, slot, text.encode())

    def push(self, slot, to, offset, t, stream):
        """Pushes all of t, which is dense, after the stream's work; the stream continues after it."""
        size, one_run = ctypes.c_size_t(t.nbytes), ctypes.c_int64(1)
        source = ctypes.c_void_p(t.data_ptr()), size, size, one_run
        call("te_comm_peer_follow", self.made, pointer(stream))
        call("te_comm_peer_push", self.made, slot, to, ctypes.c_size_t(offset), size, *source)
        call("te_comm_peer_signal", self.made, slot, to)
        call("te_comm_peer_join", self.made, slot, pointer(stream))

    def receive(self, slot, of, stream):
        """Waits for the push of `of` to this rank, and then releases the slot to it."""
        call("te_comm_peer_wait", self.made, slot, of, pointer(stream))
        call("te_comm_peer_done", self.made, slot, of, None, ctypes.c_size_t(0), pointer(stream))

    def close(self):
        call("te_comm_peer_destroy", self.made)
