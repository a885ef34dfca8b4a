# Torch's kernels on a GPU read 16 bytes at once and do not check that they may: views at any offset and of any strides
# have the values of their copies, forward and backward, by every backend; empty batches.
from typing import ClassVar

import pytest
import torch
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.memory_order import aligned, by_token, zeroed

from .packed_cases import check_close, gradients


def odd(t):
    """At an odd place of memory, strides as before."""
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)


def within(t):
    """Rows of an odd pitch."""
    return torch.nn.functional.pad(t, (0, 3))[..., : t.shape[-1]]


def across(t):
    """The last dimension is not the one of stride 1."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def shared(t):
    """One head as each."""
    return t[..., :1, :].expand_as(t)


VIEWS = [odd, within, across, shared]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_aligned_views_are_not_copied(device, dtype):
    t = torch.randn(5, 2, 4, 16, device=device).to(dtype)
    one = t.as_strided((1, 2, 4, 16), (3, 64, 16, 1))  # the stride of a dimension of size 1 places nothing
    for as_it_is in (t, t.transpose(0, 1), t[..., 8:], t[1:], shared(t), t[:0], one):
        assert aligned(as_it_is) is as_it_is
    for view in (odd(t), within(t), across(t), t[..., 1:9]):
        copy = aligned(view)
        assert copy is not view and copy.data_ptr() % 16 == 0 and copy.is_contiguous()
        assert_same_bits(copy, view)


def test_tensors_of_torch_func_have_no_address(device):
    x = torch.randn(3, 5, 4, 16, device=device)
    assert_same_bits(torch.func.vmap(aligned)(x), x)
    assert_same_bits(torch.func.grad(lambda t: aligned(t).sum())(x), torch.ones_like(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 8])
def test_zeros_keep_the_order_in_memory(device, dtype, width):
    t, padding = torch.randn(5, 3, 4, width, device=device).to(dtype), torch.rand(5, 3, 1, 1, device=device) < 0.5
    t[0, 0] = torch.nan
    for order in ((0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 0, 3)):
        leaf = t.permute(order).detach().requires_grad_()
        rows = padding.permute(order)
        out = zeroed(leaf, rows)
        assert out.stride() == leaf.stride()
        assert_same_bits(out.detach(), leaf.detach().masked_fill(rows, 0.0))
        dout = torch.randn_like(out)
        (grad,) = torch.autograd.grad(out, leaf, dout, retain_graph=True)
        assert_same_bits(grad, dout.masked_fill(rows, 0.0))
        (again,) = torch.autograd.grad(out, leaf, dout, create_graph=True)
        assert_same_bits(again.detach(), grad)


class Kernel(torch.autograd.Function):
    """A result [b, h, s, d] in the order b, s, h, d, and a backward that keeps the gradient as it reads it."""

    seen: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        Kernel.seen.append(grad)
        return grad


def read(grad, *, order=(0, 2, 1, 3), gradient="strides"):
    """The gradient that the kernel's backward reads where grad [b, h, s, d] comes to its result."""
    out = Kernel.apply(torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device, requires_grad=True))
    turned = by_token(out, order, gradient=gradient)
    assert_same_bits(turned.detach(), out.detach().permute(order))
    turned.backward(grad.permute(order))
    (seen,) = Kernel.seen
    Kernel.seen.clear()
    assert_same_bits(seen, grad)
    return seen, out.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_as_a_kernel_reads_it(device, dtype):
    grad = torch.randn(2, 4, 9, 8, device=device).to(dtype)
    as_it_is = grad.transpose(1, 2).contiguous().transpose(1, 2)
    moved = odd(as_it_is.transpose(1, 2)).transpose(1, 2)
    for same in (as_it_is, as_it_is[:1]):  # the stride of a dimension of size 1 places nothing
        assert all(read(same, gradient=of)[0].data_ptr() == same.data_ptr() for of in ("strides", "address", ""))
    for other in (grad, moved, within(as_it_is), shared(grad), grad.new_zeros(1).expand(2, 4, 9, 8)):
        seen, strides = read(other)
        assert seen.stride() == strides and seen.data_ptr() % 16 == 0
    assert read(grad, gradient="address")[0].data_ptr() == grad.data_ptr()
    assert read(moved, gradient="address")[0].data_ptr() % 16 == 0
    assert read(moved, gradient="")[0].data_ptr() == moved.data_ptr()


def test_by_token_without_a_gradient(device):
    x = torch.randn(2, 4, 9, 8, device=device)
    for leaf, mode in ((x, torch.enable_grad()), (x.clone().requires_grad_(), torch.no_grad())):
        with mode:
            turned = by_token(leaf, (2, 0, 1, 3), gradient="strides")
        assert turned.data_ptr() == leaf.data_ptr()
        assert_same_bits(turned.detach(), x.permute(2, 0, 1, 3))
    assert not by_token(x, (2, 0, 1, 3), gradient="strides").requires_grad


