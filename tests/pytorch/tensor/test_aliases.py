# Aliases and rows of a quantized tensor that hold other directions than it does: a write to any of them gives all of
# them the values, in the memory that they had.
import gc

import pytest
import torch
from fp8_steps import RECIPES
from quantized_cases import FORMATS, assert_directions_agree, assert_same_bits
from support import randn, refused
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import TensorWeakRef

import transformer_engine.pytorch as te
from transformer_engine.pytorch.optimizers import FusedAdam

from ..graph.cases import HIDDEN, assert_same_step, linear, tokens
from ..graph.fp8_cases import capture, fp8_step

NAMES = ["delayed", "current", "block2d"]
every_format = pytest.mark.parametrize("name", NAMES)
ROWWISE, COLUMNWISE = {"rowwise_usage": False}, {"columnwise_usage": False}


def quantized(name, device, columnwise=True):
    return FORMATS[name](device=device, columnwise=columnwise)(randn(256, 48, device=device))


def made_behind_the_alias(name, device):
    t = quantized(name, device, columnwise=False)
    alias = t.detach()
    t.update_usage(columnwise_usage=True)
    return t, alias


def without(t, **usage):
    alias = t.detach()
    alias.update_usage(**usage)
    return alias


def each_one_direction(name, device):
    t = quantized(name, device)
    alias = without(t, **ROWWISE)
    t.update_usage(**COLUMNWISE)
    return t, alias


def each_its_own_columns(name, device):
    t = quantized(name, device, columnwise=False)
    alias = t.detach()
    for one in (t, alias):
        one.update_usage(columnwise_usage=True)
    return t, alias


def of_data(name, device):
    t = torch.nn.Parameter(quantized(name, device), requires_grad=False)
    alias = t.data
    t.update_usage(**COLUMNWISE)
    return t, alias


def made_in_inference(name, device):
    t = quantized(name, device, columnwise=False)
    alias = t.detach()
    with torch.inference_mode():
        t.update_usage(columnwise_usage=True)
    return t, alias


PAIRS = {
    "made behind the alias": made_behind_the_alias,
    "no columns": lambda name, device: (t := quantized(name, device), without(t, **COLUMNWISE)),
    "no rows": lambda name, device: (t := quantized(name, device), without(t, **ROWWISE)),
    "one direction each": each_one_direction,
    "own columns each": each_its_own_columns,
    "data": of_data,
    "inference": made_in_inference,
}


def under_a_mode(t, x):
    with FlopCounterMode(display=False):
        t.copy_(x)


WRITES = {
    "copy_": lambda t, x: t.copy_(x),
    "zero_": lambda t, x: t.zero_(),
    "mul_": lambda t, x: t.mul_(0.5),
    "quantize_": lambda t, x: t.quantize_(x),
    "by its quantizer": lambda t, x: t._quantizer(x, out=t),
    "quantized": lambda t, x: t.copy_(t._quantizer(x)),
    "data": lambda t, x: t.data.copy_(x),
    "rows": lambda t, x: t[128:].copy_(x[128:]),
    "another shape": lambda t, x: t.view(2, 128, 48).copy_(x.view(2, 128, 48)),
    "inference": torch.inference_mode()(lambda t, x: t.copy_(x)),
    "under a mode": under_a_mode,
}


@every_format
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_reaches_the_directions_of_all(device, name, pair, write):
    if (write, name) == ("under a mode", "delayed"):
        pytest.skip("scaling that keeps a state is not traced")
    if (write, name) == ("rows", "block2d") and pair in ("no rows", "one direction each"):
        pytest.skip("columns alone have no rows that are a view")
    for of in (0, 1):
        both = PAIRS[pair](name, device)
        before, values = both[0].dequantize(), randn(256, 48, device=device) * 0.5
        usages = [t.get_usages() for t in both]
        addresses = [{n: part.data_ptr() for n, part in t._tensors().items()} for t in both]
        plain = FORMATS[name](device=device)(before)
        WRITES[write](both[of], values)
        WRITES[write](plain, values)
        wanted = both[of].dequantize()
        assert not torch.equal(wanted, before)
        for t, had in zip(both, usages):
            assert t.get_usages() == had
            assert_directions_agree(t)
            assert_same_bits(t.dequantize(), wanted)
        assert [{n: part.data_ptr() for n, part in t._tensors().items()} for t in both] == addresses


@every_format
def test_rows_and_their_tensor(device, name):
    t = quantized(name, device)
    rows = t[128:]
    columns = without(t, **ROWWISE)
    rows.update_usage(rowwise_usage=True, columnwise_usage=False)
    t.update_usage(**COLUMNWISE)
    for write in (t, rows, columns, rows.detach(), t[:128]):
        write.copy_(randn(*write.shape, device=device))
        assert_same_bits(t.dequantize(), columns.dequantize())
        assert_same_bits(rows.dequantize(), t.dequantize()[128:])
    rows.update_usage(columnwise_usage=True)
    for write in (t, columns, rows):
        write.mul_(-0.5)
        assert_directions_agree(rows)
        assert_same_bits(rows.dequantize(), columns.dequantize()[128:])


@every_format
def test_a_set_noop_flag_reaches_no_alias(device, name):
    t, alias = made_behind_the_alias(name, device)
    before = t.dequantize()
    alias.quantize_(randn(256, 48, device=device), noop_flag=torch.ones(1, device=device))
    assert_same_bits(t.dequantize(), before)
    assert_directions_agree(t)


