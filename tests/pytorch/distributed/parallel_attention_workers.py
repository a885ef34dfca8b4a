# The worker functions of test_parallel_attention.py, which run on each of several ranks (ranks.py starts them). No test
# here: a worker returns what is wrong, as words, and what the tests compare.
import copy
import itertools
import pickle
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from ranks import here, on_cuda, one_by_one

import transformer_engine.pytorch as te

from .parallel_attention_cases import (
    AFTER_NORM,
    BATCH,
    DECODER,
    FFN,
    FUSED,
    GQA,
    HEAD,
    HEADS,
    HIDDEN,
    KINDS,
    NO_DROPS,
    ROTARY,
    SEQ,
    TIGHT,
    Both,
    cases,
    differs,
    examples,
    maker,
    placed,
)
from .parallel_cases import Twins
from .parallel_modules import FP8, RECIPES, randn


def by_head(rank):
    """Arguments of a call for each head are those of the rank's heads; the masks cover the whole sequences."""
    wrong = []
    bias, slopes = torch.randn(1, HEADS, SEQ, SEQ).to(here()), torch.rand(HEADS).to(here())
    hidden = (torch.rand(BATCH, HEADS, SEQ, SEQ) < 0.3).to(here())
    lengths = torch.tensor([0, SEQ - 3, 2 * SEQ - 3], dtype=torch.int32, device=here())
    for sequence in (True, False):
        inputs, dy = examples({})
        for call, heads in (
            ({"core_attention_bias_type": "post_scale_bias"}, {"core_attention_bias": bias}),
            ({"core_attention_bias_type": "alibi"}, {"alibi_slopes": slopes}),
            ({"attn_mask_type": "arbitrary"}, {"attention_mask": hidden}),
            ({"attn_mask_type": "padding_causal", "cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}, {}),
        ):
            both = Both("attention", rank, GQA, sequence)
            found = both.wrong(inputs, dy, call=call, by_head=heads)
            wrong += [f"{call} sequence {sequence}: {words}" for words in found]
    return wrong


def in_fp8():
    return te.autocast(enabled=True, recipe=RECIPES["current"])


def contexts(rank):
    """A layer inside a checkpoint, under FP8, with frozen weights, in eval, and accumulating into main_grad."""
    wrong = []
    options = {**GQA, **FUSED, "activation": "swiglu", "qk_norm_type": "RMSNorm"}
    inputs, dy = examples(options)

    def note(what, both, **how):
        wrong.extend(f"{what}: {words}" for words in both.wrong(inputs, dy, call=ROTARY, **how))

    for sequence, reentrant in itertools.product((True, False), (True, False)):

        def again(module, hidden_states, reentrant=reentrant, **call):
            return te.checkpoint(module, hidden_states, use_reentrant=reentrant, **call)

        note(f"checkpoint {sequence} {reentrant}", Both("layer", rank, options, sequence), through=again)
    for sequence in (True, False):
        fp8 = Both("layer", rank, options, sequence)
        note(f"fp8 {sequence}", fp8, around=in_fp8, tolerance=FP8)
        both = Both("layer", rank, options, sequence)
        for module in (both.whole, both.divided):
            for name, parameter in module.named_parameters():
                parameter.requires_grad_("qkv.weight" not in name and "fc2" not in name and "q_norm" not in name)
        note(f"frozen {sequence}", both)
        both = Both("layer", rank, {**options, "hidden_dropout": 0.5, "attention_dropout": 0.5}, sequence)
        both.whole.eval(), both.divided.eval()
        note(f"eval {sequence}", both)
    return wrong


def kinds_of_state(rank):
    """A layer in bfloat16, with main_grads, made on meta, without tokens, and in a group of one, there to the bit."""
    wrong, options = [], {**GQA, **FUSED, "qk_norm_type": "RMSNorm"}
    inputs, dy = examples(options)
    for sequence in (True, False):
        low = Both("layer", rank, {**options, "params_dtype": torch.bfloat16}, sequence)
        found = low.wrong([t.bfloat16() for t in inputs], dy.bfloat16(), tolerance=0.03, call=ROTARY)
        both = Both("layer", rank, {**options, "fuse_wgrad_accumulation": True}, sequence)
        weights = [[(n, p) for n, p in m.named_parameters() if p.dim() == 2] for m in (both.whole, both.divided)]
        for _, parameter in itertools.chain(*weights):
            parameter.main_grad = torch.zeros(parameter.shape, device=here())
        found += both.wrong(inputs, dy)
        for (name, whole), (_, divided) in zip(*weights):
            found += differs(name, (divided.main_grad, both.of(name, whole.main_grad)), TIGHT)
        module = maker("layer", **options)(tp_group=dist.group.WORLD, sequence_parallel=sequence)
        module(torch.randn(0, BATCH, HIDDEN, requires_grad=True, device=here())).sum().backward()
        found += [n for n, p in module.named_parameters() if p.grad is None or p.grad.count_nonzero()]
        shared = {"tp_group": dist.group.WORLD, "sequence_parallel": sequence, "set_parallel_mode": True}
        meta = te.TransformerLayer(HIDDEN, FFN, HEADS, **NO_DROPS["layer"], device="meta", **options, **shared)
        meta.to_empty(device=here()).load_state_dict(module.state_dict())
        marks = [[getattr(p, "sequence_parallel", None) for p in m.parameters()] for m in (meta, module)]
        if marks[0] != marks[1] or not torch.equal(meta(inputs[0]), module(inputs[0])):
            found.append("made on meta")
        wrong += [f"sequence {sequence}: {words}" for words in found]
    alone = dist.new_group([rank], use_local_synchronization=True)
    single = Both("layer", 0, options, True, group=alone)
    # On CUDA an attention's backward need not repeat its bits.
    found = single.wrong(inputs, dy, tolerance=TIGHT if on_cuda() else 0.0, call=ROTARY)
    return wrong + [f"a group of one: {words}" for words in found]


def copies(rank):
    """A module, its deep copy and what pickle brings back compute the same, over one group, with the same marks."""
    found = []
    torch.manual_seed(rank)
    for kind, sequence in itertools.product(KINDS, (True, False)):
        module = maker(kind, qk_norm_type="RMSNorm", **GQA)(tp_group=dist.group.WORLD, sequence_parallel=sequence)
        (x,), _ = examples({})
        wanted = module(x)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            marks = [[getattr(p, "sequence_parallel", None) for p in m.parameters()] for m in (module, other)]
            same = torch.equal(other(x), wanted) and marks[0] == marks[1]
            groups = {m.tp_group is dist.group.WORLD for m in other.modules() if getattr(m, "tp_size", 1) > 1}
            found.append((same, groups, other.tp_size, other.sequence_parallel))
    core = te.DotProductAttention(HEADS, HEAD, tp_group=dist.group.WORLD, sequence_parallel=True)
    for other in (copy.deepcopy(core), pickle.loads(pickle.dumps(core))):
        heads = other.num_attention_heads == HEADS // dist.get_world_size()
        found.append((heads, {other.tp_group is dist.group.WORLD}, other.tp_size, other.sequence_parallel))
    return found


def late_group(rank):
    """tp_size alone, and the group afterwards: it reaches every part, and the bits are those of the group at once."""
    both = Both("layer", rank, {**DECODER, "qk_norm_type": "RMSNorm"}, False)
    late = maker("layer", **DECODER, qk_norm_type="RMSNorm")(tp_size=2, set_parallel_mode=True)
    late.load_state_dict(both.divided.state_dict())
    inputs, _ = examples(DECODER)
    late.set_tensor_parallel_group(dist.group.WORLD)
    inner = [m for m in late.modules() if getattr(m, "tp_size", 1) > 1]
    equal = torch.equal(late(inputs[0], encoder_output=inputs[1]), both.divided(inputs[0], encoder_output=inputs[1]))
    return equal, len(inner), all(m.tp_group is dist.group.WORLD for m in inner)


def same(thing):
    return thing


def draws(rank):
    """Dropout masks, by where tokens or heads are divided and whether the caller forks."""
    found = {}
    for sequence, forks in itertools.product((True, False), (True, False)):
        tracker = te.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 100 + rank)
        shared = {
            "tp_group": dist.group.WORLD,
            "sequence_parallel": sequence,
            "get_rng_state_tracker": partial(same, tracker),
        }
        core = te.DotProductAttention(HEADS, HEAD, attention_dropout=0.5, **shared)
        layer = maker("layer", hidden_dropout=0.5)(**shared)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
            layer.self_attention.proj.bias.fill_(1.0)
        torch.manual_seed(7)
        q = torch.randn(SEQ, BATCH, HEADS // 2, HEAD).to(here())
        with tracker.fork() if forks else nullcontext():
            attended = core(q, q, q)
            found[sequence, forks] = attended, layer(torch.zeros(SEQ, BATCH, HIDDEN, device=here()))
    return found


def gathered_norms(rank):
    """return_layernorm_output_gathered: the norm's output of all ranks; each uses it in a part of a computation of its
    own, so that its gradients add up."""
    wrong, share = [], (0.25, 0.75)[rank]
    torch.manual_seed(11)
    x, dn = torch.randn(SEQ, BATCH, HIDDEN).to(here()), torch.randn(SEQ, BATCH, HIDDEN).to(here())
    for name in ("linear", "mlp"):

        def make(tp_group=None, name=name, **more):
            options = {"return_layernorm_output": True, "return_layernorm_output_gathered": True, "device": here()}
            if name == "linear":
                mode = {"parallel_mode": "column", "tp_group": tp_group} if tp_group is not None else {}
                return te.LayerNormLinear(HIDDEN, FFN, **options, **mode, **more)
            mode = {"set_parallel_mode": True, "tp_group": tp_group} if tp_group is not None else {}
            return te.LayerNormMLP(HIDDEN, FFN, **options, **mode, **more)

        outputs = -1 if name == "linear" else 0
        both = Twins(make, dist.group.WORLD, rank, inputs=0, outputs=outputs, sequence_parallel=True)
        whole_x, own_x = x.clone().requires_grad_(), both.tokens(x, 0).clone().requires_grad_()
        y, normed = both.whole(whole_x)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(here())
        ((y * dy).sum() + (normed * dn).sum()).backward()
        own_y, own_normed = both.divided(own_x)
        ((own_y * both.results(dy)).sum() + (own_normed * dn * share).sum()).backward()
        te.distributed.allreduce_sequence_parallel_grads(both.divided, both.group)
        found = {"norm": (own_normed, normed), "dx": (own_x.grad, both.tokens(whole_x.grad, 0))}
        for key, parameter in both.whole.named_parameters():
            found[key] = dict(both.divided.named_parameters())[key].grad, both.of(key, parameter.grad)
        wrong += [f"{name} {words}" for key, pair in found.items() for words in differs(key, pair, TIGHT)]
    return wrong


def own_examples(rank):
    (x,), dy = examples({})
    return [x.chunk(2)[rank].contiguous()], dy.chunk(2)[rank].contiguous()


def compiled(rank):
    """Compiled, in one graph, against eager. The compiler adds a residual's gradient in its own place."""
    wrong = []
    rotary = {"qk_norm_type": "RMSNorm", **GQA}
    for (kind, options), sequence in itertools.product(
        (("attention", rotary), ("layer", {**rotary, **FUSED}), ("layer", AFTER_NORM)), (True, False)
    ):
        torch.manual_seed(1)
        module = maker(kind, **options)(tp_group=dist.group.WORLD, sequence_parallel=sequence)
        torch._dynamo.reset()
        traced = torch.compile(module, backend="aot_eager", fullgraph=True)
        (x,), dy = own_examples(rank) if sequence else examples({})
        results = []
        for call in (module, traced):
            leaf = x.clone().requires_grad_()
            y = call(leaf, **placed(ROTARY))
            module.zero_grad(set_to_none=True)
            y.backward(dy)
            results.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters())])
        for name, *pair in zip(["y", "dx", *dict(module.named_parameters())], *results):
            wrong += [f"{kind} {options} {sequence} {words}" for words in differs(name, pair, TIGHT)]
    return wrong


