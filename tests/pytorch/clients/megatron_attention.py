"""megatron-core's attention, a subclass of our DotProductAttention, on packed sequences and with qk-clip. Ends with an
error if a result differs from our own module's. A script, because megatron_on_cpu.py has to pretend before
megatron-core is imported. usage: megatron_attention.py cpu|cuda"""

import sys

import torch
from megatron_on_cpu import pretend

device = sys.argv[1]
if device == "cpu":
    pretend()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.extensions.transformer_engine import TEDotProductAttention  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402

import transformer_engine.pytorch as te  # noqa: E402

HEADS, GROUPS, HEAD, TOKENS = 4, 2, 16, 12


def theirs(mask, **options):
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * HEAD, num_attention_heads=HEADS, num_query_groups=GROUPS,
        attention_dropout=0.0, use_cpu_initialization=True, **options,
    )  # fmt: skip
    made = TEDotProductAttention(config, 1, mask, "self")
    assert isinstance(made, te.DotProductAttention)
    return made.to(device)


def inputs(*rows):
    return [torch.randn(*rows, n, HEAD, device=device).bfloat16().requires_grad_() for n in (HEADS, GROUPS, GROUPS)]


def same(out, wanted, tensors):
    assert torch.equal(out, wanted)
    cotangent = torch.randn_like(out)
    for got, want in zip(*(torch.autograd.grad(t, tensors, cotangent) for t in (out, wanted)), strict=True):
        assert torch.equal(got, want)


def packed():
    lengths = torch.tensor([0, 5, TOKENS], dtype=torch.int32, device=device)
    given = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "max_seqlen_q": 7, "max_seqlen_kv": 7}
    for kind in ("vanilla", "off-by-one", "learnable"):
        mask = AttnMaskType.padding_causal
        module, tensors = theirs(mask, softmax_type=kind), inputs(TOKENS)
        ours = te.DotProductAttention(
            HEADS, HEAD, GROUPS, qkv_format="thd", attn_mask_type=mask.name, softmax_type=kind, device=device
        )
        if kind == "learnable":
            with torch.no_grad():
                module.softmax_offset.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]))
            ours.load_state_dict({"softmax_offset": module.state_dict()["softmax_offset"]})
        out = module(*tensors, None, mask, packed_seq_params=PackedSeqParams(qkv_format="thd", **given))
        same(out, ours(*tensors, **given), tensors)


def clipped():
    """The largest logits of several calls."""
    mask = AttnMaskType.causal
    module = theirs(mask, qk_clip=True)
    ours = te.DotProductAttention(HEADS, HEAD, GROUPS, attn_mask_type="causal", return_max_logit=True)
    most = torch.full((HEADS,), -torch.inf, device=device)
    for _ in range(3):
        tensors = inputs(TOKENS, 1)
        out, own = ours(*tensors)
        same(module(*tensors, None, mask), out, tensors)
        most = torch.maximum(most, own)
        assert torch.equal(module.current_max_attn_logits.float(), most.float())


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    packed()
    clipped()
