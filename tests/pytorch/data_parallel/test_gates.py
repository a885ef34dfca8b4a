# Gates in C++: a product that adds to main_grad itself counts its weight before the node's next product runs, and only
# where autograd brings nothing more. The fake reduces what was there when a reduction started: one that starts early
# loses gradients.
import contextlib
import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from support import refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.data_parallel import groups

from .fake import FakeCommunicator, wrapped

WIDTH = 16
FUSED = {"bias": False, "device": "cpu", "fuse_wgrad_accumulation": True}
OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 1}


def mlp(**options):
    torch.manual_seed(1)
    return te.LayerNormMLP(WIDTH, 2 * WIDTH, normalization="RMSNorm", **FUSED, **options)


def linear(**options):
    torch.manual_seed(1)
    return te.Linear(WIDTH, WIDTH, **FUSED, **options)


def x_of(step=0):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


class Watching(FakeCommunicator):
    """Notes which parameter's bucket starts, and for which parameters a gradient was there by then."""

    def watch(self, ddp):
        self.seen, self.params = [], dict(ddp.module.named_parameters())
        self.names = {
            bucket.grad_data.data_ptr(): ddp.bucket_groups[0].names[bucket.params_list[0]]
            for group in ddp.bucket_groups
            for bucket in group.buckets
        }

    def _started(self, kind, tensor, act):
        there = {name for name, p in self.params.items() if p.main_grad.any()}
        self.seen.append((self.names[tensor.data_ptr()], there))
        return super()._started(kind, tensor, act)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_bucket_is_reduced_before_the_nodes_next_product(monkeypatch, sharded):
    comm, module = Watching(), mlp()
    alone = copy.deepcopy(module)
    ddp = wrapped(monkeypatch, comm, module, use_distributed_optimizer=sharded, **OVERLAPPED)
    for step in range(3):
        ddp.zero_grad_buffer()
        comm.watch(ddp)
        ddp(x_of(step)).square().sum().backward()
        everything = {"layer_norm_weight", "fc1_weight", "fc2_weight"}
        if step:
            assert comm.seen[0] == ("fc2_weight", {"fc2_weight"})
            assert comm.seen[1:] == [("fc1_weight", {"fc1_weight", "fc2_weight"}), ("layer_norm_weight", everything)]
        ddp.finish_grad_sync()
        if not step:  # measured: in the order of the products
            assert comm.seen == [(name, everything) for name in ("fc2_weight", "fc1_weight", "layer_norm_weight")]
        for p in alone.parameters():
            p.grad, p.main_grad = None, torch.zeros_like(p)
        alone(x_of(step)).square().sum().backward()
        for (name, p), q in zip(module.named_parameters(), alone.parameters(), strict=True):
            wanted = q.main_grad if q.grad is None else q.grad
            own = slice(0, p.numel() // (2 if sharded else 1))
            assert torch.equal(p.main_grad.view(-1)[own], wanted.reshape(-1)[own]), f"step {step}: {name}"


class Uses(torch.nn.Module):
    """A layer whose weight is used in a way that makes a product's addition not the last one."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.layer = linear(delay_wgrad_compute=way == "delayed")
        self.rest = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        layer, weight = self.layer, self.layer.weight
        if self.way == "twice":
            return self.rest(layer(layer(x)))
        if self.way == "plain first":  # in the backward
            return self.rest(layer(x)) + F.linear(x, weight)
        if self.way == "plain last":
            return F.linear(x, weight) + self.rest(layer(x))
        if self.way in ("reentrant", "recomputed"):
            for _ in range(2):
                x = te.checkpoint(layer, x, use_reentrant=self.way == "reentrant")
            return self.rest(x)
        return self.rest(layer(x))


def prepared(way):
    torch.manual_seed(2)
    module = Uses(way)
    weight = module.layer.weight
    if way == "hook":
        node = torch.autograd.graph.get_gradient_edge(weight).node
        node.register_hook(lambda *_: weight.main_grad.add_(1.0).data_ptr() and None)
        module.node = [node]
    if way in ("dummy", "zeros"):
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, way == "zeros"
    return module


def run(module, call, x):
    if module.way == "grad":
        weight = module.layer.weight
        weight.grad = torch.ones_like(weight)
    loss = call(x).square().sum()
    if module.way == "inputs":
        loss.backward(inputs=list(module.parameters()))
    elif module.way == "retained":
        loss.backward(retain_graph=True)
        loss.backward()
    else:
        loss.backward()
    if module.way == "delayed":
        module.layer.backward_dw()


WAYS = ("once", "twice", "plain first", "plain last", "reentrant", "recomputed", "hook", "dummy", "zeros", "grad")
WAYS += ("inputs", "retained", "delayed")


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_lost_however_a_weight_is_used(monkeypatch, way, unused):
    module = prepared(way)
    serial = wrapped(monkeypatch, FakeCommunicator(), copy.deepcopy(module) if way != "hook" else prepared(way))
    ddp = wrapped(monkeypatch, FakeCommunicator(), module, find_unused_parameters=unused, **OVERLAPPED)
    for step in range(3):
        x = x_of(step).requires_grad_()
        for each in (ddp, serial):
            each.zero_grad_buffer()
            run(each.module, each, x)
        if step and way != "retained":
            assert {group.state.name for group in ddp.bucket_groups} == {"IN_FLIGHT"}
        ddp.finish_grad_sync()
        serial.finish_grad_sync()
        for p, q in zip(ddp.module.parameters(), serial.module.parameters(), strict=True):
            assert torch.equal(p.main_grad, q.main_grad), f"step {step}: {ddp.bucket_groups[0].names[p]}"


def test_gradients_that_autograd_returns_are_not_counted(monkeypatch):
    """torch.autograd.grad() runs the products, and no accumulator."""
    comm, module = FakeCommunicator(), mlp()
    ddp = wrapped(monkeypatch, comm, module, **OVERLAPPED)
    for step in range(2):
        ddp.zero_grad_buffer()
        comm.log.clear()
        torch.autograd.grad(module(x_of()).sum(), list(module.parameters()), allow_unused=True)
        assert not any(group.is_counted for group in ddp.bucket_groups) and not comm.log
        ddp(x_of()).sum().backward()
        assert len(comm.started("reduce")) == (3 if step else 0)
        ddp.finish_grad_sync()


def test_microbatches_are_held_back(monkeypatch):
    comm, module = FakeCommunicator(), mlp()
    ddp = wrapped(monkeypatch, comm, module, **OVERLAPPED)
    for step in range(2):
        ddp.zero_grad_buffer()
        comm.log.clear()
        with ddp.no_sync():
            ddp(x_of()).sum().backward()
        assert not comm.log and all(group.is_held_back for group in ddp.bucket_groups)
        first = module.fc2_weight.main_grad.clone()
        ddp(x_of()).sum().backward()
        assert len(comm.started("reduce")) == (3 if step else 0)
        ddp.finish_grad_sync()
        assert torch.equal(module.fc2_weight.main_grad, 2 * first)


@contextlib.contextmanager
def failing(weight):
    def callback(parameter, stream):
        if parameter is weight:
            raise ZeroDivisionError

    _C.add_ready_callback(callback)
    try:
        yield
    finally:
        _C.remove_ready_callback(callback)


def test_a_node_that_fails_between_its_products(monkeypatch):
    comm, module = FakeCommunicator(), mlp()
    ddp = wrapped(monkeypatch, comm, module, **OVERLAPPED)
    for step in range(4):
        ddp.zero_grad_buffer()
        comm.log.clear()
        if step == 1:
            with failing(module.fc1_weight), pytest.raises(ZeroDivisionError):
                ddp(x_of()).sum().backward()
            assert len(comm.started("reduce")) == 1 == len(comm.in_flight())
            continue
        ddp(x_of()).sum().backward()
        assert len(comm.started("reduce")) == (3 if step else 0)
        ddp.finish_grad_sync()
        assert not comm.in_flight()


@pytest.mark.parametrize("unused", [False, True])
def test_a_backward_after_one_that_failed_without_a_new_step(monkeypatch, unused):
    """The first one has counted fc2_weight, whose bucket is being reduced."""
    module = mlp()
    ddp = wrapped(monkeypatch, FakeCommunicator(), module, find_unused_parameters=unused, **OVERLAPPED)
    for _ in range(2):
        ddp.zero_grad_buffer()
        ddp(x_of()).sum().backward()
        ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    with failing(module.fc1_weight), pytest.raises(ZeroDivisionError):
        ddp(x_of()).sum().backward()
    with refused(RuntimeError, "'fc2_weight'", "more often than in the first step"):
        ddp(x_of()).sum().backward()


@pytest.mark.parametrize("options", [{}, OVERLAPPED])
def test_a_new_step_drops_products_that_wait_for_backward_dw(monkeypatch, options):
    module, found = Uses("delayed"), []
    ddp = wrapped(monkeypatch, FakeCommunicator(), module, **options)
    for left in (False, True):
        for _ in range(2):
            ddp.zero_grad_buffer()
            if left:
                ddp(x_of(1)).sum().backward()
                ddp.zero_grad_buffer()
            run(module, ddp, x_of())
            ddp.finish_grad_sync()
            found.append(module.layer.weight.main_grad.clone())
    assert all(torch.equal(found[0], other) for other in found)


def test_a_product_too_many(monkeypatch):
    module = Uses("reentrant")
    ddp = wrapped(monkeypatch, FakeCommunicator(), module, **OVERLAPPED)
    ddp.zero_grad_buffer()
    run(module, ddp, x_of().requires_grad_())
    ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    x = x_of().requires_grad_()
    with refused(RuntimeError, "'layer.weight'", "no_sync()"):
        module.rest(te.checkpoint(module.layer, ddp(x), use_reentrant=True)).sum().backward()
    ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    run(module, ddp, x)
    ddp.finish_grad_sync()
    with refused(RuntimeError, "'layer.weight'", "after the gradients were reduced", "zero_grad_buffer()"):
        module.layer(x).sum().backward()


def test_python_is_entered_for_complete_groups_alone(monkeypatch):
    module = torch.nn.Sequential(mlp(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    ddp = wrapped(monkeypatch, FakeCommunicator(), module, overlap_grad_reduce=True, bucket_size=WIDTH * WIDTH)
    called = []
    for _ in range(2):
        ddp.zero_grad_buffer()
        loss = ddp(x_of()).sum()
        called.clear()
        sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame.f_code))
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
        ddp.finish_grad_sync()
    entered = [code.co_name for code in called if code.co_filename == groups.__file__]
    assert entered.count("start_when_ready") == len(ddp.bucket_groups) == 5
    assert not set(entered) & {"check_accumulates", "register_grad_ready"}


def test_a_compiled_backward_counts_too(monkeypatch):
    comm, module = FakeCommunicator(), torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    ddp = wrapped(monkeypatch, comm, module, **OVERLAPPED)
    found = []
    for step in range(3):
        ddp.zero_grad_buffer()
        comm.log.clear()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")) if step else torch.enable_grad():
            ddp(x_of()).sum().backward()
        assert len(comm.started("reduce")) == (4 if step else 0)
        ddp.finish_grad_sync()
        found.append([p.main_grad.clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for later in found[1:] for a, b in zip(found[0], later, strict=True))


def test_a_removed_gate_counts_nothing():
    weight = torch.nn.Parameter(torch.ones(4))
    counts = _C.ReadyCounts(parameters=1, overlaps=True, may_be_unused=False, has_streams=False)
    gate = _C.GradGate(weight, torch.zeros(4), object(), counts, 0, False)
    loss = (2 * weight).sum()  # whose graph keeps the accumulator's node, and the hook on it
    loss.backward(retain_graph=True)
    assert weight.grad is None and counts.left == [1] and counts.is_counted and counts.last > 0
    gate.remove()
    gate.remove()
    loss.backward()
    assert torch.equal(weight.grad, torch.full((4,), 2.0)) and counts.left == [1]
    with refused(ValueError, "'counts'", "2 numbers", "wanted 1"):
        counts.expect([1, 2])


class Slow(torch.autograd.Function):
    """Itself; its backward takes a while on the stream of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        torch.cuda._sleep(50_000_000)
        return dy


@pytest.mark.gpu
def test_a_reduction_waits_for_the_streams_of_its_products(monkeypatch):
    """One bucket: the first product runs late on a stream of its own, the last one on that of the reduction."""
    late, last = (te.Linear(WIDTH, WIDTH, **{**FUSED, "device": "cuda"}) for _ in range(2))
    module, side = torch.nn.ModuleList([late, last]), torch.cuda.Stream()
    ddp = wrapped(monkeypatch, FakeCommunicator(), module, overlap_grad_reduce=True)
    for step in range(3):
        ddp.zero_grad_buffer()
        x = torch.ones(4, WIDTH, device="cuda", requires_grad=True)
        y = last(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = Slow.apply(late(x))
        torch.cuda.current_stream().wait_stream(side)
        (y.sum() + z.sum()).backward()
        assert {group.state.name for group in ddp.bucket_groups} == {"IN_FLIGHT" if step else "ACCUMULATING"}
        ddp.finish_grad_sync()
        assert all((p.main_grad == 4.0).all() for p in module.parameters()), f"step {step}"


@pytest.mark.gpu
def test_a_gradient_of_autograd_is_added_after_a_product_on_another_stream(monkeypatch):
    """Of one weight: autograd orders no stream after that of the product, whose gradient is none."""
    layer, side = te.Linear(WIDTH, WIDTH, **{**FUSED, "device": "cuda"}), torch.cuda.Stream()
    ddp = wrapped(monkeypatch, FakeCommunicator(), layer, overlap_grad_reduce=True)
    for step in range(3):
        ddp.zero_grad_buffer()
        x = torch.ones(4, WIDTH, device="cuda")
        y = F.linear(x, layer.weight)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = Slow.apply(layer(x))
        torch.cuda.current_stream().wait_stream(side)
        (y.sum() + z.sum()).backward()
        ddp.finish_grad_sync()
        assert (layer.weight.main_grad == 8.0).all(), f"step {step}"
