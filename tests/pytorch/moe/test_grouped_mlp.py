# te.moe.GroupedMLP: as one node it gives the bits of its parts one after the other, with every recipe and every
# destination of weight gradients; its life beside recomputation, compilation, copies and files. Its values are
# functional/test_grouped_mlp.py's.
import copy
import io
import pickle

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.moe import GroupedMLP

from ..module.grouped_cases import as_a_loop
from .cases import FFN, HIDDEN, RECIPES, assert_same_gradients, assert_same_steps, give_main_grads, in_parts, recipe_of
from .cases import step as step_of

pytestmark = pytest.mark.usefixtures("fp8_left_off")

SPLITS = [5, 0, 130, 1]
TOTAL, SPARE = sum(SPLITS), 3
BF16 = torch.bfloat16
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
either_splits = pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])


def build(device, **options):
    return GroupedMLP(len(SPLITS), HIDDEN, FFN, params_dtype=BF16, device=device, **options)


def draw(device, spare=0):
    """inp and row_scale, NaN in rows of no group, and dy."""
    x, dy = (randn(TOTAL + spare, HIDDEN, dtype=BF16, device=device) for _ in range(2))
    scale = randn(TOTAL + spare, device=device)
    x[TOTAL:], scale[TOTAL:], dy[TOTAL:] = torch.nan, torch.nan, torch.nan
    return x, scale, dy


def splits_of(on_device, device):
    return torch.tensor(SPLITS, device=device) if on_device else SPLITS


def step(module, x, scale, dy, splits, recipe=None, **options):
    """Of a call whose splits come between its tensors."""
    call = options.pop("call", module)
    return step_of(module, (x, scale), dy, recipe, call=lambda x, scale: call(x, splits, scale), **options)


@every_recipe
@either_splits
@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}], ids=str)
def test_one_node_is_its_parts(options, on_device, recipe, device):
    ours = build(device, **options)
    twin = in_parts(ours)
    if "fuse_wgrad_accumulation" in options:
        give_main_grads(ours, twin)
    made, splits = recipe_of(recipe), splits_of(on_device, device)
    assert ours._is_fused() and not twin._is_fused()
    for _ in range(3):  # delayed scales follow
        x, scale, dy = draw(device, SPARE if on_device else 0)
        got, want = (step(module, x, scale, dy, splits, made) for module in (ours, twin))
        assert_same_steps(got, want)
        assert_same_gradients(ours, twin)
        assert all(t.isfinite().all() and not t[TOTAL:].any() for t in got)
    if recipe == "delayed":
        for a, b in ((ours.fc1, twin.fc1), (ours.fc2, twin.fc2)):
            for way in ("scaling_fwd", "scaling_bwd"):
                assert_same_bits(a.fp8_meta[way].scale, b.fp8_meta[way].scale)
                assert_same_bits(a.fp8_meta[way].amax_history, b.fp8_meta[way].amax_history)


@pytest.mark.parametrize("activation", ["gelu", "clamped_swiglu"])
def test_activations(activation, device):
    params = {"limit": 1.0, "alpha": 1.5} if activation == "clamped_swiglu" else None
    ours = build(device, activation=activation, activation_params=params)
    x, scale, dy = draw(device)
    assert_same_steps(step(ours, x, scale, dy, SPLITS), step(in_parts(ours), x, scale, dy, SPLITS))


@every_recipe
@either_splits
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed(reentrant, on_device, recipe, device):
    ours = build(device)
    twin, made, splits = copy.deepcopy(ours), recipe_of(recipe), splits_of(on_device, device)

    def again(x, splits, scale):
        return te.checkpoint(twin, x, splits, scale, use_reentrant=reentrant)

    for _ in range(2):
        x, scale, dy = draw(device)
        assert_same_steps(step(twin, x, scale, dy, splits, made, call=again), step(ours, x, scale, dy, splits, made))
        assert_same_gradients(ours, twin)


@pytest.mark.parametrize("recipe", ["none", "current", "block"])
@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True}], ids=["plain", "main_grad"])
@either_splits
def test_compiled(on_device, options, recipe, device):
    ours = build(device, **options)
    twin = copy.deepcopy(ours)
    if options:
        give_main_grads(ours, twin)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    made, splits = recipe_of(recipe), splits_of(on_device, device)
    for _ in range(2):
        x, scale, dy = draw(device)
        with as_a_loop(recipe):  # which a compiled list is
            want = step(ours, x, scale, dy, splits, made)
        assert_same_steps(step(twin, x, scale, dy, splits, made, call=compiled), want)
        assert_same_gradients(ours, twin)


