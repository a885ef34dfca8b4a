"""The angles of rotary embedding, and the module that makes them: any float, interpolated, through casts, copies and
the meta device."""

import copy
import pickle

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch import MultiheadAttention, functional
from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb

from .cases import angles, draw


@pytest.fixture(autouse=True)
def poisoned():
    """torch fills what at::empty returns with NaN while algorithms are deterministic: an element not written shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float16, torch.bfloat16), ids=str)
def test_angles_of_any_float_are_computed_in_float32(device, dtype):
    """Every entry, compiled too: the bits of the same angles in float32."""
    freqs, x = angles(device, 9, 8).to(dtype), draw(device, 5, 3, 4, 16, dtype=torch.bfloat16)
    qkv = draw(device, 5, 3, 2, 3 * 16)

    def results(freqs):
        yield apply_rotary_pos_emb(x, freqs)
        yield apply_rotary_pos_emb(x, freqs, fused=True)
        yield from functional.rope(x, x, freqs=freqs)
        yield from apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [16, 16, 16])
        yield from torch.compile(functional.rope, backend="aot_eager", fullgraph=True)(x, freqs=freqs)
        yield from functional.rope_qkv(qkv, heads=(1, 1, 1), q_freqs=freqs, k_freqs=freqs.float())

    for got, wanted in zip(results(freqs), results(freqs.float()), strict=True):
        assert got.dtype is wanted.dtype and torch.equal(got, wanted)
    attention = MultiheadAttention(32, 4, attention_dropout=0.0, device=device)
    h = draw(device, 5, 3, 32)
    wanted = attention(h, rotary_pos_emb=freqs.float())
    assert torch.equal(attention(h, rotary_pos_emb=freqs), wanted)
    assert torch.equal(attention(h, rotary_pos_emb=(freqs, freqs)), wanted)


@pytest.mark.parametrize("interleaved", (False, True))
def test_angles(device, interleaved):
    rotary = te.RotaryPositionEmbedding(64, rotary_percent=0.5, rotary_base=500.0, interleaved=interleaved).to(device)
    freqs = rotary(10, offset=7)
    assert freqs.shape == (10, 1, 1, 32) and freqs.dtype == torch.float32 and freqs.device.type == device
    position = torch.arange(7, 17, dtype=torch.float64, device=device)
    want = position[:, None] * 500.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64, device=device) / 32)
    want = want.repeat_interleave(2, -1) if interleaved else torch.cat((want, want), -1)
    # The power is within a few units of float32 (its exponent, below 6.3, within one), the product within half a one.
    assert (freqs.flatten(1).double() - want).abs().le(16 * 2.0**-24 * want).all()


def test_angles_are_interpolated(device):
    def positions(length, **options):  # the first frequency is 1: its angle is the position
        return te.RotaryPositionEmbedding(8, **options).to(device)(length)[:, 0, 0, 0].tolist()

    assert positions(3) == [0, 1, 2]
    assert positions(4, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=2) == [0, 0.5, 1, 1.5]
    assert positions(8, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=2)[:3] == [0, 0.25, 0.5]
    assert positions(8, pretrained_max_position_embeddings=2)[:3] == [0, 1, 2]


def test_a_factor_alone_changes_nothing():
    """As in the API, where only pretrained_max_position_embeddings enables interpolation; a warning reports it."""
    with pytest.warns(UserWarning, match="'seq_len_interpolation_factor' has no effect without") as caught:
        rotary = te.RotaryPositionEmbedding(8, seq_len_interpolation_factor=4)
    assert caught[0].filename == __file__
    assert torch.equal(rotary(3), te.RotaryPositionEmbedding(8)(3))


def test_angles_survive_casts_and_copies(device):
    rotary = te.RotaryPositionEmbedding(64).to(device)
    want = rotary(100)
    for other in (
        copy.deepcopy(rotary).bfloat16(),
        torch.nn.Sequential(copy.deepcopy(rotary)).half()[0],
        pickle.loads(pickle.dumps(rotary)),
    ):
        assert torch.equal(other(100), want)
    fresh = te.RotaryPositionEmbedding(64, rotary_base=5.0).to(device)
    fresh.load_state_dict(rotary.state_dict())
    assert torch.equal(fresh(100), want)


def test_bad_angles_are_named():
    for arguments in ((7,), (64, 0.0), (64, 1.5), (10, 0.5)):
        with pytest.raises(ValueError, match="'dim' and 'rotary_percent'"):
            te.RotaryPositionEmbedding(*arguments)
    with pytest.raises(ValueError, match="seq_len_interpolation_factor"):
        te.RotaryPositionEmbedding(64, seq_len_interpolation_factor=0)


def test_angles_survive_to_empty():
    module = te.RotaryPositionEmbedding(16)
    wanted = module(8).cpu()
    assert torch.equal(module.to_empty(device="cpu")(8), wanted)
    assert torch.equal(module.to("meta").to_empty(device="cpu")(8), wanted)
