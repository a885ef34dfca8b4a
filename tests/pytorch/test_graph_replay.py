# A captured callable beyond its arithmetic: streams and events, delayed weight gradients, main_grad, hooks, reset, and
# what it refuses at a call. Mutants: leaving out the wait for the graph's stream, or zeroing no main_grad for
# is_first_microbatch, turn these red.
import collections
import copy
import gc
import weakref

import pytest
import torch
from graph_cases import (
    DELAYING,
    HIDDEN,
    assert_same_step,
    build,
    capture,
    layer,
    left_by,
    linear,
    mlp,
    plain,
    split_linear,
    step,
    tokens,
    twins,
)
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph.cuda import CudaGraphs
from transformer_engine.pytorch.graph.recorder import RecordedStream

# ---- streams ----


def logged():
    log = collections.deque()
    return log, RecordedStream("graph", log)


def test_a_stream_of_its_own_waits_and_is_waited_for():
    """On the recorder: every edge, in order. The current stream's own log is that of the process, so it is looked at
    from behind."""
    module = build(linear, "cpu")
    capture(module, "cpu")
    log, stream = logged()
    main = module.forward.backend.current_stream()
    main.log.clear()
    y = module(tokens("cpu", grad=True), cuda_graph_stream=stream)
    assert list(log) == [("graph", "waits for", "main")]
    assert list(main.log) == [("main", "waits for", "graph")]
    y.sum().backward()
    assert list(log) == [("graph", "waits for", "main")] * 2
    assert list(main.log) == [("main", "waits for", "graph")] * 2
    main.log.clear()
    module(tokens("cpu", grad=True), cuda_graph_stream=stream, cuda_graph_event="event").sum().backward()
    assert list(main.log) == [("main", "waits for event", "event")] * 2


def test_weight_gradients_go_to_the_stream_of_their_forward():
    module = build(linear, "cpu", delay_wgrad_compute=True)
    capture(module, "cpu")
    log, stream = logged()
    main = module.forward.backend.current_stream()
    module(tokens("cpu", grad=True), cuda_graph_stream=stream, cuda_graph_event="event").sum().backward()
    main.log.clear()
    module.backward_dw()
    assert len(log) == 3 and list(main.log) == [("main", "waits for", "graph")]  # nothing in it records the event


def test_an_event_needs_a_stream(device):
    module = build(linear, device)
    capture(module, device)
    with refused(ValueError, "Linear", "'cuda_graph_event'", "'cuda_graph_stream'"):
        module(tokens(device), cuda_graph_event=object())
    with refused(ValueError, "'cuda_graph_event'"):
        own = module.forward.backend.current_stream()
        module(tokens(device), cuda_graph_event=object(), cuda_graph_stream=own)


def test_the_current_stream_is_that_of_the_graphs_device(monkeypatch):
    device, asked = torch.device("cuda", 1), []
    monkeypatch.setattr(torch.cuda, "current_stream", asked.append)
    backend = CudaGraphs.__new__(CudaGraphs)
    backend.device = device
    backend.current_stream()
    assert asked == [device]


@pytest.mark.gpu
def test_replay_on_a_stream_equals_eager():
    module, eager = twins(mlp, "cuda", delay_wgrad_compute=True)
    capture(module, "cuda")
    stream = torch.cuda.Stream()
    for seed in range(5):
        x = tokens("cuda")
        got = step(module, x, seed, cuda_graph_stream=stream)
        want = step(eager, x, seed)
        for m in (module, eager):
            m.backward_dw()
        assert_same_step(got, want)
        assert_same_step(left_by(module), left_by(eager))


