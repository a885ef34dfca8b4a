"""Libraries that save a model and look at storages for it get each name with its own bytes, and all of them come back:
accelerate, safetensors, transformers' look at shared tensors, torch.save, DCP; nothing is copied for it, and a write
into a state dict writes into the module."""

import copy
import gc
import io

import accelerate
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import find_tied_parameters
from support import assert_same_bits, in_threads
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import transformer_engine.pytorch as te

from ..module.flat_params_cases import Ran, in_one_buffer
from .modules import MODULES, SPLIT, build, values

every_module = pytest.mark.parametrize("name", MODULES)


def same(module, wanted):
    got = values(module)
    assert list(got) == list(wanted)
    for name, want in wanted.items():
        assert_same_bits(got[name], want, name)


def accelerator(device):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=device == "cpu")


# ---- accelerate ----


@every_module
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
def test_accelerate_saves_its_state(device, name, safe, tmp_path):
    client, module = accelerator(device), build(name, device)
    module = client.prepare(module)
    wanted = values(module)
    client.save_state(tmp_path, safe_serialization=safe)
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(7)
    client.load_state(tmp_path)
    same(module, wanted)


@every_module
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
@pytest.mark.parametrize("shard", ["10GB", "5KB"])
def test_accelerate_saves_a_model(device, name, safe, shard, tmp_path):
    module = torch.nn.Sequential(build(name, device), build(name, device, seed=1))
    wanted = values(module)
    accelerator(device).save_model(module, tmp_path, max_shard_size=shard, safe_serialization=safe)
    other = torch.nn.Sequential(MODULES[name](device=device), MODULES[name](device=device))
    accelerate.load_checkpoint_in_model(other, str(tmp_path))
    same(other, wanted)


def test_accelerate_loads_what_was_made_empty(device, tmp_path):
    names = {"layer": "TransformerLayer", "experts": "GroupedLinear"}
    module = torch.nn.ModuleDict({key: build(name, device) for key, name in names.items()})
    wanted = values(module)
    accelerator(device).save_model(module, tmp_path)
    with accelerate.init_empty_weights():
        other = torch.nn.ModuleDict({key: MODULES[name](device="meta") for key, name in names.items()})
    accelerate.load_checkpoint_in_model(other.to_empty(device=device), str(tmp_path))
    same(other, wanted)
    x = torch.randn(6, 2, 32, device=device)
    with torch.no_grad():
        assert_same_bits(other["layer"](x), module["layer"](x))


def test_accelerate_finds_nothing_tied(device):
    assert find_tied_parameters(torch.nn.Sequential(*(build(name, device) for name in MODULES))) == []


# ---- safetensors, transformers ----


@every_module
def test_safetensors_saves_a_state_dict(device, name, tmp_path):
    module = build(name, device)
    safetensors.torch.save_file(module.state_dict(), tmp_path / "state.safetensors")
    other = MODULES[name](device=device)
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "state.safetensors"))
    same(other, values(module))


@every_module
def test_safetensors_saves_a_model(device, name, tmp_path):
    module = torch.nn.Sequential(build(name, device), build(name, device, seed=1))
    safetensors.torch.save_model(module, tmp_path / "model.safetensors")
    other = torch.nn.Sequential(MODULES[name](device=device), MODULES[name](device=device))
    missing, unexpected = safetensors.torch.load_model(other, tmp_path / "model.safetensors", strict=False)
    assert not unexpected and all(key.endswith("_extra_state") for key in missing)
    same(other, values(module))


@every_module
def test_no_name_shares_a_storage(device, name):
    """By what accelerate and transformers ask: device, address and size of the storage."""
    state = torch.nn.Sequential(build(name, device), build(name, device, seed=1)).state_dict()
    weights = {key: t for key, t in state.items() if not key.endswith("_extra_state")}
    assert len({accelerate.utils.id_tensor_storage(t) for t in weights.values()}) == len(weights)
    for key, t in weights.items():
        assert t.untyped_storage().nbytes() == t.nbytes and t.storage_offset() == 0, key


# ---- torch.save, DCP ----


