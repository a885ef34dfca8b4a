# The construction of every module with parameters: devices, dtypes, initialisation, meta device, state, copies and
# moves.
import copy
import io

import pytest
import torch
from module_contract import Tracker
from plain_modules import as_tuple, run
from support import assert_same_bits, refused

import transformer_engine.pytorch as te

from .cases import MODULES, build, every_module, same_bits, through_a_file, tokens

# ---- construction, meta device, state, copies ----


TAGS = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")


def tags_of(module):
    return {name: {tag: getattr(p, tag, None) for tag in TAGS} for name, p in module.named_parameters()}


def reset(module):
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


@every_module
@pytest.mark.parametrize("to_empty", [True, False])
def test_meta_device_then_real(device, name, to_empty):
    torch.manual_seed(3)
    wanted = MODULES[name](device=device)
    module = MODULES[name](device="meta")
    assert all(p.is_meta for p in module.parameters()) and tags_of(module) == tags_of(wanted)
    x = tokens("meta")
    assert [t.shape for t in as_tuple(module(x))] == [t.shape for t in as_tuple(wanted(tokens(device)))]
    if to_empty:
        module.to_empty(device=device)
    torch.manual_seed(3)
    reset(module)
    assert tags_of(module) == tags_of(wanted)
    for key, p in module.named_parameters():
        assert_same_bits(p, wanted.get_parameter(key).to(p.device), key)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    assert {p.device.type for p in module.parameters()} == {device if to_empty else default}


@every_module
def test_where_and_in_what_it_is_built(device, name):
    default = "cuda" if torch.cuda.is_available() else "cpu"
    for given in (device, torch.device(device), None):
        module = MODULES[name](device=given)
        assert {p.device.type for p in module.parameters()} == {default if given is None else device}
        assert {p.dtype for p in module.parameters()} == {torch.float32}
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert {p.dtype for p in MODULES[name](device=device).parameters()} == {torch.bfloat16}
        assert {p.dtype for p in MODULES[name](device=device, params_dtype=torch.float16).parameters()} == {
            torch.float16
        }
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.gpu
@every_module
def test_device_by_number(name):
    assert {p.device for p in MODULES[name](device=0).parameters()} == {torch.device("cuda", 0)}


@every_module
def test_initialisation(name):
    seen = []
    MODULES[name](device="cpu", init_method=lambda w: seen.append(w.dim()))
    assert seen and set(seen) == {2}, "init_method is for weights alone"
    module = MODULES[name](device="cpu")
    for key, p in module.named_parameters():
        if p.dim() > 1:  # normal(0, 0.023): within five standard errors
            assert (
                abs(p.mean()) < 5 * 0.023 / p.numel() ** 0.5
                and abs(p.std() - 0.023) < 5 * 0.023 / (2 * p.numel()) ** 0.5
            )
        else:
            assert p.eq(1 if key.endswith("layer_norm_weight") else 0).all()
    tracker = Tracker()
    before = torch.get_rng_state()
    forked = MODULES[name](device="cpu", get_rng_state_tracker=lambda: tracker)
    assert torch.equal(before, torch.get_rng_state()), "weights are drawn from the tracker's state"
    second = Tracker()
    again = MODULES[name](device="cpu", get_rng_state_tracker=lambda: second)
    same_bits(dict(again.named_parameters()), dict(forked.named_parameters()))


@every_module
def test_subclass_that_sets_attributes_before_init(name):
    base = type(MODULES[name](device="meta"))
    sizes = {"Linear": (8, 8), "LayerNormLinear": (8, 8), "LayerNormMLP": (8, 8), "MultiheadAttention": (8, 2)}

    class Client(base):
        def __init__(self, *args, **kwargs):
            self.config = {"client": True}
            self.is_first_microbatch = True
            super().__init__(*args, **kwargs)

    client = Client(*sizes.get(name, (8, 8, 2)), device="cpu", init_method=lambda w: None)
    assert client.config == {"client": True} and client.is_first_microbatch
    assert base.__module__.startswith("transformer_engine.pytorch")


@every_module
def test_state_travels(device, name):
    module, x = build(name, device), tokens(device)
    wanted = as_tuple(module(x))
    state = module.state_dict()
    extra = {key: t for key, t in state.items() if key.endswith("_extra_state")}
    assert extra and all(t.dtype == torch.uint8 and t.numel() == 0 for t in extra.values())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    without = {key: t for key, t in loaded.items() if key not in extra}
    for given in (loaded, without):
        other = MODULES[name](device=device)
        assert str(other.load_state_dict(given)) == "<All keys matched successfully>"
        for got, want in zip(as_tuple(other(x)), wanted, strict=True):
            assert_same_bits(got, want)
    del without[next(iter(without))]
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict(without)
    key = next(iter(extra))
    with refused(ValueError, "_extra_state", "3 bytes"):
        module.load_state_dict({**loaded, key: torch.zeros(3, dtype=torch.uint8)})


@every_module
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_compute_the_same_and_are_their_own(device, name, how):
    module, x = build(name, device), tokens(device)
    wanted = run(module, x)
    if how == "deepcopy":
        other = copy.deepcopy(module)
    else:
        other = through_a_file(module)
    same_bits(run(other, x), wanted)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    same_bits(run(module, x), wanted)


@every_module
def test_moves_and_casts(device, name):
    module, x = build(name, "cpu"), tokens(device)
    moved = copy.deepcopy(module).to(device).to(torch.bfloat16)
    wanted = build(name, device, torch.bfloat16)
    wanted.load_state_dict(module.state_dict())
    same_bits(run(moved, x.bfloat16()), run(wanted, x.bfloat16()))


def test_split_weights_stay_side_by_side(device):
    """Through moves, casts, copies and the meta device: joining them is a view, and they stay the same objects."""

    def joins_without_copy(module):
        for names in (module.weight_names, module.bias_names):
            parts = [getattr(module, name) for name in names]
            assert te.functional.noop_cat(parts).data_ptr() == parts[0].data_ptr()

    module = build("LayerNormLinear", "cpu")
    parameters = list(module.parameters())
    joins_without_copy(module.to(device))
    joins_without_copy(module.to(torch.bfloat16))
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
    joins_without_copy(copy.deepcopy(module))
    joins_without_copy(through_a_file(module))
    joins_without_copy(MODULES["LayerNormLinear"](device="meta").to_empty(device=device))
    meta = MODULES["LayerNormLinear"](device="meta")
    meta.reset_parameters()
    joins_without_copy(meta)
    module.a_weight = torch.nn.Parameter(module.a_weight.float())  # the user may give a part another dtype
    module.to(device)
