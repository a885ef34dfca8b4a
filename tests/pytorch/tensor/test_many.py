# quantize_all: many quantized tensors take new values as quantize_() of each gives them, those alike by one call.
import copy

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.tensor import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer
from transformer_engine.pytorch.tensor.many import quantize_all

E4M3 = torch.float8_e4m3fn
MAKERS = {
    "block": lambda device: Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "current": lambda device: Float8CurrentScalingQuantizer(E4M3, device),
    "delayed": lambda device: Float8Quantizer(torch.ones(1, device=device), torch.zeros(1, device=device), E4M3),
}


def tensors(kind, device):
    """Of one shape, one of them rowwise alone, and one of another shape."""
    made = []
    for i, shape in enumerate([(48, 32)] * 4 + [(16, 32)]):
        quantizer = MAKERS[kind](device)
        quantizer.set_usage(columnwise=i != 3)
        made.append(quantizer(randn(*shape, dtype=torch.bfloat16, device=device)))
    return made


def same(got, want):
    for name, part in want._tensors().items():
        assert_same_bits(getattr(got, name), part, name)


@pytest.mark.parametrize("kind", MAKERS)
def test_as_each_alone(kind, device):
    ours = tensors(kind, device)
    twins = copy.deepcopy(ours)
    values = [randn(*t.shape, dtype=torch.bfloat16, device=device) * 2.0**i for i, t in enumerate(ours)]
    values[1][0, 0] = torch.nan
    for flag in (None, torch.ones(1, device=device), torch.zeros(1, device=device)):
        values = [value * 2 for value in values]
        versions = [[part._version for part in (t, *t._tensors().values())] for t in ours]
        quantize_all(ours, values, noop_flag=flag)
        for one, twin, value, before in zip(ours, twins, values, versions, strict=True):
            twin.quantize_(value, noop_flag=flag)
            same(one, twin)
            assert all(p._version > v for p, v in zip((one, *one._tensors().values()), before, strict=True))


# Parts of one memory, rows of another tensor, one tensor twice: in order, so that the values of the last one stay.
@pytest.mark.parametrize("kind", ["block", "current"])
def test_memory_that_is_shared(kind, device):
    whole = MAKERS[kind](device)(randn(256, 32, dtype=torch.bfloat16, device=device))
    twin = copy.deepcopy(whole)
    first, second = whole[:128], whole[128:]
    values = [randn(128, 32, dtype=torch.bfloat16, device=device) for _ in range(2)]
    quantize_all([first, second], values)
    for part, value in zip((twin[:128], twin[128:]), values, strict=True):
        part.quantize_(value)
    same(whole, twin)
    values = [randn(256, 32, dtype=torch.bfloat16, device=device) for _ in range(2)]
    quantize_all([whole, whole], values)
    twin.quantize_(values[1])
    same(whole, twin)


def test_values_that_do_not_fit_are_refused_before_anything_is_written(device):
    ours = tensors("block", device)[:3]
    twins = copy.deepcopy(ours)
    values = [randn(48, 32, device=device) for _ in ours]
    with refused(ValueError, "argument 'dst' has shape"):
        quantize_all(ours, [values[0].t().contiguous() for _ in ours])
    for one, twin in zip(ours, twins, strict=True):
        same(one, twin)


@pytest.mark.parametrize("recipe", [R.Float8BlockScaling, R.Float8CurrentScaling])
@pytest.mark.parametrize("master", [torch.float32, torch.float16])
def test_a_step_of_many_weights(recipe, master, device, monkeypatch):
    with te.quantized_model_init(enabled=True, recipe=recipe()):
        ours = te.GroupedLinear(6, 32, 48, params_dtype=torch.bfloat16, device=device, bias=False)
    twin = copy.deepcopy(ours)
    calls = []
    real = _C.quantize_list_into
    monkeypatch.setattr(_C, "quantize_list_into", lambda *given: (calls.append(len(given[0])), real(*given))[1])
    options = {"lr": 0.1, "master_weights": True, "master_weight_dtype": master}
    optimizers = [te.optimizers.FusedAdam(m.parameters(), **options) for m in (ours, twin)]
    for _ in range(2):
        for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
            p.grad = randn(48, 32, dtype=torch.bfloat16, device=device)
            q.grad = p.grad.clone()
        optimizers[0].step()
        assert calls == [6]
        with monkeypatch.context() as one_by_one:
            one_by_one.setattr("transformer_engine.pytorch.optimizers.adam_step._ROUNDED_BYTES", 1)
            optimizers[1].step()
        assert calls == [6]
        calls.clear()
        for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
            same(p, q)