def written(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return len(file.getvalue())


@every_module
def test_one_weight_writes_its_own_bytes(device, name):
    for key, t in build(name, device).state_dict().items():
        assert written({"w": t}) < t.nbytes + 2048, key


def test_two_names_of_one_parameter_are_written_once(device):
    layer = build("split Linear", device)
    once, twice = (torch.nn.ModuleList([layer] * count) for count in (1, 2))
    assert written(twice.state_dict()) < written(once.state_dict()) + 4096
    state = twice.state_dict()
    for name in SPLIT:
        one, two = (state[f"{i}.{name}_weight"] for i in (0, 1))
        assert one.untyped_storage()._cdata == two.untyped_storage()._cdata


@every_module
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_dcp_reads_where_it_wrote(device, name, tmp_path):
    module, other = build(name, device), build(name, device, seed=1)
    dcp.save({"model": module.state_dict()}, checkpoint_id=tmp_path / "dcp")
    dcp.load({"model": other.state_dict()}, checkpoint_id=tmp_path / "dcp")  # into the tensors of the state dict
    same(other, values(module))
    third = build(name, device, seed=2)
    set_model_state_dict(third, get_model_state_dict(module))
    same(third, values(module))


# ---- what a state dict is ----


@every_module
def test_a_state_dict_is_the_memory_of_the_parameters(device, name):
    module = build(name, device)
    with Ran() as ran:
        state = module.state_dict()
    assert not set(ran.names) - {"detach", "alias", "empty"}, ran.names
    for key, p in module.named_parameters():
        assert state[key].data_ptr() == p.data_ptr() and state[key].shape == p.shape and state[key].dtype is p.dtype
        assert not state[key].requires_grad and state[key].is_leaf
        state[key].copy_(torch.full_like(p, 3.0))
    assert all((p == 3).all() for p in module.parameters())
    kept = module.state_dict(keep_vars=True)
    assert all(kept[key] is p for key, p in module.named_parameters())


def test_a_write_into_a_state_dict_counts(device):
    """A backward whose weights were written in between is refused, as torch's own would be."""
    module = te.Linear(32, 48, parameters_split=SPLIT, device=device)
    y = module(torch.randn(4, 32, device=device, requires_grad=True))
    module.state_dict()["key_weight"].mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        y.sum().backward()


def test_a_state_dict_outlives_the_module(device):
    module = build("GroupedLinear", device)
    wanted, state = values(module), module.state_dict()
    del module
    gc.collect()
    torch.empty(3 * 32 * 32, device=device).fill_(7)
    for name, want in wanted.items():
        assert_same_bits(state[name], want, name)


def test_state_dicts_are_freed(device):
    """The memory goes with the last of module and state dict."""
    module = build("GroupedLinear", device)
    states = [module.state_dict() for _ in range(3)]
    first = states[0]["weight1"].untyped_storage()
    assert all(state["weight1"].untyped_storage()._cdata == first._cdata for state in states)
    del states, first
    held = torch.multiprocessing.reductions.StorageWeakRef(module.state_dict()["weight1"].untyped_storage())
    whole = torch.multiprocessing.reductions.StorageWeakRef(module.weight1.untyped_storage())
    assert held.expired() and not whole.expired()

    state = module.state_dict()
    del module
    assert not whole.expired()
    del state
    assert whole.expired()


def test_state_dicts_of_several_threads(device):
    module = build("GroupedLinear", device)
    wanted = [module.state_dict()[f"weight{i}"].sum().item() for i in range(3)]

    def takes(i):
        return [module.state_dict()[f"weight{i % 3}"].sum().item() for _ in range(50)]

    assert in_threads(6, takes) == [[wanted[i % 3]] * 50 for i in range(6)]


def test_a_copy_of_a_state_dict_is_apart(device):
    module = build("split Linear", device)
    taken = copy.deepcopy(module.state_dict())
    wanted = {key: t.clone() for key, t in taken.items()}
    with torch.no_grad():
        module.key_weight.zero_()
    for key, want in wanted.items():
        assert_same_bits(taken[key], want, key)


@pytest.mark.parametrize("owner", [in_one_buffer, lambda parameters: in_one_buffer(parameters[::-1])], ids=["f", "r"])
def test_parameters_in_an_owners_buffer(device, owner, tmp_path):
    module = build("TransformerLayer", device)
    buffer = owner(list(module.parameters()))
    wanted = values(module)
    client = accelerator(device)
    module = client.prepare(module)
    client.save_state(tmp_path)
    buffer.zero_()
    client.load_state(tmp_path)
    same(module, wanted)
    assert buffer.any()  # loaded in place


def test_assigned_tensors_stay_shared(device):
    """A module that takes another module's state dict by assignment shares its memory, and joins it without a copy."""
    for name in ("split Linear", "GroupedLinear"):
        module, other = build(name, device), MODULES[name](device="meta")
        other.load_state_dict(module.state_dict(), assign=True)
        assert all(unit.in_order() for unit in other.row_units())
        for p, q in zip(module.parameters(), other.parameters(), strict=True):
            assert p.data_ptr() == q.data_ptr()
            assert p.untyped_storage()._cdata == q.untyped_storage()._cdata


def test_called_with_a_state_dict_it_joins_without_a_copy(device):
    module = build("split Linear", device)
    x = torch.randn(5, 32, device=device)
    with Ran() as ran, torch.no_grad():
        y = torch.func.functional_call(module, module.state_dict(), (x,))
    assert "cat" not in ran.names
    assert_same_bits(y, module(x))


def test_a_part_cannot_grow(device):
    state = build("split Linear", device).state_dict()
    with pytest.raises(RuntimeError, match="not resizable"):
        state["key_weight"].resize_(64, 64)


def test_fake_and_meta_modules(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        state = te.Linear(32, 48, parameters_split=SPLIT, device=device).state_dict()
        assert state["key_weight"].shape == (16, 32)
    state = te.Linear(32, 48, parameters_split=SPLIT, device="meta").state_dict()
    assert state["key_weight"].is_meta and state["key_weight"].shape == (16, 32)


def test_of_inference_mode(device):
    with torch.inference_mode():
        module = build("split Linear", device)
        state = module.state_dict()
    assert state["key_weight"].data_ptr() == module.key_weight.data_ptr() and state["key_weight"].is_inference()
    assert state["key_weight"].untyped_storage().nbytes() == state["key_weight"].nbytes
