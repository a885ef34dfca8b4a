# Attention and layers divided over ranks beside the same ones whole: options, inputs, the comparison. No test is here.
import itertools
from contextlib import nullcontext

import torch
import torch.distributed as dist
from ranks import here

import transformer_engine.pytorch as te

from .parallel_cases import Twins, part

HIDDEN, FFN, SEQ, SEQ_KV, BATCH = 32, 48, 8, 12, 2
HEADS, GROUPS = 8, 4
HEAD = HIDDEN // HEADS
TIGHT = 1e-5  # of a tensor's norm, in float32
KINDS = {
    "attention": (te.MultiheadAttention, (HIDDEN, HEADS)),
    "layer": (te.TransformerLayer, (HIDDEN, FFN, HEADS)),
}
NO_DROPS = {"attention": {"attention_dropout": 0.0}, "layer": {"attention_dropout": 0.0, "hidden_dropout": 0.0}}


def maker(kind, **options):
    cls, sizes = KINDS[kind]

    def make(tp_group=None, **more):
        divided = {"set_parallel_mode": True, "tp_group": tp_group} if tp_group is not None else {}
        return cls(*sizes, device=here(), **{**NO_DROPS[kind], **options}, **divided, **more)

    return make


def pieces_of(options):
    """Parameters of which a rank has parts of several pieces."""
    found = {}
    groups = options.get("num_gqa_groups", HEADS)
    if options.get("fuse_qkv_params") and not options.get("qkv_weight_interleaved", True):
        for prefix in ("", "self_attention.", "inter_attention."):
            for inner, rows in (("qkv", [HEADS, groups, groups]), ("key_value", [groups, groups])):
                for name, leaf in itertools.product((inner, f"layernorm_{inner}"), ("weight", "bias")):
                    found[f"{prefix}{name}.{leaf}"] = [n * HEAD for n in rows]
    if options.get("activation") == "swiglu":
        found |= {"layernorm_mlp.fc1_weight": 2, "layernorm_mlp.fc1_bias": 2}
    return found


class Both(Twins):
    """The module whole and divided, called with the same arguments but for what goes by head or by token."""

    def __init__(self, kind, rank, options, sequence, group=None, **more):
        tokens = 0 if sequence else None
        super().__init__(
            maker(kind, **options),
            group or dist.group.WORLD,
            rank,
            inputs=tokens,
            outputs=tokens,
            pieces=pieces_of(options),
            sequence_parallel=sequence,
            **more,
        )

    def run(self, module, inputs, dy, through, call):
        leaves = [t.clone().requires_grad_() for t in inputs]
        named = dict(zip(("hidden_states", "encoder_output"), leaves))
        y = through(module, **named, **call)
        if isinstance(y, tuple):  # what comes along is a bias of the width, or of the shape of the output
            y = sum(y[1:], y[0])
        y.backward(dy)
        return [y.detach(), *(t.grad for t in leaves)]

    def wrong(self, inputs, dy, *, tolerance=TIGHT, call=None, by_head=None, around=nullcontext, through=None):
        """by_head: arguments of the call of which each rank has those of its heads (along dimension 1)."""
        through = through or (lambda module, **arguments: module(**arguments))
        call, by_head = placed(call or {}), by_head or {}
        heads = {name: part(t, self.rank, self.ranks, 1 if t.dim() > 1 else 0) for name, t in by_head.items()}
        with around():
            y, *dx = self.run(self.whole, inputs, dy, through, {**call, **by_head})
            own = [self.tokens(t, self.inputs) for t in inputs]
            own_y, *own_dx = self.run(self.divided, own, self.tokens(dy, self.outputs), through, {**call, **heads})
        te.distributed.allreduce_sequence_parallel_grads(self.divided, self.group)
        found = {"out": (own_y, self.tokens(y, self.outputs))}
        found |= {f"dx {i}": (got, self.tokens(want, self.inputs)) for i, (got, want) in enumerate(zip(own_dx, dx))}
        whole = dict(self.whole.named_parameters())
        for name, parameter in self.divided.named_parameters():
            if parameter.grad is None or whole[name].grad is None:
                found[name] = None if parameter.grad is whole[name].grad else (parameter.grad, whole[name].grad)
            else:
                found[name] = parameter.grad, self.of(name, whole[name].grad)
        return [words for name, pair in found.items() for words in differs(name, pair, tolerance)]


