# Checkpoints that Transformer Engine wrote: scales and histories arrive in their columns, whatever form, version and
# recipe class they were written with, and weights load in any case. Invalid states: test_pickles.py.
import io
import sys
import types
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import assert_same_bits, randn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.quantization.checkpoint import extra_state

from . import te_states
from .te_states import FORMS, as_tensor, state_of, written

pytestmark = pytest.mark.usefixtures("fp8_left_off")
MODULES = {
    "Linear": (lambda **o: te.Linear(32, 16, **o), 1),
    "LayerNormLinear": (lambda **o: te.LayerNormLinear(32, 16, **o), 1),
    "LayerNormMLP": (lambda **o: te.LayerNormMLP(32, 48, **o), 2),
}
KEYS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


def columns_of(products):
    return 3 * products, 2 * products


def scales_in(module):
    return [getattr(module.fp8_meta[f"scaling_{way}"], n) for way in ("fwd", "bwd") for n in ("scale", "amax_history")]


def check_scales(module, state):
    for key, found in zip(KEYS, scales_in(module), strict=True):
        assert_same_bits(found.cpu(), state[key], key)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODULES)
def test_scales_arrive_in_their_columns(name, form, device):
    make, products = MODULES[name]
    module, twin = make(device=device), make(device=device)
    twin.load_state_dict(module.state_dict())
    state = state_of(columns_of(products))
    data = written(state, form)
    for given_as in (as_tensor(data), as_tensor(data).to(device), io.BytesIO(data)):
        module = make(device=device)
        module.load_state_dict({**twin.state_dict(), "_extra_state": given_as})
        check_scales(module, state)
    x = randn(8, 32, device=device)
    recipe = DelayedScaling(amax_history_len=4)
    with te.autocast(recipe=recipe):
        twin(x)
    for found, key in zip(scales_in(twin), KEYS, strict=True):
        found.copy_(state[key])
    results = []
    for part in (module, twin):
        with te.autocast(recipe=recipe):
            out = part(x)
        out.square().sum().backward()
        results.append([out, part.state_dict()["_extra_state"], *(p.grad for p in part.parameters())])
    for got, wanted in zip(*results, strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        (te_states.Format.HYBRID, Format.HYBRID),
        (te_states.Format.E4M3, Format.E4M3),
        (te_states.Format.E5M2, Format.E5M2),
        (te_states.FormatByName.E4M3, Format.E4M3),
        (te_states.FormatByName.HYBRID, Format.HYBRID),
    ],
    ids=str,
)
def test_scales_keep_their_meaning(form, wanted):
    """A scale for the largest value of one format becomes a scale for that of the module's format."""
    state = state_of((3, 2), recipe=te_states.DelayedScaling(margin=2, fp8_format=form))
    for way in FORMS:
        found = extra_state.unpack(written(state, way), (3, 2))
        assert all((part.rule.margin, part.rule.fp8_format) == (2, wanted) for part in found)
    module = te.Linear(32, 16, device="cpu")
    with te.autocast(recipe=DelayedScaling(amax_history_len=4, fp8_format=Format.HYBRID)):
        module(torch.randn(8, 32))
    module.set_extra_state(as_tensor(written(state, "pickle 4")))
    for way, largest, theirs in (("fwd", 448.0, wanted.value.max_fwd), ("bwd", 57344.0, wanted.value.max_bwd)):
        assert_same_bits(module.fp8_meta[f"scaling_{way}"].scale, state[f"scale_{way}"] * (largest / theirs))


def an_algorithm(history):
    return history.amax(0)


@pytest.mark.parametrize("form", FORMS)
def test_recipes_of_clients_and_without_fields_load(form):
    """A framework's subclass is not here, and its functions are not asked for."""
    fields = te_states.ClientsScaling(margin=1, amax_compute_algo=an_algorithm)
    bare = te_states.DelayedScaling()
    del bare.__dict__["fp8_format"], bare.__dict__["margin"]
    for recipe, margin in ((fields, 1), (bare, 0)):
        found = extra_state.unpack(written(state_of((3, 2), recipe=recipe), form), (3, 2))
        assert found[0].rule.margin == margin and found[0].rule.fp8_format is Format.HYBRID


@pytest.mark.parametrize("form", FORMS)
def test_other_recipes_have_no_scales(form):
    for recipe in (te_states.Float8CurrentScaling(), te_states.MXFP8BlockScaling()):
        state = {"recipe": recipe, "extra_fp8_variables": {"num_gemms": 1}}
        assert extra_state.unpack(written(state, form), (3, 2)) is None
        module = te.Linear(32, 16)
        module.load_state_dict({**module.state_dict(), "_extra_state": as_tensor(written(state, form))})
        assert "scaling_fwd" not in module.fp8_meta
    assert extra_state.unpack(written(None, form), (3, 2)) is None


def test_keys_and_columns_of_earlier_versions():
    older = {
        **state_of((6, 4), recipe=None),
        "scale_inv_fwd": torch.ones(6),
        "scale_inv_bwd": torch.ones(4),
        "global_fp8_buffer": {"a": [torch.ones(2)]},
        "global_fp8_state": ([], {}, 0),
    }
    del older["recipe"]
    found = extra_state.unpack(written(older, "torch.save"), (6, 4))
    assert_same_bits(found[0].scale, older["scale_fwd"])
    assert_same_bits(found[1].amax_history, older["amax_history_bwd"])
    assert found[0].rule.fp8_format is Format.HYBRID
    for largest, form in ((448, Format.E4M3), (57344, Format.HYBRID)):
        told = {**older, "extra_fp8_variables": {"fp8_max_fwd": 448, "fp8_max_bwd": largest}}
        assert extra_state.unpack(written(told, "torch.save"), (6, 4))[1].rule.fp8_format is form

    padded = state_of((24, 16))
    found = extra_state.unpack(written(padded, "pickle 4"), (6, 4))
    assert_same_bits(found[0].amax_history, padded["amax_history_fwd"][:, :6])
    assert_same_bits(found[1].scale, padded["scale_bwd"][:4])

    without_last = state_of((4, 2))  # input and weight, and the gradient of the output, of each of two products
    found = extra_state.unpack(written(without_last, "pickle 4"), (6, 4))
    scale, history = without_last["scale_fwd"], without_last["amax_history_bwd"]
    assert_same_bits(found[0].scale, torch.stack([*scale[:2], torch.tensor(1.0), *scale[2:], torch.tensor(1.0)]))
    wanted = torch.stack([history[:, 0], torch.zeros(4), history[:, 1], torch.zeros(4)], 1)
    assert_same_bits(found[1].amax_history, wanted)


