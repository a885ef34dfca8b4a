# Weights of groups as one tensor [groups, N, K] whose gradient is added to one main_grad, now or by backward_dw(), and
# under torch.compile: to the bit as the matrices of the list.
import pytest
import torch
from fp8_products import product
from support import refused

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import grouped_mlp
from transformer_engine.pytorch.functional.linear import TracedGradAccumulator
from transformer_engine.pytorch.module.weight_grad import WeightGradStore

from .stacked_cases import BF16, GROUPS, HOST_OR_DEVICE, Case, assert_all_same, quantizations, set_products


@pytest.fixture(params=["libtorch", "loop"])
def products(request, device):
    yield from set_products(request.param, device)


class Holder(torch.nn.Module):
    """The parameters of both products, as a module has them, and their accumulators."""

    def __init__(self, case, stacked, main_dtype):
        super().__init__()
        _, _, *weights = case.leaves((stacked, stacked))
        self.names = [[], []]
        for i, weight in enumerate(weights):
            for j, part in enumerate([weight] if stacked else weight):
                self.register_parameter(f"w{i}_{j}", torch.nn.Parameter(part.detach()))
                self.names[i].append(f"w{i}_{j}")
        buffers = [torch.full_like(w, 0.5, dtype=main_dtype) for w in case.weights]
        for names, buffer in zip(self.names, buffers, strict=True):
            for name, part in zip(names, [buffer] if stacked else buffer, strict=True):
                getattr(self, name).main_grad = part
        self.buffers_of, self.stacked = buffers, stacked

    def weights(self):
        each = [[getattr(self, name) for name in names] for names in self.names]
        return [parts[0] for parts in each] if self.stacked else each

    def accumulators(self, first=None, stores=(None, None), fused=True):
        described = [_C.WeightGradProduct(names, []) for names in self.names]
        return tuple(d.grad_accumulator(self, fused, first, s) for d, s in zip(described, stores, strict=True))


@pytest.mark.parametrize("main_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("recipe", ["none", "current", "block"])
@HOST_OR_DEVICE
def test_main_grad(on_device, recipe, main_dtype, products, device):
    """Added to, overwritten by a first microbatch, and by autograd not seen; the same from a delayed backward."""
    case = Case(device, on_device)
    x, scale, _, _ = case.leaves((True, True))

    def run(stacked, first, delayed):
        holder = Holder(case, stacked, main_dtype)
        stores = [WeightGradStore(True) if delayed else None for _ in range(2)]
        versions = [w.main_grad._version for w in holder.parameters()]
        for number in range(2):
            accumulators = holder.accumulators(first if number == 0 else False, stores)
            quantized = quantizations(recipe, device)
            y = case.call((x, scale, *holder.weights()), grad_accumulators=accumulators, quantizations=quantized)
            y.backward(case.dy)
            for store in stores if delayed else ():
                pending = store.pop()
                pending.compute(pending.product.main_grads())
        assert all(w.grad is None for w in holder.parameters())
        assert all(w.main_grad._version > v for w, v in zip(holder.parameters(), versions, strict=True))
        return holder.buffers_of

    for first in (True, False):
        want = run(False, first, False)
        assert_all_same(run(True, first, False), want)
        assert_all_same(run(True, first, True), want)


def test_delayed_without_main_grad(device):
    case = Case(device, True)
    want = case.results()
    holder, stores = Holder(case, True, BF16), [WeightGradStore(True), WeightGradStore(True)]
    x, scale, _, _ = case.leaves((True, True))
    accumulators = holder.accumulators(None, stores, fused=False)
    case.call((x, scale, *holder.weights()), grad_accumulators=accumulators).backward(case.dy)
    assert all(w.grad is None for w in holder.parameters())
    for store in stores:
        store.pop().compute([None])
    assert_all_same([x.grad, *(w.grad for w in holder.parameters())], [want[1], *want[3:]])


def test_hooks_get_a_dummy_gradient(device):
    """Where hooks wait for a gradient: one dummy of the shape of the weight, and the mark."""
    case = Case(device, True)
    holder = Holder(case, True, torch.float32)
    for weight in holder.parameters():
        weight.grad_added_to_main_grad = False
    x, scale, _, _ = case.leaves((True, True))
    case.call((x, scale, *holder.weights()), grad_accumulators=holder.accumulators()).backward(case.dy)
    for weight in holder.parameters():
        assert weight.grad_added_to_main_grad is True and weight.grad.shape == weight.shape


@pytest.mark.parametrize("stacked", [False, True])
def test_a_function_is_refused(stacked, device):
    """It would return one pair of gradients, and those of the other groups would be lost."""
    case = Case(device, True)
    for number in range(2):
        accumulators = [None, None]
        accumulators[number] = lambda work, with_bias: work.compute(with_bias)
        with refused(TypeError, "grouped_linear", "'grad_accumulator'", "function", f"{GROUPS} weights"):
            case.call(case.leaves((stacked, stacked)), grad_accumulators=tuple(accumulators))


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("recipe", ["none", "current", "block"])
@HOST_OR_DEVICE
def test_compiled(on_device, recipe, main_grad, device):
    case = Case(device, on_device)
    groups = case.groups()
    specs = ((), ()) if recipe == "none" else ([list(product(recipe, device).spec)] * 2)

    def run(call, stacked=True):
        leaves = case.leaves((stacked, stacked))
        buffers = [torch.full_like(w, 0.5, dtype=torch.float32) for w in case.weights]
        call(*leaves, *buffers).backward(case.dy)
        return [*(leaf.grad for leaf in leaves if leaf.grad is not None), *(buffers if main_grad else ())]

    def call(x, scale, first, second, *buffers):
        sinks = tuple(TracedGradAccumulator([b], [(GROUPS, i)]) if main_grad else None for i, b in enumerate(buffers))
        options = {"splits": groups["splits"], "quantizations": specs, "grad_accumulators": sinks}
        return grouped_mlp(x, groups["offsets"], first, second, scale, **options)

    got = run(torch.compile(call, fullgraph=True, backend="aot_eager"))
    want = case.results(quantizations=quantizations(recipe, device))
    assert_all_same(got[:2], want[1:3])
    if not main_grad:
        return assert_all_same(got[2:], want[3:])
    holder = Holder(case, True, torch.float32)
    x, scale, _, _ = case.leaves((True, True))
    sinks = (holder.accumulators(False)[0], holder.accumulators(True)[1])  # as above: added to, and overwritten
    quantized = quantizations(recipe, device)
    case.call((x, scale, *holder.weights()), grad_accumulators=sinks, quantizations=quantized).backward(case.dy)
    assert_all_same(got[2:], holder.buffers_of)
