# Outputs and gradients of our modules and plain ones are the same bits with offload as without: every family, 16 bits,
# recomputation, delayed and accumulated weight gradients, a graph gone through twice, layers of uneven size.
# Mutants: popping a piece without waiting, or dropping the packed pieces' unpack, turns these red on a GPU; leaving
# from inside of torch's checkpoint (in_torch_checkpoint in csrc/saved_hooks/saved_python.cpp) on a CPU too.
import contextlib

import pytest
import torch
from support import assert_same_bits, randn

import transformer_engine.pytorch as te

from .cases import forward, small, step  # noqa: F401

pytestmark = pytest.mark.usefixtures("small")

HIDDEN, FFN, HEADS, LAYERS = 32, 64, 4, 4


class Block(torch.nn.Module):
    """Plain torch, with an operation that saves its output, one that saves a view, and dropout."""

    def __init__(self, device, dtype, width):
        super().__init__()
        self.up = torch.nn.Linear(HIDDEN, width, device=device, dtype=dtype)
        self.down = torch.nn.Linear(width, HIDDEN, device=device, dtype=dtype)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x):
        y = torch.tanh(self.up(x)).transpose(0, 1)
        return self.dropout(torch.sigmoid(self.down((y * y).transpose(0, 1)))) * x


def family(name, device, dtype, i):
    options = {"device": device, "params_dtype": dtype}
    if name == "Linear":
        return te.Linear(HIDDEN, HIDDEN, **options)
    if name == "LayerNormLinear":
        return te.LayerNormLinear(HIDDEN, HIDDEN, normalization="RMSNorm", **options)
    if name == "LayerNormMLP":
        return te.LayerNormMLP(HIDDEN, FFN + 32 * (i % 2), activation="swiglu", **options)
    if name == "LayerNormMLP(checkpoint)":
        return te.LayerNormMLP(HIDDEN, FFN, checkpoint=True, **options)
    if name == "TransformerLayer":
        return te.TransformerLayer(HIDDEN, FFN, HEADS, attention_dropout=0.0, hidden_dropout=0.1, **options)
    return Block(device, dtype, FFN + 16 * i)


FAMILIES = ["Linear", "LayerNormLinear", "LayerNormMLP", "LayerNormMLP(checkpoint)", "TransformerLayer", "torch"]


def build(name, device, dtype=torch.float32):
    return [family(name, device, dtype, i) for i in range(LAYERS)]


def inputs(device, dtype=torch.float32, count=2):
    return [randn(8, 4, HIDDEN, device=device, dtype=dtype) for _ in range(count)]


def same(results, expected):
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert_same_bits(a, b, f"result {i}")


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_same_bits(name, dtype, k, device):
    layers, given = build(name, device, dtype), inputs(device, dtype)
    expected = step(layers, given)
    context, sync = te.get_cpu_offload_context(True, k, LAYERS)
    same(step(layers, given, context, sync), expected)
    assert context.offload_synchronizer.get_offloaded_total_size_mb() > 0


class Masked(torch.nn.Module):
    def __init__(self, mask, dtype):
        super().__init__()
        options = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "window_size": (9, 9)}
        options |= {"self_attn_mask_type": "padding", "device": mask.device, "params_dtype": dtype}
        self.layer, self.mask = te.TransformerLayer(HIDDEN, FFN, HEADS, **options), mask

    def forward(self, x):
        return self.layer(x, attention_mask=self.mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_of_odd_lengths(dtype, device):
    """PyTorch pads their rows to whole 16 bytes and saves a part; its backward needs the strides of that."""
    mask = torch.arange(17, device=device) >= torch.tensor([17, 5, 12, 16], device=device)[:, None]
    layers = [Masked(mask[:, None, None], dtype) for _ in range(LAYERS)]
    given = [randn(17, 4, HIDDEN, device=device, dtype=dtype) for _ in range(2)]
    expected = step(layers, given)
    same(step(layers, given, *te.get_cpu_offload_context(True, 2, LAYERS)), expected)


@pytest.mark.parametrize("how", ["te", "torch"])
def test_two_backwards_through_a_block(how, device):
    """Modules of this library refuse a derivative of the backward, not a second backward."""
    layers, given = build("LayerNormMLP" if how == "te" else how, device), inputs(device)
    expected = step(layers, given, twice=True)
    context, sync = te.get_cpu_offload_context(True, 2, LAYERS)
    same(step(layers, given, context, sync, twice=True), expected)


def test_derivatives_of_derivatives(device):
    """Plain modules support it: reloaded tensors are part of a second graph."""
    layers, (x,) = build("torch", device), inputs(device, count=1)

    def both(context=None, sync=None):
        torch.manual_seed(5)
        given = x.clone().requires_grad_()
        y = forward(layers, given, context, sync)
        (first,) = torch.autograd.grad(y.square().sum(), given, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), given)
        return [first.detach(), second]

    expected = both()
    same(both(*te.get_cpu_offload_context(True, 2, LAYERS)), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_offload_their_inputs(reentrant, device):
    layers, given = build("TransformerLayer", device), inputs(device)

    class Recomputed(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return te.checkpoint(self.inner, x, use_reentrant=reentrant)

    expected = step(layers, given)
    context, sync = te.get_cpu_offload_context(True, 2, LAYERS)
    same(step([Recomputed(layer) for layer in layers], given, context, sync), expected)
    moved = context.offload_synchronizer.get_offloaded_total_size_mb() * 2**20
    assert moved == 2 * given[0].nbytes  # only the input of each layer


CHECKPOINTS = {
    "te": lambda f, x: te.checkpoint(f, x, use_reentrant=False),
    "te reentrant": te.checkpoint,
    "torch": lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False),
    "torch reentrant": lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=True),
}


