# Inputs other than tensors, angles that end before the sequence, and an input in the other layout where sizes prove it:
# named with op, argument, got, wanted and the fix, and the module works on as before.
import numpy
import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common.recipe import CustomRecipe, DelayedScaling
from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb

HIDDEN, HEADS, HEAD, SEQ, BATCH = 16, 2, 8, 6, 2
MODULES = {
    "Linear": lambda device: te.Linear(HIDDEN, HIDDEN, device=device),
    "LayerNormLinear": lambda device: te.LayerNormLinear(HIDDEN, HIDDEN, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(HIDDEN, 24, device=device),
    "LayerNorm": lambda device: te.LayerNorm(HIDDEN, device=device),
    "RMSNorm": lambda device: te.RMSNorm(HIDDEN, device=device),
    "MultiheadAttention": lambda device: te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, device=device),
    "TransformerLayer": lambda device: layer(device),
}
NO_TENSORS = {
    "numpy.ndarray": numpy.ones((SEQ, BATCH, HIDDEN), numpy.float32),
    "list": [[1.0]],
    "NoneType": None,
    "str": "x",
}


def layer(device, **options):
    return te.TransformerLayer(HIDDEN, 24, HEADS, hidden_dropout=0.0, attention_dropout=0.0, device=device, **options)


def tokens(device, *sizes):
    return randn(*(sizes or (SEQ, BATCH)), HIDDEN, device=device)


def angles(device, positions):
    return te.RotaryPositionEmbedding(HEAD).to(device)(positions)


# ---- inputs other than tensors ----


@pytest.mark.parametrize("kind", NO_TENSORS)
@pytest.mark.parametrize("name", MODULES)
def test_inputs_other_than_tensors(name, kind, device):
    module, x = MODULES[name](device), tokens(device)
    before = module(x)
    argument = "hidden_states" if name in ("MultiheadAttention", "TransformerLayer") else "inp"
    advice = ("torch.from_numpy",) if kind == "numpy.ndarray" else ()
    with refused(TypeError, f"{name}: argument '{argument}' is a {kind}, wanted a torch.Tensor", *advice):
        module(NO_TENSORS[kind])
    assert_same_bits(module(x), before)


@pytest.mark.usefixtures("fp8_left_off")
@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear, te.LayerNormMLP])
def test_a_last_dimension_that_does_not_fit_leaves_histories_alone(kind, device):
    module, recipe = kind(32, 48, device=device), DelayedScaling()
    with te.autocast(recipe=recipe):
        module(torch.ones(16, 32, device=device)).sum().backward()
    histories = [module.fp8_meta[f"scaling_{way}"].amax_history for way in ("fwd", "bwd")]
    before = [history.clone() for history in histories]
    with refused(ValueError, "33]", "32"), te.autocast(recipe=recipe):
        module(torch.full((16, 33), 100.0, device=device))
    for history, was in zip(histories, before, strict=True):
        assert_same_bits(history, was)


def test_inputs_other_than_tensors_leave_scales_alone(device):
    module, x = te.LayerNormMLP(HIDDEN, 32, device=device), tokens(device)
    with te.autocast():
        module(x)
    before = module.get_extra_state()
    with refused(TypeError, "LayerNormMLP: argument 'inp' is a numpy.ndarray"), te.autocast():
        module(x.cpu().numpy())
    assert_same_bits(module.get_extra_state(), before)


@pytest.mark.parametrize("position", range(3))
def test_attention_inputs_other_than_tensors(position, device):
    module = te.DotProductAttention(HEADS, HEAD)
    heads = [randn(SEQ, BATCH, HEADS, HEAD, device=device) for _ in range(3)]
    before = module(*heads)
    given = [t.cpu().numpy() if i == position else t for i, t in enumerate(heads)]
    argument = ("query_layer", "key_layer", "value_layer")[position]
    with refused(TypeError, f"DotProductAttention: argument '{argument}' is a numpy.ndarray", "torch.from_numpy"):
        module(*given)
    assert_same_bits(module(*heads), before)


def test_beside_the_input(device):
    cross = layer(device, layer_type="decoder")
    x = tokens(device)
    with refused(TypeError, "MultiheadAttention: argument 'encoder_output' is a numpy.ndarray"):
        cross(x, encoder_output=x.cpu().numpy())
    module = layer(device)
    for angle in (angles("cpu", SEQ).numpy(), (angles(device, SEQ), angles("cpu", SEQ).numpy())):
        with refused(TypeError, "MultiheadAttention: argument 'rotary_pos_emb' is a numpy.ndarray"):
            module(x, rotary_pos_emb=angle)
    mask = numpy.zeros((BATCH, 1, 1, SEQ), bool)
    with refused(ValueError, "DotProductAttention: argument 'attention_mask' is array", f"[{BATCH}, 1, 1, {SEQ}]"):
        module(x, mask, self_attn_mask_type="padding")