@pytest.mark.gpu
def test_the_tail_behind_an_event_overlaps():
    """A captured copy to pinned memory behind the event: the current stream goes on before it is done, and what it
    brings is right."""
    size = 64 * 2**20
    event = torch.cuda.Event(external=True)
    host = torch.empty(size, dtype=torch.float32, pin_memory=True)

    def function(x):
        y = x * 2
        event.record()
        host.copy_(y, non_blocking=True)
        return y

    with torch.no_grad():
        graphed = te.make_graphed_callables(function, (torch.zeros(size, device="cuda"),))
    x, stream = torch.full((size,), 3.0, device="cuda"), torch.cuda.Stream()
    for wait in (False, True):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        with torch.no_grad():
            marks[0].record()
            y = graphed(x, cuda_graph_stream=stream, cuda_graph_event=None if wait else event)
            marks[1].record()
            marks[2].record(stream)
        torch.cuda.synchronize()
        until_main, until_tail = (marks[0].elapsed_time(m) for m in marks[1:])
        assert (until_main < 0.5 * until_tail) is not wait
    assert y.eq(6).all() and host.eq(6).all()


# ---- weight gradients ----


@pytest.mark.parametrize("family", DELAYING, ids=lambda f: f.__name__)
def test_delayed_weight_gradients(device, family):
    module, eager = twins(family, device, delay_wgrad_compute=True)
    capture(module, device)
    assert module.need_backward_dw()
    hooks = []
    for m in (module, eager):
        m.register_wgrad_accumulation_and_reduce_hooks(lambda m=m: hooks.append(m))
    for seed in range(3):
        x = tokens(device)
        assert_same_step(step(module, x, seed), step(eager, x, seed))
        for m in (module, eager):
            m.backward_dw()
        assert_same_step(left_by(module), left_by(eager))
    assert hooks == [module, eager] * 3


def test_delayed_modules_inside_of_a_captured_one(device):
    modules = [torch.nn.Sequential(build(linear, device, delay_wgrad_compute=True), build(mlp, device))]
    modules.append(copy.deepcopy(modules[0]))
    capture(modules[0], device)
    seen = []
    modules[0][0].register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(1))
    for seed in range(2):
        x = tokens(device)
        assert_same_step(step(modules[0], x, seed), step(modules[1], x, seed))
        modules[0].backward_dw()
        modules[1][0].backward_dw()
        assert_same_step(left_by(modules[0]), left_by(modules[1]))
    assert seen == [1, 1]


def test_delayed_weight_gradients_out_of_turn(device):
    module, eager = twins(linear, device, delay_wgrad_compute=True)
    capture(module, device)
    with refused(RuntimeError, "Linear", "backward_dw()"):
        module.backward_dw()
    x = tokens(device)
    step(module, x, 1)
    with refused(RuntimeError, "Linear", "backward_dw()", "'_order'"):
        module(x.clone().requires_grad_())
    module.drop_backward_dw()
    assert_same_step(step(module, x, 1), step(eager, x, 1))
    for m in (module, eager):
        m.backward_dw()
    assert_same_step(left_by(module), left_by(eager))
    immediate = build(linear, device)
    capture(immediate, device)
    assert not immediate.need_backward_dw()
    immediate.backward_dw()


def test_eager_gradients_that_wait_are_left_alone(device):
    """Of the module, before the capture and beside it."""
    module, eager = twins(linear, device, delay_wgrad_compute=True)
    x = tokens(device)
    for m in (module, eager):
        step(m, x, 1)
    capture(module, device)
    other = tokens(device)
    for m in (module, eager):
        step(m, other, 2)
    module.backward_dw()
    module.reset()
    module.backward_dw()
    for _ in range(2):
        eager.backward_dw()
    assert_same_step(left_by(module), left_by(eager))


