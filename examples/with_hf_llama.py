#!/usr/bin/env python
"""Hugging Face's Llama with our layers in it: same weights, same logits, then a few steps in FP8.

python examples/with_hf_llama.py            needs the extra `transformers`; tiny random weights, no download
`fuse(model)` is what a model of your own needs. Refused: attention masks (padding), key-value caches, rope scaling."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for `extras`, also under PYTHONSAFEPATH

import torch

import transformer_engine.pytorch as te
from extras import need
from transformer_engine.common import recipe


class FusedLayer(te.TransformerLayer):
    """A LlamaDecoderLayer by its call, a TransformerLayer by its work."""

    def __init__(self, config, number: int, device, dtype):
        super().__init__(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            num_gqa_groups=config.num_key_value_heads,
            kv_channels=getattr(config, "head_dim", None),
            layernorm_epsilon=config.rms_norm_eps,
            hidden_dropout=0.0,
            attention_dropout=config.attention_dropout,
            layer_number=number,
            self_attn_mask_type="causal",
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            attn_input_format="bshd",
            params_dtype=dtype,
            device=device,
        )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotary = te.RotaryPositionEmbedding(head_dim, rotary_base=config.rope_parameters["rope_theta"])
        self.register_buffer("angles", rotary(config.max_position_embeddings).to(device), persistent=False)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, **_):
        if attention_mask is not None or past_key_values is not None:
            raise NotImplementedError(
                "FusedLayer: attention_mask and past_key_values are not supported; pass sequences without padding "
                "and use_cache=False"
            )
        return super().forward(hidden_states, rotary_pos_emb=self.angles[: hidden_states.shape[1]])

    @torch.no_grad()
    def take(self, layer) -> None:
        """The weights of a LlamaDecoderLayer."""
        attention, mlp = self.self_attention, self.layernorm_mlp
        theirs = layer.self_attn
        attention.layernorm_qkv.layer_norm_weight.copy_(layer.input_layernorm.weight)
        attention.layernorm_qkv.query_weight.copy_(theirs.q_proj.weight)
        attention.layernorm_qkv.key_weight.copy_(theirs.k_proj.weight)
        attention.layernorm_qkv.value_weight.copy_(theirs.v_proj.weight)
        attention.proj.weight.copy_(theirs.o_proj.weight)
        mlp.layer_norm_weight.copy_(layer.post_attention_layernorm.weight)
        mlp.fc1_weight.copy_(torch.cat((layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight)))
        mlp.fc2_weight.copy_(layer.mlp.down_proj.weight)


def fuse(model):
    """Puts our layers into a LlamaForCausalLM, in its place; returns it."""
    config = model.config
    if config.rope_parameters.get("rope_type", "default") != "default":
        raise NotImplementedError(f"fuse: rope_type {config.rope_parameters['rope_type']!r} is not supported")
    if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        raise NotImplementedError("fuse: wanted a Llama without biases, with silu")
    layers = model.model.layers
    for number, layer in enumerate(layers):
        weight = layer.self_attn.q_proj.weight
        fused = FusedLayer(config, number + 1, weight.device, weight.dtype)
        fused.take(layer)
        layers[number] = fused
    config.use_cache = False
    return model


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
    return 0


if __name__ == "__main__":
    sys.exit(main())
