# Captured callables under quantization: the bits of eager under each recipe, scales and histories included; weights
# that are quantized once for several microbatches; state that a capture leaves as it was.
import copy

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .cases import assert_same_step, build, left_by, linear, mlp, norm_linear, recomputed_mlp, step, tokens
from .fp8_cases import RECIPES, around, assert_same_states, capture, fp8_step, states, twins
from .fp8_families import delayed, every_recipe, layer

FAMILIES = [linear, norm_linear, mlp, recomputed_mlp, layer]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)


@pytest.fixture(autouse=True)
def no_state_of_others():
    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()


@every_recipe
@every_family
def test_captured_equals_eager(device, family, name):
    module, eager = twins(family, device)
    assert capture(module, device, name) is module
    for seed in range(5):
        x = tokens(device, torch.bfloat16)
        assert_same_step(fp8_step(module, x, seed, name), fp8_step(eager, x, seed, name), f"step {seed}")
        assert_same_states(states(module), states(eager), f"step {seed}")


@every_recipe
def test_a_captured_layer_beside_an_eager_one_in_one_region(device, name):
    """The first module of the region is captured; in a second case it is eager."""
    for captured in (0, 1):
        stack = torch.nn.Sequential(build(linear, device, torch.bfloat16), build(mlp, device, torch.bfloat16))
        eager = copy.deepcopy(stack)
        capture(stack[captured], device, name)
        for seed in range(4):
            x = tokens(device, torch.bfloat16)
            assert_same_step(fp8_step(stack, x, seed, name), fp8_step(eager, x, seed, name))
            assert_same_states(states(stack), states(eager), f"step {seed}")


@delayed
def test_backward_scales_follow_whichever_call_gets_a_gradient(device, name):
    """The first captured callable of the region gets no gradient."""
    heads = [build(linear, device, torch.bfloat16) for _ in range(3)]
    eager = copy.deepcopy(heads)
    for i in (0, 2):
        capture(heads[i], device, name)
    for _ in range(3):
        x = tokens(device, torch.bfloat16, grad=True)
        for modules in (heads, eager):
            with around(name):
                modules[0](x)
                y = modules[2](modules[1](x))
            y.float().square().sum().backward()
        for ours, theirs in zip(heads[1:], eager[1:]):
            assert_same_states(states(ours), states(theirs))
            assert states(ours)[".scaling_bwd.scale"][0] != 1


@delayed
def test_without_an_autocast_around_a_call_is_its_own_region(device, name):
    module, eager = twins(mlp, device)
    capture(module, device, name)
    for seed in range(4):
        x = tokens(device, torch.bfloat16)
        assert_same_step(step(module, x, seed), fp8_step(eager, x, seed, name))
        assert_same_states(states(module), states(eager))


@every_recipe
def test_optimizer_steps(device, name):
    module, eager = twins(mlp, device)
    capture(module, device, name)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (module, eager)]
    for seed in range(4):
        x = tokens(device, torch.bfloat16)
        for m, optimizer in zip((module, eager), optimizers):
            optimizer.zero_grad()
            fp8_step(m, x, seed, name)
            optimizer.step()
    for (key, p), twin in zip(module.named_parameters(), eager.parameters()):
        assert_same_bits(p, twin, key)


@every_recipe
@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
def test_weights_are_quantized_once_for_several_microbatches(device, name, fuse):
    module, eager = twins(mlp, device, fuse_wgrad_accumulation=fuse)
    for m in (module, eager):
        for p in m.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    capture(module, device, name, cache_quantized_params=True)
    with refused(TypeError, "LayerNormMLP", "cache_quantized_params", "'is_first_microbatch'"):
        module(tokens(device, torch.bfloat16, grad=True))
    for seed, first in enumerate((True, False, False, True, False)):
        if first:  # an optimizer's step
            with torch.no_grad():
                for p, q in zip(module.parameters(), eager.parameters()):
                    p.add_(0.1)
                    q.copy_(p)
        x = tokens(device, torch.bfloat16)
        got = fp8_step(module, x, seed, name, is_first_microbatch=first)
        want = fp8_step(eager, x, seed, name, is_first_microbatch=first)
        for key in want:  # -0.0 where eager overwrites with it and the graph adds it to 0
            assert (got[key] is None) == (want[key] is None), key
            assert want[key] is None or torch.equal(got[key], want[key]), key
        assert_same_states(states(module), states(eager), f"step {seed}")