def test_rotation_inputs_other_than_tensors(device):
    t, freqs = randn(SEQ, BATCH, HEADS, HEAD, device=device), angles(device, SEQ)
    for fused in (False, True):
        with refused(TypeError, "apply_rotary_pos_emb: argument 't' is a numpy.ndarray"):
            apply_rotary_pos_emb(t.cpu().numpy(), freqs, fused=fused)
        with refused(TypeError, "apply_rotary_pos_emb: argument 'freqs' is a list"):
            apply_rotary_pos_emb(t, [1.0], fused=fused)
    qkv = randn(SEQ, BATCH, HEADS, 3 * HEAD, device=device)
    with refused(TypeError, "apply_fused_qkv_rotary_pos_emb: argument 'k_freqs' is a NoneType"):
        apply_fused_qkv_rotary_pos_emb(qkv, freqs, None, [HEAD] * 3)
    for length in (numpy.ones(3), None, "6"):
        with refused(TypeError, "RotaryPositionEmbedding", "'max_seq_len'", type(length).__name__, "number"):
            te.RotaryPositionEmbedding(HEAD)(length)
    assert te.RotaryPositionEmbedding(HEAD)(numpy.int64(3)).shape == (3, 1, 1, HEAD)


# ---- RoPE past its table ----


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("fused", [False, True])
def test_past_the_table(fused, tensor_format, device):
    seq_dim = tensor_format.index("s")
    t = randn(SEQ, BATCH, HEADS, HEAD, device=device).transpose(0, seq_dim)
    wanted = f"has {SEQ - 1} positions, wanted at least the sequence length {SEQ}: pass RotaryPositionEmbedding(dim)("
    with refused(ValueError, "argument 'freqs'", wanted):
        apply_rotary_pos_emb(t, angles(device, SEQ - 1), tensor_format, fused=fused)
    assert apply_rotary_pos_emb(t, angles(device, SEQ), tensor_format, fused=fused).isfinite().all()


def test_past_the_table_by_start_positions(device):
    """On a CPU an error, on a GPU, where nothing waits to look, NaN for these positions alone; fused or not."""
    t, freqs = randn(SEQ, BATCH, HEADS, HEAD, device=device), angles(device, SEQ + 2)
    for start, outside in (([0, 3], [(SEQ - 1, 1)]), ([-1, 2], [(0, 0)])):
        starts = torch.tensor(start, dtype=torch.int32, device=device)
        if device == "cpu":
            with refused(ValueError, "apply_rotary_pos_emb: argument 'freqs' has 8 positions", str(start), "6 each"):
                apply_rotary_pos_emb(t, freqs, start_positions=starts)
            with refused(ValueError, "start_positions", "freqs has 8 rows"):
                apply_rotary_pos_emb(t, freqs, start_positions=starts, fused=True)
            continue
        nowhere = torch.zeros(SEQ, BATCH, dtype=torch.bool, device=device)
        for at in outside:
            nowhere[at] = True
        for fused in (False, True):
            out = apply_rotary_pos_emb(t, freqs, start_positions=starts, fused=fused)
            assert torch.equal(out.isnan().all(-1).all(-1), nowhere) and torch.equal(
                out.isnan().any(-1).any(-1), nowhere
            )
    starts = torch.tensor([0, 2], dtype=torch.int32, device=device)
    plain = torch.cat([apply_rotary_pos_emb(t[:, :1], freqs), apply_rotary_pos_emb(t[:, 1:], freqs[2:])], 1)
    assert_same_bits(apply_rotary_pos_emb(t, freqs, start_positions=starts), plain)


def test_attention_past_the_table(device):
    short, long = angles(device, SEQ - 2), angles(device, SEQ)
    words = "MultiheadAttention", "'rotary_pos_emb'", f"{SEQ - 2} positions", f"length {SEQ}", f"(dim)({SEQ})"
    for qkv_format, x in (("sbhd", tokens(device)), ("bshd", tokens(device, BATCH, SEQ))):
        module = te.MultiheadAttention(HIDDEN, HEADS, qkv_format=qkv_format, device=device)
        for freqs in (short, (short, long), (long, short)):
            with refused(ValueError, *words):
                module(x, rotary_pos_emb=freqs)
        assert module(x, rotary_pos_emb=long).shape == x.shape
    cross = te.MultiheadAttention(HIDDEN, HEADS, attention_type="cross", device=device)
    with refused(ValueError, *words):
        cross(tokens(device, 3, BATCH), encoder_output=tokens(device), rotary_pos_emb=(long, short))
    cross(tokens(device), encoder_output=tokens(device, 3, BATCH), rotary_pos_emb=(long, short))


