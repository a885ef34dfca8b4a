"""te.tune: an explicit search among cuBLASLt's algorithms for the products that a module's step meets. Nothing tunes by
itself: without it every product takes the heuristic's first algorithm. Only algorithms whose order of reduction is
fixed are looked at, so a tuned run repeats its bits as an untuned one does; the two may differ from each other."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.torch_private import cuda_sleep
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.probe.one_run import recording, run_with_gradients, table, tensors_in
from transformer_engine.pytorch.tensor import layout

FORMAT = "transformer_engine gemm tuning 2"
LAYOUTS = ("TN", "NN", "NT")
NT = 2
EPILOGUES = ("none", "bias", "gelu", "dgelu", "bgrad")
NONE, BGRAD = 0, 4
# By the engine's numbers. A result is never FP8 here.
DTYPES = {3: torch.float32, 4: torch.float16, 5: torch.bfloat16}
FP8_DTYPES = {6: torch.float8_e4m3fn, 7: torch.float8_e5m2}
OPERAND_DTYPES = DTYPES | FP8_DTYPES
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
SCALINGS = tuple(words for *_, words in _C.scalings)

BATCH_US = 1000.0  # of one timing, so that an event's resolution does not show
SCREEN_ROUNDS = 3
FINALISTS = 5
FINAL_ROUNDS = 15  # one below a multiple of four, so that the quartiles are times that were measured
MARGIN = 0.01  # a smaller gain, or one within the quartiles, is noise: the heuristic's algorithm stays


@dataclass(frozen=True)
class Tuned:
    """One product: `problem` as the engine's key, times in us of the heuristic's algorithm and of the chosen one (the
    same where no other was faster beyond noise), how many were looked at, and the chosen one's bytes."""

    problem: Mapping[str, int]
    heuristic_us: float
    chosen_us: float
    candidates: int
    algorithm: bytes

    @property
    def gain(self) -> float:
        return self.heuristic_us / self.chosen_us

    def __str__(self) -> str:
        p = self.problem
        accumulated = " accumulated" if p["accumulate"] else ""
        out = "" if p["d_dtype"] == p["dtype"] else f" -> {_name(p['d_dtype'])}"
        extents = f"{p['rows']}x{p['cols']}x{p['depth']}"
        operands = _name(p["dtype"])
        if p["dtype"] in FP8_DTYPES:
            scales = f"{SCALINGS[p['a_scaling']]} x {SCALINGS[p['b_scaling']]}"
            operands += f" x {_name(p['b_dtype'])} {scales}{' fast' if p['fast_accumulation'] else ''}"
        return f"{LAYOUTS[p['layout']]} {extents} {operands}{out} {EPILOGUES[p['epilogue']]}{accumulated}"


class Tuning:
    """rows: a Tuned for each product, in the order met."""

    def __init__(self, rows: list[Tuned]) -> None:
        self.rows = rows

    def __str__(self) -> str:
        cells = [
            (str(r), f"{r.heuristic_us:.1f}", f"{r.chosen_us:.1f}", f"{r.gain:.3f}x", r.candidates) for r in self.rows
        ]
        return table(("product (rows x cols x depth)", "heuristic us", "chosen us", "gain", "candidates"), cells)

    __repr__ = __str__


def _name(dtype: int) -> str:
    return str(OPERAND_DTYPES[dtype]).removeprefix("torch.")


def _need_gpu(op: str) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(f"{op}: there is no CUDA device here; only cuBLASLt's products on one can be tuned.")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{op}: called inside of a CUDA graph capture; call it before, the graph keeps its choices.")


def _accumulated(module: torch.nn.Module, keys: list[dict[str, int]]) -> list[dict[str, int]]:
    """The weight gradients as fuse_wgrad_accumulation makes them: into main_grad, which the run here leaves alone."""
    parts = [m for m in module.modules() if isinstance(m, TransformerEngineBaseModule) and m.fuse_wgrad_accumulation]
    grads = [getattr(p, "main_grad", None) for m in parts for p in m.parameters()]
    dtypes = {g.dtype for g in grads if isinstance(g, torch.Tensor)} or ({torch.float32} if parts else set())
    more = []
    for key in filter(_may_be_wgrad, keys):
        for dtype in sorted(dtypes, key=str):
            own = key["dtype"] == NUMBERS[dtype]
            fused = {} if own else {"epilogue": NONE, "bias_dtype": -1}
            pitch = key["cols"] * dtype.itemsize
            place = {"d_dtype": NUMBERS[dtype], "d_pitch": key["cols"], "d_alignment": min(16, pitch & -pitch)}
            more += [{**key, **fused, **place, "accumulate": accumulate} for accumulate in (0, 1)]
    return more


