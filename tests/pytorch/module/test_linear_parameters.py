# te.Linear's parameters: parameters_split, state dicts, copies. test_linear.py checks the results.
import copy
import io
import pickle

import pytest
import torch
from support import addresses, assert_same_bits, randn, refused, saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.pytorch.functional import noop_cat

from .linear_cases import assert_same_step, step, twins

# ---- parameters_split ----


SPLITS = (["q", "k", "v"], ("q_", "k_", "v_"), {"q": 12, "k": 6, "v": 6}, {"q_": 20, "k_": 4, "v_": 0})


@pytest.mark.parametrize("split", SPLITS)
def test_split_module_equals_the_whole_one(split, device):
    torch.manual_seed(3)
    parts = te.Linear(16, 24, parameters_split=split, device=device)
    sizes = list(split.values()) if isinstance(split, dict) else [8, 8, 8]
    assert [n for n, _ in parts.named_parameters()] == [f"{p}_{kind}" for kind in ("weight", "bias") for p in "qkv"]
    whole = te.Linear(16, 24, device=device)
    with torch.no_grad():
        for p in (parts.q_bias, parts.k_bias, parts.v_bias):
            p.normal_()
        whole.weight.copy_(torch.cat([parts.q_weight, parts.k_weight, parts.v_weight]))
        whole.bias.copy_(torch.cat([parts.q_bias, parts.k_bias, parts.v_bias]))
    x, dy = randn(6, 16, device=device), randn(6, 24, device=device)
    y, dx, dweight, dbias = step(whole, x, dy)
    want = [y, dx, *dweight.split(sizes), *dbias.split(sizes)]
    assert_same_step(step(parts, x, dy), want)
    for moved in (copy.deepcopy(parts), pickle.loads(pickle.dumps(parts)), parts.to(torch.float64).to(torch.float32)):
        assert_same_step(step(moved, x, dy), want)


def test_split_weights_are_joined_without_a_copy(device):
    module = te.Linear(16, 24, parameters_split=["q", "k", "v"], device=device)
    parts = [module.q_weight, module.k_weight, module.v_weight]
    assert noop_cat(parts).data_ptr() == module.q_weight.data_ptr()
    assert_same_bits(noop_cat(parts), torch.cat(parts))
    x = randn(6, 16, device=device, requires_grad=True)
    with saved_tensors() as kept:
        module(x)
    assert addresses(kept) == addresses([x, module.q_weight])
    y = module(x)
    with torch.no_grad():
        module.v_weight.zero_()  # seen through the joined weight, and by autograd
    with pytest.raises(RuntimeError, match="modified inplace"):
        y.sum().backward()
    assert not module(x)[:, 16:].any()


def test_one_split_may_be_frozen(device):
    module = te.Linear(16, 24, parameters_split=["q", "k", "v"], device=device)
    x, dy = randn(6, 16, device=device), randn(6, 24, device=device)
    _, dx, *grads = step(module, x, dy)
    module.k_weight.requires_grad_(False)
    _, dx_too, *grads_too = step(module, x, dy)
    assert grads_too[1] is None
    assert_same_step([dx_too, grads_too[0], *grads_too[2:]], [dx, grads[0], *grads[2:]])


def test_noop_cat_copies_what_lies_apart(device):
    base = randn(8, 6, device=device)
    strangers = (
        [base[:2], base[3:5]],
        [base[4:], base[:4]],
        [base[:, :3], base[:, 3:]],
        [base[:2], base[2:].clone()],
        [base[:2].t(), base[2:4].t()],
    )
    for parts in strangers:
        parts = [p.requires_grad_() for p in (q.detach() for q in parts)]
        joined = noop_cat(parts)
        assert_same_bits(joined, torch.cat(parts))
        dy = torch.randn_like(joined)
        rows = [p.shape[0] for p in parts]
        for got, want in zip(torch.autograd.grad(joined, parts, dy), dy.split(rows), strict=True):
            assert_same_bits(got, want)
    flat = base.flatten()
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):  # adjacent, but no rows of one matrix
        noop_cat([flat[:12].view(2, 6), flat[12:24].view(3, 4)])
    with refused(ValueError, "noop_cat", "'parts'", "empty"):
        noop_cat([])


