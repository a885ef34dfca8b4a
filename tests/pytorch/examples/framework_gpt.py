# A small framework on the API, written as its users write theirs: subclasses that set attributes before
# super().__init__(), a layer whose __call__ chooses which part of it is captured, and gradients in a buffer of float32
# (framework_optimizers.py). No test here.
import dataclasses

import torch
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.cpu_offload import get_cpu_offload_context
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker, checkpoint
from transformer_engine.pytorch.graph import is_graph_capturing, make_graphed_callables

from ..graph.fp8_cases import RECIPES, states
from .framework_optimizers import Optimizer, ShardedOptimizer

HIDDEN, FFN, HEADS, LAYERS, VOCAB, SEQ, BATCH, MICROBATCHES = 32, 64, 4, 3, 32, 16, 2, 2
IN_TURN, IN_FLIGHT = (1, -1, 1, -1), (1, 1, -1, -1)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the framework's command line."""

    device: str = "cpu"
    recipe: str | None = None
    graphs: str | None = None  # "layer", or the part "attention"
    order: tuple[int, ...] | None = IN_TURN  # of a step's microbatches; None: layers are captured in place
    fused: bool = False  # weight gradients straight into main_grad
    offload: bool = False
    recompute: str | None = None  # "layer", or "mlp"
    keep_weights: bool = False  # quantized weights are made by a step's first microbatch alone
    quantized_weights: bool = False
    one_module: bool = False  # te.TransformerLayer in place of its parts
    dropout: float = 0.0
    shards: int = 0  # ranks among which the steps of the weights are divided; 0: float32 copies in torch's AdamW

    @property
    def fp8(self):
        return {"enabled": self.recipe is not None, "fp8_recipe": RECIPES.get(self.recipe)}

    @property
    def plain(self):
        """The options of the run that has to give the same bits: eager, in one rank, nothing recomputed, offloaded."""
        return dataclasses.replace(self, graphs=None, offload=False, recompute=None, shards=min(self.shards, 1))


_TRACKER = CudaRNGStatesTracker()


def get_tracker():
    return _TRACKER


def _init(weight):
    return torch.nn.init.normal_(weight, 0.0, 0.1)


def _of_a_linear(options):
    return {
        "bias": False,
        "return_bias": True,
        "params_dtype": torch.bfloat16,
        "device": options.device,
        "init_method": _init,
        "get_rng_state_tracker": get_tracker,
        "fuse_wgrad_accumulation": options.fused,
    }


class _FirstMicrobatch:
    """As a mixin before te's class: whether the next call is the first one since the weights changed."""

    def forward(self, x):
        first = self.is_first_microbatch if self.options.keep_weights else None
        self.is_first_microbatch = False
        return super().forward(x, is_first_microbatch=first)


class Column(_FirstMicrobatch, te.LayerNormLinear):
    def __init__(self, inputs, outputs, options):
        self.options, self.is_first_microbatch = options, True
        super().__init__(inputs, outputs, normalization="RMSNorm", **_of_a_linear(options))
        for p in self.parameters():
            p.allreduce = True


class Row(_FirstMicrobatch, te.Linear):
    def __init__(self, inputs, outputs, options):
        self.options, self.is_first_microbatch = options, True
        super().__init__(inputs, outputs, **_of_a_linear(options))
        for p in self.parameters():
            p.allreduce = True


class Core(te.DotProductAttention):
    def __init__(self, options, number):
        self.options, self.kept = options, {"qkv_format": "sbhd"}
        super().__init__(
            HEADS,
            HIDDEN // HEADS,
            attention_dropout=options.dropout,
            layer_number=number,
            get_rng_state_tracker=get_tracker,
        )

    def forward(self, query, key, value, attention_mask=None):
        kind = "causal" if attention_mask is None else "padding_causal"
        return super().forward(query, key, value, attention_mask, attn_mask_type=kind, **self.kept)


class Norm:
    """One name for two classes."""

    def __new__(cls, options, size, kind="RMSNorm"):
        on = {"params_dtype": torch.bfloat16, "device": options.device}
        return getattr(te, kind)(size, eps=1e-5, **on)


