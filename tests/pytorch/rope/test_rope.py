"""Rotary position embedding: values and gradients against a float64 oracle, views and layouts, the packed projection,
compile, the angles' module, bad input."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional
from transformer_engine.pytorch.attention.rope import (
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
    apply_rotary_to_packed,
)

from .cases import angles, draw

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALF_UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float32: 2.0**-150, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}

# seq, batch, q heads, k heads (None: no k), head_dim, rot_dim
SHAPES = (
    (7, 3, 8, 2, 64, 64),
    (5, 2, 4, 4, 128, 32),
    (6, 1, 3, 1, 20, 6),
    (4, 2, 5, None, 33, 32),
    (1, 1, 1, 1, 2, 2),
    (3, 2, 2, 1, 8, 0),
    (0, 2, 4, 2, 16, 16),
    (3, 0, 4, 2, 16, 16),
)


@pytest.fixture(autouse=True)
def poisoned():
    """torch fills what at::empty returns with NaN while algorithms are deterministic: an element not written shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def heads_first(t, tensor_format):
    return t if tensor_format == "sbhd" else t.transpose(0, 1)


def rotate_half(x, interleaved):
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return torch.cat((-x[..., x.size(-1) // 2 :], x[..., : x.size(-1) // 2]), -1)


def oracle(t, freqs, tensor_format="sbhd", start=None, interleaved=False):
    """Float64 (float64 in: differentiable)."""
    t = heads_first(t.double(), tensor_format)
    rows = torch.arange(t.size(0), device=t.device)[:, None] + (0 if start is None else start)
    a = freqs.double().flatten(1)[rows.expand(t.size(0), t.size(1))][:, :, None]
    rot = freqs.size(-1)
    y = t[..., :rot] * a.cos() + rotate_half(t[..., :rot], interleaved) * a.sin()
    return heads_first(torch.cat((y, t[..., rot:]), -1), tensor_format)


def expect_near(got, want, x, rot_dim, interleaved):
    """|got - want| <= 4 u (|x| + |partner|) + half a unit of the dtype, u = 2^-24.

    sin and cos of the float32 angle are within 2 u, the product and the sum round by u each (arithmetic in float32);
    the transpose has the same terms, so the bound serves gradients with x = dy. Features without rotation are exact."""
    size = x.double().abs()
    size = size[..., :rot_dim] + rotate_half(x.double()[..., :rot_dim], interleaved).abs()
    before = 4 * 2.0**-24 * size
    bound = before + HALF_UNIT[got.dtype] * (want[..., :rot_dim].abs() + before) + SMALLEST[got.dtype]
    error = (got.double() - want).abs()
    assert bool((error[..., :rot_dim] <= bound).all()), (error[..., :rot_dim] / bound).max()
    assert bool((error[..., rot_dim:] == 0).all())


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("tensor_format", ("sbhd", "bshd"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("starts", (False, True))
def test_values_and_gradients(device, shape, dtype, tensor_format, interleaved, starts):
    seq, batch, q_heads, k_heads, head_dim, rot_dim = shape
    freqs = angles(device, seq + 4, rot_dim)
    start = (torch.arange(batch, dtype=torch.int32, device=device) * 3) % 5 if starts else None
    options = {"tensor_format": tensor_format, "interleaved": interleaved}
    inputs, grads = [], []
    for i, heads in enumerate((q_heads, k_heads)):
        if heads is not None:
            size = (seq, batch, heads, head_dim) if tensor_format == "sbhd" else (batch, seq, heads, head_dim)
            inputs.append(draw(device, *size, dtype=dtype, seed=2 + i).requires_grad_())
            grads.append(draw(device, *size, dtype=dtype, seed=4 + i))
    outputs = functional.rope(*inputs, freqs=freqs, start_positions=start, **options)
    got = torch.autograd.grad(outputs, inputs, grads)
    assert len(outputs) == len(inputs)
    for x, y, dy, dx in zip(inputs, outputs, grads, got, strict=True):
        assert y.is_contiguous() and dx.is_contiguous() and y.dtype == dx.dtype == dtype
        exact = x.detach().double().requires_grad_()
        want = oracle(exact, freqs, start=start, **options)
        expect_near(y.detach(), want.detach(), x.detach(), rot_dim, interleaved)
        (dx_want,) = torch.autograd.grad(want, exact, dy.double())
        expect_near(dx, dx_want, dy, rot_dim, interleaved)


def test_reads_any_view(device):
    """q and k as slices of one projection, heads before sequence, a last dimension that is not dense."""
    freqs = angles(device, 6, 16)
    packed = draw(device, 6, 2, 3, 4 * 16, dtype=torch.bfloat16)
    q, k = packed[..., :32].unflatten(-1, (2, 16)).flatten(2, 3), packed[..., 32:48]
    transposed = draw(device, 2, 5, 6, 16, dtype=torch.bfloat16).permute(2, 0, 1, 3)
    scattered = draw(device, 6, 2, 16, 5, dtype=torch.bfloat16).transpose(2, 3)
    for x in (q, k, transposed, scattered, k[:, :, :1].expand(6, 2, 7, 16), k[::2], k[1:, 1:]):
        (y,) = functional.rope(x, freqs=freqs)
        (want,) = functional.rope(x.contiguous(), freqs=freqs)
        assert torch.equal(y, want)
    both = functional.rope(k, transposed, freqs=freqs)
    assert torch.equal(both[1], functional.rope(transposed, freqs=freqs)[0])


def test_reads_any_angles(device):
    """Angles without their middle dimensions, longer than the sequence, strided, one row for all positions."""
    x = draw(device, 6, 2, 3, 16)
    wide = angles(device, 9, 32)
    (want,) = functional.rope(x, freqs=wide[:, :, :, :16].contiguous())
    for freqs in (wide[..., :16], wide[:, 0, 0, :16], wide[:6, :, :, :16]):
        assert torch.equal(functional.rope(x, freqs=freqs)[0], want)
    one = wide[:1, :, :, :16].expand(6, 1, 1, 16)
    assert torch.equal(functional.rope(x, freqs=one)[0], functional.rope(x, freqs=one.contiguous())[0])
    columns = wide.transpose(0, 3)[:16, :, :, :8]  # neither dimension dense
    assert torch.equal(
        functional.rope(x[..., :8], freqs=columns)[0], functional.rope(x[..., :8], freqs=columns.contiguous())[0]
    )


def test_gradients_of_any_layout(device):
    freqs = angles(device, 5, 16)
    q, k = (draw(device, 5, 2, 4, 16, seed=s).requires_grad_() for s in (1, 2))
    y = functional.rope(q, k, freqs=freqs)
    (y[0].sum() + y[1].sum()).backward()  # gradients with strides of 0
    ones = torch.autograd.grad(functional.rope(q, freqs=freqs), q, torch.ones_like(q))[0]
    assert torch.equal(q.grad, ones) and torch.equal(k.grad, ones)
    dy = draw(device, 4, 16, 5, 2, seed=3).permute(2, 3, 0, 1)
    strided = torch.autograd.grad(functional.rope(q, freqs=freqs), q, dy)[0]
    assert torch.equal(strided, torch.autograd.grad(functional.rope(q, freqs=freqs), q, dy.contiguous())[0])


def test_unneeded_gradients(device):
    freqs = angles(device, 5, 16)
    q, k = (draw(device, 5, 2, 4, 16, seed=s).requires_grad_() for s in (1, 2))
    both = torch.autograd.grad(functional.rope(q, k, freqs=freqs), (q, k), (q.detach(), k.detach()))
    y = functional.rope(q, k, freqs=freqs)
    assert torch.equal(torch.autograd.grad(y[1], k, k.detach())[0], both[1])  # q's output unused
    y = functional.rope(q.detach(), k, freqs=freqs)
    assert torch.equal(torch.autograd.grad(y[1], k, k.detach())[0], both[1])  # q needs none
    y = functional.rope(q, k.detach(), freqs=freqs)
    assert torch.equal(torch.autograd.grad(y[0], q, q.detach())[0], both[0])
    assert not any(t.requires_grad for t in functional.rope(q.detach(), k.detach(), freqs=freqs))


@pytest.mark.parametrize("own_k_freqs", (False, True))
@pytest.mark.parametrize("tensor_format", ("sbhd", "bshd"))
@pytest.mark.parametrize("heads, groups", (((3, 1, 1), 2), ((4, 2, 2), 1), ((1, 1, 1), 4), ((2, 1, 0), 2)))
def test_packed_is_its_parts(device, tensor_format, heads, groups, own_k_freqs):
    """Bit for bit the op on each slice, forward and backward, whichever of the gradients arrive."""
    head_dim, seq, batch = 16, 5, 2
    q_freqs = angles(device, seq, 8)
    k_freqs = angles(device, seq, 8, seed=9) if own_k_freqs else q_freqs
    size = (seq, batch) if tensor_format == "sbhd" else (batch, seq)
    qkv = draw(device, *size, groups, sum(heads) * head_dim, dtype=torch.bfloat16).requires_grad_()
    start = torch.zeros(batch, dtype=torch.int32, device=device)
    options = {"start_positions": start, "tensor_format": tensor_format}
    got = functional.rope_qkv(qkv, heads=heads, q_freqs=q_freqs, k_freqs=k_freqs, **options)
    parts = [
        part.unflatten(-1, (-1, head_dim)).flatten(2, 3) if part.size(-1) else part.new_empty(*size, 0, head_dim)
        for part in qkv.split([n * head_dim for n in heads], -1)
    ]
    want = (
        functional.rope(parts[0], freqs=q_freqs, **options)[0],
        functional.rope(parts[1], freqs=k_freqs, **options)[0],
        parts[2],
    )
    for ours, part in zip(got, want, strict=True):
        assert torch.equal(ours, part) and ours.is_contiguous()
    for arrive in ((0, 1, 2), (0,), (1,), (2,), (0, 2)):
        if heads[2] == 0 and 2 in arrive:
            continue
        grads = [draw(device, *got[i].shape, dtype=torch.bfloat16, seed=20 + i) for i in arrive]
        ours = torch.autograd.grad([got[i] for i in arrive], qkv, grads, retain_graph=True)[0]
        theirs = torch.autograd.grad([want[i] for i in arrive], qkv, grads, retain_graph=True)[0]
        assert torch.equal(ours, theirs) and ours.is_contiguous(), arrive


def test_packed_entries(device):
    """The two forms that modules call: groups of [q.. k v], and [all of q | all of k | all of v]."""
    freqs, other = angles(device, 5, 16), angles(device, 5, 16, seed=9)
    qkv = draw(device, 5, 2, 3, 4 * 16)
    got = apply_fused_qkv_rotary_pos_emb(qkv, freqs, other, [32, 16, 16])
    assert [t.shape[2:] for t in got] == [(6, 16), (3, 16), (3, 16)]
    assert torch.equal(got[0], apply_rotary_pos_emb(qkv[..., :32].reshape(5, 2, 6, 16), freqs, fused=True))
    assert torch.equal(got[1], apply_rotary_pos_emb(qkv[..., 32:48], other, fused=True))
    assert torch.equal(got[2], qkv[..., 48:])

    flat = draw(device, 2, 5, (4 + 2 + 2) * 16)
    for pair in (freqs, (freqs, other)):
        got = apply_rotary_to_packed(flat, pair, heads=(4, 2), tensor_format="bshd")
        q, k, v = (part.unflatten(-1, (-1, 16)) for part in flat.split((64, 32, 32), -1))
        k_freqs = other if isinstance(pair, tuple) else freqs
        assert torch.equal(got[0], apply_rotary_pos_emb(q, freqs, "bshd", fused=True))
        assert torch.equal(got[1], apply_rotary_pos_emb(k, k_freqs, "bshd", fused=True))
        assert torch.equal(got[2], v)


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("tensor_format", ("sbhd", "bshd"))
@pytest.mark.parametrize("starts", (False, True))
def test_unfused(device, tensor_format, interleaved, starts):
    """torch's operations against the oracle; they alone give freqs a gradient."""
    size = (5, 3, 4, 16) if tensor_format == "sbhd" else (3, 5, 4, 16)
    x = draw(device, *size, dtype=torch.bfloat16)
    freqs = angles(device, 9, 8)
    start = torch.tensor([4, 0, 2], dtype=torch.int32, device=device) if starts else None
    y = apply_rotary_pos_emb(x, freqs, tensor_format, start, interleaved)
    expect_near(y, oracle(x, freqs, tensor_format, start, interleaved), x, 8, interleaved)
    freqs.requires_grad_()
    apply_rotary_pos_emb(x, freqs, tensor_format, start, interleaved).sum().backward()
    assert freqs.grad.abs().sum() > 0


@pytest.mark.parametrize("call", ("rope", "rope_qkv", "module"))
def test_compile(device, call):
    """fullgraph, dynamic shapes, bit for bit eager, gradients too."""
    freqs = angles(device, 16, 8)
    start = torch.tensor([3, 0], dtype=torch.int32, device=device)
    rotary = te.RotaryPositionEmbedding(16).to(device)

    def step(x):
        if call == "rope":
            return functional.rope(x[..., :16], x[..., 16:32], freqs=freqs, start_positions=start)
        if call == "rope_qkv":
            return functional.rope_qkv(x, heads=(1, 1, 1), q_freqs=freqs, interleaved=True)
        return [apply_rotary_pos_emb(x[..., :16], rotary(x.size(0)), fused=True)]

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq in (4, 7):
        results = []
        for function in (step, compiled):
            x = draw(device, seq, 2, 3, 48).requires_grad_()
            y = function(x)
            results.append([*y, *torch.autograd.grad(y, x, [draw(device, *t.shape, seed=5) for t in y])])
        for eager, traced in zip(*results, strict=True):
            assert torch.equal(eager, traced)


def test_opcheck(device):
    freqs, start = angles(device, 8, 8), torch.tensor([1, 0], dtype=torch.int32, device=device)
    q, k = draw(device, 5, 2, 4, 16).requires_grad_(), draw(device, 5, 2, 2, 16).requires_grad_()
    qkv = draw(device, 2, 5, 3, 64).requires_grad_()
    ops = torch.ops.te
    for args in ((q, k, freqs, start, False, False), (q, None, freqs, None, False, True)):
        torch.library.opcheck(ops.rope.default, args)
        torch.library.opcheck(ops.rope_fwd.default, (*(a.detach() if a is q or a is k else a for a in args), True))
    torch.library.opcheck(ops.rope_qkv.default, (qkv, freqs, None, start, [2, 1, 1], True, False))
    packed = (freqs, freqs.clone(), None, [2, 1, 1], True, False)
    torch.library.opcheck(ops.rope_qkv_fwd.default, (qkv.detach(), *packed))
    dq, dv = draw(device, 2, 5, 6, 16), draw(device, 2, 5, 3, 16)
    torch.library.opcheck(ops.rope_qkv_bwd.default, (dq, None, dv, *packed))


def test_keeps_the_angles_alone(device):
    freqs, start = angles(device, 8, 8), torch.tensor([1, 0], dtype=torch.int32, device=device)
    q, k = (draw(device, 5, 2, 4, 16).requires_grad_() for _ in range(2))
    qkv = draw(device, 5, 2, 1, 48).requires_grad_()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.data_ptr()), t)[1], lambda t: t):
        functional.rope(q, k, freqs=freqs, start_positions=start)
        functional.rope_qkv(qkv, heads=(1, 1, 1), q_freqs=freqs, start_positions=start)
    assert set(seen) == {freqs.data_ptr(), start.data_ptr()}


def test_autocast_changes_nothing(device):
    freqs, x = angles(device, 4, 16), draw(device, 4, 2, 2, 16)
    (want,) = functional.rope(x, freqs=freqs)
    with torch.autocast(device, dtype=torch.bfloat16):
        (y,) = functional.rope(x, freqs=freqs)
        (low,) = functional.rope(x.bfloat16(), freqs=freqs)
    assert y.dtype == torch.float32 and torch.equal(y, want) and low.dtype == torch.bfloat16


def test_double_backward_is_refused(device):
    q = draw(device, 4, 2, 2, 16).requires_grad_()
    y = functional.rope(q, freqs=angles(device, 4, 16))[0]
    with pytest.raises(NotImplementedError, match="rope: double backward"):
        torch.autograd.grad(y.sum(), q, create_graph=True)


def spoiled(name, value):
    """Good arguments of rope with one spoiled, by a function of the good one."""
    arguments = {"q": torch.ones(4, 2, 3, 16), "k": torch.ones(4, 2, 1, 16), "freqs": torch.ones(6, 1, 1, 8)}
    return arguments | {name: value(arguments.get(name))}


BAD = (
    ("q", lambda q: q[0], ValueError, "'q' has shape"),
    ("q", lambda q: q.double(), ValueError, "dtype"),
    ("q", lambda q: q.int(), ValueError, "dtype"),
    ("k", lambda k: k[:3], ValueError, "'k' has shape"),
    ("k", lambda k: k[..., :8], ValueError, "'k' has shape"),
    ("k", lambda k: k.bfloat16(), ValueError, "'k' has dtype"),
    ("k", lambda k: k.to("meta"), ValueError, "'k' is on meta"),
    ("freqs", lambda f: f[:3], ValueError, "'freqs' has 3 positions"),
    ("freqs", lambda f: f.int(), ValueError, "'freqs' has dtype"),
    ("freqs", lambda f: f.to("meta"), ValueError, "'freqs' is on meta"),
    ("freqs", lambda f: f[0], ValueError, "'freqs' has shape"),
    ("freqs", lambda f: f[..., :7], ValueError, "rot_dim' is 7"),
    ("freqs", lambda f: f.expand(6, 1, 1, 8).repeat(1, 1, 1, 3), ValueError, "rot_dim' is 24"),
    ("freqs", lambda f: f.requires_grad_(), NotImplementedError, "'freqs' requires a gradient"),
    ("start_positions", lambda _: torch.zeros(3, dtype=torch.int32), ValueError, "'start_positions'"),
    ("start_positions", lambda _: torch.zeros(2, dtype=torch.int64), ValueError, "'start_positions'"),
)


@pytest.mark.parametrize("name, value, error, message", BAD)
def test_bad_input_is_named(device, name, value, error, message):
    def to_device(t):
        return t if t is None or t.is_meta else t.detach().to(device).requires_grad_(t.requires_grad)

    arguments = {key: to_device(t) for key, t in spoiled(name, value).items()}
    q, k = arguments.pop("q"), arguments.pop("k")
    with pytest.raises(error, match=message):
        functional.rope(q, k, **arguments)
    good = {key: to_device(t) for key, t in spoiled("k", lambda k: k).items()}
    functional.rope(good.pop("q"), good.pop("k"), **good)


def test_bad_packed_input_is_named(device):
    freqs, qkv = angles(device, 4, 8), draw(device, 4, 2, 3, 64)
    for heads in ((2, 1), (0, 1, 1), (3, 1, 1)):
        with pytest.raises(ValueError, match=r"rope: argument '(heads|qkv)'"):
            functional.rope_qkv(qkv, heads=heads, q_freqs=freqs)
    with pytest.raises(ValueError, match="'k_freqs' has 3 positions"):
        functional.rope_qkv(qkv, heads=(2, 1, 1), q_freqs=freqs, k_freqs=freqs[:3])
    with pytest.raises(ValueError, match=r"argument 'k_freqs' is .*, wanted "):
        apply_fused_qkv_rotary_pos_emb(qkv, freqs, angles(device, 4, 4), [32, 16, 16])
    for split in ([32, 16], [32, 16, 8], [40, 16, 8], [64, 0, 0]):
        with pytest.raises(ValueError, match="'qkv_split_arg_list'"):
            apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, split)


@pytest.mark.parametrize("fused", (False, True))
def test_what_has_not_landed_is_named(device, fused):
    x, freqs = draw(device, 4, 2, 3, 16), angles(device, 4, 16)
    with pytest.raises(NotImplementedError, match="tensor_format"):
        apply_fused_qkv_rotary_pos_emb(x, freqs, freqs, [16, 0, 0], tensor_format="thd")
    with pytest.raises(ValueError, match="tensor_format"):
        apply_rotary_pos_emb(x, freqs, "hbsd", fused=fused)
    with pytest.raises(ValueError, match="'freqs' has 2 positions"):
        apply_rotary_pos_emb(x, freqs[:2], fused=fused)


@pytest.mark.gpu
def test_graph_replay_is_eager():
    freqs, q = angles("cuda", 64, 128), draw("cuda", 64, 2, 8, 128, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    functional.rope(q, freqs=freqs)
    with torch.cuda.graph(graph):
        (y,) = functional.rope(q, freqs=freqs)
    q.copy_(draw("cuda", 64, 2, 8, 128, dtype=torch.bfloat16, seed=3))
    graph.replay()
    assert torch.equal(y, functional.rope(q, freqs=freqs)[0])
