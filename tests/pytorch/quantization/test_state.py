# Scales and amax histories by themselves: updates against plain PyTorch, their bytes in a checkpoint, and bytes that
# are not theirs.
import copy
import io
import json
import pickle
import struct
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fp8_steps import all_scales, assert_same_tensors, new, run
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_workers import delayed_scales
from ranks import on_ranks
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format, MXFP8BlockScaling
from transformer_engine.pytorch.quantization.checkpoint import extra_state
from transformer_engine.pytorch.quantization.delayed import Region, ScalingState, update

FLOAT = torch.finfo(torch.float32)


def make_state(rule, columns=3, device="cpu", forward=True):
    return ScalingState(rule, columns, torch.device(device), forward=forward)


def entries(*states, group=None):
    region = Region()
    for state in states:
        region.add(state, group, forward=True)
    return region


def test_a_state_in_the_place_of_one_that_is_gone_is_registered():
    """Python gives its number to another one."""
    gone, state = make_state(DelayedScaling()), make_state(DelayedScaling())
    region = Region()
    region._forward[id(state)] = weakref.ref(gone), None
    del gone
    region.add_all({id(state): (weakref.ref(state), None)}, {})
    assert region.has(state)


def plain_update(history, scale, fp8_max, rule):
    """The specification, one column at a time, in Python's floats where nothing is rounded and float32 where it is."""
    history, scale = history.clone(), scale.clone()
    for column in range(history.shape[1]):
        seen = history[:1, column] if rule.amax_compute_algo == "most_recent" else history[:, column]
        seen = seen[~seen.isnan()]
        amax = seen.max() if len(seen) else torch.tensor(0.0)
        if 0 < amax < torch.inf:
            scale[column] = (torch.tensor(fp8_max) / amax / 2.0**rule.margin).clamp(FLOAT.tiny, FLOAT.max)
    rolled = torch.cat([torch.zeros(1, history.shape[1]), history[2:], history[:1]])[: len(history)]
    rolled = rolled if len(history) > 1 else torch.zeros_like(history)
    return torch.where(history[0] == 0, history, rolled), scale


AMAXES = st.one_of(st.floats(0, 2.0**100, width=32), st.sampled_from([0.0, float("inf"), float("nan"), 1e-45, 3e38]))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(AMAXES, min_size=n, max_size=n), min_size=1, max_size=6)),
    st.sampled_from(["max", "most_recent"]),
    st.integers(0, 3),
    st.sampled_from([Format.HYBRID, Format.E4M3]),
    st.booleans(),
)
def test_an_update_is_the_plain_one(rows, algorithm, margin, form, forward):
    rule = DelayedScaling(amax_history_len=len(rows), amax_compute_algo=algorithm, margin=margin, fp8_format=form)
    state = make_state(rule, len(rows[0]), forward=forward)
    history = torch.tensor(rows, dtype=torch.float32)
    state.amax_history.copy_(history)
    state.scale.copy_(torch.arange(1.0, len(rows[0]) + 1))
    memory = state.scale.data_ptr(), state.amax_history.data_ptr()
    fp8_max = 448.0 if forward or form is Format.E4M3 else 57344.0
    wanted_history, wanted_scale = plain_update(history, state.scale, fp8_max, rule)
    entries(state).update_forward()
    assert_same_bits(state.scale, wanted_scale)
    assert torch.equal(state.amax_history.isnan(), wanted_history.isnan())
    assert torch.equal(state.amax_history.nan_to_num(), wanted_history.nan_to_num())
    assert (state.scale.data_ptr(), state.amax_history.data_ptr()) == memory
    assert torch.equal(state.scale_inv, 1 / wanted_scale)


def test_many_modules_are_updated_together_and_dead_ones_are_left_out(device):
    rule = DelayedScaling(amax_history_len=2)
    states = [make_state(rule, 1 + i % 3, device) for i in range(70)]  # more than one launch takes
    for i, state in enumerate(states):
        state.amax_history[0] = 1.0 + i
    region = entries(*states)
    del states[10]
    region.update_forward()
    numbers = [i for i in range(70) if i != 10]
    for i, state in zip(numbers, states, strict=True):
        assert_same_bits(state.scale, torch.full_like(state.scale, 448.0) / torch.full_like(state.scale, 1.0 + i))
        assert state.amax_history.tolist() == [[0.0] * len(state.scale), [1.0 + i] * len(state.scale)]
    before = [state.amax_history.clone() for state in states]
    region.update_forward()  # nothing waits any more
    assert all(torch.equal(a, s.amax_history) for a, s in zip(before, states, strict=True))


