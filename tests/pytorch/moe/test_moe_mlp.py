# te.MoEMLP: against a dense mixture in float64, and bit for bit the layer of public functions and GroupedLinear; ranges
# of experts, capacity, routings of every kind, the router's bias and loss, its life beside recomputation, compilation,
# copies and files.
import copy
import io
import pickle

import pytest
import torch
from support import assert_same_bits, randn, refused, wide

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional
from transformer_engine.pytorch.moe import MoEMLP
from transformer_engine.pytorch.verdict import SplitVerdict, reset_split_verdict, split_verdict

from .cases import (
    BF16,
    EXPERTS,
    FFN,
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


def draw(device, dtype=BF16, tokens=TOKENS):
    return (randn(tokens, HIDDEN, dtype=dtype, device=device) for _ in range(2))


def step(module, x, dy, recipe=None, call=None):
    """y, aux_loss, x's gradient."""
    return step_of(module, (x,), (dy, torch.ones((), device=x.device)), recipe, call)


class PublicFunctions(torch.nn.Module):
    """The layer of public functions and GroupedLinear, with the parameters of a MoEMLP."""

    def __init__(self, moe):
        super().__init__()
        self.moe = copy.deepcopy(moe)

    def forward(self, x):
        moe = self.moe
        probs, routing_map, splits, loss = moe.router(x)
        rows, row_probs, back = te.moe_permute_with_probs(x, probs, routing_map, TOKENS * TOPK)
        hidden = moe.experts.fc1(rows, splits)
        hidden = functional.scaled_activation(hidden, row_probs, "swiglu")
        out = te.moe_unpermute(moe.experts.fc2(hidden, splits), back, restore_shape=x.shape)
        return out, loss

    def backward_dw(self):
        self.moe.backward_dw()


BIASED = {"expert_bias": True, "score_function": "sigmoid"}
OPTIONS = [{}, {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}]


@every_recipe
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_is_the_layer_of_public_functions(options, recipe, device):
    ours = build(device, **options)
    public = PublicFunctions(ours)
    if "fuse_wgrad_accumulation" in options:
        give_main_grads(ours.experts, public.moe.experts)
    made = recipe_of(recipe)
    for _ in range(2):
        x, dy = draw(device)
        assert_same_steps(step(ours, x, dy, made), step(public, x, dy, made))
        assert_same_gradients(ours, public.moe)


def dense(moe, x, dy):
    """y and the gradients of x and of all parameters of a mixture that computes every expert for every token, in
    float64, with the choice of the layer's own router."""
    leaves = {"x": wide(x).requires_grad_()} | {n: wide(p).requires_grad_() for n, p in moe.named_parameters()}
    x64 = leaves["x"]
    logits = x64 @ leaves["router.weight"].T
    chosen = wide(moe.router(x).routing_map).bool()
    probs = logits.masked_fill(~chosen, -torch.inf).softmax(-1)
    y = torch.zeros_like(x64)
    for e in range(moe.last_expert - moe.first_expert):
        a, b = (x64 @ leaves["experts.fc1.weight"][e].T).chunk(2, -1)
        hidden = torch.nn.functional.silu(a) * b
        y = y + probs[:, moe.first_expert + e, None] * (hidden @ leaves["experts.fc2.weight"][e].T)
    return y, dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), wide(dy)), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_against_a_dense_mixture(dtype, device):
    """Relative to the norm of each: operands and results of six products are rounded, in u of their dtype, and
    independent errors add up by their squares; 64 u bounds them for factors between the products of at most 10."""
    if dtype is torch.float32 and device == "cuda":
        pytest.skip("groups on the device are multiplied in 16 bits")
    ours = build(device, dtype, init_method=lambda w: torch.nn.init.normal_(w, std=0.3))
    x, dy = draw(device, dtype)
    y, _, dx = step(ours, x, dy)
    want, gradients = dense(ours, x, dy)
    unit = 2.0**-9 if dtype is BF16 else 2.0**-24
    found = {"y": (y, want.detach()), "x": (dx, gradients["x"])}
    found |= {name: (p.grad, gradients[name]) for name, p in ours.named_parameters()}
    for name, (got, exact) in found.items():
        assert (wide(got) - exact).norm() <= 64 * unit * exact.norm(), name


def in_range(whole, experts, device, **options):
    part = build(device, whole.router.weight.dtype, experts=experts, **options)
    state = whole.state_dict()
    state |= {name: state[name][slice(*experts)] for name in ("experts.fc1.weight", "experts.fc2.weight")}
    part.load_state_dict(state, strict=False)
    return part


