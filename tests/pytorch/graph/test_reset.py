# The end of a captured callable: reset(), memory, and what holds what.
import copy
import gc
import weakref

import pytest
import torch
from support import refused

import transformer_engine.pytorch as te

from .cases import (
    HIDDEN,
    assert_same_step,
    build,
    capture,
    layer,
    left_by,
    linear,
    mlp,
    plain,
    step,
    tokens,
    twins,
)


def test_reset_restores_the_eager_forward(device):
    module, eager = twins(mlp, device, delay_wgrad_compute=True)
    before = set(vars(module))
    capture(module, device)
    handle = module.forward
    y = module(tokens(device, grad=True))
    module.reset()
    assert set(vars(module)) == before and "reset" not in vars(module)
    x = tokens(device)
    assert_same_step(step(module, x, 1), step(eager, x, 1))
    for m in (module, eager):
        m.backward_dw()
    assert_same_step(left_by(module), left_by(eager))
    for use in (lambda: handle(x), y.sum().backward, handle.backward_dw):
        with refused(RuntimeError, "LayerNormMLP", "reset()", "capture again"):
            use()
    handle.reset()
    capture(module, device)
    del y, use
    eager.zero_grad(), module.zero_grad()
    assert_same_step(step(module, x, 1), step(eager, x, 1))


@pytest.mark.parametrize("delay", [False, True], ids=["now", "later"])
def test_what_adds_to_gradients_is_not_the_captures(device, delay):
    """AccumulateGrad nodes belong to the stream on which they were made, which a capture must not wait for. They live
    with a result, or because a framework keeps them for hooks, as gradient buckets do."""
    module, eager = twins(linear, device, delay_wgrad_compute=delay)
    y, heard = module(tokens(device, grad=True)), []
    nodes = {name: p.expand_as(p).grad_fn.next_functions[0][0] for name, p in module.named_parameters()}
    for name, node in nodes.items():
        node.register_hook(lambda *_, name=name: heard.append(name))
    capture(module, device)
    assert {n: p.expand_as(p).grad_fn.next_functions[0][0] for n, p in module.named_parameters()} == nodes
    x = tokens(device)
    assert_same_step(step(module, x, 1), step(eager, x, 1))
    assert heard.count("bias") == heard.count("weight") == 1
    del y


def test_a_captured_module_is_not_captured_again(device):
    module = build(linear, device)
    capture(module, device)
    with refused(ValueError, "make_graphed_callables", "'modules'", "captured already", "reset()"):
        capture(module, device)


def test_a_move_that_fails_halfway(device):
    """Some parameters are elsewhere then, and the graphs read the old ones."""
    module = build(linear, device)
    capture(module, device)
    moved = []

    def move(t):
        if moved:
            raise MemoryError("no room")
        moved.append(t.clone())
        return moved[0]

    with pytest.raises(MemoryError, match="no room"):
        module._apply(move)
    with refused(RuntimeError, "Linear", "a conversion or a move", "reset()", "capture again"):
        module(tokens(device))


def test_reset_frees_the_static_tensors(device):
    module = build(mlp, device)
    capture(module, device)
    handle = module.forward  # may live on
    kept = [weakref.ref(t) for t in (*handle.record.forward_graph.inputs, *handle.record.forward_graph.outputs)]
    if device == "cuda":
        before = torch.cuda.memory_allocated()
    module.reset()
    gc.collect()
    assert handle.record.validity.was_reset and all(ref() is None for ref in kept)
    if device == "cuda":
        assert torch.cuda.memory_allocated() < before


@pytest.mark.gpu
def test_reset_returns_all_memory():
    sample = tokens("cuda", grad=True)
    modules = [build(layer, "cuda") for _ in range(3)]

    def cycle():
        te.make_graphed_callables(tuple(modules), ((sample,), (sample.clone(),), (sample.clone(),)))
        step(modules[0], sample, 1)
        for module in modules:
            module.reset()
            module.zero_grad()

    cycle()  # allocations of libraries for the capture stream stay
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        cycle()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2**20


@pytest.mark.gpu
def test_extra_memory_is_static_tensors_and_the_pool():
    """The sample itself is the static input; the incoming gradient of the output is the other static tensor."""
    tokens_, hidden = 1024, 512
    capture(build(mlp, "cuda"), "cuda")  # allocations that libraries make once
    module = te.LayerNormMLP(hidden, 4 * hidden, device="cuda")
    sample = torch.randn(tokens_, hidden, device="cuda", requires_grad=True)
    pool = torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    te.make_graphed_callables(module, (sample,), pool=pool)
    torch.cuda.synchronize()
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool)]
    in_pool = sum(b["size"] for s in segments for b in s["blocks"] if b["state"] == "active_allocated")
    static = sum(t.untyped_storage().nbytes() for t in module.forward.record.backward_graph.grad_outputs)
    assert in_pool > 0 and static == sample.untyped_storage().nbytes()
    assert torch.cuda.memory_allocated() - before - in_pool <= static + 2**16


@pytest.mark.gpu
def test_a_pool_is_shared():
    pool = torch.cuda.graph_pool_handle()
    modules = [build(mlp, "cuda") for _ in range(2)]
    eager = copy.deepcopy(modules)
    for module in modules:
        capture(module, "cuda", pool=pool)
    assert {module.forward.record.forward_graph.graph.pool() for module in modules} == {pool}
    for seed in range(2):
        for module, twin in zip(modules, eager):
            x = torch.randn(6, 2, HIDDEN, device="cuda")
            assert_same_step(step(module, x, seed), step(twin, x, seed))


class Freed:
    """Whether the tensors of a module and its graphs are freed, on CUDA their memory too."""

    def __init__(self, module, device):
        forward = module.forward
        held = (
            module,
            forward,
            *module.parameters(),
            *forward.record.forward_graph.inputs,
            *forward.record.forward_graph.outputs,
        )
        self.references = [weakref.ref(o) for o in held]
        self.before = torch.cuda.memory_allocated() if device == "cuda" else 1

    def __bool__(self):
        after = torch.cuda.memory_allocated() if torch.cuda.is_initialized() and self.before > 1 else 0
        return all(ref() is None for ref in self.references) and after < self.before


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("family", [mlp, layer, plain], ids=lambda f: f.__name__)
def test_a_module_that_was_reset_goes_with_its_last_reference(device, family, no_collection):
    """Without the garbage collector."""
    module = build(family, device)
    capture(module, device)
    step(module, tokens(device), 1)
    gc.collect()  # garbage of building and capturing, but none made later
    freed = Freed(module, device)
    module.reset()
    del module
    assert freed


@pytest.mark.parametrize("family", [mlp, layer, plain], ids=lambda f: f.__name__)
def test_a_captured_module_goes_with_the_next_collection(device, family, no_collection):
    """The module and its graphs refer to each other."""
    module = build(family, device)
    capture(module, device)
    step(module, tokens(device), 1)
    freed = Freed(module, device)
    del module
    gc.collect()
    assert freed