MISFITS = {
    "columns of another module": state_of((3, 2)),
    "a format of a later version": state_of(
        (6, 4), recipe=te_states.DelayedScaling(fp8_format=te_states.Format.UNKNOWN)
    ),
}


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("around", [None, torch.nn.Sequential], ids=["alone", "inside"])
def test_weights_load_whatever_the_scales_belong_to(name, strict, around):
    source, module = te.LayerNormMLP(32, 48), te.LayerNormMLP(32, 48)
    state = {**source.state_dict(), "_extra_state": as_tensor(written(MISFITS[name], "pickle 4"))}
    whole = module if around is None else around(module)
    given = state if around is None else {f"0.{key}": value for key, value in state.items()}
    with pytest.warns(
        UserWarning, match=r"LayerNormMLP: the checkpoint's '_extra_state' .*; scales start again"
    ) as told:
        whole.load_state_dict(given, strict=strict)
    assert len(told) == 1
    assert "scaling_fwd" not in module.fp8_meta
    for got, wanted in zip(module.parameters(), source.parameters(), strict=True):
        assert_same_bits(got, wanted)


def a_layer(**options):
    return te.TransformerLayer(32, 48, 2, fuse_qkv_params=True, hidden_dropout=0.0, attention_dropout=0.0, **options)


def checkpoint_of_a_layer():
    """A layer's state dict with a state of Transformer Engine's for each part, attention's own among them."""
    source = a_layer()
    state = source.state_dict()
    for seed, key in enumerate(k for k in list(state) if k.endswith("_extra_state")):
        products = 2 if "mlp" in key else 8 if "core_attention" in key else 1
        state[key] = as_tensor(written(state_of(columns_of(products), seed=seed), FORMS[seed % len(FORMS)]))
    # A part of attention that some versions wrote an empty one for.
    state["self_attention.core_attention.fused_attention._extra_state"] = torch.empty(0, dtype=torch.uint8)
    return source, state


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("around", [False, True])
def test_a_whole_layer_loads(strict, around):
    source, state = checkpoint_of_a_layer()
    layer = a_layer()
    whole = torch.nn.ModuleDict({"layer": layer}) if around else layer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole.load_state_dict({f"layer.{k}": v for k, v in state.items()} if around else state, strict=strict)
    for got, wanted in zip(layer.parameters(), source.parameters(), strict=True):
        assert_same_bits(got, wanted)
    for seed, part in ((0, "self_attention.layernorm_qkv"), (2, "self_attention.proj"), (3, "layernorm_mlp")):
        products = 2 if "mlp" in part else 1
        check_scales(layer.get_submodule(part), state_of(columns_of(products), seed=seed))


@pytest.mark.parametrize("kind", ["tensor", "BytesIO"])
def test_files_travel_under_weights_only(kind, tmp_path):
    _, state = checkpoint_of_a_layer()
    if kind == "BytesIO":
        for key in [k for k, value in state.items() if k.endswith("_extra_state") and len(value)]:
            state[key] = io.BytesIO(state[key].numpy().tobytes())
    torch.save({"model": state}, tmp_path / "whole.pt")
    layer = a_layer()
    layer.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True)["model"])
    check_scales(layer.layernorm_mlp, state_of((6, 4), seed=3))

    dcp.save(state, checkpoint_id=tmp_path / "parts", no_dist=True)
    dcp_to_torch_save(tmp_path / "parts", tmp_path / "joined.pt")
    layer = a_layer()
    layer.load_state_dict(torch.load(tmp_path / "joined.pt", weights_only=True))
    check_scales(layer.layernorm_mlp, state_of((6, 4), seed=3))


def test_states_written_beside_megatron_core(monkeypatch):
    """Its import replaces the function that pickled tensors name."""
    name = "megatron.core.safe_globals"
    for package in ("megatron", "megatron.core", name):  # it may be not installed
        monkeypatch.setitem(sys.modules, package, sys.modules.get(package) or types.ModuleType(package))

    def safe_load_from_bytes(data):
        raise AssertionError("called")

    safe_load_from_bytes.__module__, safe_load_from_bytes.__qualname__ = name, "safe_load_from_bytes"
    monkeypatch.setattr(sys.modules[name], "safe_load_from_bytes", safe_load_from_bytes, raising=False)
    monkeypatch.setattr(torch.storage, "_load_from_bytes", safe_load_from_bytes)
    modules = [te.GroupedLinear(2, 32, 32, device="cpu") for _ in range(2)]
    with te.autocast(recipe=DelayedScaling()):
        for module in modules:
            module(randn(32, 32), [16, 16]).sum().backward()
    state = modules[0].get_extra_state()
    assert b"safe_load_from_bytes" in bytes(state.numpy())
    modules[1].set_extra_state(state)
    for found, wanted in zip(*map(scales_in, modules[::-1]), strict=True):
        assert_same_bits(found, wanted)
