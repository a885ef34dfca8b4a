"""Captures and replays CUDA graphs, with the interface of backend/interface.py.

- After an exception inside a capture no stream is capturing, and no generator or memory pool is held.
"""

import gc
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.torch_private import end_allocations_to_pool
from transformer_engine.pytorch.distributed.rng import prepare_no_draws
from transformer_engine.pytorch.graph.backend.interface import HostSync, Written
from transformer_engine.pytorch.graph.describe import OP
from transformer_engine.pytorch.graph.observers import capture_ends, events_of_capture
from transformer_engine.pytorch.utils import make_weak_ref

# One capture stream per device: libraries allocate a workspace for every stream that they meet.
_streams: dict[int, torch.cuda.Stream] = {}
_one_session = threading.Lock()

# CUDA's errors for a capture that depends on the default stream.
_DEFAULT_STREAM = ("legacy stream", "uncaptured work in another stream")
# CUDA's errors for a call that waits for the device inside a capture.
_HOST_SYNC = ("called a synchronizing CUDA operation", "operation not permitted when stream is capturing")


def _innermost(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"`{frames[-1].line}` ({frames[-1].name})" if frames else "an operation"


def _explain(error: RuntimeError) -> None:
    """Raises a clearer error where the meaning of CUDA's is known."""
    if any(words in str(error) for words in _HOST_SYNC):
        raise HostSync(f"{_innermost(error)} waits for the device") from error
    if any(words in str(error) for words in _DEFAULT_STREAM):
        raise RuntimeError(
            f"{OP}: the capture depends on the default stream: most likely the callable reads a tensor with a gradient "
            "that was used there before and is neither an argument nor a parameter of its module; pass it as an "
            "argument, or detach it."
        ) from error


@contextmanager
def _host_sync_refused() -> Iterator[None]:
    """torch raises before a call that would wait for the device and so invalidate the capture. It would raise in other
    threads too, so with several threads CUDA's own refusal has to do."""
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
def _no_garbage_collection() -> Iterator[None]:
    """Objects that the garbage collector frees may make CUDA calls that a capture forbids."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaGraphs:
    """The graphs of one set of callables on one device, all in one memory pool."""

    def __init__(self, device: torch.device, pool: object | None, generators: Iterable[torch.Generator]) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.private_pool = torch.cuda.graph_pool_handle()
        self.generators = [generator for generator in generators if generator.device.type == "cuda"]
        if device.index not in _streams:
            _streams[device.index] = torch.cuda.Stream(device)
        self.stream = _streams[device.index]

    @contextmanager
    def session(self) -> Iterator[None]:
        """Serializes the captures of several threads: they share the stream, and torch captures one graph at a time."""
        with _one_session, torch.cuda.device(self.device):
            yield

    @contextmanager
    def warmup(self) -> Iterator[None]:
        """Runs on the stream of the captures, so that libraries make their allocations for it before them."""
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            torch.cuda.synchronize()  # after an exception too: the state is restored on another stream

    def prepare(self, *, warmed: bool) -> None:
        """Before the captures: waits for the device and empties the allocator's cache, for the graphs' pool to use."""
        prepare_no_draws()
        if not warmed:
            self._start_cublas()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _start_cublas(self) -> None:
        """In this thread and in that of the backward: otherwise it would start in a capture, which CUDA refuses."""
        with torch.cuda.stream(self.stream), torch.inference_mode(False), torch.enable_grad():
            one = torch.ones(1, 1, device=self.device)
            (one.requires_grad_() @ one).backward()

    def capture(
        self, func: Callable[[], Written], *, private_pool: bool = False
    ) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor | None], frozenset[int]]:
        """The graph, the static tensors that it writes, and the events that it records after its results for work
        outside of it. private_pool: the graph may be replayed at any time, so no other graph may use its memory."""
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        pool = self.private_pool if private_pool else self.pool
        with torch.cuda.stream(self.stream), _no_garbage_collection():
            # Other threads that train meanwhile may make calls that a capture forbids.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                with events_of_capture(lambda: _C.captured_events(self.stream.cuda_stream)) as events:
                    with _host_sync_refused():
                        static = [None if tensor is None else tensor.detach() for tensor in func()]
                        capture_ends()
                    after_results = events.after_results()
                graph.capture_end()
            except BaseException as error:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # "The CUDA Graph is empty"
                    self._abandon(graph, pool)
                if isinstance(error, RuntimeError):
                    _explain(error)
                raise
        return graph, static, after_results

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: object) -> None:
        """Ends a capture that failed. If CUDA has invalidated it, torch leaves the pool open and the generators in
        their capture state; both are corrected here."""
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
        """A capture that succeeds: its end resets the capture state of the generators."""
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        pool = torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=pool)
        tensor = torch.zeros(1, device=self.device)
        graph.capture_end()
        graph.reset()
        del tensor

    def release(self, tensors: Written, *, private_pool: bool = False) -> list[torch.Tensor | None]:
        """Returns the memory of static tensors to the pool: later captures may write there."""
        return make_weak_ref(list(tensors))

    @staticmethod
    def replay_of(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
        """The function that graph.replay() calls."""
        return super(torch.cuda.CUDAGraph, graph).replay

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)  # the current device of a replay may be another one

    def is_stream(self, stream: object) -> bool:
        return isinstance(stream, torch.cuda.Stream) and stream.device == self.device

    @staticmethod
    def is_event(event: object) -> bool:
        return isinstance(event, torch.cuda.Event)

    @staticmethod
    def handle_of(event: torch.cuda.Event) -> int:
        return event.cuda_event  # 0 if it was never recorded

    def on(self, stream: torch.cuda.Stream) -> torch.cuda.StreamContext:
        return torch.cuda.stream(stream)
