"""Frequencies of a client's own (Llama 3's scaling, a table from a file) in RotaryPositionEmbedding: casts, moves and
copies of the model keep their values in float32."""

import copy
import io
import math

import pytest
import torch
from support import assert_same_bits

import transformer_engine.pytorch as te

DIM = 32


def llama3(inv_freq, factor=8.0, low=1.0, high=4.0, original=8192):
    """As Llama 3.1's recipe: long wavelengths divided by `factor`, short ones kept, a ramp between."""
    wavelength = 2 * math.pi / inv_freq
    ramp = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * inv_freq / factor + ramp * inv_freq


def scaled(device):
    rotary = te.RotaryPositionEmbedding(DIM, rotary_base=500000.0).to(device)
    rotary.inv_freq = llama3(rotary.inv_freq)
    return rotary


def through_a_file(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def inside(move):
    def around(rotary):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleList([rotary]))
        move(model)
        return model[1][0]

    return around


MOVES = {
    "to": lambda m: m.to(m.inv_freq.device),
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
    "to(bfloat16)": lambda m: m.to(torch.bfloat16),
    "there and back": lambda m: m.half().float(),
    "share_memory": lambda m: m.share_memory() if m.inv_freq.is_cpu else m,
    "apply": lambda m: m.apply(lambda part: None),
    "to_empty": lambda m: m.to_empty(device=m.inv_freq.device),
    "deepcopy": copy.deepcopy,
    "file": through_a_file,
    "parent.bfloat16": inside(lambda m: m.bfloat16()),
    "parent.cpu": inside(lambda m: m.cpu()),
    "parent.to_empty": inside(lambda m: m.to_empty(device="cpu")),
}


@pytest.mark.parametrize("move", MOVES)
def test_assigned_frequencies_stay(device, move):
    rotary = scaled(device)
    wanted, angles = rotary.inv_freq.clone(), rotary(4096)
    moved = MOVES[move](rotary)
    assert moved.inv_freq.dtype is torch.float32
    assert_same_bits(moved.inv_freq.to(device), wanted)
    assert_same_bits(moved(4096).to(device), angles)


@pytest.mark.parametrize("how", ["load", "load assign", "copy_", "data"])
def test_frequencies_that_are_loaded_or_written_stay(device, how):
    rotary, given = te.RotaryPositionEmbedding(DIM).to(device), scaled(device)
    if how.startswith("load"):
        rotary.load_state_dict(given.state_dict(), assign="assign" in how)
    elif how == "copy_":
        rotary.inv_freq.copy_(given.inv_freq)
    else:
        rotary.inv_freq.data = given.inv_freq.clone()
    assert_same_bits(rotary.bfloat16().to(device)(64), given(64))


def test_a_half_table_is_widened_by_a_move(device):
    """A client's table in bfloat16 means its values, which float32 holds."""
    rotary = te.RotaryPositionEmbedding(DIM).to(device)
    rotary.inv_freq = llama3(rotary.inv_freq).bfloat16()
    wanted = rotary.inv_freq.float()
    assert_same_bits(rotary.to(torch.float16).inv_freq, wanted)


def test_without_values_they_are_the_formulas(device):
    """On the meta device there are none."""
    wanted = te.RotaryPositionEmbedding(DIM, rotary_base=5.0).to(device)(100)
    rotary = te.RotaryPositionEmbedding(DIM, rotary_base=5.0).to("meta")
    assert rotary.inv_freq.is_meta
    assert_same_bits(rotary.to_empty(device=device)(100), wanted)
    rotary = te.RotaryPositionEmbedding(DIM, rotary_base=5.0).to(torch.bfloat16).to("meta").to(torch.bfloat16)
    assert_same_bits(rotary.to_empty(device=device)(100), wanted)


def test_a_model_under_fsdp_style_materialisation(device):
    """meta, to_empty, then a checkpoint: its frequencies."""
    given = scaled(device)
    rotary = te.RotaryPositionEmbedding(DIM, rotary_base=500000.0).to("meta").to_empty(device=device)
    rotary.load_state_dict(given.state_dict())
    assert_same_bits(rotary.bfloat16()(64), given(64))