class _Captured:
    """A layer that can be captured: its __call__ is the eager way, the captured part, or a replay."""

    def _start(self, options):
        self.options, self.cuda_graphs, self.microbatch = options, [], 0
        self.offload = None

    def __call__(self, *args, **kwargs):
        if is_graph_capturing() and self.options.graphs == "attention":
            return self.attention_part(*args, **kwargs)
        if self.cuda_graphs and self.training and not is_graph_capturing():
            kept = {"is_first_microbatch": self.microbatch == 0} if self.options.keep_weights else {}
            result = self.cuda_graphs[self.microbatch](*args, **kwargs, **kept)
            return self.mlp_part(result) if self.options.graphs == "attention" else result
        return super().__call__(*args, **kwargs)

    def offloaded(self, part, *args, **kwargs):
        if self.offload is None:
            return part(*args, **kwargs)
        context, sync = self.offload
        with context:
            result = part(*args, **kwargs)
        return sync(result)


class Layer(_Captured, torch.nn.Module):
    def __init__(self, options, number):
        super().__init__()
        self._start(options)
        self.qkv, self.proj = Column(HIDDEN, 3 * HIDDEN, options), Row(HIDDEN, HIDDEN, options)
        self.core = Core(options, number)
        self.up, self.down = Column(HIDDEN, 2 * FFN, options), Row(FFN, HIDDEN, options)

    def attention_part(self, hidden, attention_mask=None, context=None, context_mask=None, rotary_pos_emb=None):
        assert context is None and context_mask is None
        return self.offloaded(self._attention, hidden, attention_mask, rotary_pos_emb)

    def _attention(self, hidden, mask, angles):
        qkv, _ = self.qkv(hidden)
        query, key, value = qkv.view(*qkv.shape[:2], HEADS, -1).chunk(3, -1)
        query, key = apply_rotary_pos_emb(query, angles), apply_rotary_pos_emb(key, angles)
        out, bias = self.proj(self.core(query, key, value, mask))
        assert bias is None
        return hidden + torch.nn.functional.dropout(out, self.options.dropout, self.training)

    def mlp_part(self, hidden):
        if self.options.recompute == "mlp" and self.training:
            return checkpoint(
                self._mlp, hidden, distribute_saved_activations=False, get_rng_state_tracker=get_tracker, tp_group=None
            )
        return self._mlp(hidden)

    def _mlp(self, hidden):
        gate, up = self.up(hidden)[0].chunk(2, -1)
        return hidden + self.down(torch.nn.functional.silu(gate) * up)[0]

    def forward(self, hidden, **kwargs):
        if self.options.graphs == "attention":
            return self.mlp_part(self.attention_part(hidden, **kwargs))
        return self.offloaded(self._whole, hidden, **kwargs)

    def _whole(self, hidden, attention_mask=None, context=None, context_mask=None, rotary_pos_emb=None):
        return self.mlp_part(self._attention(hidden, attention_mask, rotary_pos_emb))


class OneModule(_Captured, te.TransformerLayer):
    """te's own layer under a framework's names of keywords."""

    def __init__(self, options, number):
        self._start(options)
        self.is_first_microbatch = True
        super().__init__(
            HIDDEN,
            FFN,
            HEADS,
            hidden_dropout=options.dropout,
            attention_dropout=options.dropout,
            layer_number=number,
            fuse_qkv_params=True,
            fuse_wgrad_accumulation=options.fused,
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            params_dtype=torch.bfloat16,
            device=options.device,
            init_method=_init,
            output_layer_init_method=_init,
            get_rng_state_tracker=get_tracker,
        )

    def forward(self, hidden, attention_mask=None, context=None, context_mask=None, rotary_pos_emb=None):
        first = self.is_first_microbatch if self.options.keep_weights else None
        self.is_first_microbatch = False
        return self.offloaded(
            super().forward,
            hidden,
            attention_mask=attention_mask,
            encoder_output=context,
            enc_dec_attn_mask=context_mask,
            rotary_pos_emb=rotary_pos_emb,
            is_first_microbatch=first,
        )


