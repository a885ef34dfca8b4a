# te.GroupedLinear, work that is done once for hundreds of experts: .grad is given without autograd's nodes, leaves are
# kept with their versions alone, attributes of parameters are read from their own __dict__. The results do not differ:
# gradients, errors, hooks and attributes equal torch's. Mutants: `watched` never true; is_plain true of any class, or
# without tp_getattro.
import pytest
import torch
from support import assert_same_bits, randn, saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch import _C

from .grouped_cases import SPLITS, K, N, build, one_by_one, step, step_of_loop

ROWS = sum(SPLITS)
BF16 = torch.bfloat16


@pytest.fixture(params=[False, True], ids=["list", "tensor"])
def case(request, device):
    ours, loop = build(device=device, dtype=BF16)
    x, dy = randn(ROWS, K, dtype=BF16, device=device), randn(ROWS, N, dtype=BF16, device=device)
    return ours, loop, x.requires_grad_(), dy, torch.tensor(SPLITS, device=device) if request.param else SPLITS


def pairs(ours, loop):
    return [(getattr(ours, f"{n}{i}"), p) for i, linear in enumerate(loop) for n, p in linear.named_parameters()]


def resized(t):
    try:
        return t.resize_(1, 1).shape
    except RuntimeError as error:
        return str(error).partition("(")[0]


def test_a_gradient_is_as_autograds_own(case):
    ours, loop, x, dy, splits = case
    for weight in (ours.weight1, loop[1].weight):
        weight.data = weight.data.t().contiguous().t()  # gradients have the layout of their parameters
    ours(x, splits).backward(dy)
    step_of_loop(loop, x, dy, SPLITS)
    for a, b in pairs(ours, loop):
        assert a.grad.stride() == b.grad.stride() and a.grad._version <= b.grad._version
        for mine in (a.grad, b.grad):
            assert mine.is_leaf and mine.grad_fn is None and not mine.requires_grad and not mine._is_view()
        assert resized(a.grad) == resized(b.grad)


def test_a_profiler_sees_each_sum(case):
    ours, _, x, dy, splits = case
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ours(x, splits).backward(dy)
    seen = [event for event in profile.events() if event.name == "torch::autograd::AccumulateGrad"]
    assert len(seen) == 1 + len(list(ours.parameters()))


@pytest.mark.parametrize("number", [0, 3])
def test_a_weight_that_is_written_to_meanwhile_is_named(number, case):
    ours, _, x, dy, splits = case
    y = ours(x, splits)
    with torch.no_grad():
        getattr(ours, f"weight{number}").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_data_that_lie_elsewhere_by_then(case):
    """As te.Linear's: the backward reads what the parameter holds."""
    ours, loop, x, dy, splits = case
    leaf = x.detach().clone().requires_grad_()
    y, want = ours(x, splits), torch.cat([one(part) for one, part in zip(loop, leaf.split(SPLITS), strict=True)])
    for weight in (ours.weight2, loop[2].weight):
        weight.data = weight.data * 3
    y.backward(dy)
    want.backward(dy)
    assert_same_bits(x.grad, leaf.grad)


def test_hooks_see_each_weight(case):
    ours, _, x, dy, splits = case
    with saved_tensors() as kept:
        y = ours(x, splits)
    seen = {t.data_ptr() for t in kept}
    assert all(getattr(ours, f"weight{i}").data_ptr() in seen for i in range(len(SPLITS)))
    y.backward(dy)