def _may_be_wgrad(key: Mapping[str, int]) -> bool:
    """FP8 products have one layout; a weight gradient is one whose sums are split and, in blocks, 1 x 128 twice."""
    if key["dtype"] not in FP8_DTYPES:
        return key["layout"] == NT and key["epilogue"] in (NONE, BGRAD)
    return key["epilogue"] == NONE and not key["fast_accumulation"] and key["a_scaling"] == key["b_scaling"]


class _Scratch:
    """Operands of one problem's shapes, pitches and alignments, filled with N(0, 1): a product of zeros is faster than
    one of data. The process's random states stay as they are."""

    def __init__(self, key: Mapping[str, int]) -> None:
        self.key, self.device = key, torch.device("cuda", key["device"])
        self._generator = torch.Generator(self.device).manual_seed(0)
        tn, nt = key["layout"] == 0, key["layout"] == NT
        dtype, b_dtype = OPERAND_DTYPES[key["dtype"]], OPERAND_DTYPES[key["b_dtype"]]
        d_dtype = DTYPES[key["d_dtype"]]
        bias_size = key["rows"] if key["epilogue"] == BGRAD else key["cols"]
        self.a = self._draw(key["cols"] if tn else key["depth"], key["a_pitch"], key["a_alignment"], dtype)
        self.b = self._draw(key["depth"] if nt else key["rows"], key["b_pitch"], key["b_alignment"], b_dtype)
        self.d = self._draw(key["rows"], key["d_pitch"], key["d_alignment"], d_dtype)
        bias = key["bias_dtype"] >= 0
        self.bias = self._draw(1, bias_size, 16, DTYPES[key["bias_dtype"]]) if bias else None
        aux = key["aux_alignment"] > 0
        self.aux = self._draw(key["rows"], key["aux_pitch"], key["aux_alignment"], d_dtype) if aux else None
        fp8 = key["dtype"] in FP8_DTYPES
        self.scales = [
            self._ones(key[f"{x}_scaling"], key[outer]) for x, outer in (("a", "cols"), ("b", "rows")) if fp8
        ]
        self.workspace = torch.empty(0, dtype=torch.uint8, device=self.device)

    def _draw(self, rows: int, pitch: int, alignment: int, dtype: torch.dtype) -> torch.Tensor:
        offset = alignment // dtype.itemsize if alignment < 16 else 0  # an allocation lies on 512 bytes
        data = torch.empty(
            rows * pitch + offset, dtype=dtype if dtype in NUMBERS else torch.bfloat16, device=self.device
        )
        return data.normal_(generator=self._generator).to(dtype)[offset:]

    def _ones(self, scaling: int, outer: int) -> torch.Tensor:
        """Scales of an operand."""
        shape = (1,) if scaling == layout.TENSOR else layout.scale_shape(scaling, outer, self.key["depth"])
        return torch.ones(shape, device=self.device)

    def run(self, choice: bytes, repeats: int = 1) -> None:
        operands = [self.a, self.b, self.d, self.bias, self.aux, *self.scales]
        _C.gemm_try(dict(self.key), choice, operands, self.workspace, repeats)

    def sample(self, choice: bytes, repeats: int) -> float:
        """us of one product."""
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cuda_sleep(200_000)  # about 0.1 ms, in which the host gets ahead
        start.record()
        self.run(choice, repeats)
        stop.record()
        stop.synchronize()
        return 1e3 * start.elapsed_time(stop) / repeats

    def repeats_its_bits(self, choice: bytes) -> bool:
        written = [t for t in (self.d, self.bias, self.aux) if t is not None]
        before, results = [t.clone() for t in written], []
        for _ in range(3):
            for t, value in zip(written, before, strict=True):
                t.copy_(value)
            self.run(choice)
            results.append([t.clone() for t in written])
        # As bytes: NaN (a product of an epilogue's own making) equals itself there.
        same = [torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for r in results for x, y in zip(results[0], r)]
        return all(same)


