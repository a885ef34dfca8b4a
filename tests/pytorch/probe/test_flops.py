# torch's FlopCounterMode over these modules in eager mode: forward and backward count what their products take, as
# plain torch's do, and the bits are those without it.
import subprocess
import sys
import threading

import pytest
import torch
from families import FFN, HIDDEN
from support import assert_same_bits, randn, refused
from torch.utils.flop_counter import FlopCounterMode

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R
from transformer_engine.pytorch.cpp_extensions import general_gemm

ROWS = 12
RECIPES = {None: None, "current": R.Float8CurrentScaling, "block": R.Float8BlockScaling}


def counted(step):
    counter = FlopCounterMode(display=False)
    with counter:
        step()
    return counter.get_total_flops()


def stepped(module, *inputs, recipe=None):
    """Outputs and gradients of one step."""
    leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    module.zero_grad()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = module(*leaves)
    out = out if isinstance(out, torch.Tensor) else out[0]
    out.backward(torch.ones_like(out))
    return [out, *(t.grad for t in leaves if t.is_floating_point()), *(p.grad for p in module.parameters())]


MODULES = {
    "Linear": (lambda **o: te.Linear(HIDDEN, 24, **o), HIDDEN * 24),
    "split": (lambda **o: te.Linear(HIDDEN, 24, parameters_split=["a", "b"], **o), HIDDEN * 24),
    "LayerNormLinear": (lambda **o: te.LayerNormLinear(HIDDEN, 24, **o), HIDDEN * 24),
    "LayerNormMLP": (lambda **o: te.LayerNormMLP(HIDDEN, FFN, **o), 2 * HIDDEN * FFN),
    "swiglu": (lambda **o: te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **o), 3 * HIDDEN * FFN),
    "RMSNorm": (lambda **o: te.RMSNorm(HIDDEN, **o), 0),
}


@pytest.mark.usefixtures("fp8_left_off")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_a_step_counts_its_products(device, name, recipe):
    """Two operations for each multiplication, three GEMMs for each one of the forward."""
    build, products = MODULES[name]
    module, x = build(device=device), randn(ROWS, HIDDEN, device=device)
    made = None if recipe is None else RECIPES[recipe]()
    got = []
    assert counted(lambda: got.extend(stepped(module, x, recipe=made))) == 3 * 2 * ROWS * products
    with torch.no_grad():
        assert counted(lambda: module(x)) == 2 * ROWS * products
    for one, want in zip(got, stepped(module, x, recipe=made), strict=True):
        assert_same_bits(one, want)


@pytest.mark.usefixtures("fp8_left_off")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tensor", [False, True], ids=["list", "tensor"])
def test_groups(device, tensor, recipe):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # modules with splits on a GPU
    module = te.GroupedLinear(3, HIDDEN, 24, params_dtype=dtype, device=device)
    x = randn(ROWS, HIDDEN, dtype=dtype, device=device)
    splits = torch.tensor([5, 0, 7], device=device) if tensor else [5, 0, 7]
    made = None if recipe is None else RECIPES[recipe]()
    call, products = torch.nn.Module(), 2 * ROWS * HIDDEN * 24
    call.inner, call.forward = module, lambda x: module(x, splits)
    found = counted(lambda: stepped(call, x, recipe=made))
    if tensor and recipe is not None:  # weight gradients of FP8 rows that are padded group by group
        assert 3 * products <= found <= 2 * products + 2 * 128 * 3 * HIDDEN * 24
    else:
        assert found == 3 * products