def test_ranges_of_experts_add_up(device):
    """To the whole layer's, within the roundings of the parts' sums; weights' gradients have its bits."""
    dtype = BF16 if device == "cuda" else torch.float32
    whole = build(device, dtype)
    x, dy = draw(device, dtype)
    want = step(whole, x, dy)
    parts = [in_range(whole, experts, device) for experts in ((0, 1), (1, 4), (4, 6))]
    got = [step(part, x, dy) for part in parts]
    for i in (0, 2):  # y, dx
        total = sum(wide(one[i]) for one in got)
        unit = 2.0**-8 if dtype is BF16 else 2.0**-22
        assert (total - wide(want[i])).norm() <= 8 * unit * wide(want[i]).norm()
    for part in parts:
        assert all(p.allreduce is False for p in part.experts.parameters())
        assert not hasattr(part.router.weight, "allreduce")
        for mine, all_of_them in zip(part.experts.parameters(), whole.experts.parameters(), strict=True):
            assert_same_bits(mine.grad, all_of_them.grad[part.first_expert : part.last_expert])
    assert_same_bits(parts[0].tokens_per_expert, whole.tokens_per_expert)
    assert not any(hasattr(p, "allreduce") for p in whole.parameters())


def routed_to(moe, experts):
    """Every token of ones goes to these experts."""
    with torch.no_grad():
        moe.router.weight.zero_()
        for rank, e in enumerate(experts):
            moe.router.weight[e] = 1 + rank / 64


@every_recipe
def test_one_expert_gets_all(recipe, device):
    ours = build(device)
    routed_to(ours, [4, 1])
    x = torch.ones(TOKENS, HIDDEN, dtype=BF16, device=device)
    y, _, dx = step(ours, x, torch.ones_like(x), recipe_of(recipe))
    assert ours.tokens_per_expert.tolist() == [0, TOKENS, 0, 0, TOKENS, 0]
    assert y.isfinite().all() and y.any() and dx.isfinite().all()
    for e in range(EXPERTS):
        for part in (ours.experts.fc1, ours.experts.fc2):
            assert bool(part.weight.grad[e].any()) == (e in (1, 4))


@every_recipe
def test_no_tokens(recipe, device):
    ours = build(device)
    x = torch.empty(0, HIDDEN, dtype=BF16, device=device)
    y, loss, dx = step(ours, x, x, recipe_of(recipe))
    assert y.shape == dx.shape == (0, HIDDEN) and loss == 0
    assert ours.tokens_per_expert.tolist() == [0] * EXPERTS
    assert all(p.grad is None or not p.grad.any() for p in ours.parameters())


def test_leading_dimensions(device):
    ours = build(device)
    x, _ = draw(device, tokens=24)
    y, _ = ours(x.view(2, 3, 4, HIDDEN))
    assert_same_bits(y.view(24, HIDDEN), ours(x)[0])


def test_rows_past_a_capacity_are_cut_and_counted(device):
    """Those of the last experts; what is left has the bits of a layer with room for all."""
    ours = build(device, capacity_factor=1.0)
    tokens = 256
    routed_to(ours, [0, 5])
    free = copy.deepcopy(ours)
    free.capacity_factor = None
    assert (ours._rows(tokens), free._rows(tokens)) == (512, 512)
    ours.capacity_factor = 0.6  # 307.2 of 512, in whole 128s: 384
    assert ours._rows(tokens) == 384
    x = torch.ones(tokens, HIDDEN, dtype=BF16, device=device)
    reset_split_verdict(device)
    y, _ = ours(x)
    assert split_verdict(device) == SplitVerdict(0, 128)
    reset_split_verdict(device)
    want, _ = free(x)
    assert split_verdict(device) == SplitVerdict(0, 0)
    assert_same_bits(y[:128], want[:128])
    assert not torch.equal(y[128:], want[128:])
    assert ours.tokens_per_expert.tolist() == [256, 0, 0, 0, 0, 256]


@every_recipe
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed(reentrant, recipe, device):
    ours = build(device, aux_loss_coeff=0.01)
    twin, made = copy.deepcopy(ours), recipe_of(recipe)
    for _ in range(2):
        x, dy = draw(device)
        again = step(twin, x, dy, made, call=lambda x: te.checkpoint(twin, x, use_reentrant=reentrant))
        assert_same_steps(again, step(ours, x, dy, made))
        assert_same_gradients(ours, twin)


@pytest.mark.parametrize("recipe", ["none", "current", "block"])
@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True}], ids=["plain", "main_grad"])
def test_compiled(options, recipe, device):
    ours = build(device, aux_loss_coeff=0.01, **options)
    twin, made = copy.deepcopy(ours), recipe_of(recipe)
    if options:
        give_main_grads(ours.experts, twin.experts)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x, dy = draw(device)
        assert_same_steps(step(twin, x, dy, made, call=compiled), step(ours, x, dy, made))
        assert_same_gradients(ours, twin)
        assert_same_bits(ours.tokens_per_expert, twin.tokens_per_expert)


@pytest.mark.parametrize("recipe", ["none", "block"])
def test_offloaded(recipe, device):
    ours = build(device)
    twin, made = copy.deepcopy(ours), recipe_of(recipe)
    x, dy = draw(device)
    context, sync = te.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)

    def offloaded(x):
        with context:
            y, loss = twin(x)
        return sync(y), loss

    assert_same_steps(step(twin, x, dy, made, call=offloaded), step(ours, x, dy, made))
    assert_same_gradients(ours, twin)


