# Arguments and modules that make_graphed_callables refuses before anything is changed; and an exception inside of
# warm-up or capture, which leaves no trace.
import copy

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph import is_graph_capturing

from .cases import (
    HIDDEN,
    assert_same_step,
    build,
    capture,
    dropout_layer,
    left_by,
    linear,
    mlp,
    step,
    tokens,
    twins,
)
from .fault_cases import STAGES, WARMUPS, Fault, Faulty, allocated, faulty_backward_dw

OP = "make_graphed_callables"

# ---- arguments ----


def sample(device):
    return (tokens(device, grad=True),)


@pytest.mark.parametrize(
    ("count", "args", "kwargs", "words"),
    [
        (1, torch.ones(2), None, ["'sample_args'", "(x,)"]),
        (2, (torch.ones(2),), None, ["'sample_args'", "tuple for each"]),
        (2, ((torch.ones(2),),), None, ["'sample_args'", "1 entries", "wanted 2"]),
        (1, (1.0,), None, ["'sample_args'", "1.0", "argument 0", "'sample_kwargs'"]),
        (1, ([torch.ones(2), None],), None, ["'sample_args'", "None", "argument 0[1]"]),
        (1, (torch.ones(2).expand(3, 2),), None, ["argument 0", "strides [0, 1]", "contiguous"]),
        (2, ((torch.ones(2),),) * 2, ({},), ["'sample_kwargs'", "1 dicts", "wanted 2"]),
        (1, (torch.ones(2),), "x", ["'sample_kwargs'", "'x'"]),
        (1, (torch.ones(2),), {"is_first_microbatch": True}, ["'sample_kwargs'", "'is_first_microbatch'"]),
    ],
)
def test_samples(count, args, kwargs, words):
    modules = tuple(build(linear, "cpu") for _ in range(count))
    with refused(ValueError, OP, *words):
        te.make_graphed_callables(modules if count > 1 else modules[0], args, sample_kwargs=kwargs)


def test_samples_of_an_order(device):
    modules = (build(linear, device), build(linear, device))
    with refused(ValueError, OP, "'sample_args'", "3 entries", "wanted 4", "microbatch"):
        te.make_graphed_callables(modules, (sample(device),) * 3, _order=[1, 2, -2, -1, 1, 2, -2, -1])


def test_modules(device):
    module = build(linear, device)
    with refused(ValueError, OP, "'modules'", "empty"):
        te.make_graphed_callables((), ())
    with refused(ValueError, OP, "'modules'", "int"):
        te.make_graphed_callables(3, sample(device))
    with refused(ValueError, OP, "'modules'", "twice", "'_order'"):
        te.make_graphed_callables((module, module), (sample(device),) * 2)
    with refused(ValueError, OP, "'modules'", "train", "eval"):
        te.make_graphed_callables((module, build(linear, device).eval()), (sample(device),) * 2)
    other = torch.nn.Linear(HIDDEN, HIDDEN, device="meta")
    with refused(ValueError, OP, "'sample_args'", "meta"):
        te.make_graphed_callables(other, sample(device))


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_modules_with_hooks(device, register):
    module = build(linear, device)
    handle = getattr(module, register)(lambda *_: None)
    with refused(ValueError, OP, "callable 0 (Linear)", "hooks", "remove"):
        capture(module, device)
    handle.remove()
    capture(module, device)


def test_a_buffer_with_a_gradient(device):
    module = build(mlp, device)
    module.register_buffer("extra", torch.ones(2, device=device, requires_grad=True))
    with refused(ValueError, OP, "'extra'", "LayerNormMLP", "gradient"):
        capture(module, device)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_warmup_iters": -1}, ["'num_warmup_iters'", "-1"]),
        ({"num_warmup_iters": 1.0}, ["'num_warmup_iters'", "1.0"]),
        ({"enabled": (True, False)}, ["'enabled'", "(True, False)"]),
        ({"enabled": False, "fp8_enabled": False}, ["'enabled'", "'fp8_enabled'", "deprecated name"]),
        ({"recipe": 1, "fp8_recipe": 2}, ["'recipe'", "'fp8_recipe'"]),
        ({"_num_layers_per_chunk": 1}, ["'_num_layers_per_chunk'", "'_order'"]),
        ({"_reuse_graph_input_output_buffers": True}, ["'_reuse_graph_input_output_buffers'", "'_order'"]),
        ({"capture_time_hooks": [{}, {}]}, ["'capture_time_hooks'", "1 callables"]),
        ({"capture_time_hooks": [{"forward": {}}]}, ["'capture_time_hooks'", "'forward'", "'forward_pre_hooks'"]),
        ({"capture_time_hooks": [{"forward_hooks": [print]}]}, ["'capture_time_hooks'", "'forward_hooks'"]),
        ({"capture_time_hooks": [{"forward_hooks": {0: 3}}]}, ["'capture_time_hooks'", "3"]),
        ({"_order": [1, -1, -1.5]}, ["'_order'", "-1.5", "delay_wgrad_compute"]),
    ],
)
def test_options(options, words):
    module = build(linear, "cpu")
    given = (sample("cpu"),) if "_order" in options else sample("cpu")
    with refused(ValueError, OP, *words):
        te.make_graphed_callables((module,) if "_order" in options else module, given, **options)
    assert "forward" not in vars(module)


