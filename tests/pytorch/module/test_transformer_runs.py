# Runs of TransformerLayer: stochastic depth and dropout, weight gradients that accumulate, torch.compile, autocast.
import copy

import pytest
import torch
from plain_modules import angles, run
from support import assert_same_bits, randn

import transformer_engine.pytorch as te

from .transformer_cases import DECODER, HEADS, HIDDEN, OPTIONS, POST_LN, SEQ_KV, build, calling, inputs_of, tokens

# ---- stochastic depth ----


def ones_layer(device, rate, layout, **options):
    """Both branches are 1 everywhere: zero weights, biases 1."""
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "drop_path_rate": rate} | options
    layer = te.TransformerLayer(16, 8, 2, attn_input_format=layout, device=device, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.self_attention.proj.bias.fill_(1.0)
        layer.layernorm_mlp.fc2_bias.fill_(1.0)
    return layer


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("parallel", [False, True])
def test_drop_path_drops_whole_sequences(device, layout, parallel):
    """A branch is gone from a sequence, or there 1 / (1 - rate) times; the branches draw by themselves."""
    rate, batch, seq = 0.25, 512, 3
    layer = ones_layer(device, rate, layout, parallel_attention_mlp=parallel)
    x = torch.zeros(*((seq, batch) if layout == "sbhd" else (batch, seq)), 16, device=device)
    out = layer(x)
    by_sequence = out.transpose(0, 1) if layout == "sbhd" else out
    counts = by_sequence[:, 0, 0] * (1 - rate)
    assert torch.equal(by_sequence, by_sequence[:, :1, :1].expand_as(by_sequence)), "whole sequences"
    branches = [0.0, 2.0] if parallel else [0.0, 1.0, 2.0]
    shares = [rate, 1 - rate] if parallel else [rate**2, 2 * rate * (1 - rate), (1 - rate) ** 2]
    assert sum(torch.isclose(counts, counts.new_tensor(n), atol=1e-5).sum().item() for n in branches) == batch
    for n, p in zip(branches, shares, strict=True):
        share = torch.isclose(counts, counts.new_tensor(n), atol=1e-5).float().mean().item()
        assert abs(share - p) < 5 * (p * (1 - p) / batch) ** 0.5  # five standard deviations of a binomial
    assert not torch.equal(out, layer(x)), "each call draws by itself"
    assert_same_bits(layer.eval()(x), torch.full_like(x, 2.0))


def test_drop_path_replays_and_scales_gradients(device):
    """The same seed drops the same sequences; the gradient of a dropped sequence comes from the residual alone."""
    layer, x = ones_layer(device, 0.5, "sbhd"), torch.zeros(2, 64, 16, device=device, requires_grad=True)
    torch.manual_seed(5)
    first = layer(x)
    torch.manual_seed(5)
    assert_same_bits(layer(x), first)
    first.sum().backward()
    assert_same_bits(x.grad, torch.ones_like(x))
    dropped = (first.detach()[0, :, 0] / 2).round()  # 0, 1 or 2 branches are there, twice each
    kept_mlp = layer.layernorm_mlp.fc2_bias.grad[0].item() / (2 * 2)
    kept_attention = layer.self_attention.proj.bias.grad[0].item() / (2 * 2)
    assert kept_mlp + kept_attention == dropped.sum().item()


@pytest.mark.parametrize("rate", ["drop_path_rate", "hidden_dropout"])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_rate_of_one_leaves_the_residual_alone(device, rate, parallel):
    """The branches get gradients of 0, not none."""
    layer = ones_layer(device, **{"rate": 0.0, "layout": "sbhd", "parallel_attention_mlp": parallel, rate: 1.0})
    x = randn(3, 4, 16, device=device, requires_grad=True)
    out = layer(x)
    assert_same_bits(out, x.detach())
    out.backward(torch.full_like(out, 2.0))
    assert_same_bits(x.grad, torch.full_like(x, 2.0))
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in layer.parameters())


