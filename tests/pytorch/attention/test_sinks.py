# Sinks, soft caps, the maximum logit, ALiBi and biases by chunked attention, dense and packed, against float64; the
# state of a learned sink.
import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional
from transformer_engine.pytorch.attention.masks import default_slopes

from .packed_cases import Packed, check_close, gradients, reference

PACKED = Packed([5, 1, 0, 70, 4], [9, 3, 2, 600, 0], gap=2)
SINK = [0.5, -2.0, 3.0, 0.0]


def with_sink(module, device):
    module.to(device)
    with torch.no_grad():
        module.softmax_offset.copy_(torch.tensor(SINK))
    return module


def against_reference(kind, dtype, device, mask="padding_causal", **options):
    """out, and the gradients of q, k, v and of a learned sink."""
    module = te.DotProductAttention(4, 16, 2, qkv_format="thd", attn_mask_type=mask, softmax_type=kind, device=device)
    tensors, learned = PACKED.tensors(4, 2, 16, 16, dtype, device), kind == "learnable"
    sink = {"vanilla": None, "off-by-one": torch.zeros(4)}.get(kind, torch.tensor(SINK))

    def ours(*t):
        if learned:
            with_sink(module, device)
        return module(*t, **PACKED.arguments(device), **options)

    exact_options = {"mask": mask, "softcap": options.get("softcap", 0.0)}
    if options.get("core_attention_bias_type") == "alibi":
        exact_options["slopes"] = default_slopes(4, torch.device("cpu"))
    got = gradients(ours, tensors)
    exact = gradients(lambda *t: reference(*t, PACKED, sink=sink, **exact_options)[0], [t.double() for t in tensors])
    check_close(got, exact, dtype, f"{kind} {options}")
    if learned:
        module(*tensors, **PACKED.arguments(device), **options).float().square().sum().backward()
        out, _ = reference(*tensors, PACKED, sink=(leaf := sink.clone().requires_grad_()), **exact_options)
        out.square().sum().backward()
        # the loss squares the rounded out: one more rounding of each term
        check_close([module.softmax_offset.grad * 1], [leaf.grad], torch.float32, "sink", dtype)