class GPT(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options
        on = {"device": options.device, "dtype": torch.bfloat16}
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN, **on)
        self.rotary = te.RotaryPositionEmbedding(HIDDEN // HEADS).to(options.device)
        with fp8_model_init(enabled=options.quantized_weights, recipe=RECIPES.get(options.recipe)):
            kind = OneModule if options.one_module else Layer
            self.layers = torch.nn.ModuleList(kind(options, i + 1) for i in range(LAYERS))
        self.norm = Norm(options, HIDDEN)
        self.head = te.Linear(HIDDEN, VOCAB, bias=False, params_dtype=torch.bfloat16, device=options.device)
        self.context = None
        if options.offload:
            self.context, sync = get_cpu_offload_context(True, LAYERS - 1, LAYERS)
            for layer in self.layers:
                layer.offload = self.context, sync

    def angles(self):
        return self.rotary(SEQ)

    def forward(self, tokens, microbatch):
        hidden = self.embedding(tokens)
        given = {"attention_mask": None, "context": None, "context_mask": None, "rotary_pos_emb": self.angles()}
        with fp8_autocast(**self.options.fp8):
            for layer in self.layers:

                def call(hidden, layer=layer, **given):
                    layer.microbatch = microbatch  # of a recomputation too
                    return layer(hidden, **given)

                if self.options.recompute == "layer" and self.training:
                    hidden = checkpoint(call, hidden, get_rng_state_tracker=get_tracker, **given)
                else:
                    hidden = call(hidden, **given)
        return self.head(self.norm(hidden)).float()

    def start_step(self):
        for module in self.modules():
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = True


def capture(model):
    """Each layer in graphs of its own, once for each microbatch of an order."""
    options, layers = model.options, tuple(model.layers)
    passes = MICROBATCHES if options.order else 1
    on = {"device": options.device, "dtype": torch.bfloat16, "requires_grad": True}
    samples = tuple((torch.zeros(SEQ, BATCH, HIDDEN, **on),) for _ in range(passes * LAYERS))
    # The keywords that layers get as None are no part of the sample.
    keywords = tuple({"rotary_pos_emb": model.angles()} for _ in samples)
    order = {}
    if options.order:
        # One chunk of all layers: in the order of an interleaved schedule each would be one.
        order = {
            "_order": list(options.order),
            "_num_layers_per_chunk": [LAYERS],
            "_reuse_graph_input_output_buffers": True,
        }
    hooks = {}
    if model.context is not None:
        model.context.offload_synchronizer.reserve_pinned(1 << 21, options.device)
        hooks = {"pre_warmup_hook": model.context.disable, "post_warmup_hook": model.context.enable}
    graphs = make_graphed_callables(
        layers,
        samples,
        num_warmup_iters=2,
        allow_unused_input=True,
        sample_kwargs=keywords,
        fp8_enabled=options.fp8["enabled"],
        fp8_recipe=options.fp8["fp8_recipe"],
        fp8_weight_caching=options.keep_weights,
        **order,
        **hooks,
    )
    if options.order:
        for i, layer in enumerate(layers):
            layer.cuda_graphs = [graphs[microbatch * LAYERS + i] for microbatch in range(passes)]


def batch(step, microbatch, device):
    """Rows that go on by one rule."""
    start = torch.arange(BATCH) + 5 * microbatch + step
    rows = [start]
    for _ in range(SEQ):
        rows.append((rows[-1] * 5 + 3) % VOCAB)
    rows = torch.stack(rows).to(device)
    return rows[:-1], rows[1:]


def loss_of(model, step, microbatch):
    tokens, wanted = batch(step, microbatch, model.options.device)
    logits = model(tokens, microbatch)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def train(options, steps=4, capture_at=1, seed=7):
    """Losses and what is left: gradients of the last step, weights, scales, and the loss of an evaluation."""
    torch.manual_seed(seed)
    _TRACKER.reset()
    _TRACKER.add("model-parallel-rng", seed + 1)
    model = GPT(options).train()
    owned = [p for p in model.parameters() if p.requires_grad], MICROBATCHES
    optimizer = ShardedOptimizer(*owned, options.shards) if options.shards else Optimizer(*owned)
    left = {}
    for step in range(steps):
        if options.graphs and step == capture_at:
            capture(model)
        optimizer.zero()
        model.start_step()
        waiting, forwards, losses = [], 0, []
        for entry in options.order or IN_TURN:
            if entry > 0:
                waiting.append(loss_of(model, step, forwards))
                losses.append(waiting[-1].detach().clone())
                forwards += 1
            else:
                waiting.pop(0).backward()
        left[f"loss {step}"] = torch.stack(losses)
        left[f"gradients {step}"] = optimizer.buffer.clone()
        optimizer.step()
    left |= {f"weight {name}": p.detach().float() for name, p in model.named_parameters()} | states(model)
    model.eval(), model.start_step()
    with torch.no_grad():
        left["evaluation"] = loss_of(model, steps, 0).view(1)
    return model, left
