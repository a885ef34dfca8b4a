# tensor.utils: weights with their data in a buffer, masters cast into them part by part over 1 to 4 ranks, the results
# from gathered data, in modules too. Each expectation is the whole master quantized at once.
import copy

import pytest
import torch
from quantized_cases import FORMATS, assert_readable, assert_same_parts, block1d, block2d, current, delayed, parts_of
from ranks import on_ranks
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch.tensor import utils

from . import shard_workers

STEPS = 2
IN_PARTS = {"delayed": delayed, "current": current, "block2d": block2d}
BOUNDS = {
    1: (0, 1),
    2: (0, 0.37, 1),
    3: (0, 0.21, 0.21, 1),  # one rank has nothing of anything
    4: (0, 0.013, 0.55, 0.62, 1),
}


def master(*shape, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-4, 5, shape, generator=generator)
    return x.to(device)


# ---- several ranks ----


@pytest.fixture(scope="module")
def of_ranks():
    """The results of each of four ranks in the groups of the first one to four of them."""
    return on_ranks(shard_workers.in_groups, BOUNDS, STEPS, ranks=max(BOUNDS), device="cpu")


@pytest.mark.parametrize("ranks", BOUNDS)
@pytest.mark.parametrize("manual", [False, True])
def test_every_rank_has_the_whole(of_ranks, ranks, manual):
    """Bytes, scales, both directions and amaxes, twice in a row; one MAX a cast."""
    wanted, held = shard_workers.quantized_at_once(STEPS), []
    blocks = sum({(300, 200): 6, (3, 90, 48): 3, (0, 16): 0}.get(shape, 1) for _, shape, _ in shard_workers.WEIGHTS)
    for rank in range(ranks):
        found, reductions, stayed, ranges = of_ranks[rank][ranks, manual]
        assert reductions == ([("RedOpType.MAX", blocks)] * STEPS if ranks > 1 else [])
        held.append(ranges)
        for i, ((parts, amax), (parts_wanted, amax_wanted)) in enumerate(zip(found, wanted)):
            assert_same_parts(parts, parts_wanted, f"rank {rank}, weight {i}")
            assert stayed[i] or not manual or len(shard_workers.WEIGHTS[i][1]) < 2
            assert (amax is None) == (amax_wanted is None)
            if amax is not None:
                assert_same_bits(amax, amax_wanted, f"amax of weight {i}")
    if ranks == 3:
        assert not any(held[1])


@pytest.mark.parametrize("ranks", BOUNDS)
def test_bytes_go_into_shards(of_ranks, ranks):
    results = [of_ranks[rank][ranks, "shards"] for rank in range(ranks)]
    quantized = shard_workers.quantized_at_once(1)
    for i, number in enumerate(shard_workers.WEIGHTS_WITH_ELEMENTS):
        parts = quantized[number][0]
        data = next(part for name, part in parts.items() if name in ("_data", "_rowwise_data"))
        gathered = torch.cat([targets[i] for targets, _, _ in results])
        assert_same_bits(gathered, data.reshape(-1), f"weight {number}")
        for _, scales, untouched in results:
            assert untouched
            for name, part in scales[i].items():
                assert_same_bits(part, parts[name], f"weight {number} {name}")


# ---- one process ----


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_whole_master(name, device):
    weight, x = IN_PARTS[name](device=device)(torch.ones(130, 40, device=device)), master(130, 40, device=device)
    wanted = copy.deepcopy(weight).quantize_(x)
    before = weight._version, {n: t._version for n, t in parts_of(weight).items()}
    utils.cast_master_weights_to_fp8([weight], [torch.nn.Parameter(x)], [0], None)
    assert weight.get_usages() == {"rowwise": True, "columnwise": False}
    assert weight._version > before[0] and all(t._version > before[1][n] for n, t in parts_of(weight).items())
    assert_same_bits(weight.dequantize(), wanted.dequantize(), name)
    utils.post_all_gather_processing(weight)
    assert_same_parts(weight, wanted, name)
    assert_readable(weight)


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_backward_that_saved_the_weight_raises(name):
    weight = IN_PARTS[name]()(torch.ones(32, 32))
    saved = shard_workers.raw_of(weight)
    y = (torch.ones(32, 32, requires_grad=True) * saved).sum()
    utils.cast_master_weights_to_fp8([weight], [master(1024)], [0], None)
    with refused(RuntimeError, "modified by an inplace operation"):
        y.backward()


RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block2d": recipe.Float8BlockScaling(),
}


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_modules_step_like_quantize_(name, manual, device):
    """Losses, gradients and the scaling state of a module whose master is cast in parts, beside one whose weight takes
    the whole: before the first step too, where a delayed weight's scale is made for it."""
    with te.quantized_model_init(recipe=RECIPES[name]):
        module = te.Linear(48, 144, device=device, params_dtype=torch.bfloat16)
    other = copy.deepcopy(module)
    for step in range(4):
        x, values = master(16, 48, seed=step, device=device).bfloat16(), master(144, 48, seed=9 + step, device=device)
        cast = [module.weight], [values.view(-1)], [0], None, None
        utils.quantize_master_weights(*cast, manual_post_all_gather_processing=manual)
        if manual:
            utils.post_all_gather_processing([module.weight])
        other.weight.quantize_(values.bfloat16())
        for m in (module, other):
            with te.autocast(recipe=RECIPES[name]):
                y = m(x)
            y.float().square().mean().backward()
        assert_same_bits(module.weight.grad, other.weight.grad, f"step {step}")
        assert_same_parts(module.weight, other.weight, f"step {step}")
        module.zero_grad()
        other.zero_grad()
        if name == "delayed":
            ours, theirs = (m.fp8_meta["scaling_fwd"] for m in (module, other))
            assert_same_bits(ours.scale, theirs.scale, "scale")
            assert_same_bits(ours.amax_history, theirs.amax_history, "history")


def test_captured_modules_read_the_new_columns(device):
    """A graph reads the memory that the columnwise data had at its capture."""
    with te.quantized_model_init(recipe=RECIPES["current"]):
        module = te.Linear(48, 144, device=device, params_dtype=torch.bfloat16)
    eager, x = copy.deepcopy(module), master(16, 48, device=device).bfloat16().requires_grad_()
    graphed = te.make_graphed_callables(module, (x,), enabled=True, recipe=RECIPES["current"])
    cast = lambda m: ([m.weight], [master(144, 48, seed=7, device=device)], [0], None)  # noqa: E731
    with refused(ValueError, "model_weights[0] has columnwise data that a captured graph reads", "wanted True"):
        utils.quantize_master_weights(*cast(module))
    with refused(RuntimeError, "clear_columnwise_cache: a captured graph reads"):
        utils.clear_columnwise_cache(module.weight)
    results = []
    for m, call in ((module, graphed), (eager, eager)):
        utils.quantize_master_weights(*cast(m), manual_post_all_gather_processing=True)
        utils.post_all_gather_processing([m.weight])
        given = x.detach().clone().requires_grad_()
        with te.autocast(recipe=RECIPES["current"]):
            y = call(given)
        y.sum().backward()
        results.append((y, given.grad))
    for got, want in zip(*results):
        assert_same_bits(got, want, "captured")


def test_memory_that_is_freed_is_named():
    """As sharding frameworks free a weight's data; a shard's own memory needs none of it."""
    weight, x = current()(torch.ones(20, 40)), master(20, 40)
    wanted = copy.deepcopy(weight).quantize_(x)
    shard = torch.empty(800, dtype=torch.uint8)
    weight.update_usage(columnwise_usage=False)
    weight._data.untyped_storage().resize_(0)
    with refused(RuntimeError, "its memory has been freed"):
        utils.quantize_master_weights([weight], [x], [0], None)
    with refused(RuntimeError, "its memory has been freed"):
        utils.post_all_gather_processing(weight)
    utils.quantize_master_weights([weight], [x], [0], None, [shard])
    assert_same_bits(shard.view(20, 40), wanted._data, "shard")
    assert_same_bits(weight._scale_inv, wanted._scale_inv, "scale")


# ---- where the data lie ----


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "hybrid"])
@pytest.mark.parametrize("pitch", [None, 64])
def test_data_in_a_buffer(name, pitch, device):
    """Values, scales and the other direction stay; what is written into the buffer is in the tensor."""
    weight = FORMATS[name](device=device)(master(20, 40, device=device))
    before, raw = copy.deepcopy(weight), shard_workers.raw_of(weight)
    buffer = torch.zeros(20 * 64 + 7, dtype=raw.dtype, device=device)
    place = buffer[7:].as_strided((20, 40), (40 if pitch is None else pitch, 1))
    utils.replace_raw_data(weight, place)
    assert_same_parts(weight, before, name)
    assert shard_workers.raw_of(weight).data_ptr() == place.data_ptr()
    utils.replace_raw_data(weight, buffer[: 20 * 40].view(20, 40))  # which overlaps
    assert_same_parts(weight, before, name)
    buffer.zero_()
    assert not weight.dequantize().any()
    weight.quantize_(master(20, 40, seed=1, device=device))
    assert buffer.any() and weight.dequantize().any()


