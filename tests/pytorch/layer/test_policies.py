# Policies of tests/layer below unchanged layers: a TPComm that delivers rows in three uneven runs, products over two
# weights, saved tensors that are recomputed, live rows. The suites of the modules run under each (qa/L0_unittest); this
# file has the checks that only a policy allows. CPU products go by the plain loop, whose bits the rows beside them do
# not change. Mutants: through() (csrc/layer/tp_comm.h) giving the product the whole operand, or all rows their first
# run's range; rows_of (csrc/gemm/product.cpp) leaving block scales as they are; save_layer()
# (csrc/layer/save_rules.cpp) keeping recomputed tensors, or the first weight alone; ~AnnouncedRows leaving rows
# announced.
import contextlib

import pytest
import torch
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch import _C, functional
from transformer_engine.pytorch.quantization.recipes.products import plan_of
from transformer_engine.pytorch.saved.marks import live_rows

from .policies import policy

RECIPES = {
    "none": None,
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "high precision": recipe.Float8BlockScaling(backward_override="high_precision"),
    "dequantized": recipe.Float8BlockScaling(backward_override="dequantized"),
}
MODULES = {
    "linear": lambda **o: te.Linear(256, 384, **o),
    "split": lambda **o: te.Linear(256, 384, parameters_split=("a", "b", "c"), **o),
    "norm_linear": lambda **o: te.LayerNormLinear(256, 384, normalization="RMSNorm", **o),
    "mlp": lambda **o: te.LayerNormMLP(256, 384, activation="swiglu", **o),
    "mlp_recomputed": lambda **o: te.LayerNormMLP(256, 384, activation="swiglu", checkpoint=True, **o),
    "mlp_fp8": lambda **o: te.LayerNormMLP(256, 384, activation="gelu", save_preactivation="fp8", **o),
}


@pytest.fixture
def by_loop():
    _C.set_cpu_products("loop")
    yield
    _C.set_cpu_products("libtorch")


@contextlib.contextmanager
def installed(name):
    policy(name).install()
    try:
        yield policy(name)
    finally:
        policy(name).remove()


def run(module, x, dy, kind):
    x = x.detach().requires_grad_()
    module.zero_grad()
    with te.autocast(enabled=RECIPES[kind] is not None, recipe=RECIPES[kind]):
        y = module(x)
    y.backward(dy[..., : y.shape[-1]])
    return [y, x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("rows", [(0,), (1,), (2,), (5, 3), (200,)], ids=str)
@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_rows_that_arrive_in_runs(name, kind, rows, device, by_loop):
    if device == "cuda" and kind != "none" and 0 in rows:
        rows = (3,)
    module = MODULES[name](device=device)
    x, dy = randn(*rows, 256, device=device), randn(*rows, 384, device=device)
    whole = run(module, x, dy, kind)
    with installed("tp_comm_in_chunks") as tp_comm:
        tp_comm.runs()
        in_runs = run(module, x, dy, kind)
        assert tp_comm.runs() > 0
    if device == "cuda":  # cuBLASLt may sum in another order where there are fewer rows
        for a, b in zip(in_runs, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    else:
        for a, b in zip(in_runs, whole, strict=True):
            assert_same_bits(a, b)


def _quantization(kind):
    return None if RECIPES[kind] is None else plan_of(RECIPES[kind]).quantization


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 6, 384, 500])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [None, 0, 1])
def test_two_weights_are_two_linears(kind, rows, bias, frozen, device, by_loop):
    """Each of its own rows, one after the other: y, dx and all gradients; a frozen one gets none."""
    if kind != "none" and bias:
        pytest.skip("column sums are of all rows where they are made with the FP8 gradient")
    if kind == "current":
        pytest.skip("one scale for all rows, where two layers have two")
    cut = rows // 3 // 128 * 128 if kind != "none" else rows // 3
    if kind in ("high precision", "dequantized") and cut != rows // 3:
        pytest.skip("a gradient that is not quantized is cut where no block ends")
    weights = [randn(384, 256, device=device).requires_grad_(i != frozen) for i in range(2)]
    biases = [randn(384, device=device).requires_grad_() for _ in range(2)] if bias else []
    x, dy = randn(rows, 256, device=device), randn(rows, 384, device=device)
    wanted = [w for w in weights if w.requires_grad] + biases
    both = x.clone().requires_grad_()
    y = policy("two_weights").linear(both, weights, biases, _quantization(kind))
    grads = torch.autograd.grad(y, [both, *wanted], dy)
    ys, dxs, dws = [], [], []
    for i, part in enumerate((slice(0, cut), slice(cut, rows))):
        one = x[part].clone().requires_grad_()
        out = functional.linear(one, weights[i], biases[i] if bias else None, quantization=_quantization(kind))
        mine = [t for t in (weights[i], *biases[i : i + 1]) if t.requires_grad]
        dx, *rest = torch.autograd.grad(out, [one, *mine], dy[part])
        ys.append(out), dxs.append(dx), dws.append(rest)
    names = [id(t) for t in wanted]
    found = dict(zip(names, grads[1:], strict=True))
    for i in range(2):
        mine = [t for t in (weights[i], *biases[i : i + 1]) if t.requires_grad]
        for t, grad in zip(mine, dws[i], strict=True):
            if t.dim() == 1 and i == frozen:  # the bias's sums beside a product, and without one
                torch.testing.assert_close(found[id(t)], grad, rtol=1e-5, atol=1e-4)
            else:
                assert_same_bits(found[id(t)], grad)
    assert_same_bits(y, torch.cat(ys))
    assert_same_bits(grads[0], torch.cat(dxs))