# ---- the other layout, where sizes prove it ----

FORMATS = {"sbhd": ("batch", "bshd"), "bshd": ("sequence", "sbhd")}


def proofs(device):
    """Arguments beside an input of (SEQ, BATCH) tokens that fit no other layout: name of the argument -> keywords."""
    padding = torch.zeros(BATCH, 1, 1, SEQ, dtype=torch.bool, device=device)
    lengths = torch.tensor([0, 3, 7], dtype=torch.int32, device=device)
    square = torch.zeros(BATCH, 1, SEQ, SEQ, device=device)
    return {
        "attention_mask": {"attention_mask": padding, "self_attn_mask_type": "padding"},
        "attention_mask[0]": {"attention_mask": (padding, padding), "self_attn_mask_type": "padding_causal"},
        "cu_seqlens_q": {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "self_attn_mask_type": "padding"},
        "core_attention_bias": {"core_attention_bias": square, "core_attention_bias_type": "post_scale_bias"},
        "arbitrary": {"attention_mask": square.bool(), "self_attn_mask_type": "arbitrary"},
        "alibi_slopes": {
            "alibi_slopes": torch.ones(BATCH, HEADS, device=device),
            "core_attention_bias_type": "alibi",
        },
    }


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("argument", proofs("cpu"))
def test_an_argument_that_fits_the_other_layout(argument, layout, device):
    module, keywords = layer(device, attn_input_format=layout), proofs(device)[argument]
    right = tokens(device).transpose(0, layout.index("s"))
    before = module(right, **keywords)
    first, other = FORMATS[layout]
    named = "attention_mask" if argument == "arbitrary" else argument
    with refused(ValueError, f"DotProductAttention: argument '{named}'", f"{first} first", f"'{other}'", "transpose"):
        module(right.transpose(0, 1), **keywords)
    assert_same_bits(module(right, **keywords), before)


@pytest.mark.parametrize("layout", FORMATS)
def test_an_encoder_that_fits_the_other_layout(layout, device):
    module = layer(device, attn_input_format=layout, layer_type="decoder")
    pair = [tokens(device, n, BATCH).transpose(0, layout.index("s")) for n in (SEQ, SEQ + 1)]
    module(pair[0], encoder_output=pair[1])
    first, other = FORMATS[layout]
    with refused(ValueError, "argument 'encoder_output'", f"{first} first", f"'{other}'"):
        module(pair[0].transpose(0, 1), encoder_output=pair[1].transpose(0, 1))
    with pytest.raises(ValueError, match="encoder_output") as caught:  # fits neither
        module(pair[0], encoder_output=tokens(device, 3, BATCH + 2).transpose(0, layout.index("s")))
    assert "first" not in str(caught.value)


@pytest.mark.parametrize("layout", FORMATS)
def test_declared_sizes(layout, device):
    first, other = FORMATS[layout]
    module = layer(device, attn_input_format=layout, seq_length=SEQ, micro_batch_size=BATCH)
    right = tokens(device).transpose(0, layout.index("s"))
    module(right)
    with refused(ValueError, "'hidden_states'", "seq_length", "micro_batch_size", f"{first} first", f"'{other}'"):
        module(right.transpose(0, 1))
    for sizes in ((SEQ, 3), (3, BATCH), (BATCH, BATCH), (SEQ, SEQ), (1, 1)):  # no proof: any size may come
        module(tokens(device, *sizes))
    square = layer(device, attn_input_format=layout, seq_length=SEQ, micro_batch_size=SEQ)
    square(tokens(device, SEQ, SEQ))


def test_a_mask_that_fits_neither_is_described(device):
    mask = torch.zeros(BATCH, 1, 1, SEQ + 1, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match="True where padded") as caught:
        layer(device)(tokens(device), mask, self_attn_mask_type="padding")
    assert "first" not in str(caught.value)


# ---- functions ----


def functions():
    """name -> (call with an argument that is not a tensor, the argument)."""
    from transformer_engine.pytorch import cpp_extensions, distributed

    x, y = numpy.ones((4, 8), numpy.float32), torch.ones(4, 8)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    found = {
        "interleave_glu_tensor": (lambda: te.interleave_glu_tensor(x, 2), "tensor"),
        "deinterleave_glu_tensor": (lambda: te.deinterleave_glu_tensor(x, 2), "tensor"),
        "gather_along_first_dim": (lambda: distributed.gather_along_first_dim(x, None), "inp"),
        "reduce_scatter_along_first_dim": (lambda: distributed.reduce_scatter_along_first_dim(x, None), "inp"),
        "allreduce": (lambda: distributed.allreduce(x), "inp"),
        "general_gemm": (lambda: cpp_extensions.general_gemm(y, x), "B"),
        "quantize": (lambda: tex.quantize(x, quantizer), "tensor"),
        "clamped_swiglu": (lambda: tex.clamped_swiglu(x), "input"),
        "clamped_dswiglu": (lambda: tex.clamped_dswiglu(y, x), "fwd_input"),
    }
    for kind in ("gelu", "swiglu"):
        found[kind] = (lambda kind=kind: getattr(tex, kind)(x), "input")
        found[f"d{kind}"] = (lambda kind=kind: getattr(tex, f"d{kind}")(y, x), "fwd_input")
    return found


