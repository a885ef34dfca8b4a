# Invalid states in place of those that Transformer Engine wrote: named, never run, and no object is built of them.
import copyreg
import io
import pickle
import struct
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization.checkpoint import extra_state

from . import te_states
from .te_states import FORMS, as_tensor, state_of, written

pytestmark = pytest.mark.usefixtures("fp8_left_off")
KEYS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


# ---- invalid states ----


RAN = []


def ran(*arguments):
    RAN.append(arguments)
    return {}


class Evil:
    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return ran, self.arguments


class Foreign:
    def __setstate__(self, state):
        ran(state)


def pickled(*parts):
    return b"\x80\x04" + b"".join(parts) + b"."


def text(word):
    return b"X" + struct.pack("<I", len(word)) + word.encode()


GOOD = state_of((3, 2))
HERE = __name__.encode()


def storage_of(count, data=b"", key="0"):
    """The old file of a storage with `count` as its number of elements."""
    head = [pickle.dumps(n, 2) for n in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    identity = b"\x80\x02(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu")
    identity += b"\x8a\x08" + struct.pack("<q", count) + b"NtQ."
    return b"".join(head) + identity + pickle.dumps([key], 2) + struct.pack("<q", count) + data


def with_scale(storage, size, stride, offset=0):
    """GOOD with a forward scale of this storage, size and stride."""

    class Made:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (Stored(storage), offset, size, stride, False, {})

    class Stored:
        def __init__(self, data):
            self.data = data

        def __reduce__(self):
            return torch.storage._load_from_bytes, (self.data,)

    return written({**GOOD, "scale_fwd": Made()}, "pickle 4")


def nested(depth):
    return pickled(b"}" + text("recipe") + b")" + b"\x85" * depth + b"s")


def archive(entries, packed=False):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as out:
        for name, data in entries.items():
            out.writestr(name, data)
    return file.getvalue()


def repacked(packed=False, **changes):
    data = written(GOOD, "torch.save")
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    root = next(iter(entries)).split("/")[0]
    return archive({**entries, **{f"{root}/{name}": value for name, value in changes.items()}}, packed)


