# te.Linear, the module: a drop-in for torch.nn.Linear with Transformer Engine's arguments. Its arithmetic is proved in
# functional/test_linear.py; split parameters and state are test_linear_parameters.py's.
import contextlib
import copy
import inspect

import pytest
import torch
from support import DTYPES, assert_same_bits, assert_within, in_threads, randn, refused, wide

import transformer_engine.pytorch as te
from transformer_engine.pytorch.functional import linear

from .linear_cases import assert_same_step, step, twins

# specs: name and default of every argument, in order. `device` stands for "cuda where there is one".
SIGNATURE = {
    "in_features": inspect.Parameter.empty,
    "out_features": inspect.Parameter.empty,
    "sequence_parallel": False,
    "fuse_wgrad_accumulation": False,
    "tp_group": None,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "rng_tracker_name": None,
    "init_method": None,
    "bias": True,
    "return_bias": False,
    "params_dtype": None,
    "parallel_mode": None,
    "parameters_split": None,
    "device": None,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "ub_name": None,
    "delay_wgrad_compute": False,
    "symmetric_ar_type": None,
    "save_original_input": False,
    "name": None,
    "tp_recompute_allgather": True,
    "tp_overlap": "auto",
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_drop_in_for_torch(dtype, bias, device):
    ours, plain = twins(device, bias=bias, dtype=dtype)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in plain.named_parameters()]
    x, dy = randn(6, 16, dtype=dtype, device=device), randn(6, 24, dtype=dtype, device=device)
    got, want = step(ours, x, dy), step(plain, x, dy)
    if device == "cpu":
        return assert_same_step(got, want)
    exact = step(copy.deepcopy(plain).double(), x.double(), dy.double())
    for a, b, e in zip(got, want, exact, strict=True):
        # each within one rounding of a float32 sum of at most 24 terms of magnitude at most 8 x 8
        slack = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
        assert_within(a, wide(e), slack * wide(e).abs() + 24 * 2.0**-23 * 64, "against float64")
        assert a.dtype == b.dtype


def test_the_function_gets_the_modules_parameters(device):
    module = te.Linear(16, 24, device=device)
    x = randn(2, 3, 16, device=device)
    assert_same_bits(module(x), linear(x, module.weight, module.bias))
    assert_same_bits(module(x, is_first_microbatch=True), module(x, is_first_microbatch=False))


def test_return_bias_leaves_it_to_the_caller(device):
    module = te.Linear(16, 24, return_bias=True, device=device, init_method=torch.nn.init.normal_)
    with torch.no_grad():
        module.bias.fill_(3)
    x = randn(5, 16, device=device)
    out, bias = module(x)
    assert bias is module.bias
    assert_same_bits(out, linear(x, module.weight))
    assert te.Linear(16, 24, bias=False, return_bias=True, device=device)(x)[1] is None


@pytest.mark.parametrize("family", [te.Linear, te.LayerNormLinear])
def test_a_missing_bias_is_an_empty_tensor(device, family):
    """It moves with the weight; it is no parameter, and in no checkpoint."""
    for split, names in ((None, ["bias"]), (["q", "k"], ["q_bias", "k_bias"])):
        module = family(16, 24, bias=False, parameters_split=split, device=device, params_dtype=torch.bfloat16)
        for one in (module, copy.deepcopy(module), module.float()):
            for name in names:
                bias, weight = getattr(one, name), getattr(one, one.weight_names[0])
                assert type(bias) is torch.Tensor and bias.shape == (0,)
                assert (bias.dtype, bias.device) == (weight.dtype, weight.device)
                assert name not in dict(one.named_parameters()) and name not in one.state_dict()


def test_rows_are_optional(device):
    module = te.Linear(16, 24, device=device)
    x = randn(0, 16, device=device, requires_grad=True)
    y = module(x)
    y.sum().backward()
    assert y.shape == (0, 24) and x.grad.shape == (0, 16)
    assert not module.weight.grad.any() and not module.bias.grad.any()
    assert module(randn(16, device=device)).shape == (24,)


# ---- parameters ----


def test_signature_is_the_apis():
    parameters = dict(inspect.signature(te.Linear.__init__).parameters)
    parameters.pop("self")
    assert {name: p.default for name, p in parameters.items()} == SIGNATURE
    assert list(parameters) == list(SIGNATURE)
    forward = list(inspect.signature(te.Linear.forward).parameters)
    assert forward == ["self", "inp", "is_first_microbatch", "fp8_output", "fp8_grad"]