def _tune_one(key: dict[str, int], most: int) -> Tuned:
    choices = _C.gemm_candidates(key, most)
    with torch.cuda.device(key["device"]):
        scratch = _Scratch(key)
        bytes_wanted = max(int.from_bytes(choice[64:72], "little") for choice in choices)
        scratch.workspace = torch.empty(bytes_wanted, dtype=torch.uint8, device=scratch.device)
        first = choices[0]
        scratch.run(first, 3)
        repeats = max(1, min(100, round(BATCH_US / scratch.sample(first, 3))))
        screened = []
        for choice in choices:
            scratch.run(choice)
            samples = sorted(scratch.sample(choice, repeats) for _ in range(SCREEN_ROUNDS))
            screened.append((samples[SCREEN_ROUNDS // 2], choice))
        finalists = [first] + [c for _, c in sorted(screened, key=lambda s: s[0])[:FINALISTS] if c != first]
        times: dict[bytes, list[float]] = {choice: [] for choice in finalists}
        for turn in range(FINAL_ROUNDS):
            for choice in finalists[:: -1 if turn % 2 else 1]:
                times[choice].append(scratch.sample(choice, repeats))
        quartiles = [(FINAL_ROUNDS + 1) * i // 4 - 1 for i in (1, 2, 3)]
        p25, p50, p75 = ({c: sorted(t)[i] for c, t in times.items()} for i in quartiles)
        faster = [c for c in finalists if p50[c] * (1 + MARGIN) < p50[first] and p75[c] < p25[first]]
        faster = [c for c in sorted(faster, key=p50.get) if scratch.repeats_its_bits(c)]
        chosen = faster[0] if faster else first
    return Tuned(key, p50[first], p50[chosen], len(choices), chosen)


class Tuner:
    """te.tune(module, *sample): runs the module's forward and backward once, times cuBLASLt's candidates for each
    product it met on scratch operands of the same shapes, and lets the fastest run from now on, in this process, for
    every product of the same shape, dtype, layout, epilogue, pitch and alignment on that device. Pass the sample that
    you train with: other shapes are other products. Products that another thread meets meanwhile are tuned too.

    candidates: how many of the heuristic's ranking are looked at.
    Returns a Tuning, which prints. Gradients go nowhere: parameters, .grad, main_grad and the random states stay.
    With fuse_wgrad_accumulation the accumulating products are tuned as well.
    Errors: ValueError where nothing is on a CUDA device; RuntimeError inside of a graph capture; TypeError for what is
    no module, or is compiled.

    te.tune.save(path), te.tune.load(path), te.tune.clear(): what was chosen, as JSON for the same GPU and cuBLASLt.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple, Tuned] = {}

    def __call__(self, module: torch.nn.Module, *sample: object, candidates: int = 32, **options: object) -> Tuning:
        if not isinstance(candidates, int) or candidates < 1:
            raise ValueError(f"tune: argument 'candidates' is {candidates!r}, wanted a number from 1 up.")
        if isinstance(module, torch.nn.Module):
            tensors = (*tensors_in([sample, options]), *module.parameters())
            if not any(t.is_cuda for t in tensors):
                raise ValueError(
                    "tune: the module and its sample are on the CPU, where there is nothing to tune: LibTorch's own "
                    "product runs there. Move both to a CUDA device."
                )
            _need_gpu("tune")
        with recording("tune", module):
            _C.tune_start()
            try:
                run_with_gradients(module, sample, options)
            finally:
                keys = _C.tune_stop()
        keys += [key for key in _accumulated(module, keys) if key not in keys]
        rows = [_tune_one(key, candidates) for key in keys]
        self._install(rows)
        return Tuning(rows)

    def _install(self, rows: list[Tuned]) -> None:
        with self._lock:
            for device in {r.problem["device"] for r in rows}:
                own = [r for r in rows if r.problem["device"] == device]
                _C.gemm_choose([dict(r.problem) for r in own], [r.algorithm for r in own])
            self._rows |= {tuple(r.problem.values()): r for r in rows}

    def clear(self) -> None:
        """Takes every choice back: the heuristic's first algorithm runs again."""
        with self._lock:
            _C.gemm_forget_choices()
            self._rows.clear()

    def save(self, path: str | os.PathLike) -> None:
        """Writes what is chosen in this process. The device's index is left out: the file is for its kind of GPU.

        Errors: RuntimeError where nothing was tuned, or on GPUs of several kinds."""
        with self._lock:
            rows = list(self._rows.values())
        if not rows:
            raise RuntimeError("tune.save: nothing was tuned in this process; call te.tune(module, *sample) first.")
        names = sorted({torch.cuda.get_device_name(r.problem["device"]) for r in rows})
        if len(names) > 1:
            raise RuntimeError(f"tune.save: tuned on {' and '.join(names)}, wanted one kind of GPU in a file.")
        problems = []
        for r in rows:
            key = {field: value for field, value in r.problem.items() if field != "device"}
            times = {"heuristic_us": r.heuristic_us, "chosen_us": r.chosen_us, "candidates": r.candidates}
            problems.append({"problem": key, "algorithm": r.algorithm.hex(), **times})
        text = {"format": FORMAT, "gpu": names[0], "cublaslt": _C.gemm_library_version(), "problems": problems}
        Path(path).write_text(json.dumps(text, indent=1) + "\n")

    def load(self, path: str | os.PathLike) -> Tuning:
        """Chooses for the current device what a file says; what was chosen before for other products stays.

        Errors, nothing being loaded: OSError for a file that cannot be read; ValueError for one that save() did not
        write, or whose algorithms cuBLASLt refuses; RuntimeError for another GPU or cuBLASLt, or without a GPU."""
        rows, gpu, version = _read(path)
        _need_gpu("tune.load")
        device = torch.cuda.current_device()
        for what, got, wanted in (
            ("GPU", gpu, torch.cuda.get_device_name(device)),
            ("cuBLASLt", version, _C.gemm_library_version()),
        ):
            if got != wanted:
                raise RuntimeError(
                    f"tune.load: '{path}' was tuned on {what} {got}, and this is {wanted}; tune again with te.tune."
                )
        rows = [Tuned({**r.problem, "device": device}, *list(vars(r).values())[1:]) for r in rows]
        self._install(rows)
        return Tuning(rows)


def _read(path: str | os.PathLike) -> tuple[list[Tuned], str, int]:
    """The rows of a file, deviceless; its GPU and cuBLASLt."""
    try:
        text = json.loads(Path(path).read_text())
        if text["format"] != FORMAT:
            raise ValueError(f"its format is {text['format']!r}, wanted {FORMAT!r}")
        rows = []
        for entry in text["problems"]:
            key = {field: int(entry["problem"][field]) for field in _C.gemm_key_fields() if field != "device"}
            algorithm = bytes.fromhex(entry["algorithm"])
            if len(algorithm) != 72 or set(entry["problem"]) != set(key):
                raise ValueError("a problem or its algorithm is of another shape")
            operands = (key["dtype"], key["b_dtype"])
            if not (set(operands) <= set(OPERAND_DTYPES) and key["d_dtype"] in DTYPES):
                raise ValueError("a problem has a dtype that no product takes")
            if not (0 <= key["layout"] < len(LAYOUTS) and 0 <= key["epilogue"] < len(EPILOGUES)):
                raise ValueError("a problem has a layout or an epilogue that no product takes")
            if not all(0 <= key[field] < len(SCALINGS) for field in ("a_scaling", "b_scaling")):
                raise ValueError("a problem has a scaling that no product takes")
            times = float(entry["heuristic_us"]), float(entry["chosen_us"]), int(entry["candidates"])
            rows.append(Tuned(key, *times, algorithm))
        return rows, str(text["gpu"]), int(text["cublaslt"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # UnicodeDecodeError and JSON's are ValueErrors
        raise ValueError(f"tune.load: '{path}' is no table that te.tune.save wrote: {error!r}.") from error


tune = Tuner()
