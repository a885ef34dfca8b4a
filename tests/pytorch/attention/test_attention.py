# te::attention as an op: its schemas and Meta functions, what it saves, what it refuses by itself.
import pytest
import torch
from module_contract import saved_shapes
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional

from .packed_cases import Packed

PATTERN, SCORES = [-1, 0, 0, -1, -1], [0.25, 1.0, 0.0]


def rows(**given):
    names = ("mask", "present_q", "present_kv", "q", "kv", "q_padded", "kv_padded")
    return [given.get(name) for name in names]


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_opcheck(device, layout):
    ops, floats = torch.ops.te, {"device": device}
    lengths = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    packed = layout == "thd"
    q, k, v = (torch.randn((5, h, 8) if packed else (2, 3, h, 8), **floats) for h in (4, 2, 2))
    bias = None if packed else torch.randn(1, 4, 3, 3, **floats)
    told = rows(q=lengths, kv=lengths) if packed else rows(present_q=torch.ones(2, 3, dtype=torch.bool, device=device))
    sink, slopes = torch.zeros(4, **floats), torch.ones(4, **floats)
    rest = (told, layout, "chunked", PATTERN, SCORES)
    leaves = [t if t is None else t.clone().requires_grad_() for t in (q, k, v, bias, slopes, sink)]
    torch.library.opcheck(ops.attention.default, (*leaves, *rest))
    torch.library.opcheck(ops.attention_fwd.default, (q, k, v, bias, slopes, sink, *rest))
    out, lse, _ = ops.attention_fwd(q, k, v, bias, slopes, sink, *rest)
    wanted = [True, True, True, bias is not None, True, True]
    arguments = (torch.randn_like(out), None, q, k, v, bias, slopes, sink, out, lse, *rest, wanted)
    torch.library.opcheck(ops.attention_bwd.default, arguments)


def test_saves_no_scores(device):
    """q, k, v and out of 300 tokens, one value a row and head, and the lengths."""
    packed = Packed([200, 100])
    tensors = [t.requires_grad_() for t in packed.tensors(4, 2, 16, 16, torch.bfloat16, device)]
    call = {"layout": "thd", "scale": 0.25, **packed.arguments(device)}
    saved = saved_shapes(lambda: functional.attention(*tensors, **call)[0].sum())
    kept = [entry for entry in saved if 300 in entry[0]]
    heads = [((300, h, 16), torch.bfloat16) for h in (4, 2, 2, 4)]
    assert sorted(map(str, kept)) == sorted(map(str, [*heads, ((300, 4), torch.float32)]))
    assert all(shape == (3,) for shape, _ in saved if 300 not in shape and shape)


def test_the_memory_plan_has_the_kept_tensors(device):
    """Of a packed module: bytes by hand, and the names of what the node keeps."""
    packed = Packed([200, 100])
    tensors = [t.requires_grad_() for t in packed.tensors(4, 2, 16, 16, torch.bfloat16, device)]
    module = te.DotProductAttention(4, 16, 2, qkv_format="thd", attn_mask_type="padding")
    plan = te.memory_plan(module, *tensors, **packed.arguments(device))
    assert sum(row.bytes for row in plan.rows) == 300 * 16 * 2 * (4 + 2 + 2 + 4) + 300 * 4 * 4 + 3 * 4
    assert all(name in str(plan) for name in ("attention output", "log of the sum of exp"))


def test_double_backward_is_refused(device):
    q = torch.randn(2, 3, 2, 8, device=device, requires_grad=True)
    with refused(NotImplementedError, "attention", "double backward"):
        torch.autograd.grad(functional.attention(q, q, q, scale=1.0)[0].sum(), q, create_graph=True)
    assert [t.requires_grad for t in functional.attention(q, q, q, scale=1.0)] == [True, True, False]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"layout": "hsbd"}, ("'layout'", "hsbd", "thd")),
        ({"kernel": "flesh"}, ("'kernel'", "flesh", "'flash'")),
        ({"q": (2, 3, 16)}, ("'q'", "[2, 3, 16]", "heads, head_dim")),
        ({"k": (2, 3, 2, 4)}, ("'k'", "[2, 3, 2, 4]", "head_dim of 'q'")),
        ({"k": (2, 3, 3, 8)}, ("'k'", "[2, 3, 3, 8]", "divides")),
        ({"k": (1, 3, 2, 8), "v": (1, 3, 2, 8)}, ("'k'", "batch of 'q'")),
        ({"v": (2, 4, 2, 8)}, ("'v'", "[2, 4, 2, 8]", "tokens and heads of 'k'")),
        ({"alibi_slopes": (3,)}, ("'alibi_slopes'", "[3]", "[4]")),
        ({"layout": "thd", "q": (5, 4, 8), "k": (5, 2, 8), "v": (5, 2, 8)}, ("'cu_seqlens_q'", "None", "int32")),
    ],
)
def test_bad_tensors(change, words):
    given = {"q": (2, 3, 4, 8), "k": (2, 3, 2, 8), "v": (2, 3, 2, 8)} | change
    made = {name: torch.randn(value) if isinstance(value, tuple) else value for name, value in given.items()}
    with refused(ValueError, "attention", *words):
        functional.attention(made.pop("q"), made.pop("k"), made.pop("v"), scale=1.0, **made)


