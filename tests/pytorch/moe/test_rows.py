# te.MoEMLP whose backward gathers the experts' rows again: the bits of rows that are kept, with every recipe, every
# destination of weight gradients, and beside recomputation, compilation and offload; what is kept, and by whose law.
import copy

import pytest
import torch
from support import assert_same_bits, randn, saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional
from transformer_engine.pytorch.moe import MoEMLP
from transformer_engine.pytorch.verdict import SplitVerdict, reset_split_verdict, split_verdict

from .cases import (
    BF16,
    EXPERTS,
    HIDDEN,
    TOKENS,
    TOPK,
    assert_same_gradients,
    assert_same_steps,
    build,
    every_recipe,
    give_main_grads,
    recipe_of,
)
from .cases import step as step_of

pytestmark = pytest.mark.usefixtures("fp8_left_off")


def both(device, dtype=BF16, **options):
    """A layer that gathers again, and its copy that keeps the rows."""
    ours = build(device, dtype, **options)
    twin = copy.deepcopy(ours)
    twin.keep_rows = True
    if options.get("fuse_wgrad_accumulation"):
        give_main_grads(ours.experts, twin.experts)
    return ours, twin


def draw(device, dtype=BF16, tokens=TOKENS):
    return (randn(tokens, HIDDEN, dtype=dtype, device=device) for _ in range(2))


def step(module, x, dy, recipe=None, call=None):
    """y, aux_loss, x's gradient."""
    return step_of(module, (x,), (dy, torch.ones((), device=x.device)), recipe, call)


OPTIONS = [
    {},
    {"fuse_wgrad_accumulation": True},
    {"delay_wgrad_compute": True},
    {"experts": (1, 4)},
    {"capacity_factor": 0.5, "save_preactivation": "fp8"},
    {"activation": "gelu", "score_function": "sigmoid", "aux_loss_coeff": 0.01},
]


@every_recipe
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gathered_again_is_kept(options, recipe, device):
    ours, twin = both(device, **options)
    made = recipe_of(recipe)
    for _ in range(3):  # delayed scales follow
        x, dy = draw(device, tokens=300 if "capacity_factor" in options else TOKENS)
        assert_same_steps(step(ours, x, dy, made), step(twin, x, dy, made))
        assert_same_gradients(ours, twin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype, device):
    if dtype is torch.float32 and device == "cuda":
        pytest.skip("groups on the device are multiplied in 16 bits")
    ours, twin = both(device, dtype)
    x, dy = draw(device, dtype)
    assert_same_steps(step(ours, x, dy), step(twin, x, dy))
    assert_same_gradients(ours, twin)


def test_under_autocast(device):
    ours, twin = both(device, torch.float32)
    x, dy = draw(device, torch.float32)
    with torch.autocast(device, dtype=BF16):
        assert_same_steps(step(ours, x, dy), step(twin, x, dy))
    assert_same_gradients(ours, twin)


def offloaded(module):
    context, sync = te.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)

    def call(x):
        with context:
            y, loss = module(x)
        return sync(y), loss

    return call


HOW = {
    "checkpoint": lambda module: lambda x: te.checkpoint(module, x),
    "reentrant": lambda module: lambda x: te.checkpoint(module, x, use_reentrant=True),
    "compiled": lambda module: torch.compile(module, fullgraph=True, backend="aot_eager"),
    "dynamic": lambda module: torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True),
    "offloaded": offloaded,
}


@pytest.mark.parametrize("recipe", ["none", "current", "block"])
@pytest.mark.parametrize("how", HOW)
def test_beside(how, recipe, device):
    ours, twin = both(device)
    made, call = recipe_of(recipe), HOW[how](ours)
    for tokens in (TOKENS, 24):
        x, dy = draw(device, tokens=tokens)
        assert_same_steps(step(ours, x, dy, made, call=call), step(twin, x, dy, made))
        assert_same_gradients(ours, twin)


def test_torchs_checkpoint(device):
    ours, twin = both(device)
    x, dy = draw(device)
    again = step(ours, x, dy, call=lambda x: torch.utils.checkpoint.checkpoint(ours, x, use_reentrant=False))
    assert_same_steps(again, step(twin, x, dy))
    assert_same_gradients(ours, twin)


@pytest.mark.parametrize("recipe", ["none", "delayed", "block"])
@pytest.mark.parametrize("where", ["router", "experts", "experts.fc1"])
def test_with_hooks(where, recipe, device):
    """A hook sees what the public functions give it, and the layer computes the same."""
    ours, twin = both(device)
    seen = []
    twin.get_submodule(where).register_forward_hook(lambda module, given, result: seen.append(given[0].shape[0]))
    made = recipe_of(recipe)
    x, dy = draw(device)
    assert_same_steps(step(ours, x, dy, made), step(twin, x, dy, made))
    assert_same_gradients(ours, twin)
    assert seen == [TOKENS if where == "router" else TOKENS * TOPK]


def test_a_range_with_hooks(device):
    ours, twin = both(device, experts=(2, 5))
    twin.router.register_forward_hook(lambda module, given, result: None)
    x, dy = draw(device)
    assert_same_steps(step(ours, x, dy), step(twin, x, dy))
    assert_same_gradients(ours, twin)


