#!/usr/bin/env python
"""Hugging Face's Llama with our layers in it: same weights, same logits, then a few steps in FP8, saved and loaded
again.

python examples/with_hf_llama.py            needs the extra `transformers`; tiny random weights, no download
Your own model needs `fuse(model)`; `unfuse(model)` is its inverse; save_pretrained() of a fused model writes
Hugging Face's names. With a key-value cache, as generate() passes, Hugging Face's attention runs, with all its
masks; without one padding comes after the tokens. Refused there: other attention masks, and positions that differ from
row to row of a batch. Refused always: rope types whose frequencies change with the sequence or whose angles are scaled,
attention weights as outputs."""

import argparse
import functools
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for `extras`, also under PYTHONSAFEPATH

import torch

import transformer_engine.pytorch as te
from extras import need
from transformer_engine.common import recipe

# A decoder layer: Hugging Face's parameter, ours, and which half of ours.
WEIGHTS = (
    ("input_layernorm.weight", "self_attention.layernorm_qkv.layer_norm_weight", None),
    ("self_attn.q_proj.weight", "self_attention.layernorm_qkv.query_weight", None),
    ("self_attn.k_proj.weight", "self_attention.layernorm_qkv.key_weight", None),
    ("self_attn.v_proj.weight", "self_attention.layernorm_qkv.value_weight", None),
    ("self_attn.o_proj.weight", "self_attention.proj.weight", None),
    ("post_attention_layernorm.weight", "layernorm_mlp.layer_norm_weight", None),
    ("mlp.gate_proj.weight", "layernorm_mlp.fc1_weight", 0),
    ("mlp.up_proj.weight", "layernorm_mlp.fc1_weight", 1),
    ("mlp.down_proj.weight", "layernorm_mlp.fc2_weight", None),
)
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


def in_their_names(tensors, prefix=""):
    """[(Hugging Face's name, our tensor)] for a dict of ours by name."""
    found = []
    for theirs, ours, half in WEIGHTS:
        weight = tensors[prefix + ours]
        found.append((theirs, weight if half is None else weight.chunk(2)[half]))
    return found


@functools.cache
def fused_class(decoder_layer):
    """A subclass of the model's layer class; transformers finds the layers to record and recompute by that class."""

    class FusedLayer(decoder_layer):
        def __init__(self, config, number, inv_freq, device, dtype):
            torch.nn.Module.__init__(self)
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            self.config, self.head_dim = config, head_dim
            # Hugging Face's attention and caches read these of a layer:
            self.layer_idx, self.is_causal = number, True
            self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
            self.layer = te.TransformerLayer(
                config.hidden_size,
                config.intermediate_size,
                config.num_attention_heads,
                num_gqa_groups=config.num_key_value_heads,
                kv_channels=head_dim,
                layernorm_epsilon=config.rms_norm_eps,
                hidden_dropout=0.0,
                attention_dropout=config.attention_dropout,
                layer_number=number + 1,
                self_attn_mask_type="causal",
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                attn_input_format="bshd",
                params_dtype=dtype,
                device=device,
            )
            self.rotary = te.RotaryPositionEmbedding(head_dim)  # float32 after any cast of the model
            self.rotary.register_buffer("inv_freq", inv_freq.to(device, torch.float32, copy=True), persistent=False)
            self.register_load_state_dict_pre_hook(_load_their_names)

        def forward(self, hidden_states, attention_mask=None, position_ids=None, **options):
            if options.get("output_attentions") or self.config.output_attentions:
                raise NotImplementedError("FusedLayer: output_attentions=True, but attention weights are never made")
            caches = [options.pop(name, None) for name in ("past_key_values", "cache")]  # "cache" from 5.24 on
            cache = caches[0] if caches[1] is None else caches[1]
            if cache is not None:
                return _with_cache(self, hidden_states, attention_mask, position_ids, cache, **options)
            padding = {}
            if attention_mask is not None:
                starts = _starts(attention_mask)
                padding = {"self_attn_mask_type": "padding_causal", "cu_seqlens_q": starts, "cu_seqlens_kv": starts}
            return self.layer(hidden_states, rotary_pos_emb=self._angles(hidden_states, position_ids), **padding)

        def _angles(self, hidden_states, position_ids):
            length = hidden_states.shape[1]
            if position_ids is None:
                return self.rotary(length)
            position_ids = position_ids.reshape(-1, length)
            if len(position_ids) > 1 and not (position_ids == position_ids[:1]).all():  # which waits for the device
                raise NotImplementedError(
                    "FusedLayer: position_ids differ from row to row of the batch; pass one row at a time"
                )
            angles = position_ids[0].to(torch.float32)[:, None] * self.rotary.inv_freq
            return torch.cat((angles, angles), dim=-1)[:, None, None, :]

        def __reduce_ex__(self, protocol):  # pickle cannot find a class that a function has made
            return _new_layer, (decoder_layer,), self.__dict__

        @property
        def _gradient_checkpointing_func(self):
            """te.checkpoint: torch's would run the layer again outside of te.autocast, with other bits under FP8."""
            return functools.partial(te.checkpoint, use_reentrant=False)

        @_gradient_checkpointing_func.setter
        def _gradient_checkpointing_func(self, theirs):
            pass

    return FusedLayer