@pytest.mark.parametrize("delay", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("protocol", [False, True], ids=["main_grad", "with dummies"])
@pytest.mark.parametrize("family", [linear, split_linear, mlp], ids=lambda f: f.__name__)
def test_main_grad(device, family, protocol, delay):
    module, eager = twins(family, device, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    for m in (module, eager):
        for p in m.parameters():
            p.main_grad = torch.full_like(p, 0.5)
            if protocol:
                p.grad_added_to_main_grad = False
    capture(module, device)
    assert all(p.main_grad.eq(0.5).all() for p in module.parameters())
    assert not any(getattr(p, "grad_added_to_main_grad", False) for p in module.parameters())
    for seed, first in enumerate((None, False, True, False)):
        x = tokens(device)
        left = []
        for m in (module, eager):
            left.append(step(m, x, seed, is_first_microbatch=first))
            if delay:
                m.backward_dw()
            for p in m.parameters():
                p.seen = getattr(p, "grad_added_to_main_grad", None), p.grad is None
                if p.dim() == 2:
                    p.grad = None  # dummies have no values
                if protocol:
                    p.grad_added_to_main_grad = False
        for (name, p), q in zip(module.named_parameters(), eager.parameters()):
            assert p.seen == q.seen, name
            assert_same_bits(p.main_grad, q.main_grad, name)
            if p.grad is not None:
                assert_same_bits(p.grad, q.grad, name)
        assert_same_bits(left[0]["x.grad"], left[1]["x.grad"])


def test_overwrite_main_grad_may_change_between_replays(device):
    module, eager = twins(linear, device, fuse_wgrad_accumulation=True)
    for m in (module, eager):
        m.weight.main_grad = torch.ones_like(m.weight)
        m.weight.overwrite_main_grad = True
    capture(module, device)
    assert module.weight.overwrite_main_grad and module.weight.main_grad.eq(1).all()
    for seed, overwrite in enumerate((True, False, True)):
        x = tokens(device)
        for m in (module, eager):
            m.weight.overwrite_main_grad = overwrite
            step(m, x, seed)
        assert torch.equal(module.weight.main_grad, eager.weight.main_grad)


def test_another_main_grad_is_refused(device):
    module = build(linear, device, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros_like(module.weight)
    capture(module, device)
    kept, module.weight.main_grad = module.weight.main_grad, torch.zeros_like(module.weight)
    with refused(RuntimeError, "Linear", "main_grad", "capture again"):
        module(tokens(device, grad=True)).sum().backward()
    assert kept.eq(0).all()


def test_static_gradients_on_demand(device):
    module, eager = twins(mlp, device)
    capture(module, device, clone_param_grads_on_return=False)
    for seed in range(2):
        x = tokens(device)
        for m in (module, eager):
            m.zero_grad()
        assert_same_step(step(module, x, seed), step(eager, x, seed))
    aliases = {t.data_ptr() for t in module.forward.grad_parameters}
    assert all(p.grad.data_ptr() in aliases for p in module.parameters())


# ---- refusals ----


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[:-1], ["argument 0", "[5, 2, 32]", "[6, 2, 32]"]),
        (lambda x: x.to(torch.bfloat16), ["argument 0", "bfloat16", "float32"]),
        (lambda x: x.detach(), ["argument 0", "requires_grad"]),
        (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), ["argument 0", "strides [32, 192, 1]"]),
        (lambda x: x.to("meta"), ["argument 0", "meta"]),
        (lambda x: 3, ["argument 0", "3"]),
        (lambda x: None, ["argument 0", "None"]),
    ],
    ids=["shape", "dtype", "gradient", "strides", "device", "number", "none"],
)
def test_an_argument_of_another_form(device, change, words):
    module = build(mlp, device)
    capture(module, device)
    module(tokens(device, grad=True))
    static = module.forward.inputs[0]
    before = static.detach().clone()
    with refused(ValueError, "graphed callable 0 (LayerNormMLP)", *words):
        module(change(tokens(device, grad=True)))
    assert_same_bits(static, before)


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"a": x}, lambda x: (x,)], ids=["list", "dict", "tuple"])
def test_one_argument_that_holds_one_tensor(device, wrap):
    def double(tree):
        (x,) = tree.values() if isinstance(tree, dict) else tree
        return x * 2

    graphed = te.make_graphed_callables(double, (wrap(tokens(device, grad=True)),))
    x = tokens(device, grad=True)
    y = graphed(wrap(x))
    assert_same_bits(y, x * 2)
    y.sum().backward()
    assert x.grad.eq(2).all()
    with refused(TypeError, "double", "form"):
        graphed(x)


