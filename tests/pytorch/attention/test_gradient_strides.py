# The gradient that cuDNN's backward reads has the strides of its result, at an address of whole 16 bytes, eager and
# compiled, whatever the model does with the result. On a CPU a stand-in takes its place, which checks both.
import contextlib

import pytest
import torch
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.backends import attention_path
from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

from .batch_stand_in import batch_kernels_on_the_cpu, inductor_as_on_a_gpu
from .packed_cases import check_close
from .test_alignment import odd, within

HEADS, GROUPS, WIDTH = 4, 2, 16
# Functions of the result: each has its own order of the incoming gradient.
CONSUMERS = {
    "itself": lambda out: out.float().square(),
    "sum": lambda out: out.sum(),
    "turned": lambda out: (out.transpose(0, 1).contiguous().float() ** 2).cumsum(0),
    "by feature": lambda out: out.permute(2, 0, 1).contiguous().sin(),
    "a part": lambda out: out[..., 3:].float().exp(),
    "beside another": lambda out: torch.cat((out[..., :1], out), -1).float().cos(),
    "a product": lambda out: out.flatten(0, 1).t().float() @ out.flatten(0, 1).float(),
}


@contextlib.contextmanager
def cudnn_on_the_cpu(monkeypatch):
    """DotProductAttention on a CPU takes the path of a GPU, and cuDNN's stand-in on it."""
    choose = dot_product_attention.attention_path

    def path_of_a_gpu(device, *args, **options):
        return choose(torch.device("cuda"), *args, **options)

    def by_cudnn(q, k, v, attn_mask, *, dropout_p, is_causal, scale, enable_gqa):
        assert attn_mask is None and dropout_p == 0.0
        if not enable_gqa:
            assert q.shape[1] == k.shape[1]
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, False, scale=scale
        )[0]

    monkeypatch.setattr(dot_product_attention, "attention_path", path_of_a_gpu)
    monkeypatch.setattr(dot_product_attention, "scaled_dot_product_attention", by_cudnn)
    with batch_kernels_on_the_cpu():
        yield


@pytest.fixture(autouse=True)
def kernels(request, monkeypatch):
    torch.use_deterministic_algorithms(False)  # the fixture of all suites restores it
    torch._dynamo.reset()
    on_cpu = getattr(request.node, "callspec", None) and request.node.callspec.params.get("device") == "cpu"
    with cudnn_on_the_cpu(monkeypatch) if on_cpu else contextlib.nullcontext():
        yield
    torch._dynamo.reset()


def inputs(device, layout, *, dtype=torch.bfloat16, views=False):
    shape, made = (3, 10) if layout == "bshd" else (10, 3), []
    if views:
        packed = torch.randn(*shape, HEADS + 2 * GROUPS, WIDTH).to(device, dtype)
        made = packed.split((HEADS, GROUPS, GROUPS), dim=2)
    else:
        made = [torch.randn(*shape, n, WIDTH).to(device, dtype) for n in (HEADS, GROUPS, GROUPS)]
    return [t.detach().requires_grad_() for t in made]


def step(call, consumer, tensors):
    out = consumer(call(*tensors))
    generator = torch.Generator().manual_seed(5)
    dout = torch.randn(out.shape, generator=generator).to(out)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout)]