def _with_cache(fused, hidden_states, attention_mask, position_ids, cache, position_embeddings=None, **options):
    """A layer beside the keys and values of earlier tokens: attention runs as the model's own layers call it."""
    attention, config, head_dim = fused.layer.self_attention, fused.config, fused.head_dim
    theirs = sys.modules[type(fused).__mro__[1].__module__]
    heads = attention.layernorm_qkv(hidden_states).unflatten(-1, (-1, head_dim)).transpose(1, 2)
    query, key, value = heads.split((config.num_attention_heads, *[config.num_key_value_heads] * 2), dim=1)
    angles = position_ids[:, None, :, None].to(torch.float32) * fused.rotary.inv_freq
    query, key = (_rotated(x, torch.cat((angles, angles), dim=-1)) for x in (query, key))
    key, value = cache.update(key, value, fused.layer_idx)
    kind, eager = config._attn_implementation, theirs.eager_attention_forward
    attend = theirs.ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager)
    dropout = config.attention_dropout if fused.training else 0.0
    options |= {"dropout": dropout, "scaling": head_dim**-0.5, "position_ids": position_ids}
    attended, _ = attend(fused, query, key, value, attention_mask, **options)
    hidden_states = hidden_states + attention.proj(attended.flatten(2))
    return hidden_states + fused.layer.layernorm_mlp(hidden_states)


def _rotated(x, angles):
    first, second = x.chunk(2, dim=-1)
    return (x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()).to(x.dtype)


def _load_their_names(layer, state, prefix, *_):
    """load_state_dict() also takes a file of save_pretrained(): transformers' Trainer resumes from one, and only warns
    of names that do not fit."""
    found = {}
    for theirs, ours, _ in WEIGHTS:
        found.setdefault(f"{prefix}layer.{ours}", []).append(prefix + theirs)
    for ours, theirs in found.items():
        if ours not in state and all(name in state for name in theirs):
            parts = [state.pop(name) for name in theirs]
            state[ours] = parts[0] if len(parts) == 1 else torch.cat(parts)


def _new_layer(decoder_layer):
    fused = fused_class(decoder_layer)
    return fused.__new__(fused)


@torch.no_grad()
def _replace(model, number, made, copies):
    """Replaces a layer by another one, with its hooks; copies: (to, from) of the weights."""
    layer = model.model.layers[number]
    trained = [(to if to.is_leaf else to._base, weight.requires_grad) for to, weight in copies]
    for to, weight in copies:
        to.copy_(weight)
    for parameter, wanted in trained:
        parameter.requires_grad_(wanted)
    for name in HOOKS:
        getattr(made, name).update(getattr(layer, name))
    made.gradient_checkpointing = layer.gradient_checkpointing
    model.model.layers[number] = made.train(layer.training)


def _check(layer, number):
    """The properties of the model that our layers cannot represent."""
    if not hasattr(layer, "self_attn"):
        raise TypeError(
            f"fuse: layer {number} is a {type(layer).__name__}, wanted LlamaDecoderLayer; is it fused already?"
        )
    weights = {name: layer.get_parameter(name) for name, _, _ in WEIGHTS}
    dtypes = {weight.dtype: name for name, weight in weights.items()}
    if len(dtypes) > 1:
        raise NotImplementedError(f"fuse: layer {number} has several dtypes, {dtypes}; cast it to one of them first")
    if weights["mlp.gate_proj.weight"].requires_grad != weights["mlp.up_proj.weight"].requires_grad:
        raise NotImplementedError(
            f"fuse: gate_proj and up_proj of layer {number} become one weight; freeze both or none"
        )


def _starts(attention_mask):
    """The tokens of each row of the batch, added up, by a mask of transformers [b, s] or [b, 1, s, s]. In it the last
    query sees each token of its row."""
    full = attention_mask.dim() == 4
    seen = attention_mask[:, 0, -1] if full else attention_mask
    seen = seen == 0 if full and seen.is_floating_point() else seen != 0
    after = (seen[:, 1:] <= seen[:, :-1]).all()
    refusal = (
        "FusedLayer: attention_mask hides tokens before others; pad after the tokens (padding_side='right'). "
        "transformers makes such a mask by itself where position_ids restart without attention_mask=ones"
    )
    if after.is_cuda:
        torch._assert_async(after, refusal)  # without a wait
    elif not after:
        raise NotImplementedError(refusal)
    return torch.nn.functional.pad(seen.sum(1).cumsum(0), (1, 0)).int()


