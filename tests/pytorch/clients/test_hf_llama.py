"""examples/with_hf_llama.py in a client's hands: positions, recomputation, hidden states, captures, saving, generation,
and back to Hugging Face's own layers."""

import copy
import inspect
import io

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.common import recipe

transformers = pytest.importorskip("transformers")
with_hf_llama = pytest.importorskip("with_hf_llama")
fuse, unfuse = with_hf_llama.fuse, with_hf_llama.unfuse

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def model(device, **options):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "attention_dropout": 0.0,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | options))).to(device)


def tokens(device, rows=1, length=64):
    return torch.randint(64, (rows, length), device=device)


def logits(of, *args, **options):
    with torch.no_grad():
        return of(*args, use_cache=False, **options).logits


def close(got, wanted, bound=1e-4):
    assert (got - wanted).abs().max() <= bound * wanted.abs().max()


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": LLAMA3}], ids=["default", "llama3"])
def test_positions_count(device, rope):
    plain = model(device, **rope)
    fused, t = fuse(copy.deepcopy(plain)), tokens(device, 2)
    close(logits(fused, t), logits(plain, t))
    ones, positions = torch.ones_like(t), torch.arange(32, device=device).repeat(2)[None]
    far = logits(plain, t, attention_mask=ones)
    for given in (positions, positions.expand(2, -1), positions + 70):
        want = logits(plain, t, attention_mask=ones, position_ids=given)
        close(logits(fused, t, attention_mask=ones, position_ids=given), want)
    assert (want - far).abs().max() > 1e-3 * far.abs().max()  # they matter, beyond close()
    different = torch.stack((positions[0], positions[0] + 1))
    with refused(NotImplementedError, "position_ids differ from row to row"):
        logits(fused, t, attention_mask=ones, position_ids=different)


def test_frequencies_stay_in_float32(device):
    fused, t = fuse(model(device)), tokens(device)
    wanted = [part.inv_freq.clone() for part in fused.modules() if isinstance(part, te.RotaryPositionEmbedding)]
    fused.to(torch.bfloat16)
    for part, want in zip(
        [part for part in fused.modules() if isinstance(part, te.RotaryPositionEmbedding)], wanted, strict=True
    ):
        assert_same_bits(part.inv_freq, want)
    assert logits(fused, t).dtype is torch.bfloat16


def gradients(of, t, around):
    of.zero_grad()
    with around():
        loss = of(t, labels=t).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in of.named_parameters() if p.grad is not None}


def current():
    return te.autocast(recipe=recipe.Float8CurrentScaling())


def delayed():
    return te.autocast(recipe=recipe.DelayedScaling(amax_history_len=2))


@pytest.mark.parametrize("around", [torch.enable_grad, current, delayed])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_gradient_checkpointing_recomputes_to_the_same_bits(device, around):
    fused, t = fuse(model(device)).train(), tokens(device)
    other = copy.deepcopy(fused)
    other.gradient_checkpointing_enable()
    kept = {}
    for name, of in (("plain", fused), ("recomputed", other)):
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, seen=seen: seen.append(x.nbytes) or x, lambda x: x):
            with around():
                of(t)
        kept[name] = sum(seen)
    assert kept["recomputed"] < kept["plain"] / 2
    one, two = copy.deepcopy(fused), copy.deepcopy(other)
    wanted, got = gradients(one, t, around), gradients(two, t, around)
    assert list(got) == list(wanted) and len(got) == len(dict(one.named_parameters()))
    for name, want in wanted.items():
        assert_same_bits(got[name], want, name)


@pytest.mark.parametrize("called_before", [False, True])
def test_hidden_states(device, called_before):
    plain, t = model(device), tokens(device)
    if called_before:
        plain(t, output_hidden_states=True)
    wanted = plain(t, output_hidden_states=True, use_cache=False).hidden_states
    got = fuse(copy.deepcopy(plain))(t, output_hidden_states=True).hidden_states
    assert len(got) == len(wanted) == 3
    for one, two in zip(got, wanted, strict=True):
        close(one, two)


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_padding_after_the_tokens(device, kind):
    """Logits of tokens and the gradients of their loss; padding has no effect, whatever tokens it holds."""
    plain = model(device, attn_implementation=kind)
    fused, t, mask = fuse(copy.deepcopy(plain)), tokens(device, 3), torch.ones(3, 64, dtype=torch.long, device=device)
    mask[0, 40:] = mask[2, 1:] = 0
    labels, real = t.masked_fill(mask == 0, -100), mask != 0
    close(logits(fused, t, attention_mask=mask)[real], logits(plain, t, attention_mask=mask)[real])
    losses = [m(t, attention_mask=mask, labels=labels, use_cache=False).loss for m in (plain, fused)]
    for loss in losses:
        loss.backward()
    close(losses[1], losses[0])
    close(fused.model.embed_tokens.weight.grad, plain.model.embed_tokens.weight.grad, 1e-3)
    other = torch.where(real, t, tokens(device, 3))
    assert_same_bits(logits(fused, other, attention_mask=mask)[real], logits(fused, t, attention_mask=mask)[real])


