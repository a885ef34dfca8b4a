# Casts that are kept between steps: whatever happens to a weight in between, bytes, scales, both directions, amaxes and
# versions are those of the functions that look everything up in each step.
import copy

import pytest
import torch
from quantized_cases import assert_readable, assert_same_parts, block2d, current, delayed, parts_of
from support import assert_same_bits, refused

from transformer_engine.pytorch.tensor import Float8Quantizer, utils
from transformer_engine.pytorch.tensor.master_casts import ColumnsOfWeights, MasterCasts

FORMATS = {"delayed": delayed, "current": current, "block2d": block2d}
SHAPES = [(160, 48), (16, 144), (3, 32, 16)]


def nothing(weight, master):
    pass


def no_columns(weight, master):
    weight.update_usage(columnwise_usage=False)


def other_memory(weight, master):
    utils.replace_raw_data(weight, torch.empty_like(utils_data(weight)))


def values_by_hand(weight, master):
    weight.quantize_(torch.full(weight.shape, 0.75, device=weight.device))


def transpose_is_invalid(weight, master):
    if hasattr(weight, "_reset_caches"):
        weight._reset_caches()


def other_quantizer(weight, master):
    weight._quantizer = weight._quantizer.copy()


def other_epsilon(weight, master):
    if hasattr(weight._quantizer, "amax_epsilon"):
        weight._quantizer.amax_epsilon = 64.0


def other_scale(weight, master):
    if isinstance(weight._quantizer, Float8Quantizer):
        weight._quantizer.scale = weight._quantizer.scale * 4.0


def other_master_values(weight, master):
    master.data = master.data.clone().mul_(3.0)


EVENTS = [nothing, no_columns, other_memory, values_by_hand, transpose_is_invalid, other_quantizer, other_epsilon]
EVENTS += [other_scale, other_master_values]


def utils_data(weight):
    return getattr(weight, weight._gathered[0])


def made(name, parts, device):
    """Weights, their masters, of which this rank has the given part, and where the parts begin."""
    torch.manual_seed(3)
    weights, masters, starts = [], [], []
    for i, shape in enumerate(SHAPES):
        values = torch.randn(shape, device=device)
        weights.append(FORMATS[name](device=device)(values))
        n = values.numel()
        first, last = (n * cut // 8 for cut in parts[i % len(parts)])
        masters.append(values.view(-1)[first:last].clone() if first < last else None)
        starts.append(first if first < last else None)
    return weights, masters, starts


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", FORMATS)
def test_whatever_happens_between_steps(name, event, device):
    parts = [(0, 8), (3, 7), (0, 0)]
    (weights, masters, starts), (others, their_masters, _) = made(name, parts, device), made(name, parts, device)
    casts, columns = MasterCasts(weights, masters, starts, None), ColumnsOfWeights(weights)
    for step in range(5):
        for values in zip(masters, their_masters, strict=True):
            for own in values:
                if own is not None:
                    own.mul_(-1.25)
        if step in (2, 3):
            for of in zip(weights, masters), zip(others, their_masters):
                for weight, master in list(of)[step - 2 :: 2]:
                    if master is not None:
                        event(weight, master)
        casts.run()
        utils.quantize_master_weights(others, their_masters, starts, None, manual_post_all_gather_processing=True)
        columns.make()
        utils.post_all_gather_processing(others)
        for i, (weight, other) in enumerate(zip(weights, others, strict=True)):
            assert_same_parts(weight, other, f"step {step}, weight {i}")
            assert_readable(weight)
            if name == "delayed":
                assert_same_bits(weight._quantizer.amax, other._quantizer.amax, f"step {step}, weight {i}")


@pytest.mark.parametrize("name", FORMATS)
def test_later_steps_make_no_tensor(name):
    """From the third step on: the first one may bring columns of their own memory."""
    weights, masters, starts = made(name, [(0, 8)], "cpu")
    casts, columns = MasterCasts(weights, masters, starts, None), ColumnsOfWeights(weights)
    for step in range(5):
        before = [(weight._native(), dict(weight._tensors())) for weight in weights]
        versions = [{n: t._version for n, t in parts_of(weight).items()} for weight in weights]
        kept = casts._casts, columns._copies
        casts.run()
        for weight, seen in zip(weights, versions, strict=True):
            for n, t in parts_of(weight).items():
                assert t._version > seen[n], f"step {step}: {n} is as before"
        columns.make()
        if step < 2:
            continue
        assert kept == (casts._casts, columns._copies)
        for weight, (native, tensors) in zip(weights, before, strict=True):
            assert weight._native() is native
            assert all(t is weight._tensors()[n] for n, t in tensors.items())


@pytest.mark.parametrize("name", FORMATS)
def test_an_alias_gets_the_new_values(name):
    (weights, masters, starts), (others, _, _) = made(name, [(0, 8)], "cpu"), made(name, [(0, 8)], "cpu")
    casts, columns = MasterCasts(weights, masters, starts, None), ColumnsOfWeights(weights)
    for step in range(4):
        alias = weights[0].detach() if step == 2 else None
        if alias is not None:
            alias.update_usage(columnwise_usage=False)
            alias.update_usage(columnwise_usage=True)  # in memory of its own
        for master in masters:
            master.add_(1.0)
        casts.run()
        columns.make()
        utils.quantize_master_weights(others, masters, starts, None)
        utils.post_all_gather_processing(others)
        for weight, other in zip(weights, others, strict=True):
            assert_same_parts(weight, other, f"step {step}")
        if alias is not None:
            assert_same_parts(alias, others[0], f"step {step}, the alias")


def test_a_master_that_is_not_dense_is_read_again():
    weight, values = block2d()(torch.ones(32, 16)), torch.randn(16, 32)
    casts = MasterCasts([weight], [values.t()], [0], None)
    for _ in range(3):
        values.mul_(0.5)
        casts.run()
        assert_same_bits(weight.dequantize(), block2d()(values.t().contiguous()).dequantize(), "values")


def test_errors_are_those_of_utils():
    weights, masters, starts = made("block2d", [(0, 8)], "cpu")
    casts, columns = MasterCasts(weights, masters, starts, None), ColumnsOfWeights(weights)
    casts.run()
    columns.make()
    held = copy.deepcopy(weights[1])
    weights[1].update_usage(columnwise_usage=True, rowwise_usage=False)
    with refused(RuntimeError, "model_weights[1] has no rowwise data"):
        casts.run()
    with refused(RuntimeError, "model_weights[1] has no rowwise data"):
        columns.make()
    weights[1].update_usage(rowwise_usage=True)
    masters[1].copy_(held.dequantize().view(-1))
    casts.run()
    columns.make()
    assert_same_bits(weights[1].dequantize(), held.dequantize(), "values")
    size = utils_data(weights[2]).untyped_storage().nbytes()
    utils_data(weights[2]).untyped_storage().resize_(0)
    with refused(RuntimeError, "its memory has been freed"):
        casts.run()
    utils_data(weights[2]).untyped_storage().resize_(size)