@pytest.mark.parametrize("saved", [False, True], ids=["", "save_on_cpu"])
@pytest.mark.parametrize("count", [1, LAYERS])
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_checkpoint_around_contexts(how, count, saved, device):
    """With other tensors saved beside the offloaded ones, and with other hooks in between: all of it is recomputed."""
    layers, given = build("torch", device), inputs(device)
    for layer in layers:
        layer.dropout.p = 0.0
    context, sync = te.get_cpu_offload_context(True, 2, LAYERS)

    class Several(torch.nn.Module):
        def __init__(self, at, offload):
            super().__init__()
            self.layers, self.offload = torch.nn.ModuleList(layers[at : at + count]), offload

        def run(self, x, *offload):
            with torch.autograd.graph.save_on_cpu() if saved else contextlib.nullcontext():
                for layer in self.layers:
                    x = forward([layer], x, *offload)
                    x = x * x.cos()
            return x * x.cos()

        def forward(self, x):
            return CHECKPOINTS[how](lambda x: self.run(x, context, sync), x) if self.offload else self.run(x)

    whole, plain = ([Several(at, offload) for at in range(0, LAYERS, count)] for offload in (True, False))
    same(step(whole, given), step(plain, given))
    if not saved:
        assert not list(context.offload_synchronizer.steps())


def test_a_context_inside_of_a_checkpoint_leaves_its_tensors_alone(device):
    layers, given = build("LayerNormMLP", device), inputs(device)
    context, sync = te.get_cpu_offload_context(True, 2, LAYERS)

    class Inside(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def layer(self, x):
            with context:
                x = self.inner(x)
            return sync(x)

        def forward(self, x):
            return te.checkpoint(self.layer, x, use_reentrant=False)

    expected = step(layers, given)
    same(step([Inside(layer) for layer in layers], given), expected)
    assert not list(context.offload_synchronizer.steps())


@pytest.mark.parametrize("fused", [False, True])
def test_delayed_weight_gradients(fused, device):
    options = {"device": device, "delay_wgrad_compute": True, "fuse_wgrad_accumulation": fused}
    layers, given = [te.LayerNormMLP(HIDDEN, FFN, **options) for _ in range(LAYERS)], inputs(device)

    def delayed(context=None, sync=None):
        for layer in layers:
            for p in layer.parameters():
                p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        results = step(layers, given, context, sync)[:4]
        for layer in layers:
            for _ in given:
                layer.backward_dw()
        grads = [g for layer in layers for p in layer.parameters() for g in (p.grad, p.main_grad) if g is not None]
        return results + grads

    expected = delayed()
    context, sync = te.get_cpu_offload_context(True, 2, LAYERS)
    same(delayed(context, sync), expected)


def test_gradients_of_one_layer_alone(device):
    """torch.autograd.grad to a layer in the middle: earlier layers are never reloaded."""
    layers, (x,) = build("LayerNormMLP", device), inputs(device, count=1)
    context, sync = te.get_cpu_offload_context(True, 3, LAYERS)

    def of_last(context=None, sync=None):
        y = forward(layers, x.clone().requires_grad_(), context, sync)
        return torch.autograd.grad(y.sum(), list(layers[2].parameters()))

    expected = of_last()
    same(of_last(context, sync), expected)
    context.offload_synchronizer.forget_step()
    assert context.offload_synchronizer.pinned_usage()["slots"] == 0


def test_autocast(device):
    layers, given = build("torch", device), inputs(device)
    context, sync = te.get_cpu_offload_context(True, 2, LAYERS)
    with torch.autocast(device, torch.bfloat16):
        expected = step(layers, given)
        same(step(layers, given, context, sync), expected)


def test_around_a_compiled_layer(device):
    layers, given = build("torch", device), inputs(device)
    for layer in layers:
        layer.dropout.p = 0.0
    compiled = [torch.compile(layer, backend="aot_eager", fullgraph=True) for layer in layers]
    expected = step(compiled, given)
    context, sync = te.get_cpu_offload_context(True, 2, LAYERS)
    same(step(compiled, given, context, sync), expected)
    assert context.offload_synchronizer.get_offloaded_total_size_mb() > 0


def test_the_memory_plan_shows_what_leaves(device):
    context, sync = te.get_cpu_offload_context(True, 2, LAYERS)

    class Stack(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(build("LayerNormMLP", device))

        def forward(self, x):
            return forward(self.layers, x, context, sync)

    stack, x = Stack(), randn(8, 4, HIDDEN, device=device, requires_grad=True)
    plan = te.memory_plan(stack, x)
    left = [row for row in plan.rows if row.status == "offloaded"]
    moved = round(context.offload_synchronizer.get_offloaded_total_size_mb() * 2**20)
    assert plan.bytes_of("offloaded") == sum(row.bytes for row in left) == moved > 0
    assert {row.module for row in left} == {"layers.0", "layers.1"}
    assert "offloaded" in str(plan) and f"offloaded {moved:,} B" in str(plan)
    context.disable()
    without = te.memory_plan(stack, x)
    context.enable()
    assert without.bytes_of("offloaded") == 0
    both = plan.kept_bytes + plan.bytes_of("input") + moved
    assert both == without.kept_bytes + without.bytes_of("input")
