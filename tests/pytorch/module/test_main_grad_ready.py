# The ready callback: called with a parameter and a stream after a module added that parameter's gradient to main_grad.
# Mutant: GradAccumulator::ready called before accumulate_any turns test_called_after_the_addition red.
import contextlib

import pytest
import torch
from support import refused

from transformer_engine.pytorch import _C

from .weight_grad_cases import backward, build, every_family, linear, microbatch, weights, with_main_grads


@contextlib.contextmanager
def registered(callback):
    _C.add_ready_callback(callback)
    try:
        yield
    finally:
        _C.remove_ready_callback(callback)


def current_stream(device):
    return torch.cuda.current_stream().cuda_stream if device == "cuda" else 0


@every_family
@pytest.mark.parametrize("delayed", [False, True])
def test_called_after_the_addition(device, family, delayed):
    options = {"delay_wgrad_compute": True} if delayed else {}
    module = with_main_grads(build(family, device, fuse_wgrad_accumulation=True, **options), value=0.0)
    calls = []

    def callback(parameter, stream):
        calls.append((parameter, stream, parameter.main_grad.clone()))

    with registered(callback):
        backward(module, *microbatch(device, torch.float32, 1))
        if delayed:
            assert calls == []
            module.backward_dw()
    parameters = list(weights(module).values())
    assert sorted(id(p) for p, _, _ in calls) == sorted(map(id, parameters))
    for parameter, stream, main_grad in calls:
        assert stream == current_stream(device)
        assert main_grad.ne(0).any() and torch.equal(main_grad, parameter.main_grad)
    backward(module, *microbatch(device, torch.float32, 2))
    if delayed:
        module.backward_dw()
    assert len(calls) == len(parameters)


def test_a_bound_method_is_removed(device):
    class Owner:
        count = 0

        def ready(self, parameter, stream):
            self.count += 1

    owner = Owner()
    module = with_main_grads(build(linear, device, fuse_wgrad_accumulation=True), value=0.0)
    with registered(owner.ready):
        backward(module, *microbatch(device, torch.float32, 1))
    backward(module, *microbatch(device, torch.float32, 2))
    assert owner.count == 1


def test_an_error_of_the_callback_ends_the_backward(device):
    def fail(parameter, stream):
        raise KeyError("not a bucket's")

    module = with_main_grads(build(linear, device, fuse_wgrad_accumulation=True), value=0.0)
    with registered(fail), pytest.raises(KeyError, match="not a bucket's"):
        backward(module, *microbatch(device, torch.float32, 1))


def test_what_cannot_be_called_is_refused(device):
    with refused(TypeError, "add_ready_callback", "'callback'", "int", "wanted a callable"):
        _C.add_ready_callback(1)