@pytest.mark.gpu
def test_padding_does_not_wait_for_the_device():
    fused, t = fuse(model("cuda")), tokens("cuda", 3)
    starts = with_hf_llama._starts
    mask = torch.ones(3, 64, dtype=torch.long, device="cuda")
    mask[0, 40:] = 0
    logits(fused, t, attention_mask=mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert starts(mask).shape == (4,)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_is_not_there_is_refused(device):
    fused, t = fuse(model(device)), tokens(device, 2)
    if device == "cpu":  # a GPU asserts, and loses its context
        mask = torch.ones_like(t)
        mask[0, :5] = 0
        with refused(NotImplementedError, "attention_mask", "padding_side='right'"):
            fused(t, attention_mask=mask)
        with refused(NotImplementedError, "attention_mask", "position_ids restart"):
            fused(t, position_ids=torch.arange(32).repeat(2)[None])
    with refused(NotImplementedError, "output_attentions"):
        fused(t, output_attentions=True)
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    with refused(NotImplementedError, "yarn"):
        fuse(model(device, rope_parameters=yarn))


@pytest.mark.parametrize("trained", [False, True])
def test_saved_and_read_again(device, trained, tmp_path):
    fused, t = fuse(model(device)), tokens(device)
    if trained:
        optimizer = te.optimizers.FusedAdam(fused.parameters(), lr=1e-2)
        fused(t, labels=t).loss.backward()
        optimizer.step()
    fused.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).to(device)
    close(logits(again, t), logits(fused, t))
    names = dict(again.named_parameters())
    for name, p in unfuse(copy.deepcopy(fused)).named_parameters():
        assert_same_bits(names[name].detach(), p.detach(), name)
    close(logits(fuse(again), t), logits(fused, t))


def test_saved_with_a_state_dict_that_was_gathered(device, tmp_path):
    """As trainers do, which pass the state dict that they gathered."""
    fused, t = fuse(model(device)), tokens(device)
    fused.save_pretrained(tmp_path, state_dict={key: value.clone() for key, value in fused.state_dict().items()})
    close(logits(transformers.LlamaForCausalLM.from_pretrained(tmp_path).to(device), t), logits(fused, t))