@pytest.mark.parametrize("name", ["plain", *OPTIONS])
def test_dropout_replays_and_eval_is_without(device, name):
    options = OPTIONS.get(name, {})
    dropping = {"hidden_dropout": 0.3, "attention_dropout": 0.3, "drop_path_rate": 0.3}
    module, inputs = build(device, **options, **dropping), inputs_of(options, device)
    without = build(device, **options)
    without.load_state_dict(module.state_dict())
    results = []
    for recompute in (False, True):
        torch.manual_seed(5)
        results.append(run(module, *inputs, call=calling(checkpoint_core_attention=recompute)))
    for key in results[0]:
        assert_same_bits(results[1][key], results[0][key], key)
    call = calling()
    assert not torch.equal(results[0]["output 0"], call(without, *inputs))
    assert_same_bits(call(module.eval(), *inputs), call(without, *inputs))


# ---- fused weight-gradient accumulation ----


@pytest.mark.parametrize("options", [{}, DECODER, {**POST_LN, "qk_norm_type": "RMSNorm"}], ids=["", "decoder", "post"])
def test_weight_gradients_accumulate_in_every_part(device, options):
    """Each weight matrix of each submodule: the first microbatch overwrites its main_grad, the next one adds to it."""
    options = {**options, "fuse_qkv_params": True, "num_gqa_groups": 2}
    module, plain = build(device, fuse_wgrad_accumulation=True, **options), build(device, **options)
    plain.load_state_dict(module.state_dict())
    matrices = {name: p for name, p in module.named_parameters() if p.dim() == 2}
    assert len(matrices) == (7 if options.get("layer_type") == "decoder" else 4)
    for p in matrices.values():
        p.main_grad = torch.full(p.shape, torch.nan, device=device)
        p.grad_added_to_main_grad = False
    for first in (True, False):
        inputs = inputs_of(options, device)
        for m in (module, plain):
            calling(is_first_microbatch=first)(m, *inputs).square().sum().backward()
    for name, p in plain.named_parameters():
        ours = module.get_parameter(name)
        got = ours.main_grad if name in matrices else ours.grad
        assert name not in matrices or ours.grad_added_to_main_grad
        # Two float32 sums of two addends each; on CUDA the product is added to main_grad before it is rounded.
        torch.testing.assert_close(got, p.grad, rtol=1e-5, atol=1e-5 * p.grad.abs().max().item())


# ---- torch.compile ----


@pytest.mark.parametrize("name", OPTIONS)
def test_compiled_equals_eager(device, name):
    options = OPTIONS[name]
    module, inputs = build(device, **options), inputs_of(options, device)
    call = calling(rotary_pos_emb=angles(SEQ_KV, HIDDEN // HEADS).to(device))
    got = run(module, *inputs, call=torch.compile(call, fullgraph=True, backend="aot_eager"))
    for key, wanted in run(module, *inputs, call=call).items():
        torch.testing.assert_close(got[key], wanted, rtol=1e-5, atol=1e-5, msg=lambda m, n=key: f"{n}: {m}")


def test_compiled_dropout_runs(device):
    module = build(device, hidden_dropout=0.5, attention_dropout=0.5, drop_path_rate=0.5)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = tokens(device)
    first, second = compiled(x), compiled(x)
    assert first.isfinite().all() and not torch.equal(first, second)


# ---- autocast ----


@pytest.mark.parametrize("name", OPTIONS)
def test_autocast_casts_the_inputs(device, name):
    """Whatever the order of its parts: the layer in bfloat16, to the bits."""
    options = OPTIONS[name]
    module, inputs = build(device, **options), inputs_of(options, device)
    low = copy.deepcopy(module).bfloat16()
    with torch.autocast(device, dtype=torch.bfloat16):
        out = calling()(module, *inputs)
    wanted = calling()(low, *(t.bfloat16() for t in inputs))
    assert_same_bits(out, wanted)
    for result in (out, wanted):
        result.sum().backward()
    for got, want in zip(module.parameters(), low.parameters(), strict=True):
        assert_same_bits(got.grad.bfloat16(), want.grad)
