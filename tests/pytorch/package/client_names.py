# Names that clients import without a guard, by the path that they write, and what each one does next with it: a small
# call that asserts what the client relies on. Everything runs on the CPU.
import functools
import warnings

import torch
from api_names import TE
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch import cpp_extensions


def made(cls, *args):
    """Subclassed, built and run, as a framework does with a module's class."""
    client = type("Client", (cls,), {})
    layer = client(*args, device="cpu")
    given = ([3, 2],) if issubclass(cls, te.GroupedLinear) else ()
    layer(torch.randn(5, 8, requires_grad=True), *given).sum().backward()
    assert layer.__class__.__mro__[1] is cls


def padded_for_ranks(pad):
    tokens, labels = torch.arange(1, 6), torch.arange(11, 16)
    cumulative = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    for lead in (tokens, tokens[None]):
        ids, targets, ends = pad(lead, labels, cumulative, 4, padding_token_id=7)
        assert ids.tolist() == [1, 2, 3, 7, 4, 5, 7, 7]
        assert targets.tolist() == [11, 12, 13, -100, 14, 15, -100, -100]
        assert ends.tolist() == [0, 4, 4, 8] and ends.dtype == cumulative.dtype


def handed_to_a_product(get_workspace):
    a, b = torch.randn(4, 8), torch.randn(3, 8)
    options = {"quantization_params": None, "gelu": None, "gelu_in": None, "accumulate": False, "bias": None}
    got, *_ = cpp_extensions.general_gemm(a, b, workspace=get_workspace(), **options, ub=None, bulk_overlap=None)
    assert_same_bits(got, cpp_extensions.general_gemm(a, b)[0])


def dummies_freed(dummies):
    shape, dtype = (3, 5), torch.float16
    dummies.clear()
    assert len(dummies) == 0 and (*shape, dtype) not in dummies
    grad = te.module.base.get_dummy_wgrad(shape, dtype, device="cpu")
    assert dummies[(*shape, dtype)].data_ptr() == grad.data_ptr() and list(dummies) == [(*shape, dtype)]
    dummies.clear()
    assert not dummies and grad.shape == shape


def a_groups_type(kind):
    assert isinstance(kind, type) and (kind | None)


def initialised(get):
    torch.manual_seed(0)
    want = torch.randn(4, 4) * 0.023
    torch.manual_seed(0)
    weight = torch.empty(4, 4)
    get()(weight)
    assert torch.allclose(weight, want, rtol=1e-6, atol=0)
    torch.manual_seed(0)
    assert_same_bits(te.Linear(4, 4, bias=False, device="cpu").weight, weight)


def cast(function):
    t = torch.ones(2)
    assert function(t, torch.float32) is t and function(None, torch.float32) is None
    assert function(t, torch.bfloat16).dtype == torch.bfloat16


def divided(divide):
    assert divide(12, 3) == 4
    try:
        divide(12, 5)
    except ValueError as error:
        assert "'numerator' is 12, wanted a multiple of 5" in str(error)
    else:
        raise AssertionError("12 / 5 is no whole number")


def split(function):
    x = torch.randn(4, 6, requires_grad=True)
    apply = function.apply
    for sections in (2, [1, 3, 2]):
        parts = apply(x, -1, sections)
        for part, want in zip(parts, torch.split(x, sections, -1), strict=True):
            assert_same_bits(part, want)
    q, k = apply(x.view(4, 2, 3), 1, 1, True)
    assert q.shape == k.shape == (4, 3)
    (q * 2 + k).sum().backward()
    assert x.grad.view(4, 2, 3)[:, 0].eq(2).all() and x.grad.view(4, 2, 3)[:, 1].eq(1).all()


def autocasts(function):
    assert function() == torch.get_autocast_dtype("cuda")


def fits(function):
    for shape, want in (((8, 16), True), ((16, 8), False), ((4, 16), False), ((8, 16, 1), False)):
        assert function(torch.empty(shape)) is want


# ---- jit: torch's own operations ----


def gelu_of(function):
    x, bias = torch.randn(5, 4), torch.randn(4)
    for b in (bias, None, torch.empty(0)):
        added = x if b is None or not b.numel() else x + b
        assert_same_bits(function(x, b), torch.nn.functional.gelu(added, approximate="tanh"))


def gelu_gradient_of(function):
    x, bias, dy = torch.randn(5, 4, requires_grad=True), torch.randn(4, requires_grad=True), torch.randn(5, 4)
    te.jit.bias_gelu_fused(x, bias).backward(dy)
    dbias, dx = function(dy, x.detach(), bias.detach())
    assert_same_bits(dx, x.grad)
    assert torch.allclose(dbias, bias.grad)
    assert function(dy, x.detach(), None)[0] is None