def fuse(model):
    """Puts our layers into a LlamaForCausalLM, in place, and returns it. The layers' parameters are new ones: make the
    optimizer afterwards."""
    if not hasattr(getattr(model, "model", None), "rotary_emb"):
        raise TypeError(f"fuse: got a {type(model).__name__}, wanted a LlamaForCausalLM; adapters are merged first")
    config, rotary = model.config, model.model.rotary_emb
    kind = config.rope_parameters.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3") or rotary.attention_scaling != 1.0:
        raise NotImplementedError(f"fuse: rope_type {kind!r} is not supported")
    if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        raise NotImplementedError("fuse: wanted a Llama without biases, with silu")
    for number, layer in enumerate(model.model.layers):
        _check(layer, number)
    for number, layer in enumerate(model.model.layers):
        weight = layer.self_attn.q_proj.weight
        made = fused_class(type(layer))(config, number, rotary.inv_freq, weight.device, weight.dtype)
        ours = in_their_names(dict(made.layer.named_parameters()))
        _replace(model, number, made, [(to, layer.get_parameter(theirs)) for theirs, to in ours])
    model.unfused_use_cache, config.use_cache = config.use_cache, False
    model.save_pretrained = functools.partial(_save_pretrained, model)
    return model


def capture(model, tokens, **options):
    """Puts the layers of a fused model into CUDA graphs, for calls of this form: shapes, keywords, with gradients or
    without. For hidden states set model.config.output_hidden_states afterwards (layers refuse the keyword). options:
    make_graphed_callables'. Returns the model; each layer's reset() undoes the capture."""
    if not hasattr(model, "unfused_use_cache"):
        raise TypeError(f"capture: this {type(model).__name__} is not fused; fuse(model) first")
    layers, handed = tuple(model.model.layers), []

    def note(_, args, kwargs):
        handed.append((args, kwargs))

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    samples = tuple((torch.zeros_like(x).requires_grad_(x.requires_grad),) for (x,), _ in handed)
    te.make_graphed_callables(layers, samples, sample_kwargs=tuple(kwargs for _, kwargs in handed), **options)
    return model


def unfuse(model):
    """The inverse of fuse(): restores Hugging Face's own layers with the current weights, and returns the model. The
    layers' parameters are new ones again."""
    if not hasattr(model, "unfused_use_cache"):
        raise TypeError(f"unfuse: this {type(model).__name__} is not fused")
    for number, fused in enumerate(model.model.layers):
        weight = fused.layer.self_attention.proj.weight
        with torch.device(weight.device):
            made = type(fused).__mro__[1](model.config, number).to(weight.dtype)
        ours = in_their_names(dict(fused.layer.named_parameters()))
        _replace(model, number, made, [(made.get_parameter(theirs), weight) for theirs, weight in ours])
    model.config.use_cache = model.unfused_use_cache
    del model.save_pretrained, model.unfused_use_cache
    return model


def _save_pretrained(model, directory, *args, state_dict=None, **options):
    """As PreTrainedModel's, under the names that from_pretrained() reads. Nothing is copied."""
    state = dict(model.state_dict() if state_dict is None else state_dict)
    theirs = {name: weight for name, weight in state.items() if ".layer." not in name}
    for number in range(len(model.model.layers)):
        prefix = f"model.layers.{number}."
        theirs |= {prefix + name: weight for name, weight in in_their_names(state, prefix + "layer.")}
    model.config.use_cache = model.unfused_use_cache
    try:
        type(model).save_pretrained(model, directory, *args, state_dict=theirs, **options)
    finally:
        model.config.use_cache = False


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(arguments)
    transformers = need("transformers", "transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(device)
    tokens = torch.randint(256, (4, 64), device=device)
    with torch.no_grad():
        before = model(tokens, use_cache=False).logits
        after = fuse(model)(tokens).logits
    print(
        f"logits with our layers: off by at most {(after - before).abs().max() / before.abs().max():.1e} of the largest"
    )
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=3e-3)
    for step in range(args.steps):
        with te.autocast(recipe=recipe.Float8CurrentScaling()):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, args.steps - 1):
            print(f"FP8 step {step + 1}: loss {loss.item():.4f}")
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        trained = model(tokens).logits
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder).to(device)(tokens, use_cache=False).logits
        plain = unfuse(model)(tokens, use_cache=False).logits
    for what, logits in (("read again", again), ("unfused", plain)):
        print(f"{what}: off by at most {(logits - trained).abs().max() / trained.abs().max():.1e} of the largest")
    return 0


if __name__ == "__main__":
    sys.exit(main())
