# MoEMLP with a stash: outputs, auxiliary loss and gradients are those of the same layers without one, bit for bit, the
# bytes taken are those of the live rows, and released memory is overwritten before the reload.
import copy

import pytest
import torch
from support import randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R
from transformer_engine.pytorch import functional

from .cases import Originals, count, made, report, same

pytestmark = pytest.mark.usefixtures("fp8_left_off")
TOKENS, HIDDEN, FFN, LAYERS = 48, 128, 128, 3
LIVES = (0, 3, 17, TOKENS)
RECIPES = {
    "bfloat16": None,
    "delayed": lambda: R.DelayedScaling(amax_history_len=2),
    "current": R.Float8CurrentScaling,
    "block": R.Float8BlockScaling,
}


class Mixture:
    """Layers of which each token goes to one expert, in each layer the same one. Of four experts two live here."""

    def __init__(self, device, recipe, stash=None, **options):
        torch.manual_seed(1)
        self.device, self.stash, self.recomputes = device, stash, False
        self.recipe = RECIPES[recipe]
        self.dtype = torch.float32 if device == "cpu" and self.recipe else torch.bfloat16
        options = {"experts": (0, 2), "aux_loss_coeff": 0.01, "params_dtype": self.dtype, "device": device, **options}
        self.layers = torch.nn.ModuleList(te.MoEMLP(HIDDEN, FFN, 4, 1, stash=stash, **options) for _ in range(LAYERS))
        signs = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]], dtype=self.dtype, device=device)
        with torch.no_grad():
            for layer in self.layers:
                layer.router.weight[:, :2] = signs
                layer.router.weight[:, 2:] *= 0.01
        if options.get("fuse_wgrad_accumulation"):
            for p in self.layers.parameters():
                p.main_grad = torch.full(p.shape, 0.5, dtype=torch.float32, device=device)

    def twin(self):
        """The same layers without a stash."""
        other = copy.copy(self)
        other.layers, other.stash = copy.deepcopy(self.layers), None
        for layer in other.layers:
            layer.stash = None
        for p, q in zip(self.layers.parameters(), other.layers.parameters(), strict=True):
            if hasattr(p, "main_grad"):
                q.main_grad = p.main_grad.clone()
        return other

    def tokens(self, live, seed=0):
        """`live` of them go to the experts that live here."""
        torch.manual_seed(seed)
        x = randn(TOKENS, HIDDEN, device=self.device, dtype=self.dtype)
        x[:, 0] = -3
        x[:live, 0] = 3
        return x

    def forward(self, y):
        losses = []
        for layer in self.layers:
            with te.autocast(enabled=self.recipe is not None, recipe=self.recipe and self.recipe()):
                out, loss = te.checkpoint(layer, y) if self.recomputes else layer(y)
            y = y + out
            losses.append(loss)
        return y, sum(losses)

    def step(self, *inputs):
        """Results and gradients of microbatches that are all in flight before the first backward, the oldest first."""
        self.layers.zero_grad(set_to_none=True)
        leaves, bytes_overwritten = [x.clone().requires_grad_() for x in inputs], 0
        with Originals() as originals:
            results = [self.forward(leaf) for leaf in leaves]
            if self.stash is not None:
                self.stash.step.free_leaving()
                bytes_overwritten = originals.overwrite()
        for y, loss in results:
            (y.float().square().sum() + loss).backward()
            for layer in self.layers:
                if layer.need_backward_dw():
                    layer.backward_dw()
        gradients = [getattr(p, name, None) for p in self.layers.parameters() for name in ("grad", "main_grad")]
        outputs = [t.detach().reshape(-1) for result in results for t in result]
        return [*outputs, *(leaf.grad for leaf in leaves), *gradients], bytes_overwritten

    def row_bytes(self):
        """Of a row: the pre-activation, its probability, its token, and with keep_rows the row itself."""
        element = torch.finfo(self.dtype).bits // 8
        return 2 * FFN * element + 4 + 4 + (HIDDEN * element if self.layers[0].keep_rows else 0)


def agree(mixture, stash, *inputs, steps=2, live=None):
    plain = mixture.twin()
    for _ in range(steps):
        stash.reset()
        found, overwritten = mixture.step(*inputs)
        same(found, plain.step(*inputs)[0])
        numbers = report(stash)
        assert numbers["flags"] == 0 and numbers["device_in_use"] == numbers["host_in_use"] == 0
        if live is not None:
            assert numbers["groups"] == LAYERS - 1
            assert numbers["live_bytes"] == (LAYERS - 1) * live * mixture.row_bytes()
            assert overwritten
    return numbers


