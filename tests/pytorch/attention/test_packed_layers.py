# MultiheadAttention and TransformerLayer over packed sequences: equal to a loop over the sequences; padding, rotary
# embedding, cross-attention, norms of q and k, compiled and recomputed calls.
import pytest
import torch
from plain_modules import angles, randomize
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common import recipe

from .packed_cases import Packed, check_close, gradients

HIDDEN, FFN, HEADS = 32, 40, 4
LENGTHS = [5, 1, 0, 9]


def layer(device, **options):
    options = {"self_attn_mask_type": "padding_causal", "attn_input_format": "thd", **options}
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": device, **options}
    return randomize(te.TransformerLayer(HIDDEN, FFN, HEADS, 2, **options))


def tokens(packed, device, dtype=torch.float32, side=0, fill=0.0):
    x = torch.randn(packed.rows[side], HIDDEN)
    x[packed.padding(side)] = fill
    return x.to(device, dtype)


OPTIONS = {
    "plain": {},
    "fused, norm before the rotation": {
        "fuse_qkv_params": True,
        "qk_norm_type": "RMSNorm",
        "qk_norm_before_rope": True,
    },
    "norm after the rotation": {"qk_norm_type": "L2Normalization", "normalization": "RMSNorm", "bias": False},
    "sinks": {"softmax_type": "learnable", "window_size": (3, 0)},
    "output norm": {"output_layernorm": True, "apply_residual_connection_post_layernorm": True},
    "parallel": {"parallel_attention_mlp": True},
}


def compare(call, sequences, x, packed, parameters):
    """The packed call against one for each sequence: values, and gradients of tokens and parameters."""
    got, alone = gradients(call, [x, *parameters]), gradients(sequences, [x, *parameters])
    real = ~packed.padding(0).to(x.device)
    got[0], alone[0] = got[0][real], alone[0][real]
    check_close(got, [t.double() for t in alone], torch.float32)


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("gap", [0, 2])
def test_a_layer_is_the_loop_over_its_sequences(device, kind, gap):
    """Positions begin at 0 in each sequence; gradients of parameters are the sums of the sequences'."""
    packed, module = Packed(LENGTHS, gap=gap), layer(device, **OPTIONS[kind])
    freqs = angles(16, 8).to(device)
    x, told = tokens(packed, device), packed.arguments(device)
    names = [name for name, _ in module.named_parameters()]
    real = ~packed.padding(0).to(device)

    def together(x, *parameters):
        out = torch.func.functional_call(
            module, dict(zip(names, parameters, strict=True)), (x,), {"rotary_pos_emb": freqs, **told}
        )
        return out * real[:, None]

    def one_by_one(x, *parameters):
        out = torch.zeros_like(x)
        for rows, n in zip(packed.sequences(0), packed.lengths[0], strict=True):
            own = {"rotary_pos_emb": freqs, **Packed([n]).arguments(device)}
            if n:
                result = torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x[rows],), own)
                out = out.index_put((torch.arange(rows.start, rows.stop, device=device),), result)
        return out

    compare(together, one_by_one, x, packed, [p.detach() for p in module.parameters()])


def test_a_row_with_a_batch_of_one_is_a_row(device):
    """[t, 1, hidden] and [t, hidden]: the same bits, in the shape of the input; the norm's output too."""
    packed = Packed(LENGTHS)
    x, told = tokens(packed, device), packed.arguments(device)
    module = layer(device)
    assert_same_bits(module(x.unsqueeze(1), **told), module(x, **told).unsqueeze(1))
    options = {"attn_mask_type": "padding", "qkv_format": "thd", "attention_dropout": 0.0, "device": device}
    attention = te.MultiheadAttention(
        HIDDEN, HEADS, input_layernorm=True, return_layernorm_output=True, return_bias=True, **options
    )
    flat, batch = attention(x, **told), attention(x.unsqueeze(1), **told)
    assert flat[0].shape == flat[2].shape == x.shape and flat[1].shape == (HIDDEN,)
    assert_same_bits(flat[2], batch[2].squeeze(1))


def test_padding_holds_anything(device):
    """1e20 in rows of padding changes no bit of a token."""
    packed, module = Packed(LENGTHS, gap=3), layer(device)
    freqs, results = angles(16, 8).to(device), []
    real = ~packed.padding(0).to(device)
    for fill in (0.0, 1e20):
        torch.manual_seed(0)
        x = tokens(packed, device, fill=fill).requires_grad_()
        out = module(x, rotary_pos_emb=freqs, **packed.arguments(device))
        out[real].square().sum().backward()
        results.append((out.detach()[real], x.grad[real]))
    for got, wanted in zip(*results, strict=True):
        assert_same_bits(got, wanted)