def test_cached_weights_are_read(device):
    """Between two optimizer steps a change of the weights has no effect."""
    module, _ = twins(linear, device)
    capture(module, device, "current", cache_quantized_params=True)
    x = tokens(device, torch.bfloat16, grad=True)
    first = module(x, is_first_microbatch=True).detach().clone()
    with torch.no_grad():
        module.weight.mul_(2)
    assert_same_bits(module(x, is_first_microbatch=False), first)
    assert not torch.equal(module(x, is_first_microbatch=True), first)
    assert FP8GlobalStateManager.get_skip_fp8_weight_update_tensor() is None


@every_recipe
@pytest.mark.parametrize("reuse", [False, True], ids=["own", "reuse"])
@pytest.mark.parametrize("cached", [False, True], ids=["each", "cached"])
def test_a_pipeline(device, name, reuse, cached):
    modules = tuple(build(mlp, device, torch.bfloat16, delay_wgrad_compute=True) for _ in range(2))
    eager = copy.deepcopy(modules)
    order = [1, 1, -1, -1.5, 1, -1, -1.5, -1, -1.5]
    graphed = te.make_graphed_callables(
        modules,
        tuple((tokens(device, torch.bfloat16, grad=True),) for _ in range(6)),
        enabled=True,
        recipe=RECIPES[name],
        cache_quantized_params=cached,
        _order=order,
        _reuse_graph_input_output_buffers=reuse,
    )
    for _ in range(3):
        inputs = [tokens(device, torch.bfloat16) for _ in range(3)]
        left = []
        for which in (modules, eager):
            done, alive, kept = [0, 0, 0], {}, []
            for entry in order:
                kind = 0 if entry > 0 else 1 if entry == -1 else 2
                m, done[kind] = done[kind], done[kind] + 1
                options = {"is_first_microbatch": m == 0} if cached else {}
                if kind == 0:
                    x = y = inputs[m].clone().requires_grad_()
                    with around(name):
                        for layer_index in range(2):
                            run = graphed[2 * m + layer_index] if which is modules else which[layer_index]
                            y = run(y, **options)
                    alive[m] = x, y
                    kept.append(y.detach().clone())
                elif kind == 1:
                    x, y = alive.pop(m)
                    y.square().sum().backward()
                    kept.append(x.grad)
                else:
                    for layer_index in (1, 0):
                        (graphed[2 * m + layer_index] if which is modules else which[layer_index]).backward_dw()
            left.append(kept)
        for got, want in zip(*left):
            assert_same_bits(got, want)
        for m, twin in zip(modules, eager):
            assert_same_step(left_by(m), left_by(twin))
            assert_same_states(states(m), states(twin))


@every_recipe
def test_checkpoint_inside(device, name):
    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build(mlp, device, torch.bfloat16)

        def forward(self, x):
            return te.checkpoint(self.inner, x)

    module = Checkpointed()
    eager = copy.deepcopy(module)
    capture(module, device, name)
    for seed in range(4):
        x = tokens(device, torch.bfloat16)
        assert_same_step(fp8_step(module, x, seed, name), fp8_step(eager, x, seed, name), f"step {seed}")
        assert_same_states(states(module), states(eager), f"step {seed}")


def test_enabled_for_each_callable(device):
    modules = tuple(build(linear, device, torch.bfloat16) for _ in range(2))
    eager = copy.deepcopy(modules)
    samples = tuple((tokens(device, torch.bfloat16, grad=True),) for _ in modules)
    te.make_graphed_callables(modules, samples, enabled=(True, False), recipe=RECIPES["current"])
    x = tokens(device, torch.bfloat16)
    assert_same_step(step(modules[0], x, 1), fp8_step(eager[0], x, 1, "current"))
    assert_same_step(step(modules[1], x, 1), step(eager[1], x, 1))


def test_a_recipe_for_each_callable(device):
    modules = tuple(build(linear, device, torch.bfloat16) for _ in range(2))
    eager = copy.deepcopy(modules)
    samples = tuple((tokens(device, torch.bfloat16, grad=True),) for _ in modules)
    names = ("delayed", "block")
    te.make_graphed_callables(modules, samples, enabled=True, recipe=tuple(RECIPES[n] for n in names))
    for seed in range(2):
        x = tokens(device, torch.bfloat16)
        for module, twin, n in zip(modules, eager, names):
            assert_same_step(fp8_step(module, x, seed, n), fp8_step(twin, x, seed, n))


def test_high_precision_inside_of_an_autocast(device):
    """enabled=False, the default, takes precedence over the autocast around the capture."""
    module, eager = twins(linear, device)
    with around("current"):
        te.make_graphed_callables(module, (tokens(device, torch.bfloat16, grad=True),))
    x = tokens(device, torch.bfloat16)
    assert_same_step(step(module, x, 1), step(eager, x, 1))