def test_a_recomputation_counts_no_cut_rows(device):
    ours = build(device, capacity_factor=0.1)
    x, dy = draw(device, tokens=300)
    reset_split_verdict(device)
    step(ours, x, dy, call=lambda x: te.checkpoint(ours, x))
    assert split_verdict(device) == SplitVerdict(0, 300 * TOPK - 128)
    reset_split_verdict(device)


def test_a_hook_may_change_the_routing(device):
    ours = build(device)
    only = torch.zeros(TOKENS, EXPERTS, device=device)
    only[:, 2] = 1

    def elsewhere(module, given, routing):
        chosen = only.bool()
        return routing._replace(probs=only, routing_map=chosen, tokens_per_expert=chosen.sum(0))

    ours.router.register_forward_hook(elsewhere)
    x, dy = draw(device)
    step(ours, x, dy)
    for e in range(EXPERTS):
        assert bool(ours.experts.fc1.weight.grad[e].any()) == (e == 2)


@every_recipe
def test_a_probability_of_zero(recipe, device):
    """Its row is 0 and has no gradient, as in moe_permute_with_probs; its gradient has no part in a scale of FP8."""
    ours, twin = both(device, init_method=lambda w: torch.nn.init.normal_(w, std=0.3))
    with torch.no_grad():
        ours.router.weight.mul_(2.0**12)
        twin.router.weight.copy_(ours.router.weight)
    hooked = copy.deepcopy(ours)
    hooked.router.register_forward_hook(lambda module, given, result: None)  # public functions
    x, dy = draw(device)
    routing = ours.router(x)
    assert bool(((routing.probs == 0) & routing.routing_map).any())
    made = recipe_of(recipe)
    want = step(hooked if recipe == "none" else twin, x, dy, made)
    for layer in (ours, twin) if recipe == "none" else (ours,):
        assert_same_steps(step(layer, x, dy, made), want)
        assert_same_gradients(layer, hooked if recipe == "none" else twin)


def law(tokens, topk, hidden, ffn, preactivation=None, keep_rows=False):
    """Bytes that the experts keep, beside x: what each row and each pair takes."""
    rows, of_row = tokens * topk, 4 * ffn if preactivation is None else 2.0625 * ffn
    return rows * (of_row + 8 + 2 * hidden * keep_rows) + 4 * tokens * topk


@pytest.mark.parametrize("keep_rows", [False, True])
@pytest.mark.parametrize("preactivation", [None, "fp8"])
def test_the_law_of_memory(preactivation, keep_rows, device):
    """Bytes that te.memory_plan counts, and that a forward saves, are within 2 % of it, beside the router's."""
    tokens, topk, hidden, ffn, experts = 256, 4, 128, 96, 16
    layer = MoEMLP(
        hidden, ffn, experts, topk, params_dtype=BF16, device=device, keep_rows=keep_rows,
        save_preactivation=preactivation,
    )  # fmt: skip
    x = randn(tokens, hidden, dtype=BF16, device=device).requires_grad_()
    want, of_router = law(tokens, topk, hidden, ffn, preactivation, keep_rows), 4 * tokens * (experts + topk)
    planned = te.memory_plan(layer, x).kept_bytes
    assert abs(planned - of_router - want) <= 0.02 * want
    with saved_tensors() as saved:
        layer(x)
    known = {p.untyped_storage().data_ptr() for p in (x, *layer.parameters())}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert sum(size for address, size in storages.items() if address not in known) == planned


def test_the_law_at_full_size():
    mib = [round(law(8192, 8, 2048, 768, *options) / 2**20) for options in ((), (None, True), ("fp8",))]
    assert mib == [193, 449, 100]


def test_the_experts_alone(device):
    """GroupedMLP takes a map, also where its parts have hooks."""
    experts = build(device).experts
    twin = copy.deepcopy(experts)
    twin.fc2.register_forward_hook(lambda module, given, result: None)
    x, _ = draw(device)
    probs = torch.rand(TOKENS, EXPERTS, device=device)
    chosen = probs.topk(TOPK).indices.int()
    scale, *row_map, offsets, _ = functional.permute_routing(probs, chosen, (0, EXPERTS), TOKENS * TOPK)
    for sum_rows in (False, True):
        results = []
        for one in (experts, twin):
            leaf = x.clone().requires_grad_()
            y = one(leaf, offsets.diff(), scale, row_map=tuple(row_map), sum_rows=sum_rows)
            y.backward(torch.ones_like(y))
            results.append([y.detach(), leaf.grad])
        assert_same_steps(*results)
        assert_same_gradients(experts, twin)
        assert y.shape[0] == (TOKENS if sum_rows else TOKENS * TOPK)
    with pytest.raises(TypeError, match="GroupedMLP: argument 'row_map' is 3"):
        experts(x, offsets.diff(), scale, row_map=3)
    with pytest.raises(ValueError, match="GroupedMLP: argument 'row_map' has first shape"):
        experts(x, offsets.diff(), scale, row_map=(row_map[1], row_map[1]))


def test_explain_shows_the_gather(device):
    layer = build(device)
    x, _ = draw(device)
    shown = str(te.explain(layer, x.requires_grad_()))
    assert "permute_gather_fwd" in shown and "permute_routing_fwd" in shown
    assert_same_bits(layer(x)[0], layer(x)[0])
