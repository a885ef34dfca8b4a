"""megatron-core on a CPU: it uses CUDA by name throughout, so the CPU answers in its place. For tests alone; run as a
script, it is examples/with_megatron_core.py in one rank, with the example's options."""

import contextlib
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))


class _Stream(contextlib.nullcontext):
    """A CPU has one stream, on which everything is done in order: waits have nothing to wait for."""

    def __init__(self, *args, **kwargs):
        super().__init__(self)

    def _done(self, *args, **kwargs):
        return self

    wait_stream = wait_event = synchronize = record = wait = record_event = _done


class _Generators:
    def __getitem__(self, index):
        return torch.default_generator


def _on_the_cpu(function):
    def made(*args, **kwargs):
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return made


def _nothing():
    def done(*args, **kwargs):
        return None

    return done


def pretend() -> None:
    """Each name gets a function of its own: torch.compile's tables refuse one function under two names."""
    cuda = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize, cuda.set_device, cuda._lazy_init = _nothing(), _nothing(), _nothing()
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    for room in (cuda, cuda.random):
        room.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        room.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.default_generators = _Generators()
    for name in ("Stream", "Event", "stream", "current_stream", "default_stream"):
        setattr(cuda, name, type(name, (_Stream,), {}))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    kind = torch.Tensor.type  # its optimizer sorts parameters by "torch.cuda.BFloat16Tensor"

    def type_(self, *args, **kwargs):
        answer = kind(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer

    torch.Tensor.type = type_
    for name in ("empty", "zeros", "ones", "tensor", "arange", "full", "rand", "randn"):
        setattr(torch, name, _on_the_cpu(getattr(torch, name)))


class _Works(list):
    def wait(self):
        for work in self:
            work.wait()


def collectives_one_by_one() -> None:
    """gloo's coalesced collectives mix dtypes: inside a coalescing manager each one starts alone, and the manager's
    work waits for all of them. Call it before megatron-core is imported, which keeps these functions."""
    dist, opened = torch.distributed, []

    def noted(function):
        def started(*args, **kwargs):
            work = function(*args, **kwargs)
            if opened and work is not None:
                opened[-1].append(work)
            return work

        return started

    @contextlib.contextmanager
    def manager(group=None, device=None, async_ops=False):
        opened.append(_Works())
        try:
            yield opened[-1]
        finally:
            opened.pop()

    for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"):
        setattr(dist, name, noted(getattr(dist, name)))
    dist._coalescing_manager = dist.distributed_c10d._coalescing_manager = manager


if __name__ == "__main__":
    pretend()
    import with_megatron_core

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    losses = with_megatron_core.train(with_megatron_core.options(sys.argv[1:]), torch.device("cpu"))
    sys.exit(0 if losses[-1] < losses[0] else 1)
