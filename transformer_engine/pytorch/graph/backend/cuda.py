"""CUDA graphs, by the interface that cpu.py has too. Never leaves a stream capturing, nor a generator, nor a pool held,
whatever is raised inside a capture."""

import gc
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.capture_flag import capture_ends
from transformer_engine.pytorch._internal.torch_private import end_allocations_to_pool
from transformer_engine.pytorch.distributed.rng import prepare_no_draws
from transformer_engine.pytorch.graph.backend.interface import HostSync, Written
from transformer_engine.pytorch.graph.describe import OP
from transformer_engine.pytorch.utils import make_weak_ref

# One capture stream a device: libraries keep a workspace for every stream that they have seen.
_streams: dict[int, torch.cuda.Stream] = {}
_one_session = threading.Lock()

# What CUDA says where a capture meets the default stream: that would wait for the capture, or the capture for it.
_OUTSIDE = ("legacy stream", "uncaptured work in another stream")
_WAITED = ("called a synchronizing CUDA operation", "operation not permitted when stream is capturing")


def _innermost(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"`{frames[-1].line}` ({frames[-1].name})" if frames else "an operation"


def _explain(error: RuntimeError) -> None:
    """In our words, where it is known what CUDA's mean."""
    if any(words in str(error) for words in _WAITED):
        raise HostSync(f"{_innermost(error)} waits for the device") from error
    if any(words in str(error) for words in _OUTSIDE):
        raise RuntimeError(
            f"{OP}: the capture would wait for the default stream, or that one for it: most likely the callable reads "
            "a tensor with a gradient that was used there before and is neither an argument nor a parameter of its "
            "module; pass it as an argument, or detach it."
        ) from error


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """torch raises before a call that would wait for the device, and so spoil the capture. It would raise in other
    threads too: beside these CUDA itself refuses the call."""
    if threading.active_count() > 1:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _no_collection() -> Iterator[None]:
    """What the garbage collector frees may ask the device for something that a capture forbids."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaGraphs:
    """Graphs of one set of callables on one device, all in one memory pool."""

    def __init__(self, device: torch.device, pool: object | None, generators: Iterable[torch.Generator]) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.apart = torch.cuda.graph_pool_handle()
        self.generators = [generator for generator in generators if generator.device.type == "cuda"]
        if device.index not in _streams:
            _streams[device.index] = torch.cuda.Stream(device)
        self.stream = _streams[device.index]

    @contextmanager
    def session(self) -> Iterator[None]:
        """Captures of several threads take turns: they share the stream, and torch captures one graph at a time."""
        with _one_session, torch.cuda.device(self.device):
            yield

    @contextmanager
    def warming(self) -> Iterator[None]:
        """On the stream of the captures, so that what libraries allocate for a stream is there before them."""
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            torch.cuda.synchronize()  # after an exception too: what it disturbs is put back on another stream

    def prepare(self, *, warmed: bool) -> None:
        """Before the captures: nothing is in flight, and no cached memory is kept from their pool."""
        prepare_no_draws()
        if not warmed:
            self._start_cublas()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _start_cublas(self) -> None:
        """In this thread and in backward's: else it would start in a capture, which CUDA refuses."""
        with torch.cuda.stream(self.stream), torch.inference_mode(False), torch.enable_grad():
            one = torch.ones(1, 1, device=self.device)
            (one.requires_grad_() @ one).backward()

    def capture(
        self, work: Callable[[], Written], *, apart: bool = False
    ) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor | None], frozenset[int]]:
        """The graph, the static tensors that it writes, and the events that it records for work outside of it.
        `apart`: a graph that may be replayed at any time, whose memory no other one may have."""
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        pool = self.apart if apart else self.pool
        with torch.cuda.stream(self.stream), _no_collection():
            # Other threads, which train meanwhile, may ask CUDA for what a capture may not.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                with _waiting_refused():
                    static = [None if tensor is None else tensor.detach() for tensor in work()]
                    capture_ends()
                events = frozenset(_C.captured_events(self.stream.cuda_stream))
                graph.capture_end()
            except BaseException as error:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # "The CUDA Graph is empty"
                    self._abandon(graph, pool)
                if isinstance(error, RuntimeError):
                    _explain(error)
                raise
        return graph, static, events

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: object) -> None:
        """Ends a capture that failed. Where CUDA has spoilt it, torch leaves the pool open and the generators counting
        for it; both are put right by hand."""
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):
                end_allocations_to_pool(self.device.index, pool)
            graph.reset()
            self._capture_nothing()
        else:
            graph.reset()

    def _capture_nothing(self) -> None:
        """A capture that succeeds: its end tells the generators that no capture is under way."""
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        pool = torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=pool)
        something = torch.zeros(1, device=self.device)
        graph.capture_end()
        graph.reset()
        del something

    def release(self, tensors: Sequence[torch.Tensor | None], *, apart: bool = False) -> list[torch.Tensor | None]:
        """Gives the memory of static tensors back to the pool: captures from here on may write there."""
        return make_weak_ref(list(tensors))

    @staticmethod
    def replay_of(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
        """What graph.replay() calls."""
        return super(torch.cuda.CUDAGraph, graph).replay

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)  # not of the device that is current at a replay

    def is_stream(self, stream: object) -> bool:
        return isinstance(stream, torch.cuda.Stream) and stream.device == self.device

    @staticmethod
    def is_event(event: object) -> bool:
        return isinstance(event, torch.cuda.Event)

    @staticmethod
    def handle_of(event: torch.cuda.Event) -> int:
        return event.cuda_event  # 0 of one that was never recorded

    def on(self, stream: torch.cuda.Stream) -> torch.cuda.StreamContext:
        return torch.cuda.stream(stream)