def test_algorithms_of_the_caller():
    rule = DelayedScaling(
        amax_history_len=3,
        amax_compute_algo=lambda history: history.sum(0),
        scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: fp8_max / amax + scale + recipe.margin,
        margin=2,
    )
    state = make_state(rule)
    state.amax_history.copy_(torch.arange(1.0, 10).view(3, 3))
    entries(state).update_forward()
    assert_same_bits(state.scale, 448.0 / torch.tensor([12.0, 15.0, 18.0]) + 1 + 2)
    assert state.amax_history.tolist() == [[0, 0, 0], [7, 8, 9], [1, 2, 3]]
    mixed = make_state(DelayedScaling(amax_history_len=3, scaling_factor_compute_algo=lambda a, s, m, r: m / a))
    mixed.amax_history.copy_(torch.arange(1.0, 10).view(3, 3))
    entries(mixed).update_forward()
    assert_same_bits(mixed.scale, 448.0 / torch.tensor([7.0, 8.0, 9.0]))
    for name in ("amax_compute_algo", "scaling_factor_compute_algo"):
        answers = (torch.ones(7), "[7]"), (torch.ones(3, dtype=torch.complex64), "complex64"), (None, "NoneType")
        for answer, word in answers:
            wrong = make_state(DelayedScaling(**{name: lambda *args, answer=answer: answer}))
            with refused(ValueError, "DelayedScaling", name, word, "[3]"):
                entries(wrong).update_forward()


def test_amaxes_are_reduced_over_the_ranks_in_one_call():
    first, second = on_ranks(delayed_scales)
    assert first["calls"] == second["calls"] == 1
    assert first["scales"][:2] == second["scales"][:2]
    third = torch.tensor(448.0).div(5).item()
    assert first["scales"] == [[224.0, third, 224.0], [224.0, 224.0], [448.0] * 3]
    assert second["scales"][2] == [224.0] * 3  # reduce_amax=False


def test_another_length_keeps_the_newest_amaxes():
    state = make_state(DelayedScaling(amax_history_len=5), 1)
    state.amax_history.copy_(torch.tensor([9.0, 1, 2, 3, 4]).view(5, 1))  # 9 is being written, 4 the newest before it
    state.resize(3)
    assert state.amax_history.flatten().tolist() == [9, 3, 4]
    state.resize(6)
    assert state.amax_history.flatten().tolist() == [9, 0, 0, 0, 3, 4]
    state.resize(1)
    assert state.amax_history.flatten().tolist() == [9]
    state.resize(2)
    assert state.amax_history.flatten().tolist() == [9, 0]


def test_another_format_scales_to_its_largest():
    state = make_state(DelayedScaling(amax_history_len=2), 1, forward=False)
    state.scale.fill_(57344.0 / 3)
    state.adopt(DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3))
    assert_same_bits(state.scale, torch.tensor([57344.0 / 3]) * (448.0 / 57344.0))
    assert state.fp8_max == 448.0 and len(state.amax_history) == 4


def test_the_copy_of_the_scales_lasts_until_they_change():
    state = make_state(DelayedScaling(amax_history_len=2))
    used = state.used()
    assert state.used() is used and used.data_ptr() != state.scale.data_ptr()
    state.amax_history[0] = 2.0
    entries(state).update_forward()
    assert used.tolist() == [1.0] * 3 and state.used().tolist() == [224.0] * 3
    assert copy.deepcopy(state).used() is not state.used()


# ---- bytes ----


def filled(seed=0, length=4, form=Format.HYBRID):
    torch.manual_seed(seed)
    rule = DelayedScaling(amax_history_len=length, fp8_format=form, margin=1)
    forward, backward = make_state(rule, 3), make_state(rule, 2, forward=False)
    for state in (forward, backward):
        state.scale.copy_(torch.rand_like(state.scale) + 0.1)
        state.amax_history.copy_(torch.rand_like(state.amax_history))
    return forward, backward