@pytest.mark.parametrize("kind", [*RECIPES, "delayed"])
@pytest.mark.parametrize("name", MODULES)
def test_what_is_not_kept_is_made_again(name, kind, device):
    module = MODULES[name](device=device)
    x, dy = randn(6, 256, device=device), randn(6, 384, device=device)
    kept = _steps(module, x, dy, kind)
    with installed("recomputed") as again:
        again.counts()
        fresh = MODULES[name](device=device)
        fresh.load_state_dict({k: v for k, v in module.state_dict().items() if not k.endswith("_extra_state")})
        made = _steps(fresh, x, dy, kind)
        counts = again.counts()
    for a, b in zip(made, kept, strict=True):
        assert_same_bits(a, b)
    layers = 2  # steps
    wanted = {}
    if "mlp" in name:
        wanted = {"norm output": layers, "activation": layers, "pre-activation": layers}
    elif name == "norm_linear":
        wanted = {"norm output": layers}
    elif kind not in ("none", "high precision"):  # which keep the caller's tensor
        wanted = {"linear input": layers}
    assert counts == wanted


def _steps(module, x, dy, kind):
    """Two, so that scales have moved; those of a new module start alike."""
    results = []
    chosen = recipe.DelayedScaling() if kind == "delayed" else RECIPES[kind]
    for _ in range(2):
        leaf = x.detach().requires_grad_()
        module.zero_grad()
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = module(leaf)
        y.backward(dy[..., : y.shape[-1]])
        results += [y, leaf.grad, *(p.grad.clone() for p in module.parameters())]
    return results


def test_live_rows_are_announced_while_they_are_saved(device):
    seen = []
    x = randn(8, 4, device=device).requires_grad_()
    counter = torch.tensor([3], device=device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(live_rows(t)) or t, lambda t: t):
        y = policy("live_rows").keep(x, counter, 2)
        plain = te.Linear(4, 4, device=device)(x)  # which keeps x whole
    assert seen[0] is not None and seen[0][0] is counter and seen[0][1] == 2
    assert seen[1:] == [None] * (len(seen) - 1) and len(seen) >= 3
    assert live_rows(x) is None
    (y.sum() + plain.sum()).backward()


def test_a_node_inside_a_hook_leaves_announced_rows(device):
    x = randn(8, 4, device=device).requires_grad_()
    counter = torch.tensor([3], device=device)
    seen = []

    def pack(t):
        if not seen:
            seen.append(None)  # what the inner node saves is packed here too
            with torch.enable_grad():
                assert te.Linear(4, 4, device=device)(x.detach().requires_grad_()).grad_fn is not None
            seen[:] = [live_rows(t)]
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        policy("live_rows").keep(x, counter, 2)
    assert seen[0] is not None and seen[0][1] == 2