doubling = b"]\x94" + b"".join(b"0](h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(60))
HOSTILE = {
    "a call": (pickle.dumps(Evil("reduce")), "calls "),
    "a call in the recipe": (written({**GOOD, "recipe": Evil("recipe")}, "pickle 4"), "calls "),
    "a call beside scales": (written({**GOOD, "extra_fp8_variables": {"a": Evil(1)}}, "pickle 4"), "calls "),
    "a call in torch.save's file": (written({**GOOD, "other": Evil(1)}, "torch.save"), "calls "),
    "a call in torch.save's old file": (written({**GOOD, "other": Evil(1)}, "old torch.save"), "calls "),
    "a call in a tensor's bytes": (with_scale(pickle.dumps(Evil(1)), (3,), (1,)), "calls "),
    "an object of another class": (written({**GOOD, "other": Foreign()}, "pickle 4"), "names "),
    "a name of something else": (written({**GOOD, "other": io.open}, "pickle 4"), "names "),
    "getattr of something else": (
        pickled(b"}" + text("a") + b"cbuiltins\ngetattr\ncos\n__dict__\n" + text("system") + b"\x86Rs"),
        "names os.__dict__",
    ),
    "INST": (pickled(b"(i" + HERE + b"\nran\n"), "instruction INST"),
    "OBJ": (pickled(b"(c" + HERE + b"\nran\no"), "instruction OBJ"),
    "NEWOBJ_EX": (pickled(b"c" + HERE + b"\nran\n)}\x92"), "instruction NEWOBJ_EX"),
    "the extension registry": (pickled(b"\x82\xf0)R"), "instruction EXT1"),
    "a persistent id of text": (pickled(b"Pstorage\n"), "instruction PERSID"),
    "a persistent id without a file": (pickled(b")Q"), "outside of it"),
    "a buffer from elsewhere": (b"\x80\x05\x97.", "instruction NEXT_BUFFER"),
    "state for a dict": (pickled(b"}}b"), "fills an object that is not a Record"),
    "state for a tensor twice": (pickled(b"ctorch\nx\n)\x81}bNb}b"), "twice"),
    "items of a list": (pickled(b"]" + text("a") + b"Ns"), "fills an object that is not a dict"),
    "an empty stack": (pickled(b"0"), "empty stack"),
    "no mark": (pickled(b"t"), "no mark"),
    "what was never kept": (pickled(b"h\x07"), "has not written"),
    "a key that is a tuple": (pickled(b"})Ns"), "a key that is neither text"),
    "a call of no name": (pickled(text("os.system") + b")R"), "an object without a name"),
    "a name of no text": (pickled(b"NN\x93"), "a name that is not text"),
    "no end": (b"\x80\x04" + b"}" * 9, "damaged"),
    "without end": (pickled(b"N0" * 40000), "more than 65536 instructions"),
    "no dict": (pickle.dumps([1, 2]), "pickle of a list"),
    "another dict": (pickle.dumps({"a": 1}), "without a recipe and without scales"),
    "no scale": (written(state_of((3, 2), scale_fwd=None), "pickle 4"), "lacks scale_fwd"),
    "no history": (written(state_of((3, 2), amax_history_bwd=None), "pickle 4"), "lacks scale_bwd"),
    "a list for a scale": (written({**GOOD, "scale_fwd": [1.0] * 3}, "pickle 4"), "lacks scale_fwd"),
    "integers": (
        written({**GOOD, "scale_fwd": torch.ones(3, dtype=torch.int)}, "old torch.save"),
        "not a storage of floats",
    ),
    "a scale of two dimensions": (written({**GOOD, "scale_fwd": torch.ones(3, 1)}, "pickle 4"), "lacks scale_fwd"),
    "a history of no rows": (written({**GOOD, "amax_history_fwd": torch.ones(0, 3)}, "pickle 4"), "lacks scale_fwd"),
    "other columns of the history": (
        written({**GOOD, "amax_history_fwd": torch.ones(4, 4)}, "pickle 4"),
        r"3 scales in scale_fwd, and amax_history_fwd is \[4, 4\]",
    ),
    "a scale of 0": (written({**GOOD, "scale_bwd": torch.zeros(2)}, "pickle 4"), "not a positive number"),
    "NaN for a scale": (
        written({**GOOD, "scale_bwd": torch.full((2,), torch.nan)}, "pickle 4"),
        "not a positive number",
    ),
    "a negative amax": (written({**GOOD, "amax_history_fwd": -torch.ones(4, 3)}, "pickle 4"), "negative amax"),
    "a negative margin": (
        written(state_of((3, 2), recipe=te_states.DelayedScaling(margin=-1)), "pickle 4"),
        "an invalid recipe",
    ),
    "a margin that doubles": (
        pickled(
            b"}("
            + b"".join(text(key) + b"N" for key in KEYS)
            + text("recipe")
            + b"ctransformer_engine.common.recipe\nDelayedScaling\n)\x81}"
            + text("margin")
            + doubling
            + b"sbu"
        ),
        "margin is a list",
    ),
    "a deep tuple": (nested(60000), "without a recipe and without scales"),
    "an expanded tensor": (with_scale(storage_of(1, b"\0\0\x80?"), (2**39,), (0,)), r"in 1 numbers"),
    "a tensor beyond its storage": (with_scale(storage_of(1, b"\0\0\x80?"), (1,), (1,), 7), r"in 1 numbers"),
    "a size below 0": (with_scale(storage_of(1, b"\0\0\x80?"), (-3,), (1,)), "not a plain one"),
    "a size as a text": (with_scale(storage_of(1, b"\0\0\x80?"), ("3",), (1,)), "not a plain one"),
    "a storage that is not there": (with_scale(storage_of(2**39), (3,), (1,)), "0 bytes for"),
    "a storage of more than there is": (with_scale(storage_of(2**62), (3,), (1,)), "not a storage of floats"),
    "a storage of fewer than 0": (with_scale(storage_of(-1), (3,), (1,)), "not a storage of floats"),
    "half of a storage": (with_scale(storage_of(3, b"\0" * 7), (3,), (1,)), "7 bytes for 3 numbers"),
    "packed entries": (repacked(packed=True), "packed it"),
    "a pickle of its own in an archive": (repacked(**{"data.pkl": pickle.dumps(Evil(1))}), "calls "),
    "another byte order": (repacked(byteorder=b"big"), "byte order"),
    "storages of other lengths": (repacked(**{"data/0": b"1"}), "1 bytes for"),
    "an archive of something else": (archive({"a/b": b"c"}), "torch.save has not written"),
    "half an archive": (written(GOOD, "torch.save")[:-30], "damaged"),
    "half an old file": (written(GOOD, "old torch.save")[:-30], "bytes for"),
    "half a pickle": (written(GOOD, "pickle 4")[:-30], "damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_invalid_state_is_named_and_never_run(name):
    data, words = HOSTILE[name]
    RAN.clear()
    copyreg.add_extension(HERE.decode(), "ran", 0xF0)
    copyreg._extension_cache[0xF0] = ran  # what the registry found once it hands out without asking
    try:
        with pytest.raises(extra_state.Unfit, match=words):
            extra_state.unpack(data, (3, 2))
        module = te.Linear(32, 16)
        before = {key: value.clone() for key, value in module.state_dict().items()}
        other = te.Linear(32, 16).state_dict()
        with refused(ValueError, "Linear", "_extra_state", "drop that key"):
            module.load_state_dict({**other, "_extra_state": as_tensor(data)})
        for key, value in module.state_dict().items():
            assert_same_bits(value, before[key])
    finally:
        copyreg._extension_cache.pop(0xF0, None)
        copyreg.remove_extension(HERE.decode(), "ran", 0xF0)
    assert not RAN


def test_the_net_is_worth_something():
    """pickle itself runs them."""
    RAN.clear()
    pickle.loads(HOSTILE["a call"][0])
    assert RAN == [("reduce",)]


DATA = {form: written(GOOD, form) for form in FORMS}


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.sampled_from(FORMS), st.floats(0, 1), st.binary(min_size=1, max_size=3), st.integers(0, 64))
def test_damage_anywhere_is_named_or_harmless(form, where, patch, cut):
    damaged = bytearray(DATA[form][: len(DATA[form]) - cut])
    at = int(where * (len(damaged) - len(patch)))
    damaged[at : at + len(patch)] = patch
    try:
        found = extra_state.unpack(bytes(damaged), (3, 2))
    except extra_state.Unfit:
        return
    assert found is None or all(
        (part.scale > 0).all() and part.scale.shape == part.amax_history.shape[1:] for part in found
    )


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.lists(st.sampled_from([bytes([n]) for n in range(256)] + [text("a"), b"h\0", b"q\0"]), max_size=40))
def test_any_instructions_are_named_or_harmless(instructions):
    with pytest.raises(extra_state.Unfit):
        extra_state.unpack(pickled(*instructions, b"]"), (3, 2))