def exact(module, consumer, tensors):
    """By the plain backend in float64."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wide = [t.detach().double().requires_grad_() for t in tensors]
        turn = (1, 2, 0, 3) if module.qkv_format == "sbhd" else (0, 2, 1, 3)
        back = (2, 0, 1, 3) if module.qkv_format == "sbhd" else (0, 2, 1, 3)

        def call(*t):
            q, k, v = (x.permute(turn) for x in t)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.permute(back).flatten(2)

        return step(call, consumer, wide)


@pytest.mark.parametrize(
    "options, read",
    [
        ({}, "strides"),
        ({"mask": "arbitrary"}, "strides"),
        ({"dtype": torch.float32}, "address"),
        ({"window": (4, 0)}, "address"),
        ({"deterministic": True}, "address"),
        ({"away": ("NVTE_FUSED_ATTN",)}, "address"),
        ({"mask": "arbitrary", "bias": "post_scale_bias", "bias_grad": True}, "address"),
        ({"mask": "arbitrary", "deterministic": True}, ""),
        ({"device": "cpu"}, ""),
        ({"mask": "padding", "packed": True, "widest_head": 64}, ""),
    ],
    ids=str,
)
def test_the_gradient_that_a_path_reads(options, read):
    options = {"device": "cuda", "dtype": torch.bfloat16, "deterministic": False, "mask": "causal", **options}
    device = torch.device(options.pop("device"))
    assert attention_path(device, options.pop("dtype"), **options).gradient == read


BACKENDS = {"eager": None, "aot_eager": "aot_eager", "inductor": "inductor"}


def check(device, layout, backend, consumer, tensors):
    module = te.DotProductAttention(HEADS, WIDTH, GROUPS, qkv_format=layout)

    def whole(*t):
        return consumer(module(*t))

    run = whole if backend is None else torch.compile(whole, backend=backend, fullgraph=True)
    got = step(run, lambda out: out, tensors)
    check_close(got[1:], exact(module, consumer, tensors)[1:], torch.bfloat16, backend, factor=4)


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_functions_of_the_result(device, backend, layout, consumer):
    for views in (False, True) if backend == "eager" else (layout == "sbhd",):
        check(device, layout, BACKENDS[backend], CONSUMERS[consumer], inputs(device, layout, views=views))


@pytest.mark.parametrize("backend, layout", [("eager", "sbhd"), ("eager", "bshd"), ("inductor", "sbhd")])
def test_views_as_incoming_gradients(device, backend, layout):
    """They come to the result itself: of any strides and, unless the graph is compiled on a CPU, at any address."""
    module = te.DotProductAttention(HEADS, WIDTH, GROUPS, qkv_format=layout)
    run = module if backend == "eager" else torch.compile(module, backend=BACKENDS[backend], fullgraph=True)
    tensors = inputs(device, layout)
    out = run(*tensors)
    dout = torch.randn_like(out)
    turned = lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)  # noqa: E731
    views = [lambda t: t, within, lambda t: t[:, :, :1].expand_as(t), turned]
    if backend == "eager" or (device != "cpu" and backend == "inductor"):
        views.append(odd)
    for view in views:
        grad = view(dout)
        got = torch.autograd.grad(out, tensors, grad, retain_graph=True)
        wanted = torch.autograd.grad(out, tensors, grad.contiguous().clone(), retain_graph=True)
        for ours, theirs in zip(got, wanted, strict=True):
            if device == "cpu":
                assert_same_bits(ours, theirs)
            torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def test_a_compiled_graph_by_inductor(device):
    weight = torch.randn(HEADS * WIDTH, 3, device=device).bfloat16()
    turned = lambda out: out.permute(2, 1, 0).reshape(HEADS * WIDTH, -1).t() @ weight.to(out.dtype)  # noqa: E731
    check(device, "sbhd", "inductor", turned, inputs(device, "sbhd", views=True))


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_a_gradient_to_which_inductor_gives_other_strides(device, layout):
    """A gradient with two readers is in memory. Traced, it has the order of its first factor and of the result, and
    inductor gives it the order of most factors. An eager call has left a plan by the strides of the result."""
    tensors = inputs(device, layout)
    factors = [torch.randn(*tensors[0].shape[:2], HEADS * WIDTH).bfloat16().to(device) for _ in range(6)]
    factors = [t.transpose(0, 1).contiguous() for t in factors]
    shift = torch.randn(HEADS * WIDTH, device=device).bfloat16().requires_grad_()

    def consumer(out):
        turned = out.transpose(0, 1) + shift.to(out.dtype)  # whose gradient is a sum of out's
        for factor in factors:
            turned = turned * factor.to(out.dtype)
        return turned.transpose(0, 1)

    module = te.DotProductAttention(HEADS, WIDTH, GROUPS, qkv_format=layout)
    wanted = exact(module, consumer, tensors)[1:]
    check_close(step(module, consumer, tensors)[1:], wanted, torch.bfloat16, layout, factor=4)
    as_on_a_gpu = inductor_as_on_a_gpu() if device == "cpu" else contextlib.nullcontext()
    with as_on_a_gpu:
        check(device, layout, "inductor", consumer, tensors)
    check_close(step(module, consumer, tensors)[1:], wanted, torch.bfloat16, layout, factor=4)


def test_recomputed(device):
    module = te.DotProductAttention(HEADS, WIDTH, GROUPS, qkv_format="sbhd")
    tensors = inputs(device, "sbhd")
    consumer = CONSUMERS["turned"]
    got = step(lambda *t: module(*t, checkpoint_core_attention=True), consumer, tensors)
    check_close(got[1:], exact(module, consumer, tensors)[1:], torch.bfloat16, factor=4)


def test_compiled_autograd(device):
    """Its graph of an eager forward has the hook too."""
    module = te.DotProductAttention(HEADS, WIDTH, GROUPS, qkv_format="sbhd")
    tensors, consumer = inputs(device, "sbhd"), CONSUMERS["turned"]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        got = step(module, consumer, tensors)
    check_close(got[1:], exact(module, consumer, tensors)[1:], torch.bfloat16, factor=4)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_cudnn_keeps_its_plan(backend):
    """cuDNN computes these calls, and the plan of the first gradient serves those of other strides."""
    tensors = inputs("cuda", "sbhd")
    module = te.DotProductAttention(HEADS, WIDTH, GROUPS)
    rows = te.explain(module, *tensors).rows
    assert [row.path for row in rows if row.op == "attention"] == ["cuDNN"]
    for name in ("turned", "sum", "itself", "by feature", "turned"):
        check("cuda", "sbhd", BACKENDS[backend], CONSUMERS[name], tensors)
