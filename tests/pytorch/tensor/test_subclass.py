# A client's class that derives from QuantizedTensor directly: data in attributes of its own, values by its dequantize,
# new values by its quantize_.
import copy
import pickle

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling


class Scaled(te.QuantizedTensor):
    """int8 by one scale."""

    def __new__(cls, values, dtype=torch.float32, requires_grad=False):
        self = super().__new__(cls, values.shape, dtype, requires_grad=requires_grad, device=values.device)
        self.bytes = torch.empty_like(values, dtype=torch.int8)
        self.step = torch.empty(1, device=values.device)
        return self.quantize_(values)

    def dequantize(self, *, dtype=None):
        return (self.bytes * self.step).to(self.dtype if dtype is None else dtype)

    def quantize_(self, tensor, *, noop_flag=None):
        self.step.copy_(tensor.abs().max() / 127)
        self.bytes.copy_((tensor / self.step).round())
        return self


class ReadOnly(te.QuantizedTensor):
    """Ones."""

    def dequantize(self, *, dtype=None):
        return torch.ones(self.shape, dtype=self.dtype if dtype is None else dtype, device=self.device)


class Bare(te.QuantizedTensor):
    """Nothing of its own."""


def made(device, *shape):
    return Scaled(randn(*(shape or (6, 40)), device=device))


def test_it_is_a_tensor(device):
    t = made(device)
    assert isinstance(t, (torch.Tensor, te.QuantizedTensor, te.QuantizedTensorStorage))
    assert t.shape == (6, 40) and t.dtype is torch.float32 and t.device.type == device and t.is_leaf
    assert repr(t).startswith("Scaled(shape=(6, 40)") and "data=tensor" in repr(t)
    values = t.dequantize()
    for operation in (
        lambda v: v + 1,
        lambda v: v @ v.t(),
        lambda v: torch.nn.functional.linear(v[:2], v),
        lambda v: torch.cat([v, v]),
        lambda v: v[1:3] * 2,
        lambda v: v.view(-1)[:3] + 0,
        lambda v: v.to(torch.bfloat16) + 0,
        lambda v: v.chunk(3)[1] + 0,
        lambda v: torch.zeros_like(v).copy_(v),
        lambda v: torch.stack([v, v]).new_zeros(2),
    ):
        got = operation(t)
        assert not isinstance(got, te.QuantizedTensor)
        assert_same_bits(got, operation(values))


def test_aliases_share_and_copies_do_not(device):
    t = made(device)
    for other in (t.detach(), t.data, torch.nn.Parameter(t), t.detach().detach()):
        assert type(other) is Scaled or isinstance(other, torch.nn.Parameter)
        assert other.bytes.data_ptr() == t.bytes.data_ptr()
    before = t.dequantize()
    for other in (t.clone(), copy.deepcopy(t), copy.deepcopy(torch.nn.Parameter(t))):
        assert isinstance(other, Scaled) and other.bytes.data_ptr() != t.bytes.data_ptr()
        other.detach().zero_()
        assert_same_bits(t.dequantize(), before)


def test_values_go_in(device):
    t, y = made(device), randn(6, 40, device=device) * 3
    version = t._version
    for change in (
        lambda v: v.copy_(y),
        lambda v: v.mul_(0.5),
        lambda v: v.add_(y),
        lambda v: v.copy_(te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, torch.device(device))(y)),
        lambda v: v.copy_(Scaled(y)),
        lambda v: torch.neg(v, out=v),
    ):
        plain = t.dequantize()
        assert change(t) is t
        assert_same_bits(t.dequantize(), Scaled(change(plain)).dequantize())
    assert t._version > version
    p = torch.nn.Parameter(t)
    p.data = y
    assert_same_bits(p.dequantize(), Scaled(y).dequantize())
    p.data = made(device, 3, 16)
    assert p.shape == (3, 16) and p.dequantize().shape == (3, 16)
    with refused(ValueError, "Scaled.data", "ReadOnly"):
        p.data = ReadOnly((6, 40), torch.float32, device=torch.device(device))
    with refused(RuntimeError, "Scaled", "would write"):
        t[:2].zero_()


def test_modules_and_gradients(device):
    """As a weight it is computed with in high precision; FP8 refuses it by name."""
    layer = te.Linear(40, 16, device=device)
    layer.weight = torch.nn.Parameter(made(device, 16, 40))
    plain = te.Linear(40, 16, device=device)
    plain.load_state_dict({"weight": layer.weight.dequantize(), "bias": layer.bias})
    x = randn(8, 40, device=device)
    for module in (layer, plain):
        module(x).square().sum().backward()
    assert_same_bits(layer.weight.grad, plain.weight.grad)
    (layer.weight * 2).sum().backward()
    torch.optim.SGD([layer.weight], 0.1).step()
    with refused(RuntimeError, "Linear", "Scaled"), te.autocast(recipe=Float8CurrentScaling()):
        layer(x)


def test_what_it_lacks_has_a_name(device):
    ones = ReadOnly((2, 3), torch.float32, device=torch.device(device))
    assert (ones + ones == 2).all()
    with refused(NotImplementedError, "ReadOnly", "quantize_"):
        ones.zero_()
    bare = Bare((2, 3), torch.float32, device=torch.device(device))
    assert bare.shape == (2, 3)
    with refused(NotImplementedError, "Bare", "dequantize"):
        bare + 1
    with refused(NotImplementedError, "Scaled", "__reduce_ex__"):
        pickle.dumps(made(device))
    with refused(NotImplementedError, "Scaled", "torch.compile"):
        made(device).__tensor_flatten__()
    with pytest.raises(TypeError, match="QuantizedTensor: make one by"):
        te.QuantizedTensor((2, 3), torch.float32)