@pytest.mark.parametrize("name", functions())
def test_function_inputs_other_than_tensors(name):
    call, argument = functions()[name]
    with refused(TypeError, f"{name}: argument '{argument}' is a numpy.ndarray", "torch.from_numpy"):
        call()


def test_arguments_other_than_functions():
    with refused(TypeError, "checkpoint: argument 'function' is a Tensor", "its arguments follow it"):
        te.checkpoint(torch.ones(2), te.Linear(2, 2, device="cpu"))
    for name, sizes in (("Linear", (8, 8)), ("LayerNormLinear", (8, 8)), ("LayerNormMLP", (8, 16))):
        with refused(TypeError, f"{name}: argument 'init_method' is 'normal', wanted a function or None"):
            getattr(te, name)(*sizes, init_method="normal", device="cpu")
    with refused(TypeError, "LayerNormMLP: argument 'output_layer_init_method' is 0.02"):
        te.LayerNormMLP(8, 16, output_layer_init_method=0.02, device="cpu")
    with refused(TypeError, "quantize: argument 'quantizer' is a NoneType, wanted a Quantizer"):
        tex.quantize(torch.ones(2, 2), None)


class Own(ValueError):
    """A caller's."""


@pytest.mark.parametrize("error", [Own, ValueError, TypeError])
@pytest.mark.parametrize("module", ["Linear", "LayerNormLinear", "LayerNormMLP", "LayerNorm", "RMSNorm"])
def test_errors_of_a_callers_own_hooks_pass_unchanged(device, module, error):
    """Even where they read like an op's inside."""
    called, x, raised = MODULES[module](device), tokens(device), error("normalization: argument 'gamma' of a hook")

    def pack(t):
        raise raised

    with pytest.raises(error) as caught, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        called(x.requires_grad_())
    assert caught.value is raised and caught.value.args == ("normalization: argument 'gamma' of a hook",)
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.mark.parametrize("error", [Own, ValueError, TypeError])
@pytest.mark.parametrize("module", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_errors_of_a_callers_own_quantizer_pass_unchanged(device, module, error):
    raised = error("linear: argument 'x' of a quantizer")

    class Raising(te.Float8CurrentScalingQuantizer):
        def quantize_impl(self, tensor):
            raise raised

    recipe = CustomRecipe(qfactory=lambda role: Raising(te.DType.kFloat8E4M3, device))
    with pytest.raises(error) as caught, te.autocast(recipe=recipe):
        MODULES[module](device)(tokens(device))
    assert caught.value is raised


@pytest.mark.parametrize(
    ("module", "parameter", "words"),
    [
        ("LayerNorm", "weight", "LayerNorm: argument 'weight' has dtype"),
        ("LayerNorm", "bias", "LayerNorm: argument 'bias' has dtype"),
        ("RMSNorm", "weight", "RMSNorm: argument 'weight' has dtype"),
        ("LayerNormLinear", "layer_norm_bias", "LayerNormLinear: argument 'layer_norm_bias' has dtype"),
        ("LayerNormLinear", "bias", "LayerNormLinear: argument 'bias' has dtype"),
        ("LayerNormMLP", "layer_norm_weight", "LayerNormMLP: argument 'layer_norm_weight' has dtype"),
        ("LayerNormMLP", "fc2_bias", "LayerNormMLP: linear: argument 'bias' has dtype"),
    ],
)
def test_a_parameter_of_another_dtype_is_named_as_its_module_names_it(device, module, parameter, words):
    called = MODULES[module](device)
    setattr(called, parameter, torch.nn.Parameter(getattr(called, parameter).detach().double()))
    with refused(ValueError, words):
        called(tokens(device))


def test_a_second_weight_that_does_not_fit_is_not_reported_as_the_input(device):
    called = MODULES["LayerNormMLP"](device)
    called.fc2_weight = torch.nn.Parameter(called.fc2_weight.detach()[:, 1:].contiguous())
    with refused(ValueError, "LayerNormMLP: linear: argument 'x' has shape", "wanted a last dimension of 23"):
        called(tokens(device))