def test_attributes_clients_read(device):
    module = te.Linear(16, 24, device=device, ub_name="qkv", name="layer.qkv")
    got = {name: getattr(module, name) for name in ("in_features", "out_features", "use_bias", "tp_size", "ub_name")}
    assert got == {"in_features": 16, "out_features": 24, "use_bias": True, "tp_size": 1, "ub_name": "qkv"}
    assert module.sequence_parallel is False and module.parallel_mode is None and module.name == "layer.qkv"
    assert module.fuse_wgrad_accumulation is False and module.need_backward_dw() is False
    assert type(module).__module__.startswith("transformer_engine.pytorch")
    assert repr(module) == "Linear(in_features=16, out_features=24, bias=True)"


def test_marks_that_clients_change_stay(device):
    module = te.Linear(16, 24, parallel_mode="row", device=device)
    module.weight.partition_stride = 2
    module.load_state_dict(module.state_dict())
    module.reset_parameters()
    assert module.to(torch.bfloat16).weight.partition_stride == 2 and module.weight.partition_dim == 1


def test_default_initialisation(device):
    module = te.Linear(512, 512, device=device)
    assert not module.bias.any()
    # 2^18 draws of normal(0, 0.023): mean within 5 of its standard errors, deviation within 1%
    assert abs(module.weight.mean().item()) < 5 * 0.023 / 512
    assert abs(module.weight.std().item() / 0.023 - 1) < 0.01


def test_init_method_and_dtype(device):
    seen = []
    module = te.Linear(16, 24, init_method=seen.append, params_dtype=torch.bfloat16, device=device)
    assert len(seen) == 1 and seen[0] is module.weight
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    try:
        torch.set_default_dtype(torch.float16)
        assert te.Linear(2, 3, device=device).weight.dtype == torch.float16
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("where", ["cpu", torch.device("cpu"), "meta"])
def test_device_argument(where):
    assert te.Linear(2, 3, device=where).weight.device == torch.device(where)


def test_device_defaults_to_cuda_where_there_is_one():
    assert te.Linear(2, 3).weight.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.gpu
def test_device_as_a_number():
    assert te.Linear(2, 3, device=0).weight.device == torch.device("cuda:0")