def l2(function):
    x = torch.randn(5, 4, dtype=torch.bfloat16)
    want = torch.nn.functional.rms_norm(x.double(), [4], eps=1e-6)
    assert torch.allclose(function(x).double(), want, rtol=2**-7)


def adds(function, *more):
    """residual + x + bias where nothing is dropped."""
    x, bias, residual = torch.randn(5, 4), torch.randn(4), torch.randn(5, 4)
    assert_same_bits(function(x, bias, residual, 0.0, *more), residual + (x + bias))
    assert_same_bits(function(x, None, residual, 0.0, *more), residual + x)


def drops(function):
    adds(function)
    x, bias = torch.zeros(200, 10), torch.ones(10)
    dropped = function(x, bias, torch.zeros(200, 10), 0.5)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}


def chosen_by_training(get):
    drops(get(True))
    adds(get(False))


def fused(decorator):
    assert decorator(gelu_of) is gelu_of


def not_traced(decorator):
    for make in (decorator(), decorator(recursive=False)):
        assert make(lambda x: x + 1)(torch.ones(1)) == 2


# ---- state ----


def asked_for_debugging(state):
    state.initialize()
    assert not state.debug_enabled and not state.initialized
    state.set_weight_tensor_tp_group_reduce(False)
    assert not state.weight_tensor_tp_group_reduce
    assert [state.get_layer_count(), state.get_layer_count()] == [1, 2]
    state.reset()
    assert state.weight_tensor_tp_group_reduce and state.layer_count == 1


def compared(version):
    assert version() >= (2, 9) and all(isinstance(number, int) for number in version())


def updated(update):
    """As the scales of a module are: from the largest amax, the row that was written last going to the end."""
    for rule in (
        recipe.DelayedScaling(margin=1, amax_history_len=3),
        recipe.DelayedScaling(margin=1, amax_history_len=3, amax_compute_algo=lambda history: history.amax(0)),
    ):
        history, scale = torch.tensor([[2.0, 0.0], [4.0, 0.0], [1.0, 0.0]]), torch.tensor([1.0, 3.0])
        update(history, scale, 448.0, rule)
        assert scale.tolist() == [448.0 / 4 / 2, 3.0]
        assert history[:, 0].tolist() == [0.0, 1.0, 2.0]


def largest(helper):
    assert helper(448, 57344).max_bwd == recipe.Format.HYBRID.value.max_bwd
    assert isinstance(recipe.Format.E4M3.value, helper)


def asked_for_flash(utils):
    from packaging.version import Version

    assert not utils.is_installed and not utils.v3_is_installed and not utils.use_v3 and not utils.v2_4_plus
    assert utils.version < Version("2.0.6") and utils.fa3_version < Version("3.0.0")


def watched(manager):
    """The attributes that an owner of a graph reads and restores."""
    state = manager.quantization_state
    assert not state.fp8_enabled and state.fp8_recipe is None and state.autocast_depth == 0
    assert not state.is_first_fp8_module and not state.fp8_parameters and not state.fp8_calibration
    rule = recipe.Float8CurrentScaling()
    with te.autocast(recipe=rule):
        assert state.fp8_enabled and state.fp8_recipe is rule and state.fp8_distributed_group is None
        assert state.autocast_depth == 1
        assert state.is_first_fp8_module and state.is_first_fp8_module
        assert manager.is_first_fp8_module() and not state.is_first_fp8_module
        state.is_first_fp8_module = True
        assert manager.is_first_fp8_module() and not manager.is_first_fp8_module()
    assert not state.fp8_graph_capturing
    state.fp8_graph_capturing = True
    assert manager.fp8_graph_capturing()
    state.fp8_graph_capturing = False
    assert state.skip_fp8_weight_update_tensor is None and not state.high_precision_init_val


def run_in(rule):
    with te.autocast(recipe=rule):
        te.Linear(16, 16, device="cpu")(torch.randn(16, 16)).sum().backward()


def alone(function, want):
    assert function() == function(None) == want


