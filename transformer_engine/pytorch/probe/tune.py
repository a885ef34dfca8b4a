"""te.tune: an explicit search among cuBLASLt's algorithms for the GEMMs of a module's step.

- Nothing is tuned without a call: by default every GEMM uses the first algorithm of the heuristic.
- Only algorithms with a fixed order of reduction are candidates, so a tuned run repeats its bits, like an untuned one;
  the bits of the two may differ.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
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
# By the numbers of the engine. A result is never FP8 here.
DTYPES = {3: torch.float32, 4: torch.float16, 5: torch.bfloat16}
FP8_DTYPES = {6: torch.float8_e4m3fn, 7: torch.float8_e5m2}
OPERAND_DTYPES = DTYPES | FP8_DTYPES
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
SCALINGS = tuple(words for *_, words in _C.scalings)

BATCH_US = 1000.0  # of one timing, much longer than the resolution of an event
SCREEN_ROUNDS = 3
FINALISTS = 5
FINAL_ROUNDS = 15  # one below a multiple of four, so that quartiles are measured times
MARGIN = 0.01  # a smaller gain, or one within the quartiles, is noise: the first algorithm stays


@dataclass(frozen=True)
class Tuned:
    """One GEMM: `problem` is the key of the engine; times in us of the heuristic's algorithm and of the chosen one (the
    same unless another was faster beyond noise); the number of candidates; the bytes of the chosen algorithm."""

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
    """rows: a Tuned for each GEMM, in the order of the run."""

    def __init__(self, rows: list[Tuned]) -> None:
        self.rows = rows

    def __str__(self) -> str:
        cells = [
            (str(r), f"{r.heuristic_us:.1f}", f"{r.chosen_us:.1f}", f"{r.gain:.3f}x", r.candidates) for r in self.rows
        ]
        return table(("GEMM (M x N x K)", "heuristic us", "chosen us", "gain", "candidates"), cells)

    __repr__ = __str__


def _name(dtype: int) -> str:
    return str(OPERAND_DTYPES[dtype]).removeprefix("torch.")


def _need_gpu(op: str) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(f"{op}: there is no CUDA device, wanted one; only GEMMs of cuBLASLt can be tuned.")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{op}: called inside of a CUDA graph capture; call it before, a graph keeps its algorithms."
        )


def _accumulated(module: torch.nn.Module, keys: list[dict[str, int]]) -> list[dict[str, int]]:
    """The keys of weight gradients with fuse_wgrad_accumulation: the run here does not add to main_grad."""
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
    """FP8 GEMMs have one layout; a weight gradient has split accumulation and the same scaling for both operands."""
    if key["dtype"] not in FP8_DTYPES:
        return key["layout"] == NT and key["epilogue"] in (NONE, BGRAD)
    return key["epilogue"] == NONE and not key["fast_accumulation"] and key["a_scaling"] == key["b_scaling"]


class _Scratch:
    """Operands with the shapes, pitches and alignments of one problem, filled from N(0, 1), since a GEMM of zeros is
    faster. The random states of the process do not change."""

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
        offset = alignment // dtype.itemsize if alignment < 16 else 0  # an allocation is aligned to 512 bytes
        data = torch.empty(
            rows * pitch + offset, dtype=dtype if dtype in NUMBERS else torch.bfloat16, device=self.device
        )
        return data.normal_(generator=self._generator).to(dtype)[offset:]

    def _ones(self, scaling: int, outer: int) -> torch.Tensor:
        """The scales of an operand."""
        shape = (1,) if scaling == layout.TENSOR else layout.scale_shape(scaling, outer, self.key["depth"])
        return torch.ones(shape, device=self.device)

    def run(self, choice: bytes, repeats: int = 1) -> None:
        operands = [self.a, self.b, self.d, self.bias, self.aux, *self.scales]
        _C.gemm_try(dict(self.key), choice, operands, self.workspace, repeats)

    def sample(self, choice: bytes, repeats: int) -> float:
        """us of one GEMM."""
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cuda_sleep(200_000)  # about 0.1 ms, in which the host enqueues the work
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
        # Compared as bytes, since NaN (an epilogue may produce it) does not equal itself.
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
    """te.tune(module, *sample): runs the module's forward and backward once, times cuBLASLt's candidates for each GEMM
    of the run on scratch operands of the same shapes, and selects the fastest, in this process, for every GEMM of the
    same shape, dtype, layout, epilogue, pitch and alignment on that device. Pass a sample as in training: other shapes
    are other GEMMs. GEMMs that other threads run meanwhile are tuned too.

    candidates: the number of algorithms from the heuristic's ranking.
    Returns a Tuning, which prints. Gradients are discarded: parameters, .grad, main_grad and random states stay. With
    fuse_wgrad_accumulation the accumulating GEMMs are tuned as well.
    Errors: ValueError if nothing is on a CUDA device; RuntimeError inside of a graph capture; TypeError for a value
    other than a module, or a compiled module.

    te.tune.save(path), te.tune.load(path), te.tune.clear(): the choices, as JSON for the same GPU and cuBLASLt.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple, Tuned] = {}
        self._warned: set[str] = set()

    def __call__(self, module: torch.nn.Module, *sample: object, candidates: int = 32, **options: object) -> Tuning:
        if not isinstance(candidates, int) or candidates < 1:
            raise ValueError(f"tune: argument 'candidates' is {candidates!r}, wanted a number from 1 up.")
        if isinstance(module, torch.nn.Module):
            tensors = (*tensors_in([sample, options]), *module.parameters())
            if not any(t.is_cuda for t in tensors):
                raise ValueError(
                    "tune: the module and its sample are on the CPU, where LibTorch computes GEMMs and there is "
                    "nothing to tune. Move both to a CUDA device."
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
        """Drops all choices: the first algorithm of the heuristic runs again."""
        with self._lock:
            _C.gemm_forget_choices()
            self._rows.clear()

    def save(self, path: str | os.PathLike) -> None:
        """Writes the choices of this process, without the device's index: the file is for the kind of GPU.

        Errors: RuntimeError if nothing was tuned, or on GPUs of several kinds."""
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
        """Applies the choices of a file to the current device; earlier choices for other GEMMs stay. A file of another
        GPU or cuBLASLt is ignored with one warning: the result has no rows.

        Errors, with nothing loaded: OSError for a file that cannot be read; ValueError for one that save() did not
        write, or whose algorithms cuBLASLt refuses; RuntimeError without a GPU."""
        rows, gpu, version = _read(path)
        _need_gpu("tune.load")
        device = torch.cuda.current_device()
        for what, got, wanted in (
            ("GPU", gpu, torch.cuda.get_device_name(device)),
            ("cuBLASLt", version, _C.gemm_library_version()),
        ):
            if got != wanted:
                self._warn_once(f"tune.load: '{path}' was tuned on {what} {got}, but this is {wanted}: it is ignored.")
                return Tuning([])
        rows = [Tuned({**r.problem, "device": device}, *list(vars(r).values())[1:]) for r in rows]
        self._install(rows)
        return Tuning(rows)

    def _warn_once(self, ignored: str) -> None:
        if ignored not in self._warned:
            self._warned.add(ignored)
            warnings.warn(ignored + " Tune again with te.tune.", stacklevel=3)


def _read(path: str | os.PathLike) -> tuple[list[Tuned], str, int]:
    """(the rows of a file without a device, its GPU, its version of cuBLASLt)."""
    try:
        text = json.loads(Path(path).read_text())
        if text["format"] != FORMAT:
            raise ValueError(f"its format is {text['format']!r}, wanted {FORMAT!r}")
        rows = []
        for entry in text["problems"]:
            key = {field: int(entry["problem"][field]) for field in _C.gemm_key_fields() if field != "device"}
            algorithm = bytes.fromhex(entry["algorithm"])
            if len(algorithm) != 72 or set(entry["problem"]) != set(key):
                raise ValueError("a problem or its algorithm has the wrong fields or length")
            operands = (key["dtype"], key["b_dtype"])
            if not (set(operands) <= set(OPERAND_DTYPES) and key["d_dtype"] in DTYPES):
                raise ValueError("a problem has a dtype that no GEMM accepts")
            if not (0 <= key["layout"] < len(LAYOUTS) and 0 <= key["epilogue"] < len(EPILOGUES)):
                raise ValueError("a problem has a layout or an epilogue that no GEMM accepts")
            if not all(0 <= key[field] < len(SCALINGS) for field in ("a_scaling", "b_scaling")):
                raise ValueError("a problem has a scaling that no GEMM accepts")
            times = float(entry["heuristic_us"]), float(entry["chosen_us"]), int(entry["candidates"])
            rows.append(Tuned(key, *times, algorithm))
        return rows, str(text["gpu"]), int(text["cublaslt"])
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ValueError(f"tune.load: '{path}' was not written by te.tune.save: {error!r}.") from error


tune = Tuner()
