# Helpers of the suites of TransformerLayer's options: a layer, its twin and their inputs. No test is here.
import torch
from plain_modules import randomize
from support import randn

import transformer_engine.pytorch as te

HIDDEN, FFN, HEADS, SEQ, SEQ_KV, BATCH = 32, 40, 4, 7, 9, 3

POST_LN = {"output_layernorm": True}
AFTER_NORM = {"apply_residual_connection_post_layernorm": True}
DECODER = {"layer_type": "decoder"}
OPTIONS = {
    "parallel": {"parallel_attention_mlp": True},
    "after norm": AFTER_NORM,
    "post-LN": POST_LN,
    "post-LN after norm": {**POST_LN, **AFTER_NORM},
    "decoder": DECODER,
    "decoder after norm": {**DECODER, **AFTER_NORM},
    "decoder post-LN": {**DECODER, **POST_LN},
    "fused": {"fuse_qkv_params": True, "num_gqa_groups": 2},
    "side by side": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "decoder fused": {**DECODER, "fuse_qkv_params": True, "qk_norm_type": "L2Normalization"},
    "q and k normed": {"qk_norm_type": "RMSNorm"},
    "q and k normed first": {"qk_norm_type": "LayerNorm", "qk_norm_before_rope": True},
}


def build(device, dtype=torch.float32, **options):
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": dtype, "device": device, **options}
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, **options)
    randomize(layer)
    if layer.output_layernorm and not layer.layernorm.zero_centered_gamma:
        with torch.no_grad():
            layer.layernorm.weight.add_(1.0)
    return layer


def tokens(device, dtype=torch.float32, layout="sbhd", seq=SEQ):
    return randn(*((seq, BATCH) if layout == "sbhd" else (BATCH, seq)), HIDDEN, dtype=dtype, device=device)


def inputs_of(options, device, dtype=torch.float32):
    layout = options.get("attn_input_format", "sbhd")
    inputs = [tokens(device, dtype, layout)]
    return inputs + ([tokens(device, dtype, layout, SEQ_KV)] if options.get("layer_type") == "decoder" else [])


def calling(**arguments):
    """The module or its twin as a function of its inputs, float tensors of arguments where the inputs are."""

    def call(m, x, encoder_output=None):
        moved = {k: v.to(x.device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        return m(x, encoder_output=encoder_output, **moved)

    return call
