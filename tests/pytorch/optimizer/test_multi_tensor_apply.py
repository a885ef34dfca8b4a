"""multi_tensor_applier and the functions it is called with: equal to the functional forms, whose values are
test_optimizer.py's, to the bit; flags, empties, what is refused."""

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine_torch as tex
from transformer_engine.pytorch import DType, functional, optimizers
from transformer_engine.pytorch.optimizers import multi_tensor_applier

ADAM = (1e-2, 0.9, 0.98, 1e-8, 3)  # lr, beta1, beta2, eps, step
NAMED = dict(zip(("lr", "beta1", "beta2", "eps", "step"), ADAM))


def flag(device, value=0, dtype=torch.int32):
    return torch.full((1,), value, dtype=dtype, device=device)


def adam_lists(device, param=torch.float32, sizes=(0, 1, 7, 3000)):
    """g, p, m, v."""
    torch.manual_seed(3)
    g, p, m = ([randn(n, dtype=dtype, device=device) for n in sizes] for dtype in (torch.float32, param, torch.float32))
    return [g, p, m, [t.square() for t in m]]


def copies(lists):
    return [[t.clone() for t in each] for each in lists]


def same(given, wanted):
    for a, b in zip(given, wanted, strict=True):
        for x, y in zip(a, b, strict=True):
            assert_same_bits(x, y)


def test_the_names_are_everywhere():
    names = [name for name in optimizers.__all__ if name.startswith("multi_tensor_")]
    assert len(names) == 12
    assert all(getattr(tex, name) is getattr(optimizers, name) for name in names)
    assert multi_tensor_applier.chunk_size == 65536


@pytest.mark.parametrize("mode", (0, 1))
@pytest.mark.parametrize("bias_correction", (0, 1))
def test_adam(device, mode, bias_correction):
    lists = adam_lists(device)
    wanted = copies(lists)
    options = {"decoupled": bool(mode), "bias_correction": bool(bias_correction), "weight_decay": 0.1}
    multi_tensor_applier(optimizers.multi_tensor_adam, flag(device), lists, *ADAM, mode, bias_correction, 0.1)
    functional.optimizer_adam(*wanted, **NAMED, **options)
    same(lists, wanted)


def test_adam_with_masters_and_remainders(device):
    for name, make in (("adam", torch.Tensor.float), ("adam_param_remainder", lambda t: torch.zeros_like(t).short())):
        lists = adam_lists(device, torch.bfloat16)
        lists.append([make(t) for t in lists[1]])
        wanted = copies(lists)
        function = getattr(optimizers, f"multi_tensor_{name}")
        multi_tensor_applier(function, flag(device), lists, *ADAM, 1, 1, 0.1)
        functional.optimizer_adam(*wanted, **NAMED, weight_decay=0.1)
        same(lists, wanted)


@pytest.mark.parametrize("fp8_dtype", (DType.kFloat8E4M3, DType.kFloat8E5M2))
def test_adam_fp8(device, fp8_dtype):
    g, masters, m, v = adam_lists(device, sizes=(0, 16, 1024))
    data = [torch.empty_like(t, dtype=torch.uint8) for t in g]
    scales = [[torch.tensor([x], device=device) for _ in g] for x in (2.0, 0.0, 0.0)]
    lists = [g, data, m, v, masters, *scales]
    wanted = copies(lists)
    multi_tensor_applier(optimizers.multi_tensor_adam_fp8, flag(device), lists, *ADAM, 1, 1, 0.1, fp8_dtype)
    e5m2 = fp8_dtype is DType.kFloat8E5M2
    functional.optimizer_adam(*wanted[:5], **NAMED, weight_decay=0.1, fp8=tuple(wanted[5:]), e5m2=e5m2)
    same(lists[:5], wanted[:5])
    for scale, amax, inverse, master in zip(*scales, masters, strict=True):
        if master.numel():
            assert amax.item() == master.abs().max().item() and inverse.item() == 0.5 and scale.item() == 2.0


@pytest.mark.parametrize("master", (False, True))
def test_adam_capturable(device, master):
    lists = adam_lists(device, torch.bfloat16 if master else torch.float32)
    if master:
        lists.append([t.float() for t in lists[1]])
    wanted = copies(lists)
    lr, step, inv_scale = torch.tensor([1e-2], device=device), flag(device, 3), torch.tensor([0.25], device=device)
    op = optimizers.multi_tensor_adam_capturable_master if master else optimizers.multi_tensor_adam_capturable
    args = (lr, 0.9, 0.98, 1e-8, step, 1, 1, 0.1, inv_scale)
    before = copies(lists)
    multi_tensor_applier(op, flag(device, 1), lists, *args)
    same(lists, before)  # the flag
    multi_tensor_applier(op, flag(device), lists, *args)
    functional.optimizer_adam(*wanted, **NAMED | {"lr": float(lr)}, weight_decay=0.1, inv_scale=inv_scale)
    same(lists, wanted)
    same([lists[0]], [[t * 0.25 for t in before[0]]])  # unscaled in place


def test_infs_pass_and_flags_skip(device):
    lists = adam_lists(device, sizes=(5, 5))
    lists[0][0][2] = torch.inf
    multi_tensor_applier(optimizers.multi_tensor_adam, flag(device, 1), lists, *ADAM, 1, 1, 0.1)
    assert lists[2][0][2] == torch.inf and lists[2][1].isfinite().all()
    g, p = [torch.ones(4, device=device)], [torch.ones(4, device=device)]
    rest = (0.0, 0.0, 0.0, 0.5, False, False, False, 1.0)
    multi_tensor_applier(optimizers.multi_tensor_sgd, flag(device, 1), [g, p, [p[0].clone()]], *rest)
    assert (p[0] == 1).all()
    multi_tensor_applier(optimizers.multi_tensor_sgd, flag(device), [g, p, [p[0].clone()]], *rest)
    assert (p[0] == 0.5).all()