def test_a_module_with_its_weight_in_a_buffer(device):
    """Neighbours in the buffer, NaN in both formats, take no part in products."""
    with te.quantized_model_init(recipe=RECIPES["current"]):
        module = te.Linear(40, 21, device=device, params_dtype=torch.bfloat16)
    other = copy.deepcopy(module)
    buffer = torch.full((3 + 21 * 40 + 4000,), 0x7F, dtype=torch.uint8, device=device)
    utils.replace_raw_data(module.weight, buffer[3 : 3 + 21 * 40].view(21, 40))
    x, results = master(16, 40, device=device).bfloat16(), []
    for m in (module, other):
        given = x.clone().requires_grad_()
        with te.autocast(recipe=RECIPES["current"]):
            y = m(given)
        y.sum().backward()
        results.append((y, given.grad, m.weight.grad))
    for a, b in zip(*results):
        assert_same_bits(a, b, "in a buffer")


# ---- the other direction ----


@pytest.mark.parametrize("name", IN_PARTS)
def test_columnwise_data_follow_the_gathered_ones(name, device):
    """They are in the memory that they had; after they were dropped, they come back when a forward needs them."""
    weight = IN_PARTS[name](device=device)(torch.ones(130, 40, device=device))
    wanted = IN_PARTS[name](device=device)(master(130, 40, device=device))
    addresses = {n: t.data_ptr() for n, t in parts_of(weight).items()}
    for part, new in zip(weight.fsdp_extract_buffers()[0], wanted.fsdp_extract_buffers()[0]):
        part.copy_(new)
    for field in weight._names("scale"):
        getattr(weight, field).copy_(getattr(wanted, field))
    utils.post_all_gather_processing([weight])
    assert_same_parts(weight, wanted, name)
    assert {n: t.data_ptr() for n, t in parts_of(weight).items()} == addresses
    utils.clear_columnwise_cache([weight])
    assert weight.get_usages() == {"rowwise": True, "columnwise": False}
    weight.update_usage(columnwise_usage=True)
    assert_same_parts(weight, wanted, name)
    utils.clear_columnwise_cache(weight)
    utils.post_all_gather_processing(weight)
    assert_same_parts(weight, wanted, name)
    assert_readable(weight)


def test_memory_that_waited_is_not_taken_for_another_shape():
    """A weight that takes other data between a cast and what follows the gather."""
    weight, other = current()(torch.ones(20, 40)), current()(master(48, 16))
    utils.quantize_master_weights([weight], [master(800)], [0], None, manual_post_all_gather_processing=True)
    weight.data = copy.deepcopy(other)
    utils.clear_columnwise_cache(weight)
    utils.post_all_gather_processing(weight)
    assert_same_parts(weight, other)
    utils.quantize_master_weights([weight], [master(768)], [0], None, manual_post_all_gather_processing=True)
    weight.data = current()(torch.ones(20, 40))
    weight._transpose = None
    utils.post_all_gather_processing(weight)
    assert_same_parts(weight, current()(torch.ones(20, 40)))


def test_formats_of_one_direction_need_nothing():
    weight = FORMATS["identity"]()(torch.ones(4, 40))
    utils.post_all_gather_processing(weight)
    utils.clear_columnwise_cache([weight])
    assert (weight.dequantize() == 1).all()


# ---- bad input ----


