# Keywords that a constructor or a context does not have: TypeError names it, the keyword and the likely one; inspection
# by clients shows the signature as it is written.
import inspect
import warnings

import pytest
import torch
from support import refused

import transformer_engine.pytorch as te

MODULES = {
    "Linear": (8, 8),
    "LayerNormLinear": (8, 8),
    "LayerNormMLP": (8, 16),
    "LayerNorm": (8,),
    "RMSNorm": (8,),
    "DotProductAttention": (2, 4),
    "MultiheadAttention": (8, 2),
    "TransformerLayer": (8, 16, 2),
    "RotaryPositionEmbedding": (8,),
}
CONTEXTS = (
    "autocast",
    "fp8_autocast",
    "quantized_model_init",
    "fp8_model_init",
    "onnx_export",
    "get_cpu_offload_context",
)
MEANT = [
    ("Linear", "dtype", "params_dtype"),
    ("Linear", "init_methods", "init_method"),
    ("LayerNormLinear", "layernorm_eps", "eps"),
    ("LayerNormLinear", "dtype", "params_dtype"),
    ("LayerNormMLP", "ffn_hidden", "ffn_hidden_size"),
    ("LayerNormMLP", "dtype", "params_dtype"),
    ("RMSNorm", "epsilon", "eps"),
    ("DotProductAttention", "dropout", "attention_dropout"),
    ("MultiheadAttention", "num_heads", "num_attention_heads"),
    ("MultiheadAttention", "head_dim", "kv_channels"),
    ("MultiheadAttention", "batch_first", "qkv_format"),
    ("TransformerLayer", "batch_first", "attn_input_format"),
    ("TransformerLayer", "epsilon", "layernorm_epsilon"),
    ("TransformerLayer", "dtype", "params_dtype"),
    ("RotaryPositionEmbedding", "rotary_bas", "rotary_base"),
    ("autocast", "fp8_recipe", "recipe"),
    ("autocast", "fp8_group", "amax_reduction_group"),
    ("fp8_autocast", "recipe", "fp8_recipe"),
    ("fp8_autocast", "amax_reduction_group", "fp8_group"),
    ("quantized_model_init", "fp8_recipe", "recipe"),
    ("fp8_model_init", "fp8_recipe", "recipe"),
    ("make_graphed_callables", "num_warmup_iter", "num_warmup_iters"),
    ("get_cpu_offload_context", "model_layer", "model_layers"),
]


@pytest.mark.parametrize(("name", "keyword", "meant"), MEANT)
def test_the_keyword_that_was_meant(name, keyword, meant):
    with refused(TypeError, f"{name}: no argument '{keyword}'; did you mean '{meant}'?"):
        getattr(te, name)(*MODULES.get(name, ()), **{keyword: None})


@pytest.mark.parametrize("name", [*MODULES, *CONTEXTS])
def test_a_keyword_like_none(name):
    target = getattr(te, name)
    parameters = inspect.signature(target).parameters.values()
    names = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    with refused(TypeError, f"{name}: no argument 'zzz'; it has {names[0]}", *names):
        target(*MODULES.get(name, ()), zzz=1)


def test_norms_take_the_keywords_beyond_their_signature():
    with refused(TypeError, "LayerNorm: no argument 'devices'; did you mean 'device'?"):
        te.LayerNorm(8, devices="cpu")
    assert te.LayerNorm(8, device="cpu", dtype=torch.float16, sm_margin=2).weight.dtype is torch.float16


def test_in_a_subclass_the_base_is_named():
    class Mine(te.Linear):
        def __init__(self, config, **kwargs):
            self.config = config
            super().__init__(8, 8, device="cpu", **kwargs)

    assert Mine({}, params_dtype=torch.bfloat16).weight.dtype is torch.bfloat16
    with refused(TypeError, "Linear: no argument 'dtype'; did you mean 'params_dtype'?"):
        Mine({}, dtype=torch.bfloat16)


def test_other_type_errors_pass():
    """Of missing arguments, and of what a constructor calls."""
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'out_features'"):
        te.Linear(8)

    def wrong(weight):
        raise TypeError("not this weight")

    with refused(TypeError, "not this weight"):
        te.Linear(8, 8, device="cpu", init_method=wrong)


@pytest.mark.parametrize("name", [*MODULES, *CONTEXTS, "make_graphed_callables"])
def test_signatures_are_those_that_are_written(name):
    """By each way that clients inspect them, in names, order and defaults."""
    target = getattr(te, name)
    function = target.__init__ if isinstance(target, type) else target
    written = inspect.unwrap(function)
    code = written.__code__
    names = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    found = inspect.signature(function).parameters
    kept = [name for name, p in found.items() if p.kind is not p.VAR_KEYWORD]
    assert kept == names and "unknown" not in found
    spec = inspect.getfullargspec(function)
    assert [*spec.args, *spec.kwonlyargs] == names and (spec.varkw is not None) == name.endswith("Norm")
    defaults = [*(written.__defaults__ or ()), *(written.__kwdefaults__ or {}).values()]
    assert [p.default for p in found.values() if p.default is not p.empty] == defaults
    assert function.__name__ == written.__name__ and function.__doc__ == written.__doc__


RETIRED = ("apply_query_key_layer_scaling", "attention_softmax_in_fp32")


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", ["DotProductAttention", "MultiheadAttention", "TransformerLayer"])
def test_keywords_of_older_versions(name, value):
    """They change nothing, and a warning at the caller's line names them; another one beside them is still unknown."""
    cls = getattr(te, name)
    for keyword in RETIRED:
        with pytest.warns(DeprecationWarning, match=f"{name}: argument '{keyword}' has no effect") as caught:
            found = cls(*MODULES[name], attention_dropout=0.0, **{keyword: value})
        assert [warning.filename for warning in caught] == [__file__]
        with refused(TypeError, name, "'num_head'"):
            cls(*MODULES[name], **{keyword: value}, num_head=2)
    with pytest.warns(DeprecationWarning) as caught:
        found = cls(*MODULES[name], attention_dropout=0.25, **dict.fromkeys(RETIRED, value))
    core = {"DotProductAttention": lambda m: m, "MultiheadAttention": lambda m: m.core_attention}
    assert len(caught) == 2
    assert core.get(name, lambda m: m.self_attention.core_attention)(found).attention_dropout == 0.25
    with refused(TypeError, "Linear", f"'{RETIRED[0]}'"):
        te.Linear(8, 8, **{RETIRED[0]: value})


def test_warnings_point_at_the_caller():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        te.fp8_autocast(enabled=False)
        te.fp8_model_init(enabled=False)
        te.make_graphed_callables(te.Linear(8, 8, device="cpu"), (torch.ones(2, 8),), fp8_enabled=False)
        te.get_cpu_offload_context(True, 1, 2, offload_weights=True)
    assert [warning.filename for warning in caught] == [__file__] * 4


@pytest.mark.usefixtures("fp8_left_off")
def test_a_context_in_compiled_code():
    from transformer_engine.common.recipe import Float8CurrentScaling

    module, recipe = te.Linear(16, 16, device="cpu"), Float8CurrentScaling()

    def step(x):
        with te.autocast(enabled=True, recipe=recipe):
            return module(x)

    x = torch.randn(4, 16)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), step(x))