def test_sgd(device):
    (g, p, b, _), half = adam_lists(device), torch.float16
    lists = [g, p, b, [torch.empty_like(t, dtype=half) for t in p]]
    wanted = copies(lists)
    args = (0.1, 0.9, 0.0, 0.5, True, False, True, 0.5)
    multi_tensor_applier(optimizers.multi_tensor_sgd, flag(device), lists, *args)
    options = {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True, "wd_after_momentum": True, "scale": 0.5}
    functional.optimizer_sgd(*wanted, lr=0.5, **options)
    same(lists, wanted)


def test_scales_and_norms(device):
    x = [randn(n, device=device) for n in (0, 3, 4000)]
    y = [torch.empty_like(t, dtype=torch.bfloat16) for t in x]
    third = torch.tensor([0.3], device=device)
    for op, scale in ((optimizers.multi_tensor_scale, 0.3), (optimizers.multi_tensor_scale_tensor, third)):
        multi_tensor_applier(op, flag(device), [x, y], scale)
        same([y], [[(t * 0.3).bfloat16() for t in x]])
    norm, each = multi_tensor_applier(optimizers.multi_tensor_l2norm, flag(device), [x], True)
    wanted = functional.optimizer_l2norm(x[1:], noop=flag(device), per_tensor=True)  # the empty one is gone
    same([[norm, each]], [wanted])
    norm, each = multi_tensor_applier(optimizers.multi_tensor_unscale_l2norm, flag(device), [x], third, False)
    assert_same_bits(norm, functional.optimizer_l2norm(x, noop=flag(device), inv_scale=third)[0])
    assert norm.shape == (1,) and each.shape == (0,)
    x[1][0] = torch.nan
    for call in (
        lambda raised: multi_tensor_applier(optimizers.multi_tensor_scale, raised, [x, y], 2.0),
        lambda raised: multi_tensor_applier(optimizers.multi_tensor_l2norm, raised, [x], False),
    ):
        for dtype in (torch.int32, torch.float32):
            raised = flag(device, 0, dtype)
            call(raised)
            assert raised.item() == 1


def test_scales_from_amaxes(device):
    amax, scale, inverse = ([torch.tensor([x], device=device) for x in each] for each in ((2.0, 3.0), (0, 0), (0, 0)))
    op = optimizers.multi_tensor_compute_scale_and_scale_inv
    lists = [amax, [t.float() for t in scale], [t.float() for t in inverse]]
    multi_tensor_applier(op, flag(device), lists, 448.0, True, 0.0)
    assert [t.item() for t in lists[1]] == [128.0, 128.0] and [t.item() for t in lists[2]] == [1 / 128] * 2


def test_empties_are_dropped(device):
    calls = []

    def op(chunk_size, noop_flag, tensor_lists, *args):
        calls.append((chunk_size, [len(each) for each in tensor_lists], args))
        return "done"

    empty, full = torch.empty(0, device=device), torch.ones(3, device=device)
    assert multi_tensor_applier(op, flag(device), [[empty, full, empty], [empty, full, full]], 7) == "done"
    assert calls == [(65536, [2, 2], (7,))]
    assert multi_tensor_applier(op, flag(device), [[empty], [empty]]) is None
    assert multi_tensor_applier(op, flag(device), [[]]) is None and len(calls) == 1


def test_refusals(device):
    x, raised = torch.ones(3, device=device), flag(device)
    with refused(ValueError, "chunk_size", "0"):
        optimizers.MultiTensorApply(0)
    with refused(ValueError, "tensor_lists", "empty"):
        multi_tensor_applier(optimizers.multi_tensor_l2norm, raised, [])
    with refused(ValueError, "multi_tensor_scale", "1 lists", "in, out"):
        multi_tensor_applier(optimizers.multi_tensor_scale, raised, [[x]], 2.0)
    with refused(ValueError, "list 'out'", "1 tensors"):
        multi_tensor_applier(optimizers.multi_tensor_scale, raised, [[x, x.clone()], [x]], 2.0)
    with refused(ValueError, "multi_tensor_adam", "mode", "2"):
        multi_tensor_applier(optimizers.multi_tensor_adam, raised, [[x]] * 4, *ADAM, 2, 1, 0.0)
    with refused(ValueError, "multi_tensor_l2norm", "noop_flag", "None"):
        multi_tensor_applier(optimizers.multi_tensor_l2norm, None, [[x]], False)
    with refused(ValueError, "multi_tensor_adam_param_remainder", "remainder", "float32", "int16"):
        multi_tensor_applier(
            optimizers.multi_tensor_adam_param_remainder, raised, [[x.clone()] for _ in range(5)], *ADAM, 1, 1, 0.0
        )
    with refused(ValueError, "multi_tensor_adam_capturable", "lr", "0.1", "tensor"):
        optimizers.multi_tensor_adam_capturable(1, raised, [[x]] * 4, 0.1, 0.9, 0.9, 0.0, raised, 1, 1, 0.0, x[:1])
    with refused(ValueError, "overlap"):
        multi_tensor_applier(optimizers.multi_tensor_adam, raised, [[x]] * 4, *ADAM, 1, 1, 0.0)
    assert (x == 1).all()