def test_reuse_in_eval_mode(device):
    with refused(ValueError, "'_reuse_graph_input_output_buffers'", "train"):
        te.make_graphed_callables(
            (build(linear, device).eval(),),
            (sample(device),),
            _order=[1, -1],
            _reuse_graph_input_output_buffers=True,
        )


def test_older_names_warn(device):
    module = build(linear, device)
    with pytest.warns(DeprecationWarning, match="'fp8_enabled' is deprecated, use 'enabled'"):
        capture(module, device, fp8_enabled=False)


def test_autocast_with_its_cache(device):
    module = build(linear, device)
    with torch.autocast(device, torch.bfloat16), refused(RuntimeError, OP, "autocast", "cache_enabled=False"):
        capture(module, device)


def test_inside_a_capture(device):
    module, inner = build(mlp, device), build(linear, device)

    def hook(_):
        capture(inner, device)

    with refused(RuntimeError, OP, "inside a capture"):
        capture(module, device, capture_time_hooks=[{"forward_pre_hooks": {0: hook}}])
    assert not is_graph_capturing()


def test_a_hook_that_returns_something(device):
    module = build(linear, device)
    with refused(RuntimeError, OP, "'capture_time_hooks'", "backward_hooks", "callable 0 (Linear)", "int", "None"):
        capture(module, device, capture_time_hooks=[{"backward_hooks": {0: lambda m: 3}}])


@pytest.mark.parametrize("warmups", [0, 1])
def test_inputs_and_parameters_that_nothing_depends_on(device, warmups):
    def first(x, y):
        return x * 2

    with refused(RuntimeError, OP, "argument 1", "allow_unused_input=True"):
        te.make_graphed_callables(
            first, (tokens(device, grad=True), tokens(device, grad=True)), num_warmup_iters=warmups
        )
    module = build(linear, device)
    module.register_parameter("unused", torch.nn.Parameter(torch.ones(7, device=device)))
    with refused(RuntimeError, OP, "[7]", "callable 0 (Linear)", "allow_unused_input=True"):
        capture(module, device, num_warmup_iters=warmups)
    capture(module, device, num_warmup_iters=warmups, allow_unused_input=True)


def test_a_fused_weight_without_main_grad_that_nothing_uses(device):
    module = torch.nn.ModuleDict({name: build(linear, device, fuse_wgrad_accumulation=True) for name in "ab"})
    module["a"].weight.main_grad = torch.zeros_like(module["a"].weight)
    module.forward = lambda x: module["a"](x)
    capture(module, device, allow_unused_input=True)
    x = tokens(device, grad=True)
    module(x).sum().backward()
    assert module["a"].weight.main_grad.any()
    assert module["b"].weight.grad is None


@pytest.mark.parametrize("result", [None, 3.0, ()], ids=repr)
def test_a_result_without_tensors(device, result):
    with refused(ValueError, OP, "callable 0", "no tensor", "return the computed tensors"):
        te.make_graphed_callables(lambda x: result, sample(device))


# ---- operations that wait for the device ----


def values(x):
    return x * x.sum().item()


def condition(x):
    return x * 2 if x.sum() > 0 else x


def mask(x):
    return x[x > 0].sum() + x


def sizes(x):
    return x * torch.nonzero(x).shape[0]


@pytest.mark.parametrize("function", [values, condition, mask, sizes], ids=lambda f: f.__name__)
def test_what_waits_for_the_device_is_named(device, function):
    torch.manual_seed(3)
    wanted = torch.rand(3, device=device)
    torch.manual_seed(3)
    line = {"values": ".item()", "condition": "x.sum() > 0", "mask": "x[x > 0]", "sizes": "torch.nonzero(x)"}
    given = (torch.ones(4, device=device, requires_grad=True),)
    with refused(RuntimeError, OP, "forward", f"callable 0 ({function.__name__})", "host", line[function.__name__]):
        te.make_graphed_callables(function, given)
    assert_same_bits(torch.rand(3, device=device), wanted)
    module, eager = twins(mlp, device)
    capture(module, device)  # the backend can capture again
    x = tokens(device)
    assert_same_step(step(module, x, 1), step(eager, x, 1))


