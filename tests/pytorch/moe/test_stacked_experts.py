# The experts of a MoEMLP are one parameter for each product. Beside the layer as it was, with a parameter for each
# expert: values, gradients, scales and kept FP8 weights have the same bits, and a seed gives the same initial values.
import copy
import re

import pytest
import torch
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker
from transformer_engine.pytorch.moe import GroupedMLP

from .cases import (
    BF16,
    EXPERTS,
    FFN,
    HIDDEN,
    TOKENS,
    as_before,
    assert_same_steps,
    build,
    every_recipe,
    give_main_grads,
    in_todays_names,
    recipe_of,
    step,
)

pytestmark = pytest.mark.usefixtures("fp8_left_off")
OPTIONS = [{}, {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}, {"experts": (1, 4), "keep_rows": True}]


def assert_same_as_before(ours, before):
    """Gradients, main_grad and scales."""
    named = dict(before.named_parameters())
    for what in ("grad", "main_grad"):
        theirs = {n: getattr(p, what, None) for n, p in named.items()}
        got = {n: getattr(p, what, None) for n, p in ours.named_parameters()}
        assert {n for n, t in theirs.items() if t is None} == {
            n + str(i) if n.startswith("experts") else n
            for n, t in got.items()
            if t is None
            for i in range(ours.last_expert - ours.first_expert if n.startswith("experts") else 1)
        }
        want = in_todays_names({n: t for n, t in theirs.items() if t is not None})
        for name, t in want.items():
            assert_same_bits(got[name], t, f"{name}: {what}")
    for name in ("fc1", "fc2"):
        a, b = getattr(ours.experts, name), getattr(before.experts, name)
        for way in ("scaling_fwd", "scaling_bwd"):
            if a.fp8_meta.get(way) is not None:
                assert_same_bits(a.fp8_meta[way].scale, b.fp8_meta[way].scale)
                assert_same_bits(a.fp8_meta[way].amax_history, b.fp8_meta[way].amax_history)


def draw(device, turn=0):
    torch.manual_seed(turn)
    return (randn(TOKENS, HIDDEN, dtype=BF16, device=device) for _ in range(2))


def run(module, x, dy, recipe, call=None):
    return step(module, (x,), (dy, torch.ones((), device=x.device)), recipe, call)


@every_recipe
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_bits_of_a_parameter_for_each_expert(options, recipe, device):
    ours = build(device, aux_loss_coeff=0.01, **options)
    if "fuse_wgrad_accumulation" in options:
        give_main_grads(ours.experts)
    before, made = as_before(ours), recipe_of(recipe)
    for turn, first in enumerate((None, True, False, False, True, None)):
        x, dy = draw(device, turn)
        got, want = (run(m, x, dy, made, lambda x, m=m: m(x, first)) for m in (ours, before))  # noqa: B023
        assert_same_steps(got, want)
        assert_same_as_before(ours, before)
        if turn == 2:  # a step between microbatches' weights
            with torch.no_grad():
                for p in (*ours.experts.parameters(), *before.experts.parameters()):
                    p.mul_(1.5)


@every_recipe
@pytest.mark.parametrize("hooked", [False, True], ids=["one node", "in parts"])
def test_host_splits(hooked, recipe, device):
    ours = GroupedMLP(4, HIDDEN, FFN, params_dtype=BF16, device=device)
    before, made, splits = as_before(ours), recipe_of(recipe), [5, 0, 30, 2]
    if hooked:
        for part in (*ours.children(), *before.children()):
            part.register_forward_hook(lambda *_: None)
    x, dy = draw(device)
    for first in (True, False):
        got, want = (step(m, (x,), dy, made, lambda x, m=m: m(x, splits, None, first)) for m in (ours, before))  # noqa: B023
        assert_same_steps(got, want)
        grads = in_todays_names({n: p.grad for n, p in before.named_parameters()})
        for name, p in ours.named_parameters():
            assert_same_bits(p.grad, grads[name], name)