def test_a_saved_model_is_loaded_into_a_fused_one(device, tmp_path):
    """As Trainer does to resume, and to end with its best model: a file with Hugging Face's names, not strict."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    trained = fuse(model(device))
    with torch.no_grad():
        for p in trained.parameters():
            p.add_(torch.randn_like(p))
    trained.save_pretrained(tmp_path)
    for again in (fuse(model(device)), copy.deepcopy(fuse(model(device)))):
        for state in (load_file(tmp_path / "model.safetensors"), trained.state_dict()):
            with torch.no_grad():
                for p in again.parameters():
                    p.zero_()
            missing, unexpected = again.load_state_dict(state, strict=False)
            assert not missing and not unexpected
            for (name, got), want in zip(again.named_parameters(), trained.parameters(), strict=True):
                assert_same_bits(got.detach(), want.detach(), name)
    part = load_file(tmp_path / "model.safetensors")
    del part["model.layers.1.mlp.up_proj.weight"]
    missing, unexpected = again.load_state_dict(part, strict=False)
    assert missing == ["model.layers.1.layer.layernorm_mlp.fc1_weight"]
    assert unexpected == ["model.layers.1.mlp.gate_proj.weight"]


def test_unfused_equals_the_original(device):
    plain = model(device).eval()
    wanted = {name: p.detach().clone() for name, p in plain.named_parameters()}
    back = unfuse(fuse(copy.deepcopy(plain)))
    got = dict(back.named_parameters())
    assert list(got) == list(wanted) and "save_pretrained" not in vars(back)
    for name, want in wanted.items():
        assert_same_bits(got[name].detach(), want, name)
    assert type(back.model.layers[0]) is type(plain.model.layers[0]) and not back.model.layers[0].training
    t = tokens(device)
    assert_same_bits(logits(back, t), logits(plain, t))
    assert back.generate(t[:, :4], max_new_tokens=3, do_sample=False, use_cache=True).shape == (1, 7)


def test_frozen_weights_stay_frozen(device):
    plain = model(device)
    frozen = ["self_attn.k_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight"]
    for name in frozen:
        plain.model.layers[1].get_parameter(name).requires_grad_(False)
    wanted = {name: p.requires_grad for name, p in plain.named_parameters()}
    fused = fuse(plain)
    assert sum(not p.requires_grad for p in fused.parameters()) == 3
    assert {name: p.requires_grad for name, p in unfuse(fused).named_parameters()} == wanted


def test_what_cannot_be_fused_is_left_as_it_was(device):
    plain = model(device)
    layer = plain.model.layers[1]
    layer.mlp.up_proj.requires_grad_(False)
    with refused(NotImplementedError, "layer 1", "freeze both or none"):
        fuse(plain)
    layer.mlp.gate_proj.requires_grad_(False)
    layer.post_attention_layernorm.bfloat16()
    with refused(NotImplementedError, "layer 1", "several dtypes", "cast it"):
        fuse(plain)
    with refused(TypeError, "is not fused"):
        unfuse(plain)
    assert all(hasattr(one, "self_attn") for one in plain.model.layers)
    layer.post_attention_layernorm.float()
    with refused(TypeError, "fuse", "already"):
        fuse(fuse(plain))


def test_the_cache_of_the_unfused_model_is_used_again(device, tmp_path):
    fused = fuse(model(device))
    fused.save_pretrained(tmp_path)
    assert not fused.config.use_cache
    assert transformers.LlamaConfig.from_pretrained(tmp_path).use_cache and unfuse(fused).config.use_cache


def prompts(device, side):
    """Two rows, the second one with five tokens of padding before or after it."""
    t, mask = tokens(device, 2, 12), torch.ones(2, 12, dtype=torch.int64, device=device)
    mask[1, :5] = 0
    return (t, mask) if side == "left" else (t, mask.flip(1))


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=["greedy", "beams", "static"]
)
def test_generated_tokens_are_those_of_the_unfused_model(device, how):
    plain = model(device, rope_parameters=LLAMA3, pad_token_id=0).eval()
    fused, lengths = fuse(copy.deepcopy(plain)), []
    fused.model.layers[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    t, mask = prompts(device, "left")
    options = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **how}
    if how.get("cache_implementation"):
        options["disable_compile"] = True
    got, wanted = fused.generate(t, **options), plain.generate(t, **options)
    assert torch.equal(got, wanted) and wanted.shape == (2, 20)
    assert lengths == [12] + 7 * [1]  # earlier tokens come from the cache
    without = plain.generate(t[:, 5:], **options | {"attention_mask": mask[:, 5:]})
    assert not torch.equal(without[0, 7:], wanted[0, 12:])  # they matter


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_a_cache_in_parts(device, kind, side):
    """The prompt at once, then five tokens, then one; logits and gradients of the unfused model."""
    plain = model(device, attn_implementation=kind)
    fused = fuse(copy.deepcopy(plain))
    t, mask = prompts(device, side)
    mask = torch.cat((mask, torch.ones(2, 6, dtype=torch.int64, device=device)), dim=1)
    t = torch.cat((t, tokens(device, 2, 6)), dim=1)
    results = []
    for one in (fused, plain):
        cache, parts = transformers.DynamicCache(), []
        name = next(name for name in ("cache", "past_key_values") if name in inspect.signature(one.forward).parameters)
        for start, stop in ((0, 12), (12, 17), (17, 18)):
            shown = (mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, start:]
            keywords = {name: cache, "use_cache": True, "attention_mask": mask[:, :stop], "position_ids": shown}
            parts.append(one(t[:, start:stop], **keywords).logits)
        seen = torch.cat(parts, dim=1)[mask.bool()]  # hidden tokens have no defined result
        seen.square().sum().backward()
        results.append((seen.detach(), one.model.embed_tokens.weight.grad))
    for got, want in zip(*results, strict=True):
        close(got, want)


@pytest.mark.parametrize("around", [torch.enable_grad, current])
def test_captured_layers_have_the_bits_of_eager(device, around):
    """With the keywords that the model hands its layers."""
    eager = fuse(model(device)).train()
    captured, t = copy.deepcopy(eager), tokens(device, 2)
    fp8 = {"enabled": True, "recipe": recipe.Float8CurrentScaling()} if around is current else {}
    with_hf_llama.capture(captured, t, **fp8)
    for _ in range(3):
        t = tokens(device, 2)
        wanted, got = gradients(eager, t, around), gradients(captured, t, around)
        assert list(got) == list(wanted)
        for name, want in wanted.items():
            assert_same_bits(got[name], want, name)
    for layer in captured.model.layers:
        layer.reset()


def test_the_module_is_pickled_as_it_is(device):
    fused, t = fuse(model(device)), tokens(device)
    file = io.BytesIO()
    torch.save(fused, file)
    again = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert_same_bits(logits(again, t), logits(fused, t))
    assert type(again.model.layers[0]) is type(fused.model.layers[0])
    assert_same_bits(logits(unfuse(again), t), logits(unfuse(fused), t))