def test_a_graph_that_is_kept_and_one_that_is_not(case):
    ours, _, x, dy, splits = case
    y = ours(x, splits)
    y.backward(dy, retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    y.backward(dy)
    assert_same_bits(x.grad, first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(dy)


# ---- where a parameter's attributes come from ----


class Owned(torch.nn.Parameter):
    main_grad = property(lambda self: self._memory)


class Asked(torch.nn.Parameter):
    def __getattr__(self, name):
        if name == "main_grad":
            return self._memory
        raise AttributeError(name)


@pytest.mark.parametrize("whose", ["a property", "__getattr__", "torch's own class"])
def test_a_main_grad_that_a_class_has(whose, case, monkeypatch):
    ours, loop, x, dy, splits = case
    if whose == "torch's own class":
        monkeypatch.setattr(torch.nn.Parameter, "main_grad", Owned.main_grad, raising=False)
    made = {"a property": Owned, "__getattr__": Asked}.get(whose, torch.nn.Parameter)
    for module in (ours, *loop):
        module.fuse_wgrad_accumulation = True
        for name, p in list(module.named_parameters()):
            if "weight" in name:
                setattr(module, name, made(p.detach()))
                getattr(module, name)._memory = torch.full(p.shape, 0.5, device=p.device)
    step(ours, x, dy, splits)
    step_of_loop(loop, x, dy, SPLITS)
    for i, linear in enumerate(loop):
        own = getattr(ours, f"weight{i}")
        assert own.grad is None and "main_grad" not in vars(own)
        assert (own._memory - linear.weight._memory).abs().max() <= 2**-20 * linear.weight._memory.abs().max()
        assert SPLITS[i] == 0 or (own._memory != 0.5).any()


def test_parameters_of_several_classes(case):
    """Each is read by the rules of its own class, whatever the class of the one before it."""
    ours, _, x, dy, splits = case
    ours.fuse_wgrad_accumulation = True
    memory = [torch.full((N, K), 0.5, device=x.device) for _ in SPLITS]
    for i, made in enumerate((torch.nn.Parameter, Owned, torch.nn.Parameter, Asked)):
        weight = made(getattr(ours, f"weight{i}").detach())
        setattr(weight, "main_grad" if made is torch.nn.Parameter else "_memory", memory[i])
        setattr(ours, f"weight{i}", weight)
    step(ours, x, dy, splits)
    assert [bool((m != 0.5).any()) for m in memory] == [count > 0 for count in SPLITS]


# ---- gradients that are pieces of one allocation ----


@pytest.fixture
def loop_products(device):
    before = _C.set_cpu_products("loop") if device == "cpu" else None
    yield
    if before is not None:
        _C.set_cpu_products(before)


def weight_gradients(groups, k, n, device, on_device):
    module = te.GroupedLinear(groups, k, n, bias=False, params_dtype=BF16, device=device)
    splits = torch.ones(groups, dtype=torch.int32, device=device) if on_device else [1] * groups
    x, dy = randn(groups, k, dtype=BF16, device=device), randn(groups, n, dtype=BF16, device=device)
    module(x, splits).backward(dy)
    return [p.grad for p in module.parameters()]


@pytest.mark.usefixtures("loop_products")
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("n, k", [(3, 5), (1, 1), (7, 33), (16, 16)])
def test_each_piece_begins_where_memory_of_its_own_might(n, k, on_device, device):
    """Also with sizes that are not a multiple of 16 bytes."""
    grads = weight_gradients(5, k, n, device, on_device)
    assert len({g.untyped_storage().data_ptr() for g in grads}) == 1
    starts = [g.data_ptr() - grads[0].data_ptr() for g in grads]
    each = (n * k * 2 + 511) // 512 * 512
    assert starts == [i * each for i in range(5)]
    assert all(g.shape == (n, k) and g.is_contiguous() for g in grads)


@pytest.mark.usefixtures("loop_products")
@pytest.mark.parametrize("on_device", [False, True])
def test_large_gradients_have_memory_of_their_own(on_device, device):
    """From more than 1 MiB on: one that is freed is free."""
    pieces, wholes = (weight_gradients(2, 1024, n, device, on_device) for n in (512, 513))
    assert len({g.untyped_storage().data_ptr() for g in pieces}) == 1
    assert len({g.untyped_storage().data_ptr() for g in wholes}) == 2
    assert all(g.untyped_storage().nbytes() < 2**21 for g in wholes)


# ---- more groups than a launch takes ----


@pytest.mark.parametrize("groups", [1024, 1100])
def test_more_groups_than_one_launch_takes(groups, device):
    module = te.GroupedLinear(groups, 16, 8, bias=False, params_dtype=BF16, device=device)
    counts = [(i * 7) % 3 for i in range(groups)]
    x = randn(sum(counts), 16, dtype=BF16, device=device).requires_grad_()
    dy = randn(sum(counts), 8, dtype=BF16, device=device)
    found = []
    with one_by_one():
        for splits in (counts, torch.tensor(counts, device=device)):
            y = module(x, splits)
            found.append((y.detach(), *torch.autograd.grad(y, (x, *module.parameters()), dy)))
    for number, (by_list, by_tensor) in enumerate(zip(*found, strict=True)):
        assert_same_bits(by_tensor, by_list, f"y, dx, and weights' gradients in order: {number}")


def test_more_quantized_groups_than_there_may_be(device, fp8_left_off):
    """On a GPU sizes on the device are refused by name; lists work, and on a CPU both do."""
    from_list, there = [1] * 1025, torch.ones(1025, dtype=torch.int32, device=device)
    module = te.GroupedLinear(1025, 16, 16, bias=False, params_dtype=BF16, device=device)
    x = randn(1025, 16, dtype=BF16, device=device)
    with torch.no_grad(), te.autocast(recipe=recipe.Float8BlockScaling()):
        if device == "cuda":
            with pytest.raises(NotImplementedError, match=r"1024 groups.*m_splits"):
                module(x, there)
        else:
            assert_same_bits(module(x, there), module(x, from_list))


@pytest.mark.gpu
def test_explain_counts_the_bytes_of_copied_weights():
    ours, _ = build(device="cuda", dtype=BF16, bias=False)
    weight = ours.weight1
    weight.data = torch.cat([weight.data.new_zeros(1), weight.data.flatten()])[1:].view(N, K)  # 2 bytes off
    x = randn(ROWS, K, dtype=BF16, device="cuda")
    rows = te.explain(ours, x, torch.tensor(SPLITS, device="cuda")).rows
    (row,) = [row for row in rows if row.path == "grouped kernel on copies"]
    assert f"copies {N * K * 2} bytes of weight:" in row.why_not_faster