def test_calibration(device):
    ours = build(device)
    before = as_before(ours)
    x, _ = draw(device)
    for module in (ours, before):
        with te.autocast(enabled=False, calibrating=True, recipe=recipe_of("delayed")):
            module(x)
    assert ours.experts.fc1.fp8_meta["scaling_fwd"].amax_history.count_nonzero() > 1
    assert_same_as_before(ours, before)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_kept_weights_are_made_once(recipe, device):
    """Later microbatches read the kept copies of all experts, whatever became of the parameter."""
    ours, made = build(device), recipe_of(recipe)
    x, dy = draw(device)
    want = run(ours, x, dy, made, lambda x: ours(x, True))
    kept = [dict(part.runtime.quantization.weights.kept) for part in (ours.experts.fc1, ours.experts.fc2)]
    assert all(list(one) == [str(i) for i in range(EXPERTS)] for one in kept)
    with torch.no_grad():
        for p in ours.experts.parameters():
            p.zero_()
    got = run(ours, x, dy, made, lambda x: ours(x, False))
    assert_same_steps(got[:1], want[:1])
    assert all(
        dict(part.runtime.quantization.weights.kept) == one
        for part, one in zip((ours.experts.fc1, ours.experts.fc2), kept, strict=True)
    )
    assert not run(ours, x, dy, made, lambda x: ours(x, True))[0].any()


def test_kept_weights_are_found_at_once(device):
    """By the form of a matrix, which the stack's dimensions do not hide: one by one it takes ten times as long."""
    part, made = build(device).experts.fc1, recipe_of("block")
    x = randn(EXPERTS, HIDDEN, dtype=BF16, device=device)
    with te.autocast(enabled=True, recipe=made):
        part(x, [1] * EXPERTS, True)
        copies = part.runtime.quantization.kept_of_all(part, part.weight, False)
    assert copies is not None and len(copies) == EXPERTS


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_weights_held_in_fp8_are_one_for_each_expert(recipe, device):
    with te.quantized_model_init(recipe=recipe_of(recipe)):
        held = build(device)
    names = [n for n, _ in held.experts.named_parameters()]
    assert names == [f"fc{k}.weight{i}" for k in (1, 2) for i in range(EXPERTS)]
    plain = build(device)
    plain.load_state_dict(held.state_dict())  # and back
    held.load_state_dict(plain.state_dict())
    x, dy = draw(device)
    assert_same_steps(run(held, x, dy, recipe_of(recipe)), run(plain, x, dy, recipe_of(recipe)))


# ---- the parameter ----


def drawn(build_one, device, seed=7):
    torch.manual_seed(seed)
    if device == "cuda":
        torch.cuda.manual_seed(seed)
    return build_one()


INITS = {
    "default": None,
    "fan": lambda w: torch.nn.init.kaiming_uniform_(w, a=5**0.5),
}


@pytest.mark.parametrize("init", ["default", "fan"])
@pytest.mark.parametrize("tracked", [False, True], ids=["", "tracker"])
def test_a_seed_gives_the_initial_values_of_before(tracked, init, device):
    def options(kind):
        if not tracked or device != "cuda":
            return kind
        tracker = CudaRNGStatesTracker()
        tracker.add("experts", 3)
        return kind | {"get_rng_state_tracker": lambda: tracker, "rng_tracker_name": "experts"}

    of = {"params_dtype": BF16, "device": device, "init_method": INITS[init]}
    ours = drawn(lambda: GroupedMLP(5, HIDDEN, FFN, output_layer_init_method=INITS[init], **options(of)), device)
    with_each = options(of) | {"bias": False}
    pair = drawn(
        lambda: [te.GroupedLinear(5, *shape, **with_each) for shape in ((HIDDEN, 2 * FFN), (FFN, HIDDEN))], device
    )
    for part, each in zip((ours.fc1, ours.fc2), pair, strict=True):
        assert [n for n, _ in part.named_parameters()] == ["weight"]
        assert_same_bits(part.weight, torch.stack(list(each.parameters())))
    meta = GroupedMLP(5, HIDDEN, FFN, output_layer_init_method=INITS[init], **options(of | {"device": "meta"}))
    assert meta.fc1.weight.is_meta
    if device == "cuda" or not torch.cuda.is_available():  # which meta modules go to
        drawn(meta.reset_parameters, device)
        assert_same_bits(meta.fc2.weight, ours.fc2.weight)


def test_an_init_method_sees_a_matrix(device):
    seen = []
    build(device, init_method=lambda w: seen.append((w.shape, torch.is_grad_enabled())))
    assert seen == [((EXPERTS, HIDDEN), False)] + [((2 * FFN, HIDDEN), False)] * EXPERTS


