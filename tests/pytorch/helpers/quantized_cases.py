# Helpers of the suites of quantized tensors: a quantizer of every format, the values that plain_fp8.py computes for its
# tensors, and comparisons of whole quantized tensors. No test is here.
import plain_fp8
import torch
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor import layout
from transformer_engine.pytorch.tensor.subviews import buffer_of

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
BOTH = {"rowwise": True, "columnwise": True}


def delayed(fp8_dtype=E4M3, device="cpu", scale=3.7, **usages):
    state = torch.full((1,), scale, device=device), torch.zeros(1, device=device)
    return te.Float8Quantizer(*state, fp8_dtype, **{**BOTH, **usages})


def current(fp8_dtype=E4M3, device="cpu", **options):
    return te.Float8CurrentScalingQuantizer(fp8_dtype, torch.device(device), **options)


def block1d(fp8_dtype=E4M3, device="cpu", **options):
    return te.Float8BlockQuantizer(fp8_dtype, **{**BOTH, **options}, block_scaling_dim=1)


def block2d(fp8_dtype=E4M3, device="cpu", **options):
    return te.Float8BlockQuantizer(fp8_dtype, **{**BOTH, **options}, block_scaling_dim=2)


def identity(fp8_dtype=E4M3, device="cpu", **usages):
    return te.IdentityQuantizer(**usages)


def hybrid(fp8_dtype=E4M3, device="cpu", **usages):
    result = te.HybridQuantizer(
        rowwise_quantizer=current(fp8_dtype, device), columnwise_quantizer=block2d(E5M2, device)
    )
    result.set_usage(**usages)
    return result


FP8_FORMATS = {"delayed": delayed, "current": current, "block1d": block1d, "block2d": block2d}
FORMATS = {**FP8_FORMATS, "identity": identity, "hybrid": hybrid}


def folded(x):
    return x.reshape(x.shape[:-1].numel(), x.shape[-1] if x.dim() else 1)


def wanted_parts(name, x, fp8_dtype=E4M3, pow_2=None, epsilon=0.0, scale=3.7):
    """{field: tensor} by plain_fp8.py."""
    pow_2 = name.startswith("block") if pow_2 is None else pow_2
    given = torch.tensor(scale) if name == "delayed" else None
    rows, row_scales, columns, column_scales = plain_fp8.quantize(
        folded(x), plain_fp8.SCALINGS[name], fp8_dtype is E5M2, pow_2, epsilon, given
    )
    rows, columns = rows.reshape(x.shape), columns.reshape((*x.shape[-1:], *x.shape[:-1]))
    if name in ("delayed", "current"):
        return {"_data": rows, "_transpose": columns, "_scale_inv": row_scales[:1]}
    return {
        "_rowwise_data": rows,
        "_columnwise_data": columns,
        "_rowwise_scale_inv": row_scales,
        "_columnwise_scale_inv": column_scales,
    }


def parts_of(t):
    """{field: plain tensor}; of a hybrid tensor, those of both."""
    found = {}
    for name, part in t._tensors().items():
        if isinstance(part, te.QuantizedTensorStorage):
            found |= {f"{name}.{inner}": p for inner, p in parts_of(part).items()}
        else:
            found[name] = part
    return found


def assert_same_parts(got, wanted, what=""):
    got, wanted = (t if isinstance(t, dict) else parts_of(t) for t in (got, wanted))
    assert sorted(got) == sorted(wanted), what
    for name, want in wanted.items():
        assert_same_bits(got[name].cpu(), want.cpu(), f"{what} {name}")


def assert_readable(t, kinds=("rowwise", "columnwise")):
    """Products can read its data in place: pitch, zeros between the columns and the pitch and after the rows."""
    for field, part in t._tensors().items():
        if isinstance(part, te.QuantizedTensorStorage):
            assert_readable(part, kinds)
        if t._kind(field) not in kinds or not part.numel():
            continue
        m = layout.pitched(t._kind(field), part)
        assert m is not None and m.data_ptr() == part.data_ptr(), field
        (rows, cols), (all_rows, pitch) = m.shape, (layout.round_up(n, layout.PITCH) for n in m.shape)
        whole = buffer_of(part)[m.storage_offset() :][: all_rows * pitch].view(all_rows, pitch)
        assert (whole[:, cols:] == 0).all() and (whole[rows:] == 0).all(), field


def assert_same_tensor(got, wanted, what=""):
    """Class, shape, dtype, settings, usages, and every bit of every part."""
    assert type(got) is type(wanted), what
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), what
    assert got.get_usages() == wanted.get_usages(), what
    for name in wanted._details:
        if name != "_quantizer":
            assert getattr(got, name) == getattr(wanted, name), f"{what} {name}"
    assert_same_parts(got, wanted, what)


def assert_directions_agree(t):
    """Both directions hold the same values."""
    if not t.get_usages()["columnwise"]:
        return
    other = t._twin()
    other.update_usage(rowwise_usage=False)
    assert_same_bits(other.dequantize(), t.dequantize())
