# Captured modules under quantization through whole runs: delayed weight gradients into main_grad, many replays, and an
# exception at every stage of a capture.
import collections
import copy
import gc
from contextlib import nullcontext

import pytest
import torch
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import activation_recompute_forward
from transformer_engine.pytorch.graph import is_graph_capturing
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .cases import (
    Recording,
    assert_same_step,
    build,
    left_by,
    linear,
    mlp,
    norm_linear,
    recomputed_mlp,
    split_linear,
    step,
    stream_on,
    tokens,
)
from .fault_cases import STAGES, WARMUPS, Fault, Faulty, allocated, faulty_backward_dw
from .fp8_cases import RECIPES, around, assert_same_states, capture, fp8_step, states, twins

pytestmark = pytest.mark.usefixtures("fp8_left_off")
every_recipe = pytest.mark.parametrize("name", ["delayed", "current", "block"])
BF16 = torch.bfloat16


# ---- delayed weight gradients into main_grad ----


def assert_equal_step(got, want, what):
    """Compares values: -0.0, which eager writes, equals the 0.0 of the graph, which adds it to 0."""
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert (got[key] is None) == (tensor is None), f"{what} {key}"
        assert tensor is None or torch.equal(got[key], tensor), f"{what} {key}"


@every_recipe
@pytest.mark.parametrize("cached", [False, True], ids=["each", "cached"])
@pytest.mark.parametrize("main_dtype", [torch.float32, BF16], ids=["float32", "bf16"])
@pytest.mark.parametrize("family", [linear, split_linear, norm_linear, mlp], ids=lambda f: f.__name__)
def test_delayed_weight_gradients_into_main_grad(device, family, main_dtype, cached, name):
    module, eager = twins(family, device, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    for m in (module, eager):
        for p in m.parameters():
            p.main_grad = torch.full_like(p, 0.5, dtype=main_dtype)
            p.grad_added_to_main_grad = False
    before = left_by(module)
    capture(module, device, name, cache_quantized_params=cached)
    assert_same_step(left_by(module), before)
    for seed, first in enumerate((True, False, False)):
        x = tokens(device, BF16)
        left = []
        for m in (module, eager):
            found = fp8_step(m, x, seed, name, is_first_microbatch=first if cached else None)
            m.backward_dw()
            for key, p in m.named_parameters():
                found[f"{key} after"], found[f"{key}.main_grad after"] = p.grad, p.main_grad.clone()
                if p.dim() == 2:  # a dummy has no values
                    assert p.grad_added_to_main_grad
                    found[f"{key} after"] = found[f"{key}.grad"] = None
                p.grad, p.grad_added_to_main_grad = None, False
            left.append(found)
        assert_equal_step(*left, f"step {seed}")
        assert_same_states(states(module), states(eager), f"step {seed}")


# ---- calls that record no amaxes in eager ----


def quiet_call(module, x, **kwargs):
    with torch.no_grad(), around("delayed"):
        return module(x, **kwargs)


@pytest.mark.parametrize("streamed", [False, True], ids=["current stream", "own stream"])
@pytest.mark.parametrize("family", [linear, mlp, recomputed_mlp], ids=lambda f: f.__name__)
def test_a_call_without_gradients_in_training_leaves_the_scales(device, family, streamed):
    """The graph of a forward with gradients records amaxes; those recorded earlier in the same step stay. The input
    changes each time, and is a hundred times larger in calls that must record nothing."""
    module, eager = twins(family, device)
    capture(module, device, "delayed")
    options = {"cuda_graph_stream": stream_on(device)} if streamed else {}
    for seed in range(3):
        large, x = 100 * tokens(device, BF16), tokens(device, BF16)
        assert_same_step(fp8_step(module, x, seed, "delayed"), fp8_step(eager, x, seed, "delayed"), f"step {seed}")
        assert_same_bits(quiet_call(module, large, **options), quiet_call(eager, large))
        assert_same_states(states(module), states(eager), f"behind step {seed}")
        with around("delayed"):
            for m, given in ((module, options), (eager, {})):
                m(x.clone().requires_grad_(), **given)  # its amaxes are used at the end of the region
                quiet_call(m, large, **given)
        assert_same_states(states(module), states(eager), f"one region, {seed}")


@pytest.mark.parametrize("around_it", [True, False], ids=["autocast", "no autocast"])
def test_a_frozen_module_in_training_moves_its_scales(device, around_it):
    """Grad mode is on but nothing requires a gradient: the forward's scales are updated as in eager without a
    backward."""
    recipe = RECIPES["delayed"]
    module, eager = twins(linear, device)
    for part in (module, eager):
        part.requires_grad_(False)
    te.make_graphed_callables(module, (tokens(device, BF16),), enabled=True, recipe=recipe)
    for _ in range(3):
        x = tokens(device, BF16) * 10
        with te.autocast(enabled=True, recipe=recipe):
            want = eager(x)
        with te.autocast(enabled=True, recipe=recipe) if around_it else nullcontext():
            got = module(x)
        assert_same_bits(got, want)
        assert_same_states(states(module), states(eager))


def test_a_module_that_was_frozen_goes_on_as_in_eager(device):
    """Its histories of both directions are updated with the region, though its backward does not run any more."""
    stack = torch.nn.Sequential(build(linear, device, BF16), build(linear, device, BF16))
    eager = copy.deepcopy(stack)
    x = tokens(device, BF16)
    for _ in range(2):
        for layers in (stack, eager):
            fp8_step(layers, x * 4, 1, "delayed")
    for layers in (stack, eager):
        layers[0].requires_grad_(False)
    capture_of = {0: tokens(device, BF16), 1: tokens(device, BF16, grad=True)}
    for i, sample in capture_of.items():
        te.make_graphed_callables(stack[i], (sample,), enabled=True, recipe=RECIPES["delayed"])
    for seed in range(4):
        x = tokens(device, BF16)
        for layers in (stack, eager):
            with around("delayed"):
                y = layers[1](layers[0](x).requires_grad_())
            y.square().sum().backward()
        assert_same_states(states(stack), states(eager), f"step {seed}")


class Own(torch.nn.Module):
    """An inner autocast around one of its modules, and another module that records nothing."""

    def __init__(self, device):
        super().__init__()
        self.first, self.second, self.third = (build(linear, device, BF16) for _ in range(3))

    def forward(self, x):
        with torch.no_grad():
            bias = self.third(x)
        with around("delayed"):
            y = self.second(x)
        return self.first(y) + bias


@pytest.mark.parametrize("enabled", [False, True], ids=["high precision", "delayed"])
def test_an_autocast_inside_of_the_callable(device, enabled):
    """The scales of both directions are updated once a step; those of a module that ran without gradients never."""
    module = Own(device)
    module.third.requires_grad_(False)
    eager = copy.deepcopy(module)
    given = (tokens(device, BF16, grad=True),)
    te.make_graphed_callables(module, given, enabled=enabled, recipe=RECIPES["delayed"])
    for seed in range(5):
        x = tokens(device, BF16) * 3.0**seed
        found = []
        for m in (module, eager):
            given = x.clone().requires_grad_()
            with te.autocast(enabled=enabled, recipe=RECIPES["delayed"]):
                y = m(given)
            y.backward(torch.full_like(y, 3.0**-seed))
            found.append({"y": y, "dx": given.grad} | left_by(m))
        assert_same_step(*found, f"step {seed}")
        assert_same_states(states(module), states(eager), f"step {seed}")


def test_amaxes_are_put_back_behind_the_whole_graph():
    """On a separate stream, with any event of the caller: amaxes are not saved while the last replay writes them, and
    not restored before this replay has written them."""
    module = Recording(twins(linear, "cpu")[0], "cpu")
    capture(module, "cpu", "delayed")
    log, stream = collections.deque(), stream_on("cpu")
    stream.log = log
    main = module.forward.record.backend.current_stream()
    main.log.clear()
    quiet_call(module, tokens("cpu", BF16), cuda_graph_stream=stream, cuda_graph_event=module.event)
    assert list(main.log) == [("main", "waits for", "graph")] * 2
    assert list(log) == [("graph", "waits for", "main")]


def test_the_first_run_of_a_checkpoint_records(device):
    """Even without gradients."""
    module, eager = twins(mlp, device)
    capture(module, device, "delayed")
    x, rows = tokens(device, BF16), []
    for m in (module, eager):
        with around("delayed"), torch.no_grad(), activation_recompute_forward(True):
            m(x)
            rows.append(m.fp8_meta["scaling_fwd"].amax_history[0].clone())
    assert_same_bits(*rows)
    assert rows[1].any()


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_checkpoints_around_captured_layers(device, inside):
    """Two microbatches a step; the scales of both directions equal those of eager after each. The recomputations run in
    the reverse order of the first runs, each with a backward inside that of the step."""
    layers = torch.nn.ModuleList(build(linear, device, BF16) for _ in range(3))
    eager = copy.deepcopy(layers)
    samples = tuple((tokens(device, BF16, grad=True),) for _ in layers)
    te.make_graphed_callables(tuple(layers), samples, enabled=True, recipe=RECIPES["delayed"])
    for seed in range(3):
        inputs, found = [tokens(device, BF16) for _ in range(2)], []
        for stack in (layers, eager):
            left = {}
            with around("delayed") if inside else nullcontext():
                for i, given in enumerate(inputs):
                    x = y = given.clone().requires_grad_()
                    with nullcontext() if inside else around("delayed"):
                        for layer in stack:
                            y = te.checkpoint(layer, y)
                    y.square().mean().backward()
                    left |= {f"{i} y": y.detach().clone(), f"{i} dx": x.grad}
                    left |= {f"{i} {key}": value for key, value in states(stack).items()}
            found.append(left | left_by(stack) | states(stack))
        assert_same_step(*found, f"step {seed}")


# ---- many replays ----


def tensors_alive():
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("name", [None, "delayed", "current", "block"], ids=str)
def test_many_replays(device, name):
    """1,000 on CUDA; 180 on a CPU, where each takes as long as eager. Eager runs the same steps for comparison."""
    module, eager = twins(norm_linear, device)
    if name is None:
        te.make_graphed_callables(module, (tokens(device, BF16, grad=True),))
    else:
        capture(module, device, name)
    alive = {}
    for i in range(1000 if device == "cuda" else 180):
        x = tokens(device, BF16) * (1 + i % 7)
        got, want = (step(m, x, i) if name is None else fp8_step(m, x, i, name) for m in (module, eager))
        if i % 50 == 0:
            assert_same_step(got, want, f"replay {i}")
            assert_same_states(states(module), states(eager), f"replay {i}")
        for m in (module, eager):
            m.zero_grad()
        if i in (30, 179, 999):
            del got, want, x
            alive[i] = tensors_alive(), allocated(device)
    assert all(count <= alive[30][0] and size <= alive[30][1] for count, size in alive.values()), alive


# ---- faults ----


@every_recipe
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_leaves_quantization_as_it_was(device, stage, used, name, monkeypatch):
    where, count, options = STAGES[stage]
    module, eager = (Faulty(m) for m in twins(mlp, device, delay_wgrad_compute=True))
    module.where, module.count = where, count
    parts = module.inner, eager.inner
    for seed in range(2 if used else 0):
        x = tokens(device, BF16)
        for part in parts:
            fp8_step(part, x, seed, name, is_first_microbatch=seed == 0)
            part.backward_dw()
    before, extra = states(module), module.inner.get_extra_state().clone()
    grads = left_by(module)
    if where == "wgrad":
        faulty_backward_dw(monkeypatch, count)
    given, fp8 = (tokens(device, BF16, grad=True),), {"enabled": True, "recipe": RECIPES[name]}
    torch.manual_seed(21)
    wanted = torch.rand(4, device=device)
    torch.manual_seed(21)
    memory = allocated(device)
    with pytest.raises(Fault):
        te.make_graphed_callables(
            module, given, num_warmup_iters=WARMUPS, cache_quantized_params=True, **fp8, **options()
        )
    assert allocated(device) - memory < 2**20
    assert_same_bits(torch.rand(4, device=device), wanted)
    assert not is_graph_capturing()
    assert_same_states(states(module), before)
    assert torch.equal(module.inner.get_extra_state(), extra)
    assert_same_step(left_by(module), grads)
    assert FP8GlobalStateManager.get_skip_fp8_weight_update_tensor() is None
    monkeypatch.undo()
    module.where = None
    for seed in range(2):
        x = tokens(device, BF16)
        first = {"is_first_microbatch": False} if used else {}
        assert_same_step(*(fp8_step(m, x, seed, name, **first) for m in (module, eager)))
        for part in parts:
            part.backward_dw()
        assert_same_step(left_by(module), left_by(eager))
        assert_same_states(states(module), states(eager))
