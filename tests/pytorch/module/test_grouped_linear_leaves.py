# te.GroupedLinear writes the gradients of hundreds of parameters to .grad without the engine's queue where this makes
# no difference: hooks on a leaf, shared leaves and requests for some gradients get the engine's results; and no Python
# runs for each group. Mutants of csrc/autograd: accumulate_in_leaves() without fits(), set_as_grad() without
# requires_grad: each turns tests here red. Other conditions have no test here: hooks after the sum run in both ways, a
# request for some gradients holds the nodes, and the engine uses one leaf for the streams of a GPU.
import copy
import gc
import sys

import pytest
import torch
from support import assert_same_bits, randn

import transformer_engine.pytorch as te

from .grouped_cases import SPLITS, K, N, assert_same_gradients, build, give_main_grads, step, step_of_loop

ROWS = sum(SPLITS)


def rows_of_both(device, dtype=torch.bfloat16):
    return randn(ROWS, K, dtype=dtype, device=device), randn(ROWS, N, dtype=dtype, device=device)


def sizes(on_device, device):
    return torch.tensor(SPLITS, device=device) if on_device else SPLITS


def accumulator(p):
    return p.view_as(p).grad_fn.next_functions[0][0]


def gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def expected(module, x, dy, splits, times=1):
    """.grad of each parameter, from a copy without hooks, as autograd.grad() gives them."""
    twin = copy.deepcopy(module)
    found = torch.autograd.grad(twin(x, splits), list(twin.parameters()), dy)
    return [sum((g for _ in range(times - 1)), start=g) for g in found]


def by_name(module, values):
    return {n: v for (n, _), v in zip(module.named_parameters(), values, strict=True)}