@pytest.mark.parametrize("kind", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packed_sinks_match_the_reference(device, kind, dtype):
    against_reference(kind, dtype, device)
    against_reference(kind, dtype, device, softcap=1.5)
    against_reference(kind, dtype, device, mask="padding_causal_bottom_right", core_attention_bias_type="alibi")


DENSE = {
    "causal": {},
    "padding": {"lengths": ([7, 3, 0], [9, 4, 2])},
    "padding_causal_bottom_right": {"lengths": ([7, 3, 0], [9, 4, 2])},
}


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("mask", DENSE)
def test_dense_equals_packed(device, layout, mask):
    """A batch with a sink and a cap, by lengths or by masks, is the packed call over its tokens."""
    n_q, n_kv = DENSE[mask].get("lengths", ([7] * 3, [9] * 3))
    q, k, v = (torch.randn(3, n, h, 16, device=device) for n, h in ((7, 4), (9, 2), (9, 2)))
    packed = Packed(n_q, n_kv)
    alone = [torch.cat([t[i, :n] for i, n in enumerate(ns)]) for t, ns in ((q, n_q), (k, n_kv), (v, n_kv))]
    options = {"softmax_type": "learnable", "device": device}
    thd_mask = mask if "padding" in mask else "padding_causal"
    module = with_sink(te.DotProductAttention(4, 16, 2, attn_mask_type=mask, qkv_format=layout, **options), device)
    other = with_sink(te.DotProductAttention(4, 16, 2, attn_mask_type=thd_mask, qkv_format="thd", **options), device)
    wanted = other(*alone, softcap=2.0, **packed.arguments(device))
    own = [t if layout == "bshd" else t.transpose(0, 1).contiguous() for t in (q, k, v)]
    calls = [{}]
    if "padding" in mask:
        masks = tuple(
            (torch.arange(s) >= torch.tensor(n)[:, None])[:, None, None].to(device) for s, n in ((7, n_q), (9, n_kv))
        )
        calls = [packed.arguments(device), {"attention_mask": masks}]
    for call in calls:
        out = module(*own, softcap=2.0, **call)
        out = out if layout == "bshd" else out.transpose(0, 1)
        for i, rows in enumerate(packed.sequences(0)):
            torch.testing.assert_close(out[i, : n_q[i]], wanted[rows], rtol=1e-5, atol=1e-6)
            assert not out[i, n_q[i] :].any()


@pytest.mark.parametrize("shape", [(3, 4, 7, 9), (1, 4, 7, 9), (3, 1, 1, 9)])
@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
def test_a_bias_gets_its_gradient(device, kind, shape):
    q, k, v = (torch.randn(3, n, h, 16, device=device) for n, h in ((7, 4), (9, 2), (9, 2)))
    bias, hidden = torch.randn(shape, device=device), torch.rand(3, 1, 7, 9, device=device) < 0.3
    hidden[0, 0, 2] = True  # a query without keys
    module = te.DotProductAttention(4, 16, 2, qkv_format="bshd", attn_mask_type="arbitrary", softmax_type="off-by-one")

    def ours(q, k, v, bias):
        options = {"core_attention_bias_type": kind, "core_attention_bias": bias}
        return module(q, k, v, hidden, **options)

    def exact(q, k, v, bias):
        k, v = (t.repeat_interleave(2, 2) for t in (k, v))
        added = bias * (0.25 if kind == "pre_scale_bias" else 1.0)
        s = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25 + added
        s = s.masked_fill(hidden.to(s.device), -torch.inf)
        p = torch.exp(s) / (1 + torch.exp(s).sum(-1, keepdim=True))
        return torch.einsum("bhqk,bkhd->bqhd", p, v).flatten(2)

    inputs = (q, k, v, bias)
    check_close(gradients(ours, inputs), gradients(exact, [t.double() for t in inputs]), torch.float32, kind)


def test_slopes_get_their_gradient(device):
    q, k, v = (t.double() for t in PACKED.tensors(4, 2, 16, 16, torch.float32, device))
    slopes = torch.rand(4, device=device)

    def ours(slopes):
        rows = PACKED.arguments(device)
        return functional.attention(q, k, v, layout="thd", scale=0.25, window=(-1, 0), alibi_slopes=slopes, **rows)[0]

    def exact(slopes):
        return reference(q, k, v, PACKED, mask="padding_causal", slopes=slopes)[0].view(-1, 4, 16)

    got, wanted = (torch.autograd.grad(f(s := slopes.clone().requires_grad_()).sum(), s)[0] for f in (ours, exact))
    check_close([got], [wanted.cpu()], torch.float32)


def test_the_log_sum_exp_is_returned_with_the_sink(device):
    """Its gradient too: merged parts go through it."""
    q, k, v = (torch.randn(1, n, 2, 8, dtype=torch.float64, device=device) for n in (3, 5, 5))
    sink = torch.tensor([0.3, -1.0], device=device)

    def ours(q, k, v):
        return functional.attention(q, k, v, scale=0.5, sink=sink)[1]

    def exact(q, k, v):
        s = torch.einsum("bqhd,bkhd->bqhk", q, k) * 0.5
        return torch.cat((s, sink.double().view(1, 1, 2, 1).expand(1, 3, 2, 1)), -1).logsumexp(-1) + 0 * v.sum()

    check_close(gradients(ours, (q, k, v)), gradients(exact, (q, k, v)), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_logit(device, dtype):
    """Before the sink and after the cap; of seen scores alone; without a gradient."""
    tensors = PACKED.tensors(4, 2, 16, 16, dtype, device, 1e4)
    for kind, cap in (("vanilla", 0.0), ("off-by-one", 0.8)):
        options = {"softmax_type": kind, "return_max_logit": True, "attn_mask_type": "padding_causal"}
        module = te.DotProductAttention(4, 16, 2, qkv_format="thd", **options)
        q = tensors[0].requires_grad_()
        out, most = module(q, *tensors[1:], softcap=cap, **PACKED.arguments(device))
        _, exact = reference(q, *tensors[1:], PACKED, mask="padding_causal", softcap=cap)
        assert most.shape == (4,) and most.dtype == dtype and not most.requires_grad and out.requires_grad
        check_close([most], [exact], dtype)


def test_a_sink_is_a_key_without_a_value(device):
    """Bits of zero sinks are off-by-one's; one far below every score is none."""
    tensors = PACKED.tensors(4, 2, 16, 16, torch.float32, device)
    made = {
        kind: te.DotProductAttention(
            4, 16, 2, qkv_format="thd", attn_mask_type="padding", softmax_type=kind, device=device
        )
        for kind in ("vanilla", "off-by-one", "learnable")
    }
    out = {kind: module(*tensors, **PACKED.arguments(device)) for kind, module in made.items()}
    assert_same_bits(out["learnable"], out["off-by-one"])
    assert not torch.equal(out["vanilla"], out["off-by-one"])
    made["learnable"].softmax_offset.data.fill_(-1e30)
    assert_same_bits(made["learnable"](*tensors, **PACKED.arguments(device)), out["vanilla"])


def test_a_sink_of_minus_infinity_is_none(device):
    """Queries without keys among them: zeros, and no NaN in any gradient."""
    tensors = PACKED.tensors(4, 2, 16, 16, torch.float32, device)
    call = {"layout": "thd", "scale": 0.25, **PACKED.arguments(device)}
    sink = torch.full((4,), -torch.inf, device=device)
    got = gradients(lambda q, k, v, a: functional.attention(q, k, v, sink=a, **call)[0], [*tensors, sink])
    wanted = gradients(lambda q, k, v: functional.attention(q, k, v, **call)[0], tensors)
    for ours, exact in zip(got[:4], wanted, strict=True):
        assert_same_bits(ours, exact)
    assert not got[4].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_has_no_effect(device, dtype):
    tensors = PACKED.tensors(4, 2, 16, 16, torch.float32, device)
    options = {"qkv_format": "thd", "attn_mask_type": "padding", "softmax_type": "off-by-one"}
    wanted = te.DotProductAttention(4, 16, 2, **options)(*tensors, **PACKED.arguments(device))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        out = te.DotProductAttention(4, 16, 2, **options)(*tensors, **PACKED.arguments(device))
    finally:
        torch.set_default_dtype(before)
    assert_same_bits(out, wanted)


# ---- state ----


@pytest.mark.parametrize("layer", [False, True])
def test_the_state_of_a_learned_sink(layer):
    if layer:
        options = {"device": "cpu", "hidden_dropout": 0.0, "attention_dropout": 0.0, "softmax_type": "learnable"}
        module, name = te.TransformerLayer(32, 64, 4, **options), "self_attention.core_attention.softmax_offset"
    else:
        module, name = te.DotProductAttention(4, 8, softmax_type="learnable", device="cpu"), "softmax_offset"
    state = module.state_dict()
    assert state[name].shape == (4,) and state[name].dtype == torch.float32 and not state[name].any()
    module.load_state_dict({**state, name: torch.tensor(SINK)})
    assert module.get_parameter(name).tolist() == SINK
    assert not [n for n in te.DotProductAttention(4, 8, softmax_type="off-by-one").state_dict() if "softmax" in n]


def test_a_sink_on_the_meta_device():
    layer = te.MultiheadAttention(32, 4, softmax_type="learnable", device="meta")
    assert layer.core_attention.softmax_offset.is_meta
    layer.core_attention.to_empty(device="cpu")
    layer.core_attention.reset_parameters()
    assert not layer.core_attention.softmax_offset.any() and layer.core_attention.softmax_offset.device.type == "cpu"


def test_a_model_in_16_bits_computes_with_its_sink_in_float32(device):
    module = te.DotProductAttention(4, 16, 2, softmax_type="learnable", device=device)
    with_sink(module, device)
    tensors = [torch.randn(6, 2, h, 16, device=device, dtype=torch.bfloat16) for h in (4, 2, 2)]
    wanted = module(*tensors)
    assert_same_bits(module.bfloat16()(*tensors), wanted)
    module(*tensors).sum().backward()
    assert module.softmax_offset.grad.dtype == torch.bfloat16 and module.softmax_offset.grad.any()


def test_heads_of_a_rank_have_their_sinks():
    module = te.DotProductAttention(4, 8, tp_size=2, softmax_type="learnable", device="cpu")
    assert module.softmax_offset.shape == (2,)
    assert module.softmax_offset.tensor_model_parallel and module.softmax_offset.partition_dim == 0


def test_refusals():
    q = torch.randn(5, 1, 4, 8)
    for options, call in (
        ({"softmax_type": "learnable"}, {}),
        ({"return_max_logit": True}, {}),
        ({}, {"softcap": 2.0}),
    ):
        module = te.DotProductAttention(4, 8, attention_dropout=0.5, **options).to("cpu")
        with refused(NotImplementedError, "DotProductAttention", "'attention_dropout'", "0.5"):
            module(q, q, q, **call)
        assert module.eval()(q, q, q, **call) is not None
    for cap in (-1.0, torch.inf, torch.nan):
        with refused(ValueError, "DotProductAttention", "'softcap'", str(cap)):
            te.DotProductAttention(4, 8)(q, q, q, softcap=cap)
    with refused(ValueError, "attention", "'sink'", "[3]", "[4]"):
        functional.attention(q, q, q, layout="sbhd", scale=1.0, sink=torch.zeros(3))


def test_explain_names_the_reason():
    q = torch.randn(5, 1, 4, 8)
    for options, call, word in (
        ({"softmax_type": "off-by-one"}, {}, "sink"),
        ({}, {"softcap": 2.0}, "soft-capped"),
        ({"return_max_logit": True}, {}, "largest logit"),
    ):
        rows = te.explain(te.DotProductAttention(4, 8, **options), q, q, q, **call).rows
        (row,) = [row for row in rows if row.op == "attention"]
        assert row.path == "chunked" and word in row.why_not_faster


@pytest.mark.parametrize("fill", [1e20, 3e38, -3e38])
def test_padding_of_a_batch_holds_anything(device, fill):
    """Its content changes no bit, forward and backward."""
    module = te.DotProductAttention(2, 8, qkv_format="bshd", attn_mask_type="padding", softmax_type="off-by-one")
    told = Packed([5, 2], [3, 6]).arguments(device)
    results = []
    for value in (0.0, fill):
        torch.manual_seed(0)
        tensors = [torch.randn(2, n, 2, 8, device=device) for n in (6, 7, 7)]
        for t, lengths in zip(tensors, ((5, 2), (3, 6), (3, 6)), strict=True):
            for i, n in enumerate(lengths):
                t[i, n:] = value
        results.append(gradients(lambda *t: module(*t, **told), tensors))
    for got, wanted in zip(*results, strict=True):
        assert_same_bits(got, wanted)


def test_a_large_sink_beside_padding(device):
    """Rows of padding have no log-sum-exp from which it could be taken; of the others nothing is left."""
    module = te.DotProductAttention(
        2, 8, qkv_format="bshd", attn_mask_type="padding", softmax_type="learnable", device=device
    )
    torch.nn.init.constant_(module.softmax_offset, 1000.0)
    tensors = [torch.randn(2, n, 2, 8, device=device) for n in (6, 7, 7)]
    results = gradients(lambda *t: module(*t, **Packed([5, 2], [3, 6]).arguments(device)), tensors)
    module(*tensors, **Packed([5, 2], [3, 6]).arguments(device)).sum().backward()
    assert not any(t.any() for t in (*results, module.softmax_offset.grad))


@pytest.mark.parametrize(
    "options, call",
    [({"softmax_type": "off-by-one"}, {}), ({"return_max_logit": True}, {}), ({}, {"softcap": 2.0})],
    ids=str,
)
def test_dropout_is_refused_by_name(device, options, call):
    """No kernel of functional.attention has it."""
    module = te.DotProductAttention(4, 16, attention_dropout=0.1, qkv_format="bshd", **options)
    q = torch.randn(1, 5, 4, 16, device=device)
    with refused(NotImplementedError, "DotProductAttention", "'attention_dropout'", "0.1", "eval()"):
        module(q, q, q, **call)
    module.eval()(q, q, q, **call)