def test_parts_with_versions_of_their_own_are_watched(device):
    """As a load or a move leaves parts that are adjacent: the joined weight has the version of the first one alone."""
    base = randn(8, 6, device=device)
    parts = [torch.nn.Parameter(base.data[:3]), torch.nn.Parameter(base.data[3:])]
    joined = noop_cat(parts)
    assert joined.data_ptr() == parts[0].data_ptr()
    with torch.no_grad():
        parts[1].add_(1)
    with refused(RuntimeError, "noop_cat", "part 1", "modified in place"):
        joined.sum().backward()


def test_bad_splits_are_named():
    for split, words in (
        (["a", "b", "c", "d", "e"], ("5 names", "24")),
        ({"a": 12, "b": 13}, ("25", "24")),
        ({"a": 25, "b": -1}, ("'b'", "-1", "at least 0")),
        ({"a": 12.0, "b": 12.0}, ("'a'", "12.0", "integer")),
        ([1, 2], ("[1, 2]", "strings")),
        ({"a": 12, "a_": 12}, ("'a_'", "differ")),
    ):
        with refused(ValueError, "Linear", "'parameters_split", *words):
            te.Linear(16, 24, parameters_split=split, device="cpu")


# ---- state ----


def test_state_dict_round_trip(device):
    ours, plain = twins(device)
    state = ours.state_dict()
    assert list(state) == ["weight", "bias", "_extra_state"]
    assert state["_extra_state"].dtype == torch.uint8 and state["_extra_state"].numel() == 0
    other = te.Linear(16, 24, device=device)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    x = randn(3, 16, device=device)
    assert_same_bits(other(x), ours(x))
    from_plain = te.Linear(16, 24, device=device)
    result = from_plain.load_state_dict(plain.state_dict(), strict=True)  # no _extra_state: loads all the same
    assert not result.missing_keys and not result.unexpected_keys
    assert_same_bits(from_plain(x), ours(x))


def test_state_dict_errors():
    module = te.Linear(16, 24, device="cpu")
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    state = module.state_dict()
    with pytest.raises(RuntimeError, match="weight"):
        module.load_state_dict({"bias": state["bias"]}, strict=True)
    with refused(ValueError, "Linear", "_extra_state", "3 bytes", "cannot be read safely"):
        module.set_extra_state(torch.zeros(3, dtype=torch.uint8))
    for name, p in module.named_parameters():
        assert_same_bits(p, before[name])


def test_deepcopy_and_pickle_are_independent(device):
    module = te.Linear(16, 24, parallel_mode="column", device=device)
    x = randn(3, 16, device=device)
    want = module(x).detach()
    copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    for other in copies:
        assert_same_bits(other(x), want)
        assert other.weight.data_ptr() != module.weight.data_ptr()
        with torch.no_grad():
            other.weight.zero_()
    assert_same_bits(module(x), want)


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (te.Linear, ("save_original_input", "in_features", "tp_size")),
        (te.LayerNormLinear, ("recompute_norm_output", "return_layernorm_output", "out_features")),
        (te.LayerNormMLP, ("checkpoint", "recompute_norm_output", "return_layernorm_output", "activation")),
    ],
    ids=["Linear", "LayerNormLinear", "LayerNormMLP"],
)
def test_reset_parameters_of_a_subclass_sees_the_options(cls, names):
    """The constructor calls it last."""
    seen = []

    class Own(cls):
        def reset_parameters(self, defer_init=False):
            seen.append([getattr(self, name) for name in names])
            super().reset_parameters(defer_init)

    Own(16, 16)
    assert len(seen) == 1