def test_a_decoder(device):
    """Cross-attention with packed keys of other lengths, each sequence alone."""
    packed = Packed([5, 1, 4], [3, 8, 2], gap=1)
    module = layer(device, layer_type="decoder", enc_dec_attn_mask_type="padding")
    x, memory, told = tokens(packed, device), tokens(packed, device, side=1), packed.arguments(device)
    freqs = angles(16, 8).to(device)
    out = module(x, encoder_output=memory, rotary_pos_emb=freqs, **told)
    for rows, keys in zip(packed.sequences(0), packed.sequences(1)):
        own = Packed([rows.stop - rows.start], [keys.stop - keys.start]).arguments(device)
        alone = module(x[rows], encoder_output=memory[keys], rotary_pos_emb=freqs, **own)
        torch.testing.assert_close(out[rows], alone, rtol=1e-5, atol=1e-5)


def test_compiled_and_recomputed_layers(device):
    packed, module = Packed(LENGTHS, gap=1), layer(device, softmax_type="learnable")
    x, told = tokens(packed, device), packed.arguments(device, bounds=True)
    freqs = angles(16, 8).to(device)

    def call(m, x, **beyond):
        return m(x, rotary_pos_emb=freqs, **told, **beyond)

    wanted = gradients(lambda x: call(module, x), [x])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for got, exact in zip(gradients(lambda x: call(compiled, x), [x]), wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)  # other products on the CPU
    for run in (
        lambda x: call(module, x, checkpoint_core_attention=True),
        lambda x: te.checkpoint(module, x, rotary_pos_emb=freqs, use_reentrant=False, **told),
    ):
        for got, exact in zip(gradients(run, [x]), wanted, strict=True):
            assert_same_bits(got, exact)


def test_compiled_once_for_any_number_of_tokens(device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    module = layer(device)

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(x, told):
        return module(x, **told)

    counts = []
    for lengths in ([5, 3], [4, 9], [1, 20], [30, 2]):
        packed = Packed(lengths)
        x, told = tokens(packed, device), packed.arguments(device)
        torch.testing.assert_close(compiled(x, told), module(x, **told), rtol=1e-5, atol=1e-6)
        counts.append(counter.frame_count)
    assert counts[1:] == counts[1:2] * 3


def test_refusals(device):
    with refused(NotImplementedError, "TransformerLayer", "'drop_path_rate'", "0.5", "thd"):
        layer(device, drop_path_rate=0.5)
    module, x = layer(device), randn(6, HIDDEN, device=device)
    with refused(ValueError, "MultiheadAttention", "'hidden_states'", "(3, 2, 32)", "(t, hidden)"):
        module(x.view(3, 2, HIDDEN))
    with refused(ValueError, "MultiheadAttention", "'cu_seqlens_q'", "None", "thd"):
        module(x, rotary_pos_emb=angles(16, 8).to(device))
    with refused(ValueError, "TransformerLayer", "'self_attn_mask_type'", "'causal'", "thd"):
        layer(device, self_attn_mask_type="causal")(x, **Packed([6]).arguments(device))
    decoder = layer(device, layer_type="decoder")
    with refused(ValueError, "TransformerLayer", "'enc_dec_attn_mask_type'", "'no_mask'", "thd"):
        decoder(x, encoder_output=x, **Packed([6]).arguments(device))
    attention = te.MultiheadAttention(HIDDEN, HEADS, qkv_format="thd", attention_dropout=0.0, device=device)
    with refused(ValueError, "MultiheadAttention", "'attn_mask_type'", "'causal'", "thd"):
        attention(x, **Packed([6]).arguments(device))
    if device == "cpu":
        with refused(ValueError, "rope", "freqs"):
            module(x, rotary_pos_emb=angles(5, 8), **Packed([6]).arguments(device))


def ints(*values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"cu_seqlens_q": ()}, ("'cu_seqlens_q'", "[0]", "sequences + 1")),
        ({"cu_seqlens_kv": (), "cu_seqlens_q": ()}, ("'cu_seqlens_q'", "[0]")),
        ({"cu_seqlens_q_padded": (0, 2, 4, 6)}, ("'cu_seqlens_q_padded'", "4 elements", "3 of 'cu_seqlens_q'")),
        ({"cu_seqlens_kv_padded": [0, 3, 6]}, ("'cu_seqlens_kv_padded'", "[0, 3, 6]", "int32")),
        ({"max_seqlen_q": 3.0}, ("'max_seqlen_q'", "3.0")),
        ({"max_seqlen_kv": -1}, ("'max_seqlen_kv'", "-1")),
    ],
)
def test_bad_lengths_of_every_module(device, change, words):
    """By name, before anything is computed; by DotProductAttention alone too."""
    call = Packed([3, 3]).arguments(device)
    call |= {name: ints(*t, device=device) if isinstance(t, tuple) else t for name, t in change.items()}
    options = {"attn_mask_type": "padding", "qkv_format": "thd", "attention_dropout": 0.0}
    attention = te.MultiheadAttention(HIDDEN, HEADS, device=device, **options)
    with refused(ValueError, "MultiheadAttention", *words):
        attention(randn(6, HIDDEN, device=device), rotary_pos_emb=angles(16, 8).to(device), **call)
    q = randn(6, 2, 8, device=device)
    with refused(ValueError, "DotProductAttention", *words):
        te.DotProductAttention(2, 8, **options)(q, q, q, **call)