def test_bytes_travel(tmp_path):
    forward, backward = filled()
    forward.amax_history[1, 1] = float("inf")
    data = extra_state.pack(forward, backward)
    assert data.dtype is torch.uint8 and data.dim() == 1
    assert data.shape == extra_state.pack(*filled(7)).shape  # which depends on the histories' shapes alone
    torch.save({"state": data}, tmp_path / "state.pt")
    data = torch.load(tmp_path / "state.pt", weights_only=True)["state"]
    for given_as in (data, io.BytesIO(data.numpy().tobytes())):
        found = extra_state.unpack(extra_state.bytes_of(given_as), (3, 2))
        for loaded, state in zip(found, (forward, backward), strict=True):
            assert_same_bits(loaded.scale, state.scale)
            assert_same_bits(loaded.amax_history, state.amax_history)
            assert (loaded.rule.margin, loaded.rule.fp8_format) == (1, Format.HYBRID)


def test_nothing_is_no_state():
    for empty in (None, torch.empty(0, dtype=torch.uint8), torch.empty(0), io.BytesIO()):
        assert extra_state.unpack(extra_state.bytes_of(empty), (3, 2)) is None


class _Evil:
    def __reduce__(self):
        return pytest.fail, ("code in a checkpoint was run",)


def _with_header(data, **changes):
    start = data.index(b"{")
    header = json.loads(data[start : start + 500]) | changes
    return data[:start] + json.dumps(header).encode().ljust(500) + data[start + 500 :]


def _bytes(*states):
    return extra_state.pack(*states).numpy().tobytes()


