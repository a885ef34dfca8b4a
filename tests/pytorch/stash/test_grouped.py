# GroupedLinear with sizes on the device inside of groups: its node announces the live rows of its operand, and the live
# panels of an FP8 one, so that no counts are needed. Outputs and gradients are those of a run that keeps everything,
# the bytes taken are the live ones, and released memory is overwritten before the reload.
import copy
import warnings

import pytest
import torch
from support import randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R
from transformer_engine.pytorch import functional

from .cases import Originals, count, made, report, same

pytestmark = pytest.mark.usefixtures("fp8_left_off")
ROWS, GROUPS = 300, 4
WIDTHS = (160, 272, 160)  # in, between, out: two and three rows of scales of 1 x 128
SIZES = {
    "few": [0, 3, 17, 0],
    "all": [100, 3, 17, 180],
    "Zipf": [131, 65, 33, 17],
    "one group": [0, 0, 131, 0],
    "one group, all": [0, ROWS, 0, 0],
    "none": [0, 0, 0, 0],
}
RECIPES = {
    "bfloat16": None,
    "delayed": lambda: R.DelayedScaling(amax_history_len=2),
    "current": R.Float8CurrentScaling,
    "block": R.Float8BlockScaling,
    "current, high precision": lambda: R.Float8CurrentScaling(backward_override="high_precision"),
    "current, dequantized": lambda: R.Float8CurrentScaling(backward_override="dequantized"),
    "block, dequantized": lambda: R.Float8BlockScaling(backward_override="dequantized"),
}


