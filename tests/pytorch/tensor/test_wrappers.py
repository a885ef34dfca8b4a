# Quantized tensors in PyTorch's wrappers: torch.compile, casts and moves of modules, optimizers, DDP and FSDP2 on two
# processes over gloo.
import pytest
import torch
from quantized_cases import (
    FORMATS,
    FP8_FORMATS,
    assert_readable,
    assert_same_parts,
    assert_same_tensor,
    current,
    parts_of,
)
from ranks import here, on_ranks
from support import assert_same_bits, randn

import transformer_engine.pytorch as te

from . import workers
from .workers import FSDP_SHAPES, RATE, STEPS, Layer, batch

every_format = pytest.mark.parametrize("name", FORMATS)
every_fp8 = pytest.mark.parametrize("name", FP8_FORMATS)
quiet = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def made(name, device, *shape):
    return FORMATS[name](device=device)(randn(*(shape or (6, 40)), device=device))


# ---- torch.compile ----


@every_format
def test_taken_apart_and_put_together(device, name):
    t = made(name, device)
    fields, context = t.__tensor_flatten__()
    assert sorted(fields) == sorted(t._tensors())
    inner = {field: getattr(t, field) for field in fields}
    other = type(t).__tensor_unflatten__(inner, context, t.shape, t.stride())
    assert_same_tensor(other, t)
    assert other._quantizer is t._quantizer
    assert context == made(name, device).__tensor_flatten__()[1]
    assert context != t.to_dtype(torch.float16).__tensor_flatten__()[1]
    different = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device, amax_epsilon=1.0)(t.dequantize())
    assert context != different.__tensor_flatten__()[1]


@every_format
def test_compiled_with_a_quantized_input(device, name):
    def call(t, x):
        return torch.nn.functional.linear(x, t).relu() + t.sum(), t.detach()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    x = randn(3, 40, device=device)
    for again in range(3):
        t = made(name, device)
        with torch.compiler.set_stance("default" if again == 0 else "fail_on_recompile"):
            got = compiled(t, x)
        assert_same_bits(got[0], call(t, x)[0])
        assert_same_tensor(got[1], t)


@every_format
def test_gradients_of_a_compiled_function(device, name):
    p = torch.nn.Parameter(made(name, device))
    x = randn(3, 40, device=device)

    def loss(p):
        return torch.nn.functional.linear(x, p).square().sum()

    loss(p).backward()
    wanted, p.grad = p.grad, None
    torch.compile(loss, fullgraph=True, backend="aot_eager")(p).backward()
    assert_same_bits(p.grad, wanted)


@pytest.mark.parametrize("name", ["current", "block1d", "block2d"])
def test_compiled_writes_in_place(device, name):
    """A quantized input that the compiled function changes."""

    def change(t, x):
        t.copy_(x * 2.0)
        return t + 1.0

    t, x = made(name, device), randn(6, 40, device=device)
    got = torch.compile(change, fullgraph=True, backend="aot_eager")(t, x)
    wanted = FORMATS[name](device=device)(x * 2.0)
    assert_same_parts(t, wanted)
    assert_same_bits(got, wanted.dequantize() + 1.0)


# ---- modules and optimizers ----


@every_format
def test_casts_of_a_module_change_the_nominal_dtype_alone(device, name):
    module = torch.nn.Module()
    module.w, module.b = torch.nn.Parameter(made(name, device)), torch.nn.Parameter(randn(3, device=device))
    module.register_buffer("count", torch.arange(3, device=device))
    before = {n: p.clone() for n, p in parts_of(module.w).items()}
    w = module.w
    for cast, dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16), ("float", torch.float32)):
        assert getattr(module, cast)() is module
        assert module.w is w and type(w) is type(made(name, device)) and isinstance(w, torch.nn.Parameter)
        assert (w.dtype, module.b.dtype, module.count.dtype) == (dtype, dtype, torch.int64)
        assert_same_parts(w, before)
    module.to(torch.bfloat16)
    assert module.w.dtype is torch.bfloat16 and isinstance(module.w, te.QuantizedTensor)
    module.to(device)
    module.cpu()
    assert_same_parts(module.w, before)
    plain = torch.nn.Linear(2, 2).half()
    assert plain.weight.dtype is torch.float16 and plain.float().weight.dtype is torch.float32
    assert torch.nn.Module.half.__doc__ and torch.nn.Module.half.__name__ == "half"