def test_marks(device):
    """They survive casts, moves, copies and pickles; a range of the experts is not reduced with the rest."""
    ours = build(device, experts=(1, 4), delay_wgrad_compute=True)
    ours.experts.fc1.weight.of_a_client = 3
    for module in (ours, copy.deepcopy(ours), copy.deepcopy(ours).float(), copy.deepcopy(ours).to_empty(device=device)):
        for part in (module.experts.fc1, module.experts.fc2):
            p = part.weight
            assert p.shape == (3, part.out_features, part.in_features) and p.is_contiguous() and p.stacked is True
            assert (p.tensor_model_parallel, p.partition_dim, p.partition_stride) == (True, 1, 1)
            assert p.skip_backward_post_hook and part.row_units() == []
        if module is ours:
            assert all(p.allreduce is False for p in module.experts.parameters())
    assert not hasattr(build(device).experts.fc1.weight, "allreduce")
    assert sum(p.numel() for p in ours.parameters()) == EXPERTS * HIDDEN + 3 * 3 * FFN * HIDDEN


def test_a_parametrization_of_the_stack(device):
    """It is computed for all experts at once."""

    class Doubled(torch.nn.Module):
        def forward(self, w):
            return 2 * w

    ours = build(device)
    twin = copy.deepcopy(ours)
    torch.nn.utils.parametrize.register_parametrization(ours.experts.fc1, "weight", Doubled())
    with torch.no_grad():
        twin.experts.fc1.weight.mul_(2)
    x, dy = draw(device)
    assert_same_steps(run(ours, x, dy, None), run(twin, x, dy, None))
    original = ours.experts.fc1.parametrizations.weight.original
    assert_same_bits(original.grad, 2 * twin.experts.fc1.weight.grad)


@pytest.mark.parametrize("recipe", ["none", "block"])
@pytest.mark.parametrize("computed", [False, True], ids=["memory", "parametrization"])
def test_a_stack_of_another_layout(computed, recipe, device):
    """Its bits are those of the contiguous one, with kept FP8 weights too."""

    class Transposed(torch.nn.Module):
        def forward(self, w):
            return w.mT.contiguous().mT

    ours, made = build(device), recipe_of(recipe)
    twin, part = copy.deepcopy(ours), ours.experts.fc1
    if computed:
        torch.nn.utils.parametrize.register_parametrization(part, "weight", Transposed(), unsafe=True)
    else:
        part.weight.data = Transposed()(part.weight.data)
    assert not part.weight.is_contiguous()
    x, dy = draw(device)
    for first in (None, True, False):
        assert_same_steps(*(run(m, x, dy, made, lambda x, m=m: m(x, first)) for m in (ours, twin)))  # noqa: B023
        theirs = part.parametrizations.weight.original if computed else part.weight
        assert_same_bits(theirs.grad.contiguous(), twin.experts.fc1.weight.grad)


@pytest.mark.parametrize("first", [None, True], ids=["each call", "kept"])
@pytest.mark.parametrize("count", [3, 2 * EXPERTS])
def test_another_number_of_experts_in_the_weights_is_refused(count, first, device):
    ours = build(device)
    for p in ours.experts.parameters():
        p.data = p.data.repeat(2, 1, 1)[:count]
    x, _ = draw(device)
    with te.autocast(enabled=True, recipe=recipe_of("block")), pytest.raises(ValueError, match="wanted") as caught:
        ours(x, first)
    if first:
        assert f"parameter 'weight' is [{count}, {2 * FFN}, {HIDDEN}], wanted [{EXPERTS}," in str(caught.value)


def test_plans_and_paths_name_one_parameter(device):
    ours = build(device)
    before, (x, _) = as_before(ours), draw(device)
    paths = [re.split(r"[-\s]+", str(te.explain(module, x)).replace("_stacked", "")) for module in (ours, before)]
    assert paths[0] == paths[1]
    plan, old = (te.memory_plan(module, x) for module in (ours, before))
    assert plan.kept_bytes == old.kept_bytes and plan.bytes_of("parameter") == old.bytes_of("parameter")
    text = " ".join(str(plan).split())
    assert f"experts.fc2.weight {EXPERTS}x{HIDDEN}x{FFN} bfloat16" in text and "more" not in text