class Stack:
    """GroupedLinears, each in a group of a stash if one is passed."""

    def __init__(self, device, recipe, layers=2, **how):
        self.recipe, self.device = RECIPES[recipe], device
        self.name = recipe
        dtype = torch.float32 if device == "cpu" and self.recipe else torch.bfloat16
        how = {"params_dtype": dtype, "device": device, **how}
        self.how, self.dtype = how, dtype
        torch.manual_seed(layers)
        self.layers = [te.GroupedLinear(GROUPS, *self.widths(i), **how) for i in range(layers)]
        self.x = randn(ROWS, WIDTHS[0], device=device, dtype=dtype)
        self.dy = randn(ROWS, self.widths(layers - 1)[1], device=device, dtype=dtype)
        for p in self.parameters():
            p.main_grad = randn(*p.shape, device=device)

    def twin(self):
        """A copy with the same state."""
        other = copy.copy(self)
        other.layers = copy.deepcopy(self.layers)
        for p, q in zip(self.parameters(), other.parameters(), strict=True):
            q.main_grad = p.main_grad.clone()
        return other

    @staticmethod
    def widths(i):
        return (WIDTHS[0], WIDTHS[1]) if i % 2 == 0 else (WIDTHS[1], WIDTHS[2])

    def parameters(self):
        return [p for layer in self.layers for p in layer.parameters()]

    def step(self, sizes, stash=None, counts=None, scheduled=False, **how):
        """Outputs and gradients. Released memory of groups is overwritten before the backward."""
        sizes = torch.tensor(sizes, device=self.device)
        for p in self.parameters():
            p.grad = None
        main = [p.main_grad.clone() for p in self.parameters()]
        leaf = self.x.clone().requires_grad_()
        y, outputs = leaf * 1, []
        with Originals() as originals:
            for i, layer in enumerate(self.layers):
                if stash is None:
                    y = self.run(layer, y, sizes)
                else:
                    y = stash.pre_schedule(y) if scheduled else y
                    with stash.group(i, counts, **how):
                        y = self.run(layer, y, sizes)
                    y = stash.post_schedule(y) if scheduled else y
                outputs.append(y.detach().clone())
            if stash is not None:
                stash.step.free_leaving()
                originals.overwrite()
        y.backward(self.dy)
        for layer in self.layers if self.how.get("delay_wgrad_compute") else ():
            layer.backward_dw()
        gradients = [p.grad for p in self.parameters()] + [p.main_grad for p in self.parameters()]
        if self.how.get("fuse_wgrad_accumulation"):
            for p, before in zip(self.parameters(), main, strict=True):
                p.main_grad = before
        return [*outputs, leaf.grad, *gradients], originals.overwritten

    def run(self, layer, x, sizes):
        if self.recipe is None:
            return layer(x, sizes)
        with te.autocast(recipe=self.recipe()):
            return layer(x, sizes)

    def live_bytes(self, sizes, layers=None):
        """Bytes of live rows that the groups of the first layers keep."""
        n, panels, element = sum(sizes), sum(-(-size // 128) for size in sizes), self.x.element_size()
        total = 0
        for i in range(len(self.layers) if layers is None else layers):
            k = self.widths(i)[0]
            if self.recipe is None or self.how.get("save_original_input") or "high" in self.name:
                total += n * k * element
            elif "dequantized" in self.name:
                total += n * k + (n * 4 * -(-k // 128) if self.name.startswith("block") else 0)
            else:
                total += panels * k * (128 + (4 if self.name == "block" else 0))
        return total


def agree(stack, stash, sizes, **how):
    """A step with the stash gives the bits of one without. Returns the report."""
    expected = stack.twin().step(sizes)[0]
    stash.reset()
    found, overwritten = stack.step(sizes, stash, **how)
    same(found, expected, f"{sizes}")
    numbers = report(stash)
    assert overwritten > 0 and numbers["flags"] == 0 and numbers["device_in_use"] == numbers["host_in_use"] == 0
    return numbers


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_and_bytes(recipe, sizes, device):
    stack = Stack(device, recipe)
    with made(device, page_bytes=512, debug=True) as stash:
        for _ in range(2):
            assert agree(stack, stash, sizes)["live_bytes"] == stack.live_bytes(sizes)


@pytest.mark.parametrize("how", ["fuse_wgrad_accumulation", "delay_wgrad_compute", "save_original_input"])
@pytest.mark.parametrize("recipe", ["bfloat16", "current", "block"])
def test_other_gradients(recipe, how, device):
    """main_grad, backward_dw(), and an input that is quantized again: rows of no group are not read for that."""
    stack = Stack(device, recipe, **{how: True})
    with made(device, page_bytes=512) as stash:
        for sizes in (SIZES["few"], SIZES["Zipf"]):
            assert agree(stack, stash, sizes)["live_bytes"] == stack.live_bytes(sizes)


@pytest.mark.parametrize("tail", ["keep", "tile", "zero"])
@pytest.mark.parametrize("tier", ["host", "mixed"])
@pytest.mark.parametrize("recipe", ["bfloat16", "block", "block, dequantized"])
def test_tiers_and_tails(recipe, tier, tail, device):
    stack, sizes = Stack(device, recipe), SIZES["Zipf"]
    with made(device, device_pages=0 if tier == "host" else 20, host_pages=2000) as stash:
        numbers = agree(stack, stash, sizes, tail=tail)
        assert numbers["live_bytes"] == stack.live_bytes(sizes)
        assert (numbers["spilled_bytes"] == numbers["stream_bytes"]) == (tier == "host")
        assert numbers["spilled_bytes"] > 0


@pytest.mark.parametrize("recipe", ["bfloat16", "block", "block, dequantized"])
def test_eviction(recipe, device):
    stack, sizes = Stack(device, recipe, layers=6), SIZES["Zipf"]
    pages = -(-stack.live_bytes(sizes, 1) // 256) + 1
    with made(device, device_pages=6 * pages, host_pages=12 * pages, low_water=3 * pages) as stash:
        for _ in range(3):
            numbers = agree(stack, stash, sizes, scheduled=True)
        assert numbers["evicted_pages"] > 0 and numbers["live_bytes"] == stack.live_bytes(sizes, 5)


@pytest.mark.parametrize("recipe", ["bfloat16", "delayed", "current", "block", "block, dequantized"])
def test_a_lost_group(recipe, device):
    """Gradients of its weights are NaN, the gate is up, and an optimizer that reads it applies nothing."""
    stack, sizes = Stack(device, recipe), SIZES["Zipf"]
    expected, _ = stack.twin().step(sizes)
    weights = list(stack.layers[0].parameters())
    optimizer = torch.optim.Adam(stack.parameters(), fused=True)
    with made(device, device_pages=8) as stash:
        optimizer.found_inf = stash.gate()
        stash.reset()
        found, _ = stack.step(sizes, stash)
        same(found[:3], expected[:3])  # outputs and the input's gradient, which reads nothing of a group
        for weight in (p for p in weights if p.dim() == 2):
            assert weight.grad.isnan().all()
        verdict = stash.verdict(wait=True)
        assert verdict.flags == ("lost",) and verdict.report["lost_groups"] == 2 and float(stash.gate()) == 1
        before = [p.detach().clone() for p in stack.parameters()]
        optimizer.step()
        same(list(stack.parameters()), before)


def test_the_node_precedes_the_counts(device):
    """counts that are larger, or smaller, count other tensors alone."""
    stack, sizes = Stack(device, "block"), SIZES["Zipf"]
    with made(device, page_bytes=512) as stash:
        for counts in (3, ROWS):
            assert agree(stack, stash, sizes, counts=count(counts, device))["live_bytes"] == stack.live_bytes(sizes)


@pytest.mark.parametrize("others", ["none", "fewer", "more"])
def test_one_tensor_of_several_nodes(others, device):
    """Two GroupedLinears and a Linear save one input: the rows that any of them counts are live."""
    sizes, k = torch.tensor(SIZES["few"], device=device), WIDTHS[0]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    options = {"params_dtype": dtype, "device": device, "bias": False}
    gate, up = (te.GroupedLinear(GROUPS, k, k, **options) for _ in range(2))
    shared = te.Linear(k, k, **options)
    live = {"none": 20, "fewer": 7, "more": 45}[others]
    counter, x = count(live, device), randn(ROWS, k, device=device, dtype=dtype)
    alive = (torch.arange(ROWS, device=device) < live)[:, None]
    modules = torch.nn.ModuleList([gate, up, shared])

    def step(stash=None):
        modules.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        y = leaf * 1

        def layers(y):
            z = gate(y, sizes) * 2 + up(y, sizes)
            return z if others == "none" else z + torch.where(alive, shared(y), 0)

        with Originals() as originals:
            if stash is None:
                z = layers(y)
            else:
                with stash.group("a", None if others == "none" else counter):
                    z = layers(y)
                del y
                stash.step.free_leaving()
                assert originals.overwrite() == x.nbytes
        z.sum().backward()
        return [leaf.grad, *(p.grad for p in modules.parameters())]

    expected = step()
    with made(device) as stash:
        same(step(stash), expected)
        numbers = report(stash)
        assert numbers["flags"] == 0 and numbers["live_bytes"] == max(live, 20) * k * x.element_size()


def test_a_tile_of_panels_is_a_panel(device):
    """The tail "tile" ends with the last live panel."""
    stack, sizes = Stack(device, "block", layers=1), torch.tensor(SIZES["few"], device=device)
    with made(device) as stash:
        with stash.group(0, tail="tile") as group:
            y = stack.run(stack.layers[0], stack.x.clone().requires_grad_(), sizes)
        stash.step.free_leaving()
        group.handle.finish_load()
        sizes_of = [(segment.regions[0], segment.memory) for segment in group.handle.segments]
        assert len(sizes_of) == 2 and y.requires_grad
        for region, memory in sizes_of:
            assert (memory[2 * region.row_bytes :] == 0xFF).all() and not (memory == 0xFF).all()


@pytest.mark.parametrize("recipe", ["block", "block, dequantized"])
def test_the_plan_counts_panels_and_repeats(recipe, device):
    stack, sizes = Stack(device, recipe), SIZES["Zipf"]
    with made(device, device_pages=None, page_bytes=128, factor=1.0) as stash:
        stack.step(sizes, stash)
        stash.reset()
        plan = stash.plan()
        assert plan.live_bytes == stack.live_bytes(sizes)
        assert plan.peak_pages * 128 == agree(stack, stash, sizes)["taken_bytes"]


def test_offsets_that_are_written_while_their_group_leaves(device):
    """The caller's own: their last one is the counter of the rows."""
    weights = [randn(16, 24, dtype=torch.bfloat16, device=device).requires_grad_() for _ in range(2)]
    x = randn(9, 24, dtype=torch.bfloat16, device=device).requires_grad_()
    offsets = functional.grouped_offsets(torch.tensor([3, 4], device=device), x)
    with made(device) as stash:
        y = stash.pre_schedule(x) * 1
        with stash.group("a"):
            y = functional.grouped_linear(y, weights, offsets=offsets)
        offsets.sub_(1)
        with refused(RuntimeError, "counter", "'a'", "changed in place"):
            stash.post_schedule(y)


class TestWarning:
    """Something large of this library's modules without a counter is named once, and nothing else is."""

    ROWS, WIDTH = 8192, 128

    def keep(self, stash, name, layer, *arguments, counts=None):
        x = torch.zeros(self.ROWS, self.WIDTH, device=stash.device, dtype=layer.weight_dtype, requires_grad=True)
        with te.autocast(recipe=R.Float8CurrentScaling()), stash.group(name, counts):
            layer(x, *arguments)

    def layer(self, device, grouped=False):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        options = {"params_dtype": dtype, "device": device, "bias": False}
        layer = te.GroupedLinear(2, 128, 128, **options) if grouped else te.Linear(128, 128, **options)
        layer.weight_dtype = dtype
        return layer

    def test_columns_of_tokens(self, device):
        layer, counts = self.layer(device), count(5, device)
        with made(device) as stash:
            with pytest.warns(
                UserWarning, match=r"group 'a' keeps all rows of 'linear input' of linear.*1048576 bytes"
            ):
                self.keep(stash, "a", layer, counts=counts)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                self.keep(stash, "b", layer, counts=counts)

    def test_nothing_that_is_small_or_counted(self, device):
        layer, grouped = self.layer(device), self.layer(device, grouped=True)
        sizes = torch.tensor([3, 4], device=device)
        with made(device) as stash, warnings.catch_warnings():
            warnings.simplefilter("error")
            self.keep(stash, "a", grouped, sizes)
            with te.autocast(recipe=R.Float8CurrentScaling()), stash.group("b", count(5, device)):
                layer(torch.zeros(16, 128, device=device, dtype=layer.weight_dtype, requires_grad=True))