def assert_all_same(got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a is not None, i
        assert_same_bits(a, b, str(i))


@pytest.fixture(params=[False, True], ids=["list", "tensor"])
def case(request, device):
    module, _ = build(device=device, dtype=torch.bfloat16)
    x, dy = rows_of_both(device)
    return module, x.requires_grad_(), dy, sizes(request.param, device)


WATCHERS = {
    "tensor hook": lambda p, said: p.register_hook(said),
    "after the sum": lambda p, said: p.register_post_accumulate_grad_hook(lambda p: said(p.grad)),
    "node, held": lambda p, said: [node := accumulator(p), node.register_hook(lambda _, g: said(g[0]))],
    "before the node, held": lambda p, said: [node := accumulator(p), node.register_prehook(lambda g: said(g[0]))],
    "all together": lambda p, said: torch.autograd.graph.register_multi_grad_hook([p], lambda g: said(g[0])),
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_hooks_of_a_parameter_get_its_gradient(watcher, case):
    module, x, dy, splits = case
    want = expected(module, x, dy, splits)
    told = {}
    held = [
        WATCHERS[watcher](p, lambda g, i=i: told.__setitem__(i, g.clone())) for i, p in enumerate(module.parameters())
    ]
    module(x, splits).backward(dy)
    del held
    assert_all_same([told[i] for i in range(len(want))], want)
    assert_all_same(gradients(module), want)


@pytest.mark.parametrize("before", [False, True])
def test_hooks_that_the_graph_alone_holds(before, case):
    module, x, dy, splits = case
    told = []
    y = module(x, splits)
    for p in module.parameters():
        node = accumulator(p)
        node.register_prehook(lambda g: told.append(0)) if before else node.register_hook(lambda *g: told.append(0))
        del node
    gc.collect()
    y.backward(dy)
    assert len(told) == len(list(module.parameters()))


def test_a_hook_of_the_modules_node_sees_all_gradients(case):
    module, x, dy, splits = case
    want = expected(module, x, dy, splits)
    seen = []
    y = module(x, splits)
    y.grad_fn.register_hook(lambda into, _: seen.extend(into))
    y.backward(dy)
    order = [n for kind in ("weight", "bias") for n, _ in module.named_parameters() if n.startswith(kind)]
    assert_all_same([g for g in seen if g is not None][1:], [by_name(module, want)[n] for n in order])


def test_hooks_fire_where_main_grad_has_the_gradient(case):
    module, x, dy, splits = case
    module.fuse_wgrad_accumulation = True
    give_main_grads([module])
    fired, nodes = [], [accumulator(p) for p in module.parameters()]
    for i, node in enumerate(nodes):
        node.register_hook(lambda *_, i=i: fired.append(i))
    module(x, splits).backward(dy)
    assert sorted(fired) == list(range(len(nodes)))
    assert all(p.grad is None for n, p in module.named_parameters() if "weight" in n)


def test_gradients_add_up(case):
    module, x, dy, splits = case
    want = expected(module, x, dy, splits, times=2)
    kept = []
    for _ in range(2):
        module(x, splits).backward(dy)
        kept = kept or [p.grad for p in module.parameters()]
    assert_all_same(gradients(module), want)
    assert all(p.grad is before for p, before in zip(module.parameters(), kept, strict=True)), "added in place"


def test_two_backwards_of_one_graph(case):
    module, x, dy, splits = case
    want = expected(module, x, dy, splits, times=2)
    y = module(x, splits)
    y.backward(dy, retain_graph=True)
    assert_all_same(gradients(module), expected(module, x, dy, splits))
    y.backward(dy)
    assert_all_same(gradients(module), want)


def test_a_part_of_the_gradients(case):
    module, x, dy, splits = case
    want = expected(module, x, dy, splits)
    y = module(x, splits)
    y.backward(dy, inputs=[module.weight2, x], retain_graph=True)
    assert [n for n, p in module.named_parameters() if p.grad is not None] == ["weight2"]
    (got,) = torch.autograd.grad(y, [module.weight3], dy)
    assert_all_same([module.weight2.grad, got], [by_name(module, want)[n] for n in ("weight2", "weight3")])


@pytest.mark.parametrize("delayed", [False, True])
def test_a_part_of_the_gradients_goes_to_main_grad(delayed, device):
    """The main_grad of weights that are not requested stays as it is."""
    module, _ = build(
        device=device, dtype=torch.bfloat16, bias=False, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed
    )
    give_main_grads([module])
    x, dy = rows_of_both(device)
    torch.autograd.grad(module(x, SPLITS), [module.weight2], dy, allow_unused=True)
    module.backward_dw()
    assert [n for n, p in module.named_parameters() if (p.main_grad != 0.5).any()] == ["weight2"]


def test_two_calls_in_one_graph_and_two_graphs_at_once(case):
    module, x, dy, splits = case
    want = expected(module, x, dy, splits, times=2)
    (module(x, splits) + module(x, splits)).backward(dy)
    assert_all_same(gradients(module), want)
    module.zero_grad()
    first, second = module(x, splits), module(x, splits)
    first.backward(dy)
    second.backward(dy)
    assert_all_same(gradients(module), want)


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_that_another_operation_reads(fused, case):
    """Its node waits for both: what came past it would leave it waiting."""
    module, x, dy, splits = case
    alone = copy.deepcopy(module)
    if fused:
        module.fuse_wgrad_accumulation = alone.fuse_wgrad_accumulation = True
        give_main_grads([module, alone])
    step(alone, x, dy, splits)
    loss = (module(x, splits) * dy).sum() + sum(p.float().sum() for p in module.parameters())
    loss.backward()
    for (name, p), q in zip(module.named_parameters(), alone.parameters(), strict=True):
        assert_same_bits(p.grad, torch.ones_like(p) if q.grad is None else q.grad + 1, name)


@pytest.mark.filterwarnings("ignore:.*[Aa]nomaly.*", "ignore:Error detected")
def test_anomalies_are_named(case):
    module, x, dy, splits = case
    dy[-1] = float("nan")  # of the last group alone
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan values"):
        module(x.detach(), splits).backward(dy)


def test_a_gradient_of_another_dtype(case):
    module, x, dy, splits = case
    want = expected(module, x, dy, splits)
    module.weight1.grad_dtype = torch.float32
    module(x, splits).backward(dy)
    assert module.weight1.grad.dtype is torch.float32
    assert_same_bits(module.weight1.grad, by_name(module, want)["weight1"].float())


def test_frozen_parameters_get_nothing(case):
    module, x, dy, splits = case
    want = expected(module, x, dy, splits)
    module.weight1.requires_grad_(False)
    module.bias3.requires_grad_(False)
    module(x.detach(), splits).backward(dy)
    got = dict(zip((n for n, _ in module.named_parameters()), gradients(module), strict=True))
    assert got.pop("weight1") is None and got.pop("bias3") is None
    named = dict(zip((n for n, _ in module.named_parameters()), want, strict=True))
    assert_all_same(got.values(), [named[n] for n in got])


def test_parameters_frozen_after_the_forward_get_nothing(case):
    """The graph has their nodes, which add no gradient to a parameter that is frozen by then."""
    module, x, dy, splits = case
    want = expected(module, x, dy, splits)
    y = module(x, splits)
    frozen = [module.weight2, module.bias0, module.bias3]
    for p in frozen:
        p.requires_grad_(False)
    y.backward(dy)
    assert all(p.grad is None for p in frozen)
    kept = [(p.grad, g) for p, g in zip(module.parameters(), want, strict=True) if p.requires_grad]
    assert_all_same(*zip(*kept, strict=True))


def data_elsewhere(ours, loop):
    for module, name in ((ours, "weight1"), (loop[1], "weight")):
        p = getattr(module, name)
        p.data = p.data.clone() * 3


def other_parameters(ours, loop):
    for module, name in ((ours, "weight1"), (loop[1], "weight")):
        setattr(module, name, torch.nn.Parameter(getattr(module, name).detach() * 3))


def frozen(ours, loop):
    for p in (ours.weight1, loop[1].weight, ours.bias2, loop[2].bias):
        p.requires_grad_(False)


def other_main_grads(ours, loop):
    give_main_grads([ours, *loop])


def overwritten(ours, loop):
    for p in (ours.weight1, loop[1].weight):
        p.overwrite_main_grad = True


def asked_for(ours, loop):
    for p in (ours.weight1, loop[1].weight):
        memory = torch.zeros(p.shape, device=p.device)
        p.get_main_grad = lambda memory=memory: memory
        p.main_grad = memory


def waited_for(ours, loop):
    for p in (ours.weight1, loop[1].weight):
        p.grad_added_to_main_grad = False


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "change", [data_elsewhere, other_parameters, frozen, other_main_grads, overwritten, asked_for, waited_for]
)
def test_what_changes_between_calls_is_noticed(change, fused, on_device, device):
    ours, loop = build(device=device, dtype=torch.bfloat16, fuse_wgrad_accumulation=fused)
    give_main_grads([ours, *loop])
    x, dy = rows_of_both(device)
    for changes in (False, True):
        for module in (ours, *loop):
            module.zero_grad()
        if changes:
            with torch.no_grad():
                change(ours, loop)
            if fused:  # those of other parameters are there by then
                for p in (*ours.parameters(), *(p for linear in loop for p in linear.parameters())):
                    if p.ndim == 2 and not hasattr(p, "main_grad"):
                        p.main_grad = torch.zeros(p.shape, device=device)
        got = step(ours, x, dy, sizes(on_device, device))
        want = step_of_loop(loop, x, dy, SPLITS)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)
        for i, linear in enumerate(loop):
            for name, p in linear.named_parameters():
                assert (p.grad is None) == (getattr(ours, f"{name}{i}").grad is None), name
        if change is not waited_for:  # whose dummies mean nothing
            assert_same_gradients(ours, loop)


