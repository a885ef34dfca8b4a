# Two backwards at once in two threads, over one weight: each gradient is added once.
import concurrent.futures
import threading
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .fake import FakeCommunicator, wrapped

WIDTH = 16
OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 1}


def loss_of(ddp, value):
    return ddp(torch.full((1, WIDTH), float(value))).sum()


class Meeting(torch.nn.Parameter):
    """Two threads meet where a gate reads its marks."""

    meeting = None

    @property
    def grad_added_to_main_grad(self):
        if self.meeting is not None:
            self.meeting.wait(10)
        raise AttributeError


def test_two_backwards_at_once_lose_nothing(monkeypatch):
    module = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    module.weight = weight = Meeting(torch.ones(WIDTH, WIDTH))
    ddp = wrapped(monkeypatch, FakeCommunicator(), module, **OVERLAPPED)
    ddp.zero_grad_buffer()
    weight.meeting = threading.Barrier(2)
    with ddp.no_sync(), concurrent.futures.ThreadPoolExecutor(2) as pool:
        losses = [loss_of(ddp, value) for value in (1, 2)]
        for done in [pool.submit(loss.backward) for loss in losses]:
            done.result()
    assert (weight.main_grad == 3.0).all() and weight.grad is None


class OtherBackward(TorchDispatchMode):
    """While a gate adds to main_grad, another thread's backward makes its own gradient of the same weight."""

    def __init__(self, weight, loss):
        super().__init__()
        self.weight, self.loss, self.accumulated = weight, loss, threading.Event()
        self.pool, self.done = concurrent.futures.ThreadPoolExecutor(1), None

    def backward(self):
        self.weight.register_post_accumulate_grad_hook(lambda _: self.accumulated.set())
        self.loss.backward()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_gate = func is torch.ops.aten.add_.Tensor and args[0].data_ptr() == self.weight.main_grad.data_ptr()
        if is_gate and self.done is None:
            self.done = self.pool.submit(self.backward)
            assert self.accumulated.wait(10)
            end = time.monotonic() + 10
            while self.weight.grad is not None and time.monotonic() < end:
                time.sleep(0.001)  # until the other gate has taken its gradient; it waits for its turn to add it
        return func(*args, **(kwargs or {}))


def test_a_gradient_is_out_of_grad_before_it_is_added(monkeypatch):
    module = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    ddp = wrapped(monkeypatch, FakeCommunicator(), module, **OVERLAPPED)
    ddp.zero_grad_buffer()
    weight = module.weight
    with ddp.no_sync():
        first, other = (loss_of(ddp, value) for value in (1, 2))
        with OtherBackward(weight, other) as mode, mode.pool:
            first.backward()
            mode.done.result(10)
    assert (weight.main_grad == 3.0).all() and weight.grad is None