def test_bad_lists_and_parts_are_named_and_nothing_is_written():
    good, x = block2d()(torch.ones(20, 40)), torch.full((100,), 3.0)
    elsewhere = FORMATS["current"](device="meta").make_empty((20, 40), device="meta")
    columns = current()(torch.ones(20, 40))
    columns.update_usage(rowwise_usage=False)
    existing = current(use_existing_amax=True, amax=torch.ones(1))(torch.ones(20, 40))
    bare, before = torch.zeros(100, dtype=torch.uint8), parts_of(copy.deepcopy(good))
    for error, arguments, message in (
        (TypeError, (good, [x], [0], None), "argument 'model_weights' is a Float8BlockwiseQTensor, wanted a list"),
        (TypeError, ([good], x, [0], None), "argument 'master_weights' is a Tensor, wanted a list"),
        (ValueError, ([good], [x, x], [0], None), "argument 'master_weights' has 2 elements, wanted 1"),
        (ValueError, ([good], [x], [], None), "argument 'start_offsets' has 0 elements, wanted 1"),
        (ValueError, ([good], [x], [0], None, []), "argument 'fsdp_shard_model_weights' has 0 elements"),
        (TypeError, ([x], [x], [0], None), "model_weights[0] is a Tensor, wanted a quantized tensor"),
        (NotImplementedError, ([good, block1d()(torch.ones(20, 40))], [x, x], [0, 0], None), "model_weights[1] is a"),
        (NotImplementedError, ([FORMATS["hybrid"]()(torch.ones(20, 40))], [x], [0], None), "cannot be quantized in"),
        (NotImplementedError, ([FORMATS["identity"]()(torch.ones(20, 40))], [x], [0], None), "cannot be quantized in"),
        (NotImplementedError, ([existing], [x], [0], None), "computes its own amaxes"),
        (NotImplementedError, ([elsewhere], [x], [0], None), "model_weights[0] is on the meta device"),
        (NotImplementedError, ([current()(torch.ones(20, 40))[:10]], [x], [0], None), "is a view of some rows of"),
        (RuntimeError, ([good, columns], [x, x], [0, 0], None), "model_weights[1] has no rowwise data"),
        (ValueError, ([good], [None], [0], None), "master_weights[0] is None and start_offsets[0] 0, wanted both None"),
        (ValueError, ([good], [x], [None], None), "master_weights[0] is given and start_offsets[0] None"),
        (ValueError, ([good], [x], [701], None), "master_weights[0] is elements 701 to 801 of the weight"),
        (ValueError, ([good], [x], [-1], None), "master_weights[0] is elements -1 to 99"),
        (ValueError, ([good], [x], [1.0], None), "start_offsets[0] is 1.0, wanted an int"),
        (ValueError, ([good], [x.double()], [0], None), "master_weights[0] is a torch.float64"),
        (ValueError, ([good], [7], [0], None), "master_weights[0] is a int"),
        (ValueError, ([good], [x.to("meta")], [0], None), "master_weights[0] is on meta, wanted cpu"),
        (ValueError, ([good], [x], [0], None, [bare[:99]]), "fsdp_shard_model_weights[0] is torch.uint8 [99]"),
        (ValueError, ([good], [x], [0], None, [bare.float()]), "fsdp_shard_model_weights[0] is torch.float32 [100]"),
        (ValueError, ([good], [x], [0], None, [(bare, bare)]), "fsdp_shard_model_weights[0] is tuple"),
    ):
        for cast in (utils.quantize_master_weights, utils.cast_master_weights_to_fp8):
            with refused(error, cast.__name__, message):
                cast(*arguments)
    assert_same_parts(good, before)
    utils.quantize_master_weights([], [], [], None)


def test_bad_data_and_columns_are_named():
    good = current()(torch.ones(20, 40))
    before, raw = parts_of(copy.deepcopy(good)), torch.zeros(20, 40, dtype=torch.uint8)
    columns = current()(torch.ones(20, 40))
    columns.update_usage(rowwise_usage=False)
    for error, arguments, message in (
        (TypeError, (raw, raw), "argument 'tensor' is a Tensor, wanted a quantized tensor"),
        (TypeError, (good, good), "argument 'new_raw_data' is a Float8Tensor, wanted a plain tensor"),
        (NotImplementedError, (FORMATS["hybrid"]()(torch.ones(20, 40)), raw), "belong to its two parts"),
        (NotImplementedError, (current()(torch.ones(40, 40))[:20], raw), "is a view of some rows of another"),
        (RuntimeError, (columns, raw), "argument 'tensor' has no rowwise data"),
        (ValueError, (good, raw.float()), "argument 'new_raw_data' is of dtype torch.float32, wanted torch.uint8"),
        (ValueError, (good, raw.view(-1)), "argument 'new_raw_data' is of shape torch.Size([800])"),
        (ValueError, (good, raw.to("meta")), "argument 'new_raw_data' is of device meta, wanted cpu"),
        (ValueError, (good, raw.view(40, 20).t()), "argument 'new_raw_data' has strides (1, 20)"),
        (ValueError, (good, raw[0].expand(20, 40)), "argument 'new_raw_data' has strides (0, 1)"),
    ):
        with refused(error, "replace_raw_data", message):
            utils.replace_raw_data(*arguments)
    for function in (utils.post_all_gather_processing, utils.clear_columnwise_cache):
        name = function.__name__
        with refused(TypeError, name, "model_weights[1] is a Tensor, wanted a quantized tensor"):
            function([good, raw])
        with refused(NotImplementedError, name, "model_weights[1] is a Float8BlockwiseQTensor whose columnwise data"):
            function([good, block1d()(torch.ones(20, 40))])
        with refused(NotImplementedError, name, "model_weights[0] is a HybridQuantizedTensor"):
            function(FORMATS["hybrid"]()(torch.ones(20, 40)))
        with refused(RuntimeError, name, "model_weights[1] has no rowwise data"):
            function([good, columns])
    assert_same_parts(good, before)