def test_changes_of_the_result_are_seen(device):
    """It is a view of what the kernel saved."""
    x = torch.randn(2, 4, 9, 8, device=device, requires_grad=True)
    out = x.exp()
    by_token(out, (2, 0, 1, 3), gradient="strides").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_by_token_under_torch_func(device):
    x = torch.randn(3, 2, 4, 9, 8, device=device)
    call = lambda t: by_token(Kernel.apply(t), (0, 2, 1, 3), gradient="strides").sin()  # noqa: E731
    cosine = x.cos()
    assert_same_bits(torch.func.grad(lambda t: call(t).sum())(x[0]), cosine[0])
    assert_same_bits(torch.func.vmap(lambda t: by_token(t, (0, 2, 1, 3), gradient="strides"))(x), x.transpose(2, 3))
    Kernel.seen.clear()


def test_opcheck(device):
    x = torch.randn(2, 4, 9, 8, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.te.attention_result.default, (x, [2, 0, 1, 3], True))
    torch.library.opcheck(torch.ops.te.attention_gradient.default, (x.detach(), [288, 8, 32, 1]))


@torch.library.custom_op("te_test::kernel", mutates_args=())
def kernel(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("te_test::kernel_backward", mutates_args=())
def kernel_backward(grad: torch.Tensor) -> torch.Tensor:
    assert grad.data_ptr() % 16 == 0
    return grad.clone()


kernel.register_fake(torch.empty_like)
kernel_backward.register_fake(torch.empty_like)
kernel.register_autograd(lambda ctx, grad: kernel_backward(grad))


@pytest.mark.parametrize("gradient", ["address", "strides"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_gradient_that_is_a_part_of_another(device, backend, gradient):
    """A view at an odd place, compiled as well."""

    def call(x):
        out = by_token(kernel(x), (0, 1, 2, 3), gradient=gradient)
        return torch.cat((out.new_zeros(3), out.flatten())).sin()

    x = torch.randn(2, 4, 9, 8, device=device, requires_grad=True)
    torch._dynamo.reset()
    out = call(x) if backend == "eager" else torch.compile(call, backend=backend, fullgraph=True)(x)
    dout = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, x, dout)
    torch.testing.assert_close(grad, dout[3:].view(x.shape) * x.detach().cos())


CALLS = {
    "causal": {"attn_mask_type": "causal"},
    "window": {"attn_mask_type": "causal", "window_size": (5, 0)},
    "bottom right": {"attn_mask_type": "causal_bottom_right"},
    "alibi": {"attn_mask_type": "no_mask", "core_attention_bias_type": "alibi"},
    "padding": {"attn_mask_type": "padding_causal"},
    "masks": {"attn_mask_type": "padding"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("call", CALLS)
def test_views_have_the_values_of_their_copies(dtype, layout, call, deterministic):
    torch.use_deterministic_algorithms(deterministic)  # the fixture of all suites restores it
    options, lengths = dict(CALLS[call]), torch.tensor([0, 40, 73], dtype=torch.int32, device="cuda")
    if call in ("padding", "masks"):
        options |= {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths if call == "padding" else lengths.clone()}
    shape = (2, 40) if layout == "bshd" else (40, 2)
    whole = [torch.randn(*shape, n, 64, device="cuda").to(dtype) for n in (4, 2, 2)]
    module = te.DotProductAttention(4, 64, 2, qkv_format=layout)
    for recompute in (False, True):
        for which, view in enumerate(VIEWS * 3):
            tensors = list(whole)
            tensors[which % 3] = view(whole[which % 3])
            wanted = gradients(lambda *t: module(*t, **options), [t.contiguous() for t in tensors])
            leaves = [t.detach().requires_grad_() for t in tensors]
            out = module(*leaves, **options, checkpoint_core_attention=recompute)
            generator = torch.Generator().manual_seed(3)  # that of gradients()
            dout = torch.randn(out.shape, generator=generator).bfloat16().to(out)
            for place in (lambda t: t, odd, within):
                got = torch.autograd.grad(out, leaves, place(dout), retain_graph=True)
                check_close([out.detach(), *got], wanted, dtype, f"{view.__name__} {place.__name__}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS)
def test_an_empty_batch(device, dtype, call):
    torch.use_deterministic_algorithms(False)  # so that a GPU takes its fused kernels
    options, nothing = dict(CALLS[call]), torch.zeros(1, dtype=torch.int32, device=device)
    if "padding" in options["attn_mask_type"]:
        options |= {"cu_seqlens_q": nothing, "cu_seqlens_kv": nothing if call == "padding" else nothing.clone()}
    for layout, shape in (("bshd", (0, 9)), ("sbhd", (9, 0))):
        tensors = [torch.randn(*shape, n, 64, device=device).to(dtype) for n in (4, 2, 2)]
        results = gradients(te.DotProductAttention(4, 64, 2, qkv_format=layout).forward, tensors)
        assert results[0].shape == (*shape, 256) and not any(t.numel() for t in results)
        out = te.DotProductAttention(4, 64, 2, qkv_format=layout)(*tensors, **options)
        assert out.shape == (*shape, 256)
