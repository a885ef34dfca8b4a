# Rows of no group inside of a MoEMLP: new memory is NaN here, so that what reads a row that no group has written is
# seen, with every recipe and way to keep the rows.
import copy
from contextlib import closing, contextmanager

import pytest
import torch
from support import randn

import transformer_engine.pytorch as te

from .cases import BF16, HIDDEN, assert_same_gradients, assert_same_steps, build, every_recipe, recipe_of, step

pytestmark = pytest.mark.usefixtures("fp8_left_off")

TOKENS = 300


@contextmanager
def new_memory_is_nan():
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about its own operations
@every_recipe
@pytest.mark.parametrize(
    "options",
    [{}, {"experts": (1, 3)}, {"experts": (1, 3), "capacity_factor": 4.0, "save_preactivation": "fp8"}]
    + [{"experts": (2, 5), "keep_rows": True, "activation": "gelu"}],
    ids=["all", "two experts", "preactivation", "kept rows"],
)
def test_nothing_reads_them(options, recipe, device):
    ours, made = build(device, **options), recipe_of(recipe)
    twin = copy.deepcopy(ours)
    for _ in range(2):  # delayed scales follow
        x, dy = (randn(TOKENS, HIDDEN, dtype=BF16, device=device) for _ in range(2))
        inputs, grads = (x,), (dy, torch.ones((), device=device))
        want = step(ours, inputs, grads, made)
        with new_memory_is_nan():
            got = step(twin, inputs, grads, made)
        assert_same_steps(got, want)
        assert_same_gradients(twin, ours)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("recipe", ["none", "block"])
def test_nor_does_a_stash(recipe, device):
    """Two layers, the first of which leaves; the pages come back to memory that is NaN."""
    made = recipe_of(recipe)
    with closing(te.stash.PagedStash(512, device_pages=4000, device=device)) as stash:
        layers = [build(device, experts=(1, 3), stash=stash) for _ in range(2)]
        plain = [build(device, experts=(1, 3)) for _ in layers]
        for one, other in zip(plain, layers, strict=True):
            one.load_state_dict(other.state_dict())
        for _ in range(2):
            x, dy = (randn(TOKENS, HIDDEN, dtype=BF16, device=device) for _ in range(2))
            results = []
            for stack in (plain, layers):
                leaf = x.clone().requires_grad_()
                with new_memory_is_nan(), te.autocast(enabled=made is not None, recipe=made):
                    if stack is layers:
                        stash.reset()
                    y = leaf
                    for layer in stack:
                        y = layer(y)[0]
                    parameters = [p for layer in stack for p in layer.parameters()]
                    results.append([y, *torch.autograd.grad(y, [leaf, *parameters], dy)])
            for a, b in zip(*results, strict=True):
                assert torch.equal(a, b) and not a.isnan().any()


@pytest.mark.filterwarnings("ignore::UserWarning")
@every_recipe
def test_what_the_caller_reads_is_zero_there(recipe, device):
    """Without a map the output and the input's gradient have these rows."""
    made, live = recipe_of(recipe), 70
    mlp = te.moe.GroupedMLP(3, HIDDEN, 48, params_dtype=BF16, device=device)
    x, dy = (randn(live + 30, HIDDEN, dtype=BF16, device=device) for _ in range(2))
    scale = torch.rand(live + 30, device=device)
    for t in (x, dy, scale):
        t[live:] = torch.nan
    splits = torch.tensor([20, 0, 50], device=device)
    with new_memory_is_nan():
        y, dx, dscale = step(mlp, (x, scale), dy, made, lambda rows, factors: mlp(rows, splits, factors))
    assert not y[live:].any() and not dx[live:].any() and not dscale[live:].any()
    assert y[:live].any() and dx[:live].any()