@pytest.mark.gpu
def test_a_synchronization_that_spoils_the_capture():
    def function(x):
        y = torch.nn.functional.dropout(x, 0.5)
        torch.cuda.synchronize()
        return y

    with refused(RuntimeError, OP, "forward", "host", "synchronize"):
        te.make_graphed_callables(function, (tokens("cuda", grad=True),), num_warmup_iters=1)
    torch.manual_seed(1)
    a = torch.nn.functional.dropout(torch.ones(100, device="cuda"), 0.5)  # the generator works again
    torch.manual_seed(1)
    assert_same_bits(torch.nn.functional.dropout(torch.ones(100, device="cuda"), 0.5), a)
    module, eager = twins(dropout_layer, "cuda")
    capture(module, "cuda")
    x = tokens("cuda")
    assert_same_step(step(module, x, 1), step(eager, x, 1))


# ---- faults ----


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_leaves_everything_as_it_was(device, stage, monkeypatch):
    where, count, options = STAGES[stage]
    if device == "cuda":
        capture(build(mlp, device), device)  # allocations that libraries make once
    module = Faulty(build(mlp, device, delay_wgrad_compute=True), where, count)
    eager = copy.deepcopy(module)
    eager.where = None
    for m in (module, eager):
        for p in m.parameters():
            p.grad = torch.full_like(p, 0.25)
    if where == "wgrad":
        faulty_backward_dw(monkeypatch, count)
    given = sample(device)
    torch.manual_seed(21)
    rng = torch.get_rng_state()
    wanted = torch.rand(4, device=device)
    torch.manual_seed(21)
    before = allocated(device)
    with pytest.raises(Fault):
        te.make_graphed_callables(module, given, num_warmup_iters=WARMUPS, **options())
    assert allocated(device) - before < 2**20
    assert not is_graph_capturing()
    assert "forward" not in vars(module) and module.calls.eq(0).all()
    assert device == "cuda" or torch.equal(torch.get_rng_state(), rng)
    assert_same_bits(torch.rand(4, device=device), wanted)
    assert all(p.grad.eq(0.25).all() for p in module.parameters())
    with pytest.raises(RuntimeError, match="backward_dw"):
        module.inner.backward_dw()  # no memory stays allocated
    monkeypatch.undo()
    module.where = None
    for capture_first in (False, True):
        if capture_first:
            te.make_graphed_callables(module, sample(device))
        x = tokens(device)
        got, want = step(module, x, 4), step(eager, x, 4)
        assert_same_step(got, want)
        (module if capture_first else module.inner).backward_dw()
        eager.inner.backward_dw()
        assert_same_step(left_by(module), left_by(eager))


@pytest.mark.parametrize("stage", [s for s in STAGES if "warmup_hook" not in s])
def test_what_a_hook_began_is_ended(device, stage, monkeypatch):
    """A user disables and enables offload with them: the second hook is called once, wherever the warm-up or the
    capture fails, and the first exception is raised."""
    where, count, options = STAGES[stage]
    module = Faulty(build(mlp, device, delay_wgrad_compute=True), where, count)
    if where == "wgrad":
        faulty_backward_dw(monkeypatch, count)
    calls = []
    hooks = {f"{when}_warmup_hook": lambda when=when: calls.append(when) for when in ("pre", "post")}
    with pytest.raises(Fault):
        te.make_graphed_callables(module, sample(device), num_warmup_iters=WARMUPS, **hooks, **options())
    assert calls == ["pre", "post"]


def test_a_warm_up_and_its_last_hook_both_raise(device):
    module = Faulty(build(mlp, device), "forward", 1)

    def hook():
        raise ValueError("nothing to switch on")

    with pytest.warns(UserWarning, match="'post_warmup_hook'.*ValueError too: nothing to switch on"):
        with pytest.raises(Fault):
            te.make_graphed_callables(module, sample(device), post_warmup_hook=hook)
    module.where = None
    with pytest.raises(ValueError, match="nothing to switch on"):
        te.make_graphed_callables(module, sample(device), post_warmup_hook=hook)


def test_nothing_is_ended_that_did_not_begin(device):
    """Like the exit of a context manager, which is not called if its entry raises."""
    calls = []
    with pytest.raises(Fault):
        te.make_graphed_callables(
            build(mlp, device),
            sample(device),
            pre_warmup_hook=STAGES["pre_warmup_hook"][2]()["pre_warmup_hook"],
            post_warmup_hook=lambda: calls.append(1),
        )
    assert calls == []


@pytest.mark.gpu
def test_out_of_memory_in_a_capture():
    capture(build(mlp, "cuda"), "cuda")

    def function(x):
        if torch.cuda.is_current_stream_capturing():
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        return x * 2

    given = (tokens("cuda"),)
    before = allocated("cuda")
    with pytest.raises(torch.OutOfMemoryError):
        te.make_graphed_callables(function, given, num_warmup_iters=1)
    assert allocated("cuda") - before < 2**20
    assert not is_graph_capturing() and not torch.cuda.is_current_stream_capturing()