def quietly(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert function(*args) is None


def multiplied(general_gemm):
    assert general_gemm is cpp_extensions.general_gemm


def refused(cls):
    try:
        cls(1, 2, 3)
    except NotImplementedError as error:
        assert "PagedKVCacheManager" in str(error) and "not available in this version" in str(error)
    else:
        raise AssertionError("it was made")


_WORDS = {
    "AttnMaskTypes": ("causal", "padding_causal_bottom_right", "arbitrary", "no_mask", "padding", "padding_causal"),
    "AttnTypes": ("self", "cross"),
    "AttnBiasTypes": ("alibi", "no_bias", "pre_scale_bias", "post_scale_bias"),
    "LayerTypes": ("encoder", "decoder"),
    "GemmParallelModes": ("row", "column", None),
}


def holds(name, words):
    assert isinstance(words, tuple) and set(_WORDS[name]) <= set(words)


_SIZES = {"Linear": (8, 8), "LayerNormLinear": (8, 8), "LayerNormMLP": (8, 16), "GroupedLinear": (2, 8, 8)}
_DPA, _JIT = f"{TE}.attention.dot_product_attention", f"{TE}.jit"

# (module, name) -> the next use of the object that is imported from there.
NEXT = {
    **{
        (f"{TE}.module", name): functools.partial(lambda cls, sizes: made(cls, *sizes), sizes=_SIZES.get(name, (8,)))
        for name in ("Linear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "RMSNorm", "GroupedLinear")
    },
    (f"{_DPA}.context_parallel", "pad_thd_sequences_for_cp"): padded_for_ranks,
    (f"{_DPA}.utils", "FlashAttentionUtils"): asked_for_flash,
    (f"{TE}.attention.inference", "PagedKVCacheManager"): refused,
    (f"{TE}.module.base", "get_workspace"): handed_to_a_product,
    (f"{TE}.module.base", "_dummy_wgrads"): dummies_freed,
    **{(f"{TE}.constants", name): functools.partial(holds, name) for name in _WORDS},
    (f"{TE}.constants", "dist_group_type"): a_groups_type,
    (f"{TE}.distributed", "get_distributed_world_size"): functools.partial(alone, want=1),
    (f"{TE}.distributed", "get_distributed_rank"): functools.partial(alone, want=0),
    (f"{TE}.utils", "get_default_init_method"): initialised,
    (f"{TE}.utils", "cast_if_needed"): cast,
    (f"{TE}.utils", "divide"): divided,
    (f"{TE}.utils", "SplitAlongDim"): split,
    (f"{TE}.utils", "torch_get_autocast_gpu_dtype"): autocasts,
    (f"{TE}.utils", "check_dim_for_fp8_exec"): fits,
    (_JIT, "jit_fuser"): fused,
    (_JIT, "no_torch_dynamo"): not_traced,
    (_JIT, "set_jit_fusion_options"): quietly,
    (_JIT, "bias_gelu_fused"): gelu_of,
    (_JIT, "bgrad_dgelu_fused"): gelu_gradient_of,
    (_JIT, "l2normalization_fused"): l2,
    (_JIT, "bias_dropout_add"): functools.partial(lambda function: adds(function, True)),
    (_JIT, "get_bias_dropout_add"): chosen_by_training,
    (_JIT, "bias_dropout_add_fused_train"): drops,
    (_JIT, "bias_dropout_add_fused_inference"): adds,
    (_JIT, "warmup_jit_bias_dropout_add"): lambda f: quietly(f, 8, torch.float32, 4, 2),
    (_JIT, "warmup_jit_bias_dropout_add_all_dtypes"): lambda f: quietly(f, 8, 4, 2),
    (_JIT, "warmup_jit_bias_gelu"): lambda f: quietly(f, 8, torch.float32, 4, 2),
    (_JIT, "warmup_jit_bias_gelu_all_dtypes"): lambda f: quietly(f, 8, 4, 2),
    ("transformer_engine.debug.pytorch.debug_state", "TEDebugState"): asked_for_debugging,
    (TE, "torch_version"): compared,
    (f"{TE}.torch_version", "torch_version"): compared,
    (f"{TE}.fp8", "DelayedScaling"): lambda cls: run_in(cls()),
    (f"{TE}.fp8", "Format"): lambda formats: run_in(recipe.DelayedScaling(fp8_format=formats.HYBRID)),
    (f"{TE}.fp8", "get_default_fp8_recipe"): lambda get: run_in(get()),
    (f"{TE}.fp8", "_amax_and_scale_update"): updated,
    (f"{TE}.fp8", "FP8GlobalStateManager"): watched,
    ("transformer_engine.common.recipe", "_FormatHelper"): largest,
    (f"{TE}.module.linear", "general_gemm"): multiplied,
    (f"{TE}.module.layernorm_linear", "general_gemm"): multiplied,
}