INT, BOOL = torch.int32, torch.bool


@pytest.mark.parametrize(
    "change, words",
    [
        ({"mask": torch.zeros(2, 1, 9, 9, dtype=BOOL)}, ("'mask'", "[2, 1, 9, 9]", "[2, 4, 6, 6]")),
        ({"mask": torch.zeros(3, 1, 6, 6, dtype=BOOL)}, ("'mask'", "[3, 1, 6, 6]")),
        ({"mask": torch.zeros(1, 6, 6, dtype=BOOL)}, ("'mask'", "[1, 6, 6]")),
        ({"mask": torch.zeros(2, 1, 6, 6)}, ("'mask'", "Float", "bool")),
        ({"mask": torch.zeros(2, 1, 6, 1, dtype=BOOL)}, ("'mask'", "[2, 1, 6, 1]")),
        ({"present_q": torch.ones(2, 6, dtype=INT)}, ("'present_q'", "Int", "bool")),
        ({"present_kv": torch.ones(2, 5, dtype=BOOL)}, ("'present_kv'", "[2, 5]", "[2, 6]")),
        ({"bias": torch.zeros(1, 1, 9, 9)}, ("'bias'", "[1, 1, 9, 9]")),
        ({"bias": torch.zeros(1, 3, 6, 6)}, ("'bias'", "[1, 3, 6, 6]")),
        ({"bias": torch.zeros(1, 1, 6, 6, dtype=INT)}, ("'bias'", "Int", "floating")),
        ({"alibi_slopes": torch.ones(7, 4)}, ("'alibi_slopes'", "[7, 4]", "[2, 4]")),
        ({"alibi_slopes": torch.ones(1, 4)}, ("'alibi_slopes'", "[1, 4]", "[2, 4]")),
        ({"window": (-3, -9)}, ("'window'", "-3", "-9")),
        ({"window": None}, ("'window'", "None")),
        ({"window": (1, 2, 3)}, ("'window'", "(1, 2, 3)")),
        ({"cu_seqlens_kv": torch.zeros(3, dtype=INT)}, ("'cu_seqlens_kv'", "thd")),
        ({"max_seqlen_q": -7}, ("'max_seqlen_q'", "-7")),
        ({"max_seqlen_kv": 3.0}, ("'max_seqlen_kv'", "3.0")),
        ({"scale": None}, ("'scale'", "None")),
        ({"scale": float("nan")}, ("'scale'", "nan")),
        ({"scale": "x"}, ("'scale'", "'x'", "wanted a finite number")),
        ({"softcap": torch.ones(2)}, ("'softcap'", "tensor([1., 1.])", "wanted a finite number")),
        ({"softcap": None}, ("'softcap'", "None")),
        ({"softcap": float("inf")}, ("'softcap'", "inf", "finite")),
        ({"bias_scale": float("inf")}, ("'bias_scale'", "inf")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_arguments_of_a_batch(change, words):
    q, k = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8)
    with refused(ValueError, "attention: ", *words):
        functional.attention(q, k, k, **{"scale": 1.0, **change})


def test_shapes_that_are_broadcast():
    q, k = torch.randn(2, 6, 4, 8), torch.randn(2, 7, 2, 8)
    wanted, _, _ = functional.attention(q, k, k, scale=1.0)
    for sizes in ((1, 1, 1), (2, 1, 6), (1, 4, 1), (2, 4, 6)):
        options = {"mask": torch.zeros(*sizes, 7, dtype=BOOL), "bias": torch.zeros(*sizes, 7, dtype=torch.bfloat16)}
        assert_same_bits(functional.attention(q, k, k, scale=1.0, **options)[0], wanted)
    zeros = torch.zeros(2, 4)
    assert_same_bits(functional.attention(q, k, k, scale=1.0, alibi_slopes=zeros)[0], wanted)


def test_another_dtype_or_device():
    q = torch.randn(2, 3, 4, 8)
    with refused(ValueError, "attention", "'k'", "BFloat16", "Float", "like 'q'"):
        functional.attention(q, q.bfloat16(), q, scale=1.0)
    with refused(ValueError, "attention", "'q'", "Long"):
        functional.attention(q.long(), q.long(), q.long(), scale=1.0)