DATA = _bytes(*filled())
NEGATIVE, SHRUNK = filled(), filled()
NEGATIVE[0].amax_history[0, 0] = -1.0
SHRUNK[1].scale[0] = 0.0
HOSTILE = {
    "pickle": (pickle.dumps(_Evil()), "cannot be read safely"),
    "random": (bytes(range(256)) * 4, "cannot be read safely"),
    "one byte": (b"T", "cannot be read safely"),
    "a word": (b"scales", "cannot be read safely"),
    "magic alone": (DATA[:9], "truncated to 9 bytes"),
    "half a header": (DATA[:100], "truncated"),
    "half the values": (DATA[:-40], "bytes of scales and histories"),
    "more values": (DATA + b"\0\0\0\0", "bytes of scales and histories"),
    "version 9": (DATA[:7] + b"\x09" + DATA[8:], "format version 9, wanted 1"),
    "a huge header": (DATA[:8] + struct.pack("<I", 2**32 - 1) + DATA[12:], "header of 4294967295"),
    "no JSON": (DATA.replace(b"{", b"[", 1), "damaged"),
    "deep JSON": (DATA[:12] + b"[" * 500 + DATA[512:], "damaged"),
    "a huge history": (_with_header(DATA, forward=[2**40, 3]), "history of shape"),
    "a negative history": (_with_header(DATA, forward=[-4, 3]), "history of shape"),
    "other columns": (_with_header(DATA, forward=[4, 2]), r"\[4, 2\], wanted \[length, 3\]"),
    "a margin as a text": (_with_header(DATA, margin="x"), "damaged"),
    "an unknown format": (_with_header(DATA, fp8_format="E9M9"), "damaged"),
    "one bit": (DATA[:-3] + bytes([DATA[-3] ^ 1]) + DATA[-2:], "checksum"),
    "a negative amax": (_bytes(*NEGATIVE), "negative amax"),
    "a scale of 0": (_bytes(*SHRUNK), "not a positive number"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_named(name):
    data, words = HOSTILE[name]
    with pytest.raises(extra_state.Unfit, match=words):
        extra_state.unpack(data, (3, 2))


@pytest.mark.parametrize("state", [b"bytes", "text", torch.ones(3), {"a": 1}], ids=lambda s: type(s).__name__)
def test_a_state_of_another_type_is_named(state):
    with pytest.raises(extra_state.Unfit, match=r"wanted a uint8 tensor or an io\.BytesIO"):
        extra_state.bytes_of(state)


@pytest.mark.parametrize("length", [4, 1024])
def test_distributed_checkpoints_resume_a_run(device, tmp_path, length):
    """torch.distributed.checkpoint reads into the tensors of a new model's state dict."""
    import torch.distributed.checkpoint as dcp

    recipe, batches = (
        DelayedScaling(amax_history_len=length),
        [randn(8, 16, device=device, scale=2.0**i) for i in range(6)],
    )
    straight, optimizer = new(device)
    run(straight, optimizer, batches, recipe)
    first, optimizer = new(device)
    run(first, optimizer, batches[:3], recipe)
    dcp.save({"model": first.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    second, optimizer = new(device)
    assert not second.state_dict()["0._extra_state"].numel()
    with te.autocast(recipe=recipe):
        state = {"model": second.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    second.load_state_dict(state["model"])
    assert_same_tensors(all_scales(second), all_scales(first))
    run(second, optimizer, batches[3:], recipe)
    assert_same_tensors(dict(second.named_parameters()), dict(straight.named_parameters()))
    assert_same_tensors(all_scales(second), all_scales(straight))


def test_a_state_is_made_for_new_modules_alone(device):
    """Other recipes leave state_dict() as it is, and so does a module that has run, or holds its weight in FP8."""
    linear = te.Linear(16, 16, device=device)
    for recipe in (Float8CurrentScaling(), MXFP8BlockScaling()):
        with te.autocast(recipe=recipe):
            assert not linear.get_extra_state().numel()
    with te.autocast(recipe=Float8CurrentScaling()):
        linear(randn(8, 16, device=device))
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        quantized = te.Linear(16, 16, device=device)
    with te.autocast(recipe=DelayedScaling()):
        assert not linear.get_extra_state().numel() and not quantized.get_extra_state().numel()
        assert te.Linear(16, 16, device=device).get_extra_state().numel()
        assert not te.RMSNorm(16, device=device).get_extra_state().numel()


def _freed():
    state = torch.ones(100, dtype=torch.uint8)
    state.untyped_storage().resize_(0)
    return state


UNREADABLE = {
    "meta": (lambda: torch.empty(100, dtype=torch.uint8, device="meta"), "on the meta device"),
    "sparse": (lambda: torch.ones(100, dtype=torch.uint8).to_sparse(), "torch.sparse_coo"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(4)]), "nested"),
    "expanded": (lambda: torch.ones(1, dtype=torch.uint8).expand(24 << 30), "25769803776 bytes in 1 of memory"),
    "freed": (_freed, "100 bytes in 0 of memory"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_state_that_has_no_bytes_is_named(name):
    make, words = UNREADABLE[name]
    module = te.Linear(16, 16, device="cpu")
    with refused(ValueError, "Linear", "_extra_state", words):
        module.load_state_dict({**module.state_dict(), "_extra_state": make()})
    assert extra_state.bytes_of(torch.empty(0, dtype=torch.uint8, device="meta")) == b""


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(0, len(DATA) - 1), st.integers(0, 255), st.integers(0, 64))
def test_damage_anywhere_is_named_or_harmless(at, value, cut):
    damaged = bytearray(DATA[: len(DATA) - cut])
    if at < len(damaged):
        damaged[at] = value
    try:
        found = extra_state.unpack(bytes(damaged), (3, 2))
    except extra_state.Unfit:
        return
    assert found is not None and all((loaded.scale > 0).all() for loaded in found)


def test_an_update_of_nothing_is_nothing():
    update([])


def test_dcp_loads_into_a_module_that_has_run(device, tmp_path):
    """Its _extra_state has the size of the saved one, whatever the histories hold."""
    saved = te.Linear(32, 32, device=device)
    for scale in (1.0, 8.0, 64.0):
        with te.autocast(recipe=DelayedScaling()):
            saved(randn(16, 32, device=device, scale=scale)).sum().backward()
    dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    for forwards in (0, 1):
        module = te.Linear(32, 32, device=device)
        for _ in range(forwards):
            with te.autocast(recipe=DelayedScaling()):
                module(randn(16, 32, device=device))
        state = {"model": module.state_dict()}
        if not forwards:
            with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
                dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
            continue
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        module.load_state_dict(state["model"])
        assert_same_bits(module.get_extra_state(), saved.get_extra_state())