@pytest.mark.parametrize("keep_rows", [False, True])
@pytest.mark.parametrize("live", LIVES)
def test_live_rows_leave(live, keep_rows, device):
    with made(device, page_bytes=512) as stash:
        mixture = Mixture(device, "bfloat16", stash, keep_rows=keep_rows)
        stash.schedule_from_order([1, -1], LAYERS)
        agree(mixture, stash, mixture.tokens(live), live=live)


@pytest.mark.parametrize("keep_rows", [False, True])
@pytest.mark.parametrize("live", LIVES)
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_recipes(recipe, live, keep_rows, device):
    with made(device, page_bytes=512, debug=True) as stash:
        mixture = Mixture(device, recipe, stash, keep_rows=keep_rows)
        numbers = agree(mixture, stash, mixture.tokens(live), steps=3)
        assert (numbers["live_bytes"] > 0) == (live > 0)


OPTIONS = {
    "main_grad": {"fuse_wgrad_accumulation": True},
    "FP8 pre-activation": {"save_preactivation": "fp8"},
    "keep_rows": {"keep_rows": True},
    "a capacity": {"capacity_factor": 2.0},
    "all experts": {"experts": None},
    "an expert's activation": {"activation": "gelu"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, device):
    with made(device, page_bytes=512) as stash:
        mixture = Mixture(device, "bfloat16", stash, **options)
        numbers = agree(mixture, stash, mixture.tokens(17))
        assert numbers["groups"] == LAYERS - 1


@pytest.mark.parametrize("how", ["delayed", "frozen experts", "frozen router", "recomputed"])
def test_beside_other_options(how, device):
    """A checkpoint around a layer keeps nothing, so nothing is stashed."""
    with made(device, page_bytes=512) as stash:
        mixture = Mixture(device, "bfloat16", stash, delay_wgrad_compute=how == "delayed")
        mixture.recomputes = how == "recomputed"
        if how.startswith("frozen"):
            for layer in mixture.layers:
                getattr(layer, how.split()[1]).requires_grad_(False)
        numbers = agree(mixture, stash, mixture.tokens(17), steps=3)
        assert numbers["groups"] == (0 if how == "recomputed" else LAYERS - 1)


POOLS = {
    "spill": {"device_pages": 9, "host_pages": 400},
    "host": {"device_pages": 0, "host_pages": 400},
    "evict": {"device_pages": 80, "host_pages": 400, "low_water": 60},
    "sized": {"device_pages": None},
}


@pytest.mark.parametrize("recipe", ["bfloat16", "block"])
@pytest.mark.parametrize("options", POOLS.values(), ids=POOLS)
def test_pools(options, recipe, device):
    with made(device, page_bytes=512, **options) as stash:
        mixture = Mixture(device, recipe, stash)
        x = mixture.tokens(TOKENS)
        stash.reset()
        mixture.step(x)
        agree(mixture, stash, x)


def test_two_microbatches(device):
    with made(device, page_bytes=512) as stash:
        mixture = Mixture(device, "bfloat16", stash)
        inputs = [mixture.tokens(17, seed=1), mixture.tokens(TOKENS, seed=2)]
        numbers = agree(mixture, stash, *inputs, steps=3)
        assert numbers["groups"] == 2 * LAYERS


@pytest.mark.parametrize("recipe", ["bfloat16", "block"])
def test_captured_layer_by_layer(recipe, device):
    """Replays with changing counts, which spill now and then."""
    with made(device, page_bytes=512, device_pages=60, host_pages=400) as stash:
        mixture = Mixture(device, recipe, stash)
        plain, x = mixture.twin(), mixture.tokens(17)
        for _ in range(2):
            stash.reset()
            mixture.step(x)
        stash.reset()
        samples = tuple((x.clone().requires_grad_(),) for _ in mixture.layers)
        fp8 = {} if mixture.recipe is None else {"enabled": True, "recipe": mixture.recipe()}
        te.make_graphed_callables(tuple(mixture.layers), samples, **fp8)
        spilled = set()
        for i, live in enumerate((*LIVES, *LIVES[::-1])):
            x = mixture.tokens(live, seed=i)
            stash.reset()
            found, _ = mixture.step(x)
            same(found, plain.step(x)[0])
            numbers = report(stash)
            assert numbers["flags"] == 0 and numbers["groups"] == LAYERS - 1
            assert numbers["device_in_use"] == numbers["host_in_use"] == 0
            spilled.add(numbers["spilled_bytes"] > 0)
        assert spilled == {False, True}


def begin(*stashes):
    for stash in stashes:
        stash.reset()


def test_two_stashes_in_one_set(device):
    """Layers of both, captured together; the schedule of each has its own layers alone."""
    with made(device, page_bytes=512) as stash, made(device, page_bytes=512) as other:
        mixture = Mixture(device, "bfloat16", stash)
        mixture.layers[1].stash = other
        plain, x = mixture.twin(), mixture.tokens(17)
        for _ in range(2):
            begin(stash, other)
            mixture.step(x)
        begin(stash, other)
        te.make_graphed_callables(tuple(mixture.layers), tuple((x.clone().requires_grad_(),) for _ in mixture.layers))
        for i, live in enumerate(LIVES):
            x = mixture.tokens(live, seed=i)
            begin(stash, other)
            found, _ = mixture.step(x)
            same(found, plain.step(x)[0])
            assert [report(one)["groups"] for one in (stash, other)] == [1, 0]


@pytest.mark.parametrize("first", ["eager", "captured"])
def test_captured_and_eager_layers_are_not_mixed(first, device):
    """One step has eager layers or captured ones. Others are refused by the entry of the schedule that comes in place
    of another, and the next step is whole."""
    with made(device, page_bytes=512) as stash:
        mixture = Mixture(device, "bfloat16", stash)
        plain, x = mixture.twin(), mixture.tokens(17)
        expected = plain.step(x)[0]
        last = mixture.layers[-1]
        samples = tuple((x.clone().requires_grad_(),) for _ in mixture.layers[:-1])
        if first == "eager":  # the schedule has all layers
            for _ in range(2):
                stash.reset()
                mixture.step(x)
            stash.reset()
            name = mixture.layers[1].stash_group
            with refused(RuntimeError, f"the backward of group {name}, microbatch 0 came as entry 2", last.stash_group):
                te.make_graphed_callables(tuple(mixture.layers[:-1]), samples)
        else:  # it has those that are captured
            stash.reset()
            te.make_graphed_callables(tuple(mixture.layers[:-1]), samples)
            stash.reset()
            name = f"the forward of group {last.stash_group}, microbatch 0 came as entry"
            with refused(RuntimeError, "PagedStash", name, "of the schedule, wanted the"):
                mixture.step(x)
            last.stash = None
        stash.reset()
        same(mixture.step(x)[0], expected)
        assert stash.verdict(wait=True).ok


def test_a_lost_group(device):
    """The gate is up, nothing is applied, and the step runs again in a larger pool."""
    with made(device, page_bytes=512, device_pages=20, factor=1.0) as stash:
        mixture = Mixture(device, "bfloat16", stash)
        plain, x = mixture.twin(), mixture.tokens(TOKENS)
        stash.register(mixture.layers)
        optimizer = torch.optim.AdamW(mixture.layers.parameters(), fused=True)
        optimizer.found_inf = stash.gate()
        stash.reset()
        mixture.step(x)
        before = [p.detach().clone() for p in mixture.layers.parameters()]
        stash.gate()
        optimizer.step()
        verdict = stash.verdict(wait=True)
        assert verdict.flags == ("lost",) and verdict.group == mixture.layers[0].stash_group
        assert len({layer.stash_group for layer in mixture.layers}) == LAYERS
        assert any(bool(p.grad.isnan().any()) for p in mixture.layers.parameters())
        same([p.detach() for p in mixture.layers.parameters()], before)
        mixture.layers.zero_grad(set_to_none=True)
        stash.grow()
        found, _ = stash.rerun(lambda: mixture.step(x))
        assert stash.verdict(wait=True).ok
        same(found, plain.step(x)[0])


def test_rows_past_the_capacity_are_not_counted(device):
    """They are cut before the experts, in a stash and without one."""
    with made(device, page_bytes=512) as stash:
        mixture = Mixture(device, "bfloat16", stash, capacity_factor=0.5, experts=None)
        x = torch.cat([mixture.tokens(TOKENS, seed=i) for i in range(8)])
        rows = 256  # of 8 * TOKENS tokens, half of them in whole 128s
        numbers = agree(mixture, stash, x)
        assert numbers["live_bytes"] == (LAYERS - 1) * rows * mixture.row_bytes()


def test_evaluation_and_plans(device):
    """Evaluation bypasses the stash, and te.memory_plan shows what a step would stash."""
    with made(device, page_bytes=512) as stash:
        mixture = Mixture(device, "bfloat16", stash)
        x = mixture.tokens(17)
        agree(mixture, stash, x)
        with torch.no_grad():
            same([mixture.forward(x)[0]], [mixture.twin().forward(x)[0]])
        layer = mixture.layers[0]
        rows = [row for row in te.memory_plan(layer, x.clone().requires_grad_()).rows if row.status == "stashed"]
        assert sum(row.bytes for row in rows) == TOKENS * mixture.row_bytes()
        agree(mixture, stash, x)


@pytest.mark.parametrize("fails", ["router_rows", "grouped_mlp"])
def test_a_call_that_fails(fails, device, monkeypatch):
    """Before its schedulers, or in its group: it leaves nothing open, and the call can be repeated in the same step."""

    def fail(*_, **__):
        raise MemoryError("no memory")

    with made(device, page_bytes=512) as stash:
        mixture = Mixture(device, "bfloat16", stash)
        x = mixture.tokens(17)
        expected = mixture.twin().step(x)[0]
        for _ in range(2):
            stash.reset()
            with monkeypatch.context() as patched, pytest.raises(MemoryError):
                patched.setattr(functional, fails, fail)
                mixture.layers[0](x.clone().requires_grad_())
            same(mixture.step(x)[0], expected)
            assert stash.verdict(wait=True).ok


def test_parameters_stay_beside_the_hooks(device):
    """The node keeps them itself, and finds one that was written; hooks around the stash see each of them."""
    with made(device, page_bytes=512) as stash:
        layer = te.MoEMLP(HIDDEN, FFN, 4, 1, stash=stash, params_dtype=torch.bfloat16, device=device)
        x = randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16).requires_grad_()
        weights, seen = list(layer.experts.parameters()), []
        stash.reset()
        y = layer(x)[0]
        with torch.no_grad():
            weights[-1].zero_()
        with refused(RuntimeError, "grouped_mlp: one of the variables", "modified by an inplace operation"):
            y.sum().backward()
        stash.reset()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.data_ptr()) or t, lambda t: t):
            y = layer(x)[0]
        assert {w.data_ptr() for w in weights} <= set(seen)
        y.sum().backward()
        assert stash.verdict(wait=True).ok and all(w.grad is not None for w in weights)