@every_recipe
def test_weights_kept_over_microbatches(recipe, device):
    ours = build(device)
    twin, made = in_parts(ours), recipe_of(recipe)
    for first in (True, False):
        x, scale, dy = draw(device)
        got, want = (
            step(module, x, scale, dy, SPLITS, made, call=lambda x, s, scale, m=module: m(x, s, scale, first))  # noqa: B023
            for module in (ours, twin)
        )
        assert_same_steps(got, want)
        assert_same_gradients(ours, twin)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_weights_held_in_fp8(recipe, device):
    with te.quantized_model_init(recipe=recipe_of(recipe)):
        ours = build(device)
    x, scale, dy = draw(device)
    twin = in_parts(ours)
    made = recipe_of(recipe)
    assert_same_steps(step(ours, x, scale, dy, SPLITS, made), step(twin, x, scale, dy, SPLITS, made))
    assert_same_gradients(ours, twin)


def test_copies_and_files_compute_the_same(device):
    ours = build(device)
    x, scale, _ = draw(device)
    loaded, file = build(device), io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    meta = build("meta")
    assert meta.fc1.weight.is_meta
    meta.to_empty(device=device)
    meta.load_state_dict(ours.state_dict())
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), loaded, meta):
        assert_same_bits(other(x, SPLITS, scale), ours(x, SPLITS, scale))


def test_without_a_scale(device):
    ours = build(device)
    x, _, _ = draw(device)
    ones = torch.ones(TOTAL, device=device)
    assert_same_bits(ours(x, SPLITS), ours(x, SPLITS, ones))
    assert_same_bits(ours(x, SPLITS), in_parts(ours)(x, SPLITS))


def test_calibration_records_both_products(device):
    ours = build(device)
    x, scale, _ = draw(device)
    with te.autocast(enabled=False, calibrating=True, recipe=recipe_of("delayed")):
        y = ours(x, SPLITS, scale)
    assert_same_bits(y, ours(x, SPLITS, scale))
    for part in (ours.fc1, ours.fc2):
        assert part.fp8_meta["scaling_fwd"].amax_history.count_nonzero() > 0


def test_bad_arguments(device):
    x, scale, _ = draw(device)
    with refused(ValueError, "GroupedMLP", "'activation'", "no such"):
        build(device, activation="no such")
    with refused(ValueError, "GroupedMLP", "'save_preactivation'", "fp4"):
        build(device, save_preactivation="fp4")
    ours = build(device)
    with refused(ValueError, "GroupedMLP", "'inp'", "[1, 136, 32]"):
        ours(x.unsqueeze(0), SPLITS, scale)
    with refused(TypeError, "GroupedMLP", "'inp'", "list"):
        ours([1.0], SPLITS, scale)
    with refused(ValueError, "GroupedMLP", "'m_splits'", "3 numbers"):
        ours(x, [1, 2, 3], scale)
    for name in ("num_gemms", "hidden_size", "ffn_hidden_size"):
        sizes = {"num_gemms": 2, "hidden_size": HIDDEN, "ffn_hidden_size": FFN}
        for wrong in ("48", 4.5, -1):
            with refused(ValueError, "GroupedMLP", f"'{name}' is {wrong!r}"):
                GroupedMLP(**sizes | {name: wrong}, device=device)
    with refused(ValueError, "GroupedMLP: argument 'row_scale' has shape [135]", "[136]"):
        ours(x, SPLITS, scale[:135])
    with refused(ValueError, "GroupedMLP: argument 'row_scale' has dtype Double", "float32"):
        ours(x, SPLITS, scale.double())
    with refused(TypeError, "GroupedMLP: argument 'row_scale' is a list"):
        ours(x, SPLITS, [1.0])
    with refused(ValueError, "GroupedMLP: argument 'inp'", "last dimension 31, wanted 32", "[136, 31]"):
        ours(x[:, :31], SPLITS, scale)
    with refused(ValueError, "GroupedMLP: argument 'inp'", "float64"):
        ours(x.double(), SPLITS, scale)
    with refused(ValueError, "GroupedMLP: argument 'inp'", "float16", "'fc1.weight' has torch.bfloat16"):
        ours(x.half(), SPLITS, scale)
    half = build(device, save_preactivation="fp8")
    half.fc1.register_forward_hook(lambda *_: None)
    with refused(NotImplementedError, "GroupedMLP", "save_preactivation"):
        half(x, SPLITS, scale)
