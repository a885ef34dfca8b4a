"""The optimizer room's other ops: SGD, scaling, norms and FP8 scales over lists of tensors, against float64; Adam and
what holds for all of them are test_optimizer.py's."""

import pytest
import torch
from support import DTYPES, U32, assert_same_bits, assert_within, randn, wide

from transformer_engine.pytorch import functional

SIZES = (0, 1, 7, 255, 2048, 2049, 20011)


# ---- SGD ----


@pytest.mark.parametrize("momentum, dampening, nesterov", [(0.0, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)])
def test_sgd_is_torchs(device, momentum, dampening, nesterov):
    """Five steps of torch.optim.SGD in float64; every step adds 8 u of the numbers that meet."""
    p, wd, lr = randn(5003, device=device), 0.01, 0.1
    exact = torch.nn.Parameter(wide(p))
    options = {"momentum": momentum, "dampening": dampening, "weight_decay": wd, "nesterov": nesterov}
    theirs = torch.optim.SGD([exact], lr=lr, **options)
    buffer, bound = torch.empty_like(p), torch.zeros(5003, dtype=torch.float64)
    for step in range(5):
        g = randn(5003, device=device)
        exact.grad = wide(g)
        theirs.step()
        functional.optimizer_sgd([g], [p], [buffer], lr=lr, first_run=step == 0, **options)
        bound += 8 * U32 * (exact.detach().abs() + lr * 20 * wide(g).abs() + lr * 20)
        assert_within(p, exact.detach(), bound, f"step {step}")


def test_sgd_options(device):
    g, p = randn(100, device=device), randn(100, device=device)
    half = torch.empty(100, dtype=torch.float16, device=device)
    buffer, before = torch.zeros(100, device=device), p.clone()
    functional.optimizer_sgd(
        [g], [p], [buffer], [half], lr=0.5, momentum=0.9, weight_decay=0.1, wd_after_momentum=True, scale=2.0
    )
    assert_same_bits(buffer, 2 * g)
    assert_within(p, wide(before) - 0.5 * (wide(2 * g) + 0.1 * wide(before)), 8 * U32 * (before.abs() + g.abs()).cpu())
    assert_same_bits(half, p.half())
    kept = p.clone()
    functional.optimizer_sgd([g], [p], lr=0.5, noop=torch.ones(1, dtype=torch.int32, device=device))
    assert_same_bits(p, kept)


# ---- scaling, norms, scales ----


@pytest.mark.parametrize("on_device", (False, True))
@pytest.mark.parametrize("into", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(device, dtype, into, on_device):
    tensors = [randn(n, dtype=dtype, device=device) for n in SIZES]
    out = [torch.empty_like(t, dtype=into) for t in tensors]
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    functional.optimizer_scale(tensors, out, torch.tensor([0.3], device=device) if on_device else 0.3, noop=flag)
    for t, y in zip(tensors, out, strict=True):
        assert_same_bits(y, (t.float() * 0.3).to(into))
    assert flag.item() == 0
    functional.optimizer_scale(tensors, tensors, 0.0)  # in place
    assert not any(t.any() for t in tensors)


@pytest.mark.parametrize("bad", (torch.inf, -torch.inf, torch.nan, 3e38))
def test_scale_reports_values_that_are_not_finite(device, bad):
    tensors = [torch.ones(n, device=device) for n in (3, 5000, 1)]
    tensors[1][4999] = bad
    flag = torch.zeros(1, device=device)
    functional.optimizer_scale(tensors, tensors, 4.0, noop=flag)
    assert flag.item() == 1.0 and tensors[2].item() == 4.0


@pytest.mark.parametrize("per_tensor", (False, True))
@pytest.mark.parametrize("dtype", DTYPES)
def test_l2norm(device, dtype, per_tensor):
    """Squares and sums are exact to 2^-40 in float64: the product with inv_scale and the result round once each."""
    tensors = [randn(n, dtype=dtype, device=device) for n in (*SIZES, 65_536, 100_003)]  # two whole chunks, and a part
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    for inv_scale in (None, torch.tensor([0.3], device=device)):
        norm, each = functional.optimizer_l2norm(tensors, noop=flag, inv_scale=inv_scale, per_tensor=per_tensor)
        factor = 1.0 if inv_scale is None else float(inv_scale)
        wanted = torch.stack([wide(t).norm() * factor for t in tensors])
        assert norm.shape == (1,) and norm.dtype is torch.float32 and flag.item() == 0
        assert_within(norm, wanted.norm()[None], 3 * U32 * wanted.norm())
        assert each.shape == (len(tensors) if per_tensor else 0,)
        if per_tensor:
            assert_within(each, wanted, 3 * U32 * wanted + 1e-40)
        moved = [torch.cat((t.new_zeros(1), t))[1:] for t in tensors]  # off 16 bytes
        assert_same_bits(functional.optimizer_l2norm(moved, noop=flag, inv_scale=inv_scale)[0], norm)


def test_l2norm_of_mixed_dtypes_of_many_and_of_none(device):
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    mixed = [torch.full((2,), 2.0, dtype=DTYPES[i % 3], device=device) for i in range(7)]
    norm, each = functional.optimizer_l2norm(mixed, noop=flag, per_tensor=True)
    assert norm.item() == float(torch.tensor(56.0).sqrt()) and (each == float(torch.tensor(8.0).sqrt())).all()
    many = torch.full((20_000,), 3.0, device=device).split(2)
    assert functional.optimizer_l2norm(many, noop=flag)[0].item() == float(torch.tensor(180_000.0).sqrt())
    assert functional.optimizer_l2norm([], noop=flag)[0].tolist() == [0.0]
    assert functional.optimizer_l2norm([torch.empty(0, device=device)], noop=flag)[0].tolist() == [0.0]
    large = functional.optimizer_l2norm([torch.full((4,), 1e30, device=device)], noop=flag)[0]
    assert large.item() == float(torch.tensor(2e30)) and flag.item() == 0  # its square is beyond float32


@pytest.mark.parametrize("bad", (torch.inf, torch.nan))
def test_l2norm_reports_values_that_are_not_finite(device, bad):
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    tensors = [torch.ones(3, device=device), torch.tensor([bad, 1.0], device=device)]
    assert not functional.optimizer_l2norm(tensors, noop=flag)[0].isfinite()
    assert flag.item() == 1


@pytest.mark.parametrize("pow_2", (False, True))
def test_scales_from_amaxes(device, pow_2):
    amaxes = [torch.tensor([x], device=device) for x in (1.0, 3.7, 0.0, torch.inf, torch.nan)]
    scales, inverse = ([torch.empty_like(a) for a in amaxes] for _ in range(2))
    functional.optimizer_compute_scales(amaxes, scales, inverse, max_fp8=448.0, force_pow_2_scales=pow_2)
    want = torch.tensor([448.0, 448.0 / 3.7, 1.0, 1.0, 1.0])
    want = want.log2().floor().exp2() if pow_2 else want
    assert_same_bits(torch.cat(scales).cpu(), want)
    assert_same_bits(torch.cat(inverse), 1 / torch.cat(scales))
    functional.optimizer_compute_scales(amaxes, scales, inverse, max_fp8=448.0, epsilon=2.0)
    assert scales[0].item() == scales[2].item() == 224.0