def test_copies_and_files_compute_the_same(device):
    ours = build(device, **BIASED)
    x, _ = draw(device)
    ours(x)
    ours.update_expert_bias(ours.tokens_per_expert, 0.5)
    loaded, file = build(device, **BIASED), io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    meta = build("meta", **BIASED)
    assert meta.router.weight.is_meta and meta.tokens_per_expert.is_meta
    meta.to_empty(device=device)
    meta.load_state_dict(ours.state_dict())
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), loaded, meta):
        assert_same_bits(other(x)[0], ours(x)[0])


def test_meta_modules_are_made_by_reset_parameters(device):
    meta = build("meta", **BIASED)
    meta.reset_parameters()
    x, dy = draw(meta.router.weight.device.type)
    y, _, _ = step(meta, x, dy)
    assert y.isfinite().all() and meta.tokens_per_expert.sum() == TOKENS * TOPK


def test_a_cast_leaves_the_bias_in_float32(device):
    ours = build(device, torch.float32, **BIASED)
    ours.router.expert_bias.fill_(1 / 3)
    before = ours.router.expert_bias.clone()
    ours.to(BF16)
    assert ours.router.weight.dtype == BF16
    assert_same_bits(ours.router.expert_bias, before)


def test_the_bias_balances(device):
    ours = build(device, **BIASED)
    tokens = torch.tensor([4, 0, 2, 2, 1, 3], device=device)
    ours.update_expert_bias(tokens, 0.25)
    assert ours.router.expert_bias.tolist() == [-0.25, 0.25, 0.0, 0.0, 0.25, -0.25]
    ours.router.expert_bias.copy_(torch.tensor([0.0, 9, 0, 9, 0, 0]))
    x, dy = draw(device)
    step(ours, x, dy)
    assert ours.tokens_per_expert.tolist() == [0, TOKENS, 0, TOKENS, 0, 0]
    with refused(ValueError, "TopKRouter", "expert_bias=True"):
        build(device).update_expert_bias(tokens, 0.25)
    with refused(ValueError, "TopKRouter", "'tokens_per_expert'", "[5]", "[6]"):
        ours.update_expert_bias(tokens[:5], 0.25)


def test_the_loss_balances(device):
    """E coeff / (k T^2) sum of tokens_e * sum of scores_e, and its gradient reaches the router."""
    ours = build(device, aux_loss_coeff=0.5)
    leaf = next(draw(device)).requires_grad_()
    _, loss = ours(leaf)
    scores = (wide(leaf) @ wide(ours.router.weight).T).softmax(-1)
    want = (wide(ours.tokens_per_expert) * scores.sum(0)).sum() * EXPERTS * 0.5 / (TOPK * TOKENS**2)
    assert loss.dtype == torch.float32 and abs(float(loss.detach()) - float(want)) <= 1e-5 * float(want)
    loss.backward()
    assert ours.router.weight.grad.any() and leaf.grad.any() and ours.experts.fc1.weight.grad is None
    assert build(device)(leaf)[1] == 0


def test_bad_arguments(device):
    for options in ({"ep_group": object()}, {"ep_transport": "peer"}):
        with refused(NotImplementedError, "MoEMLP", f"'{next(iter(options))}'"):
            build(device, **options)
    for experts in ((0, 7), (2, 2), (3, 1), (-1, 2), 3, (0.7, 2.9), "13", (1, 2, 3)):
        with refused(ValueError, "MoEMLP", "'experts'", experts):
            build(device, experts=experts)
    for factor in (0, -1.0, float("nan"), float("inf"), "2", True):
        with refused(ValueError, "MoEMLP", "'capacity_factor'", factor):
            build(device, capacity_factor=factor)
    for name in ("hidden_size", "ffn_hidden_size", "num_experts"):
        sizes = {"hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_experts": EXPERTS, "topk": TOPK}
        for wrong in ("48", 4.5, -1):
            with refused(ValueError, "MoEMLP", f"'{name}' is {wrong!r}"):
                MoEMLP(**sizes | {name: wrong}, device=device)
    for topk in (0, 7):
        with refused(ValueError, "TopKRouter", "'topk'", topk):
            MoEMLP(HIDDEN, FFN, EXPERTS, topk, device=device)
    with refused(ValueError, "TopKRouter", "'expert_bias'", "softmax"):
        build(device, expert_bias=True)
    with refused(ValueError, "TopKRouter", "'score_function'", "tanh"):
        build(device, score_function="tanh")
    with refused(ValueError, "MoEMLP", "'inp'", "[3, 31]"):
        build(device)(torch.ones(3, 31, dtype=BF16, device=device))
    with refused(TypeError, "MoEMLP", "'inp'", "list"):
        build(device)([1.0])