def test_copies_are_groups_of_their_own(device):
    with made(device, page_bytes=512) as stash:
        layer = te.MoEMLP(HIDDEN, FFN, 4, 1, stash=stash, params_dtype=torch.bfloat16, device=device)
        layers = [layer, copy.deepcopy(layer), copy.deepcopy(layer)]
        assert len({one.stash_group for one in layers}) == 3 and all(one.stash is stash for one in layers)


def test_bad_stashes(device):
    options = {"params_dtype": torch.bfloat16, "device": device}
    with refused(TypeError, "MoEMLP", "'stash'", "object", "pre_schedule()", "PagedStash"):
        te.MoEMLP(HIDDEN, FFN, 4, 1, stash=object(), **options)
    x = randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16).requires_grad_()
    with made(device, page_bytes=512) as stash:
        layer = te.MoEMLP(HIDDEN, FFN, 4, 1, stash=stash, **options)
        with refused(RuntimeError, "PagedStash", f"group {layer.stash_group} is opened inside of group 'outer'"):
            with stash.group("outer", count(TOKENS, device)):
                layer(x)
        stash.reset()
        layer(x)[0].sum().backward()
        assert stash.verdict(wait=True).ok
        stash.close()
        with refused(RuntimeError, "PagedStash.pre_schedule", "closed", "make another one"):
            layer(x)


@pytest.mark.gpu
def test_a_stash_of_another_device():
    with made("cpu") as stash:
        layer = te.MoEMLP(HIDDEN, FFN, 4, 1, stash=stash, params_dtype=torch.bfloat16, device="cuda")
        with refused(ValueError, "PagedStash", "on cuda:0", "the pool's device, cpu", "one PagedStash for each device"):
            layer(randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_())