class FakeTracker:
    """An RNG tracker: fork() uses a generator state of its own and restores the previous state afterwards."""

    def __init__(self):
        self.forks = []

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        self.forks.append(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(77)
            yield


def test_rng_tracker_is_forked_for_weights():
    for name, forked in (("expert", "expert"), (None, "model-parallel-rng")):
        tracker = FakeTracker()
        state = torch.get_rng_state()
        module = te.Linear(6, 5, get_rng_state_tracker=lambda t=tracker: t, rng_tracker_name=name, device="cpu")
        assert tracker.forks == [forked]
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(77)
        assert_same_bits(module.weight, torch.nn.init.normal_(torch.empty(5, 6), std=0.023))


def test_meta_module_is_made_real_by_reset_parameters():
    module = te.Linear(6, 5, parallel_mode="column", device="meta")
    assert all(p.is_meta for p in module.parameters())
    assert module(torch.empty(3, 6, device="meta")).shape == (3, 5)
    torch.manual_seed(5)
    module.reset_parameters()
    assert not any(p.is_meta for p in module.parameters())
    assert module.weight.tensor_model_parallel and module.weight.requires_grad
    torch.manual_seed(5)
    direct = te.Linear(6, 5)
    assert_same_bits(module.weight, direct.weight)
    assert not module.bias.any()
    emptied = te.Linear(6, 5, device="meta").to_empty(device="cpu")
    torch.manual_seed(5)
    emptied.reset_parameters()
    assert emptied.weight.device.type == "cpu" and emptied.weight.isfinite().all() and not emptied.bias.any()


@pytest.mark.parametrize(
    "mode, weight, bias",
    [(None, (False, -1), (False, -1)), ("column", (True, 0), (True, 0)), ("row", (True, 1), (False, -1))],
)
def test_tensor_parallel_tags(mode, weight, bias):
    module = te.Linear(6, 4, parallel_mode=mode, parameters_split=["q", "k"], sequence_parallel=True, device="cpu")
    assert module.sequence_parallel is False  # active only with tp_size > 1
    for name, parameter in module.named_parameters():
        want = weight if name.endswith("weight") else bias
        assert (parameter.tensor_model_parallel, parameter.partition_dim) == want, name
        assert parameter.partition_stride == 1
        assert hasattr(parameter, "sequence_parallel") == (mode == "row" and name.endswith("bias")), name


def test_subclass_may_set_attributes_first():
    class Client(te.Linear):
        def __init__(self):
            self.is_expert = True
            super().__init__(6, 5, device="cpu")

    assert Client().is_expert and isinstance(Client(), torch.nn.Module)


# ---- use ----


def test_used_twice_in_one_step(device):
    module = te.Linear(16, 16, device=device)
    x, z, dy = randn(4, 16, device=device), randn(4, 16, device=device), randn(4, 16, device=device)
    first, second = step(module, x, dy)[2:], step(module, z, dy)[2:]
    module.zero_grad()
    (module(x) + module(z)).backward(dy)
    for p, a, b in zip(module.parameters(), first, second, strict=True):
        assert_same_bits(p.grad, a + b)
    module.zero_grad()
    module(module(x)).sum().backward()  # through itself
    assert all(p.grad.isfinite().all() for p in module.parameters())


def test_threads_get_the_same_bits(device):
    module = te.Linear(130, 96, parameters_split={"q": 64, "k": 32}, device=device)
    x, dy = randn(64, 130, device=device), randn(64, 96, device=device)

    def call(_):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        return y.detach(), *torch.autograd.grad(y, (leaf, *module.parameters()), dy)

    want = call(0)
    for got in in_threads(6, call):
        assert_same_step(got, want)


@pytest.mark.parametrize("split", [None, ["q", "k"]])
def test_compiled_bits_equal_eager(split, device):
    module = te.Linear(16, 24, parameters_split=split, device=device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (6, 9):
        x, dy = randn(rows, 16, device=device), randn(rows, 24, device=device)
        assert_same_step(step(compiled, x, dy), step(module, x, dy))


@pytest.mark.parametrize("compile", [False, True])
def test_autocast_trains_float32_parameters(compile, device):
    module = te.Linear(16, 24, device=device)
    low = copy.deepcopy(module).bfloat16()
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if compile else module
    x, dy = randn(6, 16, device=device), randn(6, 24, dtype=torch.bfloat16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = step(call, x, dy)
        module.zero_grad()
        twice = call(x) + call(x)  # the cast weight is shared
    assert got[0].dtype == torch.bfloat16
    want = step(low, x.bfloat16(), dy)
    assert_same_step([got[0], *got[1:]], [want[0], *(t.float() for t in want[1:])])
    twice.backward(dy)
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in module.parameters())


# ---- refusals ----


@pytest.mark.parametrize("argument, value", [("symmetric_ar_type", "multimem_all_reduce")])
def test_what_has_not_landed_is_refused_by_name(argument, value):
    with refused(NotImplementedError, "Linear", f"'{argument}'", value, "not available"):
        te.Linear(16, 24, device="cpu", **{argument: value})


@pytest.mark.parametrize("argument", [name for name in SIGNATURE if name.startswith("ub_") and name != "ub_name"])
def test_overlap_of_userbuffers_is_accepted_and_changes_nothing(argument, device):
    x = randn(3, 16, device=device)
    module, plain = te.Linear(16, 24, device=device, **{argument: True}), te.Linear(16, 24, device=device)
    plain.load_state_dict(module.state_dict())
    assert_same_bits(module(x), plain(x))


def test_a_quantized_input_gradient_is_refused_by_name(device):
    module, x = te.Linear(16, 24, device=device), randn(3, 16, device=device)
    with refused(NotImplementedError, "Linear", "'fp8_grad'", "not available"):
        module(x, fp8_grad=True)
    assert_same_bits(module(x, fp8_output=True), module(x))  # there is no format outside of autocast


@pytest.mark.parametrize("dtype", [torch.int32, "bf16", 16], ids=str)
@pytest.mark.parametrize("make", [te.Linear, te.LayerNormLinear, te.LayerNormMLP], ids=lambda cls: cls.__name__)
def test_parameter_dtypes_other_than_floats_are_named(make, dtype):
    with refused(ValueError, make.__name__, "'params_dtype'", repr(dtype), "torch.bfloat16"):
        make(16, 24, params_dtype=dtype, device="cpu")


def test_bad_parallel_mode_is_named():
    with refused(ValueError, "Linear", "'parallel_mode'", "'diagonal'", "'column'", "'row'"):
        te.Linear(16, 24, parallel_mode="diagonal", device="cpu")


def test_bad_input_is_named_and_harmless(device):
    module = te.Linear(16, 24, device=device)
    x, dy = randn(3, 16, device=device), randn(3, 24, device=device)
    before = step(module, x, dy)
    for bad, words in (
        (randn(3, 15, device=device), ("'inp'", "last dimension 15", "[3, 15]", "16")),
        (x.half(), ("'inp'", "'weight'", "torch.float32", "torch.float16")),
        (x.long(), ("'inp'", "torch.int64", "float32")),
        (x[0, 0], ("'inp'", "no dimensions")),
        (x.to("meta"), ("'inp'", "'weight'", device, "meta")),
    ):
        with refused(ValueError, "Linear", *words):
            module(bad)
    assert_same_step(step(module, x, dy), before)
