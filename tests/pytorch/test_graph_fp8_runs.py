# Captured modules under quantization through whole runs: delayed weight gradients into main_grad, many replays, and an
# exception at every stage of a capture. Mutants: leaving out the restoring of scales, or of what a module remembers of
# its quantized weights, when a capture fails turns the faults red.
import gc

import pytest
import torch
from graph_cases import assert_same_step, left_by, linear, mlp, norm_linear, split_linear, step, tokens
from graph_fault_cases import STAGES, WARMUPS, Fault, Faulty, allocated, faulty_backward_dw
from graph_fp8_cases import RECIPES, assert_same_states, capture, fp8_step, states, twins
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph import is_graph_capturing
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

pytestmark = pytest.mark.usefixtures("fp8_left_off")
every_recipe = pytest.mark.parametrize("name", ["delayed", "current", "block"])
BF16 = torch.bfloat16


# ---- delayed weight gradients into main_grad ----


def assert_equal_step(got, want, what):
    """Values: -0.0 where eager overwrites with it, and the graph adds it to 0, is the same."""
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


# ---- many replays ----


def tensors_alive():
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("name", [None, "delayed", "current", "block"], ids=str)
def test_many_replays(device, name):
    """1,000 on CUDA; on a CPU, where each takes as long as eager, 180. Eager takes the same steps beside them."""
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
