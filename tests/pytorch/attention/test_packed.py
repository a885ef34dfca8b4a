# DotProductAttention over packed sequences (thd): values and gradients against a float64 reference, a sequence alone
# bit for bit, padding of any content, bad lengths; compiled, recomputed and offloaded calls.
import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional
from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

from .packed_cases import Packed, check_close, gradients, reference

MASKS = ("padding", "padding_causal", "padding_causal_bottom_right")
MANY = [0, 1, 63, 64, 65, 0, 3]


def attention(heads, head_dims, groups, mask, **options):
    return te.DotProductAttention(heads, head_dims, groups, qkv_format="thd", attn_mask_type=mask, **options)


def check(packed, heads, groups, dims, mask, dtype, device, *, window=None, **options):
    tensors = packed.tensors(heads, groups, *dims, dtype, device)
    module = attention(heads, dims, groups, mask, window_size=window)
    given = packed.arguments(device)
    got = gradients(lambda *t: module(*t, **given, **options), tensors)
    wanted = {"mask": mask, "window": window or (-1, -1), "softcap": options.get("softcap", 0.0)}
    exact = gradients(lambda *t: reference(*t, packed, **wanted)[0], [t.double() for t in tensors])
    check_close(got, exact, dtype, f"{mask} {window}")
    for t, side in zip(got, (0, 0, 1, 1), strict=True):
        assert not t[packed.padding(side).to(t.device)].any()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_many_sequences(device, mask, dtype):
    for window in (None, (5, 0), (3, 7)):
        check(Packed(MANY), 4, 2, (40, 40), mask, dtype, device, window=window)
    check(Packed(MANY, [5, 0, 64, 1, 130, 0, 3], gap=2), 4, 1, (24, 16), mask, dtype, device, window=(9, 2))


@pytest.mark.parametrize("dims", [(40, 40), (64, 64), (192, 128), (256, 256)])
def test_widths_of_heads(device, dims):
    check(Packed([9, 70]), 2, 1, dims, "padding_causal", torch.float32, device)


@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 0], [2000], [600, 520, 3], [7] * 17])
def test_numbers_and_lengths(device, lengths):
    """None, one, two and seventeen sequences; more than one block of queries and of keys."""
    for mask in MASKS:
        check(Packed(lengths, gap=1), 2, 2, (16, 16), mask, torch.float32, device)


def test_windows_over_blocks(device):
    """Windows that end before, in and after blocks, and hide whole ones."""
    for window in ((100, 0), (257, 0), (511, 0), (300, 300), (0, 0)):  # 257: row 768 sees key 511, a block's last
        for mask in ("padding", "padding_causal_bottom_right"):
            check(Packed([1100, 300, 800], [1300, 1400, 800]), 1, 1, (8, 8), mask, torch.float32, device, window=window)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_result_is_rounded_once(device, dtype):
    """Over four blocks of keys: half a unit of each element's last place, beside float32's errors."""
    packed = Packed([300], [2000])
    tensors = packed.tensors(2, 1, 16, 16, dtype, device)
    out, _, _ = functional.attention(*tensors, layout="thd", scale=0.25, **packed.arguments(device))
    out = out.flatten(1)
    exact, _ = reference(*tensors, packed)
    beside = 100 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert ((out.cpu().double() - exact).abs() <= 0.5 * torch.finfo(dtype).eps * exact.abs() + beside).all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_alone_has_the_same_bits(device, mask, dtype):
    packed = Packed([5, 300, 0, 64, 1], [9, 600, 4, 3, 70], gap=3)
    q, k, v = packed.tensors(4, 2, 32, 32, dtype, device)
    module = attention(4, 32, 2, mask)
    together = module(q, k, v, **packed.arguments(device))
    for rows, keys, n_q, n_kv in zip(packed.sequences(0), packed.sequences(1), *packed.lengths, strict=True):
        alone = module(q[rows], k[keys], v[keys], **Packed([n_q], [n_kv]).arguments(device))
        assert_same_bits(together[rows], alone)


@pytest.mark.parametrize("dtype, fill", [(torch.float32, 1e20), (torch.bfloat16, 3e38), (torch.float16, 6e4)])
def test_padding_holds_anything(device, dtype, fill):
    packed, results = Packed([5, 0, 40], [3, 2, 70], gap=4), []
    module = attention(2, 16, 2, "padding_causal")
    for value in (0.0, fill, -fill):
        torch.manual_seed(0)
        tensors = packed.tensors(2, 2, 16, 16, dtype, device, value)
        results.append(gradients(lambda *t: module(*t, **packed.arguments(device)), tensors))
    for other in results[1:]:
        for got, wanted in zip(other, results[0], strict=True):
            assert_same_bits(got, wanted)