def test_a_result_does_not_keep_the_inputs(device):
    module = torch.nn.Linear(HIDDEN, HIDDEN, device=device)
    capture(module, device)
    source = tokens(device, grad=True)
    x = source * 1
    kept = weakref.ref(x)
    y = module(x)
    del x
    gc.collect()
    assert kept() is None
    y.sum().backward()
    assert source.grad is not None


def test_strides_of_single_elements_do_not_matter(device):
    graphed = te.make_graphed_callables(lambda x: x * 2, (torch.ones(4, 1, 8, device=device),))
    x = torch.randn(4, 8, device=device).as_strided((4, 1, 8), (8, 77, 1))
    assert_same_bits(graphed(x), x * 2)


def scaled(x, *, scale=1.0, y=None):
    return x * scale if y is None else x * scale + y


def test_other_arguments(device):
    sample = {"scale": 2.0, "y": tokens(device)}
    graphed = te.make_graphed_callables(scaled, (tokens(device),), sample_kwargs=sample)
    x, y = tokens(device), tokens(device)
    assert_same_bits(graphed(x, scale=2.0, y=y), scaled(x, scale=2.0, y=y))
    assert_same_bits(graphed(x, y=y, scale=2.0), scaled(x, scale=2.0, y=y))
    for kwargs, words in (
        ({"scale": 2.0}, ["missing", "'y'"]),
        ({"scale": 2.0, "y": y, "z": 1}, ["not captured", "'z'"]),
    ):
        with refused(TypeError, "scaled", *words):
            graphed(x, **kwargs)
    with refused(TypeError, "form"):
        graphed(x, x, scale=2.0, y=y)
    for scale in (3.0, 2, "2.0"):
        with refused(ValueError, "'scale'", repr(scale), "2.0"):
            graphed(x, scale=scale, y=y)
    with refused(ValueError, "'y'", "[1, 2, 32]"):
        graphed(x, scale=2.0, y=y[:1])


def test_gradients_are_not_asked_for_where_none_are_recorded(device):
    module, eager = twins(linear, device)
    capture(module, device)
    x = tokens(device)
    with torch.no_grad():
        assert_same_bits(module(x), eager(x))


def test_backward_of_an_older_call_or_twice(device):
    module = build(mlp, device)
    capture(module, device)
    first = module(tokens(device, grad=True))
    second = module(tokens(device, grad=True))
    with refused(RuntimeError, "LayerNormMLP", "another call", "'_order'"):
        first.sum().backward()
    second.sum().backward(retain_graph=True)
    with refused(RuntimeError, "LayerNormMLP", "ran already", "retain_graph_in_backward"):
        second.sum().backward()


def test_backward_twice_where_it_was_captured_for_it(device):
    module, eager = twins(mlp, device)
    capture(module, device, retain_graph_in_backward=True)
    x = tokens(device)
    for m in (module, eager):
        y = m(x.requires_grad_())
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
    for (name, p), q in zip(module.named_parameters(), eager.parameters()):
        assert_same_bits(p.grad, q.grad, name)


