"""Real CUDA graphs behind the recorder's interface. Never leaves a stream capturing, nor a generator, nor a pool held,
whatever is raised inside a capture."""

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from transformer_engine.pytorch.graph.recorder import HostSync, Written
from transformer_engine.pytorch.utils import make_weak_ref

# One capture stream a device: libraries keep a workspace for every stream that they have seen.
_streams: dict[int, torch.cuda.Stream] = {}

_WAITED = ("called a synchronizing CUDA operation", "operation not permitted when stream is capturing")


def _innermost(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"`{frames[-1].line}` ({frames[-1].name})" if frames else "an operation"


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
        self.generators = [generator for generator in generators if generator.device.type == "cuda"]
        if device.index not in _streams:
            _streams[device.index] = torch.cuda.Stream(device)
        self.stream = _streams[device.index]

    @contextmanager
    def session(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            yield

    @contextmanager
    def warming(self) -> Iterator[None]:
        """On the stream of the captures, so that what libraries allocate for a stream is there before them."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.synchronize()

    def prepare(self) -> None:
        """Before the captures: nothing is in flight, and no cached memory is kept from their pool."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def capture(self, work: Callable[[], Written]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor | None]]:
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        waiting = torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(self.stream), _no_collection():
            graph.capture_begin(pool=self.pool)
            try:
                torch.cuda.set_sync_debug_mode("error")  # raises before the call that would spoil the capture
                static = [None if tensor is None else tensor.detach() for tensor in work()]
                torch.cuda.set_sync_debug_mode(waiting)
                graph.capture_end()
            except BaseException as error:
                torch.cuda.set_sync_debug_mode(waiting)
                self._abandon(graph)
                if isinstance(error, RuntimeError) and any(words in str(error) for words in _WAITED):
                    raise HostSync(f"{_innermost(error)} waits for the device") from error
                raise
        return graph, static

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture that failed. Where CUDA has spoilt it, torch leaves the pool open and the generators counting
        for it; both are put right by hand."""
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.device.index, self.pool)
                torch._C._cuda_releasePool(self.device.index, self.pool)
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

    def release(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gives the memory of static tensors back to the pool: captures from here on may write there."""
        return make_weak_ref(list(tensors))

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def on(self, stream: torch.cuda.Stream) -> torch.cuda.StreamContext:
        return torch.cuda.stream(stream)