def test_starts_that_are_the_lengths_are_none(device, monkeypatch):
    """As frameworks pass them: no padding between sequences, and no pass over results for it."""
    packed, given = Packed([5, 0, 40], [3, 2, 70]), []
    tensors, call = packed.tensors(2, 2, 16, 16, torch.bfloat16, device), packed.arguments(device)
    module = attention(2, 16, 2, "padding_causal")
    wanted, whole = module(*tensors, **call), functional.attention
    monkeypatch.setattr(functional, "attention", lambda *t, **options: (given.append(options), whole(*t, **options))[1])
    starts = {f"cu_seqlens_{side}_padded": call[f"cu_seqlens_{side}"] for side in ("q", "kv")}
    assert_same_bits(module(*tensors, **call, **starts), wanted)
    assert not [name for name, value in given[0].items() if "padded" in name and value is not None]


def test_given_bounds_change_no_bit(device):
    packed = Packed([5, 0, 40], [3, 2, 70])
    tensors = packed.tensors(2, 2, 16, 16, torch.float32, device)
    module = attention(2, 16, 2, "padding_causal")
    runs = [
        gradients(lambda *t, b=bounds: module(*t, **packed.arguments(device, bounds=b)), tensors)
        for bounds in (False, True)
    ]
    for got, wanted in zip(*runs, strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_recomputed_and_offloaded_calls_are_the_eager_one(device, checkpointed):
    packed = Packed([5, 0, 40], [3, 2, 70], gap=2)
    tensors = packed.tensors(2, 2, 16, 16, torch.bfloat16, device)
    module = attention(2, 16, 2, "padding_causal")
    given = packed.arguments(device, bounds=True) | {"checkpoint_core_attention": checkpointed}
    eager = gradients(lambda *t: module(*t, **packed.arguments(device)), tensors)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        runs = [gradients(lambda *t, m=m: m(*t, **given), tensors) for m in (module, compiled)]
    for other in runs:
        for got, wanted in zip(other, eager, strict=True):
            assert_same_bits(got, wanted)


def test_packed_inputs_are_views(device):
    """qkv_layer and kv_layer in both orders, in every layout."""
    given = Packed([4, 3]).arguments(device)
    for layout, rows in (("thd", (7,)), ("bshd", (2, 5)), ("sbhd", (5, 2))):
        mask = "padding_causal" if layout == "thd" else "causal"
        module = te.DotProductAttention(4, 8, qkv_format=layout, attn_mask_type=mask)
        call = given if layout == "thd" else {}
        for dim in (-3, -2):
            shape = (*rows, 3, 4, 8) if dim == -3 else (*rows, 4, 3, 8)
            packed = torch.randn(shape, device=device)
            q, k, v = packed.unbind(dim)
            wanted = module(q, k, v, **call)
            assert_same_bits(module(qkv_layer=packed, qkv_interleave_dim=dim, **call), wanted)
            pair = torch.stack((k, v), dim)
            assert_same_bits(module(q, kv_layer=pair, qkv_interleave_dim=dim, **call), wanted)


def test_explain_names_the_path(device):
    packed = Packed([4, 3])
    tensors = packed.tensors(2, 2, 8, 8, torch.float32, device)
    report = te.explain(attention(2, 8, 2, "padding"), *tensors, **packed.arguments(device))
    (row,) = [row for row in report.rows if row.op == "attention"]
    assert row.path == "chunked" and "thd" in row.why_not_faster


GOOD = Packed([4, 3])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"attn_mask_type": "causal"}, ("attn_mask_type", "'causal'", "padding_causal", "thd")),
        ({"cu_seqlens_q": None}, ("cu_seqlens_q", "None", "int32")),
        ({"cu_seqlens_kv": [0, 4, 7]}, ("cu_seqlens_kv", "[0, 4, 7]", "int32")),
        ({"cu_seqlens_q": torch.tensor([0, 4, 7])}, ("cu_seqlens_q", "int64", "int32")),
        ({"core_attention_bias_type": "post_scale_bias"}, ("core_attention_bias_type", "thd")),
        ({"qkv_layer": torch.zeros(7, 3, 2, 8)}, ("qkv_layer", "key_layer", "exclude")),
    ],
)
def test_bad_calls(change, words):
    module, tensors = attention(2, 8, 2, "padding"), GOOD.tensors(2, 2, 8, 8, torch.float32, "cpu")
    before = module(*tensors, **GOOD.arguments("cpu"))
    with refused(ValueError, "DotProductAttention", *words):
        module(*tensors, **GOOD.arguments("cpu") | change)
    assert_same_bits(module(*tensors, **GOOD.arguments("cpu")), before)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"cu_seqlens_q": [0, 4, 3]}, ("'cu_seqlens_q'", "[0, 4, 3]", "the 7 tokens")),
        ({"cu_seqlens_kv": [0, 4, 8]}, ("'cu_seqlens_kv'", "[0, 4, 8]", "the 7 tokens")),
        ({"cu_seqlens_q": [1, 4, 7]}, ("'cu_seqlens_q'", "[1, 4, 7]")),
        ({"cu_seqlens_q": [0, 7]}, ("'cu_seqlens_kv'", "as long as")),
        ({"cu_seqlens_q_padded": [0, 3, 7]}, ("'cu_seqlens_q_padded'", "[0, 3, 7]", "room")),
        ({"cu_seqlens_kv_padded": [0, 4, 8]}, ("'cu_seqlens_kv_padded'", "the 7 rows")),
        ({"cu_seqlens_kv_padded": [-1, 4, 7]}, ("'cu_seqlens_kv_padded'", "-1")),
    ],
)
def test_bad_lengths(change, words):
    module, tensors = attention(2, 8, 2, "padding"), GOOD.tensors(2, 2, 8, 8, torch.float32, "cpu")
    made = {name: torch.tensor(values, dtype=torch.int32) for name, values in change.items()}
    with refused(ValueError, "attention", *words):
        module(*tensors, **GOOD.arguments("cpu") | made)