def test_double_backward(device):
    module = build(linear, device)
    capture(module, device)
    x = tokens(device, grad=True)
    with refused(NotImplementedError, "Linear", "double backward", "create_graph=True"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


def test_functional_transforms(device):
    graphed = te.make_graphed_callables(lambda x: x * 2, (tokens(device, grad=True),))
    with refused(NotImplementedError, "torch.func", "reset()"):
        torch.func.grad(lambda x: graphed(x).sum())(tokens(device, grad=True))


def test_another_mode(device):
    module, eager = twins(plain, device)
    capture(module, device)
    module.eval()
    with refused(RuntimeError, "Sequential", "train", "eval", "on_mismatch='eager'"):
        module(tokens(device, grad=True))
    module.train()
    module.reset()
    capture(module, device, on_mismatch="eager")
    module.eval(), eager.eval()
    x = tokens(device)
    for count in (1, 2):
        with pytest.warns(UserWarning, match=f"without the graph, {count} times"):
            got = step(module, x, 1)
        assert_same_step(got, step(eager, x, 1))


def test_another_mode_leaves_weight_gradients_to_the_module(device):
    module, eager = twins(linear, device, delay_wgrad_compute=True)
    capture(module, device, on_mismatch="eager")
    x = tokens(device)
    for train in (False, True, False):
        module.train(train), eager.train(train)
        if train:
            step(module, x, 1)
            with torch.no_grad(), pytest.warns(UserWarning, match="without the graph"):
                module.eval()(x)  # between: the graph's own still wait
        else:
            with pytest.warns(UserWarning, match="without the graph"):
                step(module, x, 1)
        step(eager, x, 1)
        assert module.need_backward_dw() == eager.need_backward_dw()
        for m in (module, eager):
            m.backward_dw()
        assert_same_step(left_by(module), left_by(eager))


def test_another_mode_is_told_of_the_first_microbatch(device):
    module, eager = twins(linear, device, fuse_wgrad_accumulation=True)
    for m in (module, eager):
        m.weight.main_grad = torch.ones_like(m.weight)
    capture(module, device, on_mismatch="eager")
    module.eval(), eager.eval()
    x = tokens(device)
    for first in (True, False):
        with pytest.warns(UserWarning, match="without the graph"):
            got = step(module, x, 1, is_first_microbatch=first)
        assert_same_step(got, step(eager, x, 1, is_first_microbatch=first))


# ---- reset ----


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
    if device == "cuda":
        with refused(RuntimeError, "make_graphed_callables", "still alive", "delete it"):
            capture(module, device)
    del y, use
    capture(module, device)
    eager.zero_grad(), module.zero_grad()
    assert_same_step(step(module, x, 1), step(eager, x, 1))


def test_a_captured_module_is_not_captured_again(device):
    module = build(linear, device)
    capture(module, device)
    with refused(ValueError, "make_graphed_callables", "'modules'", "captured already", "reset()"):
        capture(module, device)


def test_reset_frees_the_static_tensors(device):
    module = build(mlp, device)
    capture(module, device)
    kept = [weakref.ref(t) for t in (*module.forward.inputs, *module.forward.outputs)]
    if device == "cuda":
        before = torch.cuda.memory_allocated()
    module.reset()
    gc.collect()
    assert all(ref() is None for ref in kept)
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

    cycle()  # what libraries allocate for the capture stream stays
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        cycle()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2**20


@pytest.mark.gpu
def test_extra_memory_is_static_tensors_and_the_pool():
    """The sample itself is the static input; what comes in for the outputs is the other static tensor."""
    tokens_, hidden = 1024, 512
    capture(build(mlp, "cuda"), "cuda")  # what libraries allocate once
    module = te.LayerNormMLP(hidden, 4 * hidden, device="cuda")
    sample = torch.randn(tokens_, hidden, device="cuda", requires_grad=True)
    pool = torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    te.make_graphed_callables(module, (sample,), pool=pool)
    torch.cuda.synchronize()
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool)]
    in_pool = sum(b["size"] for s in segments for b in s["blocks"] if b["state"] == "active_allocated")
    static = sum(t.untyped_storage().nbytes() for t in module.forward.grad_outputs)
    assert in_pool > 0 and static == sample.untyped_storage().nbytes()
    assert torch.cuda.memory_allocated() - before - in_pool <= static + 2**16


@pytest.mark.gpu
def test_a_pool_is_shared():
    pool = torch.cuda.graph_pool_handle()
    modules = [build(mlp, "cuda") for _ in range(2)]
    eager = copy.deepcopy(modules)
    for module in modules:
        capture(module, "cuda", pool=pool)
    assert {module.forward.forward_graph.pool() for module in modules} == {pool}
    for seed in range(2):
        for module, twin in zip(modules, eager):
            x = torch.randn(6, 2, HIDDEN, device="cuda")
            assert_same_step(step(module, x, seed), step(twin, x, seed))