@pytest.mark.parametrize("norm", [None, "L2Normalization"])
def test_keys_rotate_by_their_own_sequences(device, norm):
    """Self-attention whose keys have other lengths than its queries: k's positions are those of cu_seqlens_kv."""
    options = {"attn_mask_type": "padding", "qkv_format": "thd", "attention_dropout": 0.0, "device": device}
    module = randomize(te.MultiheadAttention(HIDDEN, HEADS, qk_norm_type=norm, **options))
    x, freqs = randn(6, HIDDEN, device=device), angles(16, 8).to(device)
    lengths = {"cu_seqlens_q": ints(0, 3, 6, device=device), "cu_seqlens_kv": ints(0, 2, 6, device=device)}
    out = module(x, rotary_pos_emb=freqs, **lengths)
    for queries, keys in ((slice(0, 3), slice(0, 2)), (slice(3, 6), slice(2, 6))):
        q, _, _ = module._project(x[queries, None], None, freqs, None, False, own(Packed([3]), device))[:3]
        _, k, v = module._project(x[keys, None], None, freqs, None, False, own(Packed([len(x[keys])]), device))[:3]
        given = Packed([3], [len(x[keys])]).arguments(device)
        alone = module.proj(module.core_attention(q, k, v, **given))
        torch.testing.assert_close(out[queries], alone, rtol=1e-5, atol=1e-5)


def own(packed, device):
    given = packed.arguments(device)
    return (given["cu_seqlens_q"], given["cu_seqlens_kv"]), (None, None)


class _Pair(te.DotProductAttention):
    """By the API of a submodule: (tensor, None)."""

    def forward(self, *args, **options):
        return super().forward(*args, **options), None


def test_a_replaced_core_attention(device):
    packed, x = Packed(LENGTHS), randn(sum(LENGTHS), HIDDEN, device=device)
    options = {"attn_mask_type": "padding", "qkv_format": "thd", "attention_dropout": 0.0}
    module = te.MultiheadAttention(HIDDEN, HEADS, device=device, **options)
    wanted = module(x, **packed.arguments(device))
    module.core_attention = _Pair(HEADS, HIDDEN // HEADS, **options)
    assert_same_bits(module(x, **packed.arguments(device)), wanted)
    module.core_attention = te.DotProductAttention(HEADS, HIDDEN // HEADS, return_max_logit=True, **options)
    with refused(TypeError, "MultiheadAttention", "'core_attention'", "DotProductAttention"):
        module(x, **packed.arguments(device))


RECIPES = {
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
}


@pytest.mark.parametrize("name", RECIPES)
def test_fp8(device, name):
    """A packed layer in FP8 is as near to float32 as the loop over its sequences, with scales of each: values
    and gradients of tokens, in the norm. E4M3 and E5M2 round by 2^-4 and 2^-3; four products follow each other."""
    options = {"self_attn_mask_type": "padding_causal", "attn_input_format": "thd", "hidden_dropout": 0.0}
    module = randomize(te.TransformerLayer(128, 256, 4, 2, attention_dropout=0.0, device=device, **options))
    packed, freqs = Packed([48, 16, 0, 32]), angles(48, 32).to(device)
    x = torch.randn(packed.rows[0], 128, device=device)

    def together(x):
        return module(x, rotary_pos_emb=freqs, **packed.arguments(device))

    def one_by_one(x):
        out = []
        for rows in packed.sequences(0):
            if n := rows.stop - rows.start:
                out.append(module(x[rows], rotary_pos_emb=freqs, **Packed([n]).arguments(device)))
        return torch.cat(out)

    def errors(call):
        if name == "delayed":  # its scales are those of steps before
            with te.autocast(recipe=scaling):
                call(x)
        with te.autocast(recipe=scaling):
            got = gradients(call, [x])
        return [((ours - want).norm() / want.norm()).item() for ours, want in zip(got, exact, strict=True)]

    exact, scaling = gradients(together, [x]), RECIPES[name]()
    for ours, loop in zip(errors(together), errors(one_by_one), strict=True):
        assert 1e-4 < ours < min(0.2, 1.5 * loop), (ours, loop)