def test_a_backward_that_failed_on_the_way_to_leaves_is_not_run_again(case):
    module, x, dy, splits = case
    y = module(x, splits)
    refuses = list(module.parameters())[-1]
    refuses.grad = torch.zeros(1, dtype=refuses.dtype, device=refuses.device).expand(refuses.shape)
    with pytest.raises(RuntimeError, match="written-to tensor"):
        y.backward(dy)
    with pytest.raises(RuntimeError, match=r"second time|grouped_linear: .* run forward again"):
        y.backward(dy)
    module.zero_grad()
    x.grad = None
    want = expected(module, x, dy, splits)
    module(x, splits).backward(dy)
    assert_all_same(gradients(module), want)


def test_a_backward_that_failed_after_the_node_is_not_run_again(case):
    """The error is in a hook, after the node has released its leaves: a second backward raises an error."""
    module, x, dy, splits = case
    y = module(x, splits)
    hook = y.grad_fn.register_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.backward(dy)
    hook.remove()
    assert all(p.grad is None for p in (x, *module.parameters()))
    with pytest.raises(RuntimeError, match=r"^grouped_\w+: .*failed after this node.* run forward again"):
        y.backward(dy)
    want = expected(module, x, dy, splits)
    module(x, splits).backward(dy)
    assert_all_same(gradients(module), want)


def python_calls(module, x, dy, splits):
    """Calls of functions, Python's and builtin ones, in a forward and backward on this thread."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    x.grad = None
    module.zero_grad()
    sys.setprofile(note)
    try:
        module(x, splits).backward(dy)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_python_does_nothing_for_each_group(on_device, fused):
    """On the CPU, where the backward runs on this thread."""
    counts = []
    for groups in (4, 64):
        options = {"params_dtype": torch.bfloat16, "device": "cpu", "fuse_wgrad_accumulation": fused}
        module = te.GroupedLinear(groups, K, N, **options)
        give_main_grads([module])
        x, dy = randn(groups, K, dtype=torch.bfloat16).requires_grad_(), randn(groups, N, dtype=torch.bfloat16)
        splits = torch.ones(groups, dtype=torch.int32) if on_device else [1] * groups
        python_calls(module, x, dy, splits)  # makes what is made once
        counts.append(python_calls(module, x, dy, splits))
    allowed = 0 if on_device else 1  # operator.index() of each size of a list
    assert counts[1] - counts[0] <= allowed * 60, counts