def refusals(rank):
    """The errors of bad input on this rank, and whether the modules work afterwards."""
    said, world = [], dist.group.WORLD

    def note(what):
        try:
            what()
            said.append("nothing")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    parallel = {"tp_group": world, "set_parallel_mode": True, "device": here()}
    note(lambda: te.DotProductAttention(3, 8, tp_group=world))
    note(lambda: te.DotProductAttention(4, 8, num_gqa_groups=1, tp_size=2))
    note(lambda: te.MultiheadAttention(24, 3, **parallel))
    note(lambda: te.MultiheadAttention(32, 4, num_gqa_groups=1, **parallel))
    note(lambda: te.TransformerLayer(24, 48, 3, **parallel))
    note(lambda: te.TransformerLayer(32, 49, 4, **parallel))
    note(lambda: te.TransformerLayer(32, 48, 4, tp_size=2, device=here()))
    note(lambda: te.TransformerLayer(32, 48, 4, tp_overlap="fast", **parallel))
    note(lambda: te.MultiheadAttention(32, 4, tp_overlap="fast", **parallel))
    note(lambda: te.TransformerLayer(32, 48, 4, seq_length=7, sequence_parallel=True, **parallel))
    core = te.DotProductAttention(4, 8, tp_size=2)
    q = randn(4, 2, 2, 8)
    note(lambda: core(q, q, q, core_attention_bias_type="alibi"))
    note(lambda: core(*[randn(4, 2, 4, 8)] * 3))
    without = te.TransformerLayer(32, 48, 4, tp_size=2, set_parallel_mode=True, device=here())
    note(lambda: without(randn(4, 2, 32)))
    alone = dist.new_group([rank], use_local_synchronization=True)
    for module in (core, without, without.self_attention):
        note(lambda module=module: module.set_tensor_parallel_group(alone))
    layer = te.TransformerLayer(32, 48, 4, seq_length=8, micro_batch_size=2, sequence_parallel=True, **parallel)
    note(lambda: layer(randn(8, 2, 32)))
    note(lambda: layer(randn(2, 4, 32)))
    attention = te.MultiheadAttention(32, 4, sequence_parallel=True, **parallel)
    note(lambda: attention(randn(4, 2, 32), rotary_pos_emb=randn(4, 1, 1, 8)))
    whole = te.TransformerLayer(32, 48, 4, device=here(), seq_length=8)
    whole.set_tensor_parallel_group(world)  # of which an undivided layer needs nothing
    without.set_tensor_parallel_group(world)
    works = [m(randn(4, 2, 32)).shape == (4, 2, 32) for m in (layer, attention, without, whole)]
    return said, works


def everything(rank):
    """One start of the ranks for all of them."""
    found = {kind: cases(rank, kind) for kind in KINDS}
    workers = (by_head, contexts, kinds_of_state, gathered_norms, compiled, copies, late_group, draws, refusals)
    return found | one_by_one(rank, workers)