@every_format
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_see_values_and_leave_quantized_ones(device, name, make, foreach):
    p = torch.nn.Parameter(made(name, device))
    values = p.detach().dequantize().requires_grad_()
    p.grad = randn(6, 40, device=device)
    values.grad = p.grad.clone()
    for parameter in (p, values):
        make([parameter], lr=0.1, weight_decay=0.0, foreach=foreach).step()
    reference = FORMATS[name](device=device)(values.detach())
    assert_same_parts(p, reference)


# ---- several processes ----


class Alone:
    """A mesh of one."""

    def size(self):
        return 1

    def get_group(self):
        return None


@pytest.mark.parametrize("name", ["delayed", "current", "block2d", "identity"])
@pytest.mark.parametrize("shape", [(5, 7), (32, 48), (130, 40)], ids=str)
def test_gathering_into_memory_that_was_given_back(device, name, shape):
    """FSDP2 frees the memory of a gathered tensor, and takes as much again for the next one: nothing in it lasts."""
    t = made(name, device, *shape)
    call = (Alone(), t.shape, t.stride(), None, None)
    inputs, metadata = t.fsdp_pre_all_gather(*call)
    outputs = tuple(x.clone() for x in inputs)
    whole, inner = t.fsdp_post_all_gather(outputs, metadata, t.dtype)
    assert_same_tensor(whole, t)
    assert_readable(whole, ["columnwise"])
    for memory in inner:
        assert memory.numel() * memory.element_size() == memory.untyped_storage().nbytes()
        memory.view(torch.uint8).fill_(255)
    t.copy_(made(name, device, *shape))
    inputs, metadata = t.fsdp_pre_all_gather(*call)
    for memory, x in zip(outputs, inputs):
        memory.copy_(x)
    assert t.fsdp_post_all_gather(outputs, metadata, t.dtype, out=whole) is None
    assert_same_tensor(whole, t)
    assert_readable(whole, ["columnwise"])
    addresses = {memory.untyped_storage().data_ptr() for memory in inner}
    assert {p.untyped_storage().data_ptr() for n, p in parts_of(whole).items() if n != "_scale_inv"} <= addresses


def alone(name, shape):
    """One process that sees both halves of the data; (what each forward saw, the weight)."""
    module = Layer(name, shape)
    optimizer, seen = torch.optim.SGD(module.parameters(), RATE), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            module(batch(step, rank, shape)).sum().backward()
        module.weight.grad /= 2
        seen.append(module.seen)
        optimizer.step()
    return seen, module.weight


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(workers.everything, str(tmp_path_factory.mktemp("dcp")))


@pytest.mark.dist
@quiet
@pytest.mark.parametrize("name", FSDP_SHAPES)
def test_fsdp2_gathers_and_trains_as_one_process_does(ranks, name):
    shape = FSDP_SHAPES[name]
    seen, weight = alone(name, shape)
    for rank, results in enumerate(ranks):
        seen_here, local, values = results["fsdp2"][name]
        for step, (got, want) in enumerate(zip(seen_here, seen, strict=True)):
            assert got["class"] == type(want).__name__ and got["usages"] == want.get_usages()
            assert_same_parts(got["parts"], want, f"rank {rank}, step {step}")
        if name != "identity":
            assert local["usages"] == {"rowwise": True, "columnwise": False}
        rows = -(-shape[0] // 2)
        assert_same_bits(values, weight.dequantize()[rank * rows : (rank + 1) * rows], f"rank {rank}")


@pytest.mark.dist
def test_fsdp2_names_what_it_cannot_shard(ranks):
    for results in ranks:
        found = results["refusals"]
        assert "1 x 128" in found["block1d"] and "block_scaling_dim=2" in found["block1d"]
        assert "(130, 48)" in found["block2d"] and "65 rows" in found["block2d"] and "128" in found["block2d"]
        assert "HybridQuantizedTensor" in found["hybrid"]


@pytest.mark.dist
@pytest.mark.parametrize("name", FORMATS)
def test_ddp_trains_as_one_process_does(ranks, name):
    _, weight = alone(name, (6, 40))
    for results in ranks:
        assert_same_parts(results["ddp"][name], weight, name)


@pytest.mark.dist
def test_ranks_agree_on_an_amax(ranks):
    wanted = parts_of(current(device=here())(torch.arange(-40.0, 40.0, device=here()).view(8, 10)))
    for rank, results in enumerate(ranks):
        parts, kind, engine = results["amax"]
        rows = slice(4 * rank, 4 * rank + 4)
        assert kind == "python"
        assert_same_bits(parts["_scale_inv"], wanted["_scale_inv"])
        assert_same_bits(parts["_data"], wanted["_data"][rows])
        assert_same_bits(parts["_transpose"], wanted["_transpose"][:, rows])
        assert_same_bits(engine, wanted["_data"][rows])