@pytest.mark.parametrize("side", ["q", "kv"])
def test_a_bound_that_is_too_small(side):
    module, tensors = attention(2, 8, 2, "padding"), GOOD.tensors(2, 2, 8, 8, torch.float32, "cpu")
    with refused(ValueError, "attention", f"'max_seqlen_{side}'", "3", "longest sequence"):
        module(*tensors, **GOOD.arguments("cpu"), **{f"max_seqlen_{side}": 3})
    module(*tensors, **GOOD.arguments("cpu"), **{f"max_seqlen_{side}": 4})


def test_dropout_is_refused_by_name():
    module, tensors = (
        attention(2, 8, 2, "padding", attention_dropout=0.1),
        GOOD.tensors(2, 2, 8, 8, torch.float32, "cpu"),
    )
    with refused(NotImplementedError, "DotProductAttention", "'attention_dropout'", "0.1", "thd"):
        module(*tensors, **GOOD.arguments("cpu"))
    assert module.eval()(*tensors, **GOOD.arguments("cpu")).isfinite().all()


def test_a_mask_changes_no_path(monkeypatch):
    """thd reads no mask: lengths by one tensor stay the same for queries and keys."""
    told, packed = [], Packed([4, 3])
    real = dot_product_attention.attention_path
    monkeypatch.setattr(
        dot_product_attention,
        "attention_path",
        lambda *args, **options: told.append(options["same_lengths"]) or real(*args, **options),
    )
    module, tensors = attention(2, (8, 8), 2, "padding_causal"), packed.tensors(2, 2, 8, 8, torch.float32, "cpu")
    lengths = packed.arguments("cpu")["cu_seqlens_q"]
    given = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    wanted = module(*tensors, **given)
    assert_same_bits(module(*tensors, **given, attention_mask=torch.ones(1, dtype=torch.bool)), wanted)
    assert told == [True, True]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["vanilla", "learnable"])
def test_deterministic_algorithms_repeat_the_bits(device, mask, kind):
    """Chunked, also where flash would be: every case of a cap."""
    torch.use_deterministic_algorithms(True)  # the fixture of all suites restores it
    packed = Packed([70, 0, 600, 3], gap=2)
    module = attention(4, 16, 2, mask, softmax_type=kind, device=device)
    tensors = packed.tensors(4, 2, 16, 16, torch.float32, device)

    def run():
        return gradients(lambda *t: module(*t, softcap=5.0, **packed.arguments(device)), tensors)

    wanted = run()
    for _ in range(3):
        for got, want in zip(run(), wanted, strict=True):
            assert_same_bits(got, want)