def differs(name, pair, tolerance):
    if pair is None:
        return []
    got, want = pair
    if got is None or want is None or got.shape != want.shape:
        return [f"{name}: {got if got is None else got.shape} for {want if want is None else want.shape}"]
    error = (got - want).norm() / want.norm().clamp_min(1e-2)  # a key's bias has none
    return [] if error <= tolerance else [f"{name}: relative error {error:.2e}"]


def examples(options, scale=1.0):
    torch.manual_seed(11)
    first = options.get("qkv_format", options.get("attn_input_format", "sbhd")) == "sbhd"
    shapes = [(SEQ, BATCH) if first else (BATCH * 2, SEQ)]  # a batch of 4 ranks
    if options.get("attention_type") == "cross" or options.get("layer_type") == "decoder":
        shapes.append((SEQ_KV, BATCH) if first else (BATCH * 2, SEQ_KV))
    inputs, dy = [torch.randn(*shape, HIDDEN) for shape in shapes], torch.randn(*shapes[0], HIDDEN) * scale
    return [t.to(here()) for t in inputs], dy.to(here())


def placed(arguments):
    return {name: value() if value is angles else value for name, value in arguments.items()}


def angles():
    return te.RotaryPositionEmbedding(HEAD)(SEQ_KV).to(here())


FUSED, GQA = {"fuse_qkv_params": True}, {"num_gqa_groups": GROUPS}
SIDE_BY_SIDE = {**FUSED, "qkv_weight_interleaved": False}
CROSS, NORM = {"attention_type": "cross"}, {"input_layernorm": True}
ROTARY = {"rotary_pos_emb": angles}  # made where they are used: a rank has its device only then

# Options, and what the call has beside its inputs.
ATTENTION = [
    ({}, {}),
    ({**FUSED, **GQA, **NORM}, ROTARY),
    ({**SIDE_BY_SIDE, **GQA, "return_bias": True}, {}),
    ({**GQA, **NORM, "return_layernorm_output": True, "normalization": "RMSNorm"}, ROTARY),
    ({**CROSS, **NORM, **GQA, "attn_mask_type": "no_mask"}, ROTARY),
    ({**CROSS, **SIDE_BY_SIDE, "attn_mask_type": "no_mask", "bias": False}, {}),
    ({"qk_norm_type": "RMSNorm", **GQA}, ROTARY),
    ({"qk_norm_type": "LayerNorm", "qk_norm_before_rope": True, **FUSED, **NORM}, ROTARY),
    ({"qkv_format": "bshd", **FUSED, "qk_norm_type": "L2Normalization"}, ROTARY),
    ({"seq_length": SEQ, "micro_batch_size": BATCH}, {"checkpoint_core_attention": True}),
    ({}, {"core_attention_bias_type": "alibi"}),
]
DECODER, AFTER_NORM = {"layer_type": "decoder"}, {"apply_residual_connection_post_layernorm": True}
LAYER = [
    ({}, {}),
    ({**GQA, "normalization": "RMSNorm", "activation": "swiglu", "bias": False}, ROTARY),
    ({**FUSED, **GQA, "qk_norm_type": "RMSNorm", "seq_length": SEQ, "micro_batch_size": BATCH}, ROTARY),
    ({**AFTER_NORM, **SIDE_BY_SIDE}, {}),
    ({"output_layernorm": True}, {}),
    ({"parallel_attention_mlp": True, "recompute_norm_output": True}, {}),
    ({**DECODER, **GQA}, ROTARY),
    ({**DECODER, **AFTER_NORM, "output_layernorm": True}, {}),
    ({"attn_input_format": "bshd", "tp_overlap": "off", "ub_tp_comm_overlap": True}, ROTARY),
]


def cases(rank, kind):
    wrong = []
    for (options, call), sequence in itertools.product({"attention": ATTENTION, "layer": LAYER}[kind], (True, False)):
        inputs, dy = examples(options)
        both = Both(kind, rank, options, sequence, **({"tp_recompute_allgather": False} if "bias" in options else {}))
        wrong += [f"{options} sequence {sequence}: {words}" for words in both.wrong(inputs, dy, call=call)]
    return wrong