@every_format
def test_a_write_counts_for_parts_that_only_the_alias_has(device, name):
    t, alias = made_behind_the_alias(name, device)
    columns = [getattr(t, n) for n in t._of_direction("columnwise")]
    versions = [part._version for part in columns]
    alias.zero_()
    assert all(part._version > version for part, version in zip(columns, versions))


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_write_of_bytes_is_reported_once_for_all(device, name):
    t = quantized(name, device)
    alias = t.detach()
    alias._data.zero_()
    alias._reset_caches()
    assert_directions_agree(t)
    alias.update_usage(columnwise_usage=True)
    alias.copy_(randn(256, 48, device=device))
    assert_directions_agree(t)


@pytest.mark.parametrize("name", ["block1d", "hybrid"])
@pytest.mark.parametrize("dropped", [ROWWISE, COLUMNWISE], ids=["rowwise", "columnwise"])
def test_what_cannot_be_made_of_the_other_direction_refuses_the_write(device, name, dropped):
    t = quantized(name, device)
    alias, before = without(t, **dropped), t.dequantize()
    kept = alias.dequantize()
    for write in WRITES.values():
        if write is not WRITES["rows"]:
            with refused(NotImplementedError, type(t).__name__, "an alias of it holds", "clone()"):
                write(alias, before * 2)
    assert_same_bits(t.dequantize(), before)
    assert_same_bits(alias.dequantize(), kept)
    t.zero_()
    assert not alias.dequantize().any()
    del t
    alias.fill_(1.0)
    assert alias.dequantize().all()


@every_format
def test_a_tensor_in_other_memory_is_an_alias_no_more(device, name):
    t, alias = made_behind_the_alias(name, device)
    before = t.dequantize()
    alias.data = quantized(name, device, columnwise=False)
    alias.zero_()
    assert_same_bits(t.dequantize(), before)
    t.fill_(1.0)
    assert not alias.dequantize().any()
    other = alias.detach()
    alias.update_usage(columnwise_usage=True)
    other.copy_(before)
    assert_directions_agree(alias)


@every_format
def test_an_alias_keeps_no_tensor_alive_and_tensors_may_be_swapped(device, name):
    t, alias = made_behind_the_alias(name, device)
    columns = TensorWeakRef(getattr(t, t._of_direction("columnwise")[0]))
    other, other_alias = made_behind_the_alias(name, device)
    torch.utils.swap_tensors(t, other)
    assert columns() is not None
    alias.zero_()
    assert not other.dequantize().any() and t.dequantize().any()
    assert_directions_agree(other)
    gc.disable()
    try:
        del other
        assert columns() is None
    finally:
        gc.enable()
    alias.fill_(1.0)
    assert_same_bits(t.dequantize(), other_alias.dequantize())


# ---- of modules ----

HELD = ["delayed", "current", "block"]
every_recipe = pytest.mark.parametrize("recipe", HELD)


def held(device, recipe):
    with te.quantized_model_init(recipe=RECIPES[recipe]()):
        return te.Linear(128, 128, bias=False, device=device)


def run(module, x, recipe):
    x = x.detach().requires_grad_()
    with te.autocast(recipe=RECIPES[recipe]()):
        y = module(x)
    y.backward(torch.ones_like(y))
    return y.detach(), x.grad


@every_recipe
@pytest.mark.parametrize("taken", ["in training", "in evaluation", "data"])
def test_a_gradient_reads_what_was_written_to_an_alias(device, recipe, taken):
    """The weight drops its columns in evaluation and recomputes them in training, for all of its aliases."""
    module, x = held(device, recipe), randn(16, 128, device=device)
    alias = module.weight.detach() if taken == "in training" else None
    with torch.no_grad(), te.autocast(recipe=RECIPES[recipe]()):
        module.eval()(x)
    if alias is None:
        alias = module.weight.data if taken == "data" else module.weight.detach()
    module.train()
    for factor in (1 / 16, 1 / 32):  # which have room in the scale that there is
        run(module, x, recipe)
        alias.copy_(torch.eye(128, device=device) * factor)
        _, dx = run(module, x, recipe)
        assert ((dx - factor).abs() <= factor * 2.0**-4).all()  # rounded once
        with torch.no_grad():
            module.weight.mul_(2.0)
        assert_directions_agree(alias)
        assert_same_bits(alias.dequantize(), module.weight.dequantize())


def test_a_step_of_the_optimizer_reaches_an_alias(device):
    module, x = held(device, "delayed"), randn(16, 128, device=device)
    optimizer = FusedAdam(module.parameters(), lr=0.1, master_weights=True)
    alias = module.weight.detach()
    for _ in range(3):
        run(module, x, "delayed")
        module.weight.update_usage(columnwise_usage=False)
        before = alias.dequantize()
        optimizer.step()
        assert not torch.equal(alias.dequantize(), before)
        assert_directions_agree(alias)


@every_recipe
def test_a_replay_reads_what_was_written_to_an_alias(device, recipe):
    """The columns of the weight are not used then."""

    def family(**options):
        with te.quantized_model_init(recipe=RECIPES[recipe]()):
            return linear(**options)

    module, twin = (family(device=device, params_dtype=torch.bfloat16) for _ in range(2))
    twin.load_state_dict(module.state_dict())
    alias = without(module.weight, **COLUMNWISE)
    capture(module, device, recipe)
    x = tokens(device, torch.bfloat16)
    for seed in range(2):
        values = randn(HIDDEN, HIDDEN, device=device)
        for weight in (alias, twin.weight.detach()):
            weight.copy_(values)
        assert_same_bits(module.weight.dequantize(), twin.weight.dequantize())
        assert_same_step(fp8_step(module, x, seed, recipe), fp8_step(twin, x, seed, recipe))