def test_a_layer_counts_as_plain_torch(device):
    """Except the products of attention, of which torch counts only those of its GPU backends."""
    layer = te.TransformerLayer(HIDDEN, FFN, 2, hidden_dropout=0.0, attention_dropout=0.0, device=device)
    x = randn(6, 2, HIDDEN, device=device)
    products = 2 * HIDDEN * FFN + 4 * HIDDEN * HIDDEN
    found = counted(lambda: stepped(layer, x))
    attention = counted(lambda: stepped(te.DotProductAttention(2, HIDDEN // 2), *(x.view(6, 2, 2, HIDDEN // 2),) * 3))
    assert found == 3 * 2 * ROWS * products + attention
    checkpointed = counted(lambda: te.checkpoint(layer, x.clone().requires_grad_()).sum().backward())
    assert checkpointed - found >= 2 * ROWS * (products - HIDDEN * FFN)  # its forward runs again


def test_a_loss_and_products_by_name(device):
    hidden, weight = randn(ROWS, HIDDEN, device=device), randn(40, HIDDEN, device=device)
    target = torch.zeros(ROWS, dtype=torch.int64, device=device)

    def step():
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        te.fused_linear_cross_entropy(*leaves, target, reduce_loss=True).backward()

    assert counted(step) == 3 * 2 * ROWS * HIDDEN * 40
    for a, b, layout in ((weight, hidden, "TN"), (weight, randn(ROWS, 40, device=device), "NN")):
        assert counted(lambda a=a, b=b, layout=layout: general_gemm(a, b, layout=layout)) == 2 * ROWS * HIDDEN * 40
    dy, out = randn(ROWS, 40, device=device), torch.zeros(40, HIDDEN, device=device)
    for options in ({}, {"out": out, "accumulate": True}):
        assert counted(lambda o=options: general_gemm(hidden, dy, layout="NT", **o)) == 2 * ROWS * HIDDEN * 40


@pytest.mark.usefixtures("fp8_left_off")
def test_what_a_dispatch_mode_cannot_see_is_refused(device):
    """It is refused by name, as under every mode, and counts nothing."""
    x = randn(ROWS, HIDDEN, device=device)
    with FlopCounterMode(display=False) as counter:
        with refused(NotImplementedError, "delayed scaling", "plain tensors in eager mode"):
            stepped(te.Linear(HIDDEN, 24, device=device), x, recipe=R.DelayedScaling())
        fused = te.Linear(HIDDEN, 24, fuse_wgrad_accumulation=True, device=device)
        fused.weight.main_grad = torch.zeros(24, HIDDEN, device=device)
        with refused(NotImplementedError, "fuse_wgrad_accumulation", "plain tensors in eager mode"):
            fused(x)
    assert counter.get_total_flops() == 0


def test_modules_are_counted_by_name(device):
    stack = torch.nn.Sequential(te.Linear(HIDDEN, HIDDEN, device=device), te.Linear(HIDDEN, 24, device=device))
    counter = FlopCounterMode(display=False)
    with counter:
        stack(randn(ROWS, HIDDEN, device=device)).sum().backward()
    counts = {name: sum(by.values()) for name, by in counter.get_flop_counts().items()}
    assert counts["Sequential.0"] >= 2 * 2 * ROWS * HIDDEN * HIDDEN
    assert counts["Sequential.1"] >= 2 * 2 * ROWS * HIDDEN * 24


def test_another_thread_is_not_counted(device):
    module, x = te.Linear(HIDDEN, 24, device=device), randn(ROWS, HIDDEN, device=device)

    def step():
        thread = threading.Thread(target=lambda: module(x))
        thread.start()
        thread.join()

    assert counted(step) == 0


@pytest.mark.parametrize("first", ["torch.utils.flop_counter", "transformer_engine.pytorch"])
def test_the_counter_may_be_imported_first_or_last(first):
    """It is not imported without need, since it imports Triton."""
    code = f"import sys, {first}\n"
    if first.startswith("transformer"):
        code += "assert 'torch.utils.flop_counter' not in sys.modules and 'triton' not in sys.modules\n"
    code += "import torch, transformer_engine.pytorch as te\n"
    code += "from torch.utils.flop_counter import FlopCounterMode\n"
    code += "with FlopCounterMode(display=False) as counter: te.Linear(4, 4, device='cpu')(torch.ones(2, 4))\n"
    code += "assert counter.get_total_flops() == 64\n"
    code += "assert not any(type(f).__name__ == '_AtItsImport' for f in sys.meta_path)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=300)
    assert done.returncode == 0, done.stderr
