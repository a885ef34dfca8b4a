# Rotary embedding of packed sequences and of one rank's chunks: each token takes the row of its place in its sequence.
import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.rope import (
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
    packed_positions,
)

FREQS = te.RotaryPositionEmbedding(8)(24).cpu()


def cumulative(*lengths):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0)], dtype=torch.int32)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lengths", [(5,), (3, 0, 7, 1), (0, 0), ()])
def test_packed_equals_each_sequence(device, lengths, interleaved, fused):
    freqs, starts = FREQS.to(device), cumulative(*lengths).to(device)
    options = {"interleaved": interleaved, "fused": fused}
    t = torch.randn(sum(lengths) + 2, 3, 12, device=device, requires_grad=True)  # two rows after the last sequence
    out = apply_rotary_pos_emb(t, freqs, "thd", cu_seqlens=starts, **options)
    assert out.shape == t.shape
    first = 0
    for length in lengths:
        alone = apply_rotary_pos_emb(t[None, first : first + length], freqs, "bshd", **options)
        assert_same_bits(out[first : first + length], alone[0])
        first += length
    dout = torch.randn_like(out)
    out.backward(dout)
    first = 0
    for length in lengths:
        rows = slice(first, first + length)
        alone = t.detach()[None, rows].requires_grad_()
        apply_rotary_pos_emb(alone, freqs, "bshd", **options).backward(dout[None, rows])
        assert_same_bits(t.grad[rows], alone.grad[0])
        first += length
    assert t.grad.isfinite().all()


@pytest.mark.parametrize("cp_size", [1, 2])
def test_compiled_lengths_are_data(device, cp_size):
    """Positions are found on the device from the values of cu_seqlens: one graph serves all."""
    freqs, t = FREQS.to(device), torch.randn(8 // cp_size, 2, 8, device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(t, starts):
        return apply_rotary_pos_emb(t, freqs, "thd", cu_seqlens=starts, cp_size=cp_size, cp_rank=cp_size - 1)

    for lengths in ((8, 0, 0), (4, 4, 0), (0, 4, 4)):
        starts = cumulative(*lengths).to(device)
        wanted = apply_rotary_pos_emb(t, freqs, "thd", cu_seqlens=starts, cp_size=cp_size, cp_rank=cp_size - 1)
        assert_same_bits(compiled(t, starts), wanted)


def test_start_positions_are_added(device):
    freqs, t = FREQS.to(device), torch.randn(7, 2, 8, device=device)
    starts = torch.tensor([4, 9], dtype=torch.int32, device=device)
    for fused in (False, True):
        out = apply_rotary_pos_emb(
            t, freqs, "thd", cu_seqlens=cumulative(3, 4).to(device), start_positions=starts, fused=fused
        )
        assert_same_bits(out[3:], apply_rotary_pos_emb(t[None, 3:], freqs[9:], "bshd", fused=fused)[0])


def test_positions_of_padding_are_zero(device):
    """Between sequences where their lengths are given, before the first one and after the last one."""
    starts, lengths = cumulative(4, 3).to(device), cumulative(2, 3).to(device)
    assert packed_positions(starts, 9).tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 0]
    assert packed_positions(starts, 9, lengths=lengths).tolist() == [0, 1, 0, 0, 0, 1, 2, 0, 0]
    assert packed_positions(starts + 2, 10, lengths=lengths).tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 2, 0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_the_chunks_of_a_rank(device, layout, fused):
    """Ranks' results are the rows of the whole sequences' result that their chunks are."""
    size, freqs, lengths = 2, FREQS.to(device), (8, 4)
    whole, starts = torch.randn(12, 3, 8, device=device), cumulative(*lengths).to(device)
    exact = apply_rotary_pos_emb(whole, freqs, "thd", cu_seqlens=starts, fused=fused)
    for rank in range(size):
        picked, first = [], 0
        for length in lengths:
            half = length // (2 * size)
            for chunk in (rank, 2 * size - 1 - rank):
                picked += range(first + chunk * half, first + (chunk + 1) * half)
            first += length
        options = {"fused": fused, "cp_size": size, "cp_rank": rank}
        if layout == "thd":
            out = apply_rotary_pos_emb(whole[picked], freqs, "thd", cu_seqlens=starts, **options)
        else:
            own, picked = whole[picked[:4], None], picked[:4]  # of the first sequence
            own = own if layout == "sbhd" else own.transpose(0, 1)
            out = apply_rotary_pos_emb(own, freqs, layout, **options)
            out = (out if layout == "sbhd" else out.transpose(0, 1))[:, 0]
        assert_same_bits(out, exact[picked])


def test_the_chunks_of_a_packed_projection(device):
    freqs = FREQS.to(device)
    qkv = torch.randn(4, 2, 3, 24, device=device)
    for rank in range(2):
        got = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [8, 8, 8], cp_size=2, cp_rank=rank)
        rows = torch.cat((freqs[rank * 2 : rank * 2 + 2], freqs[(3 - rank) * 2 : (3 - rank) * 2 + 2]))
        for ours, wanted in zip(got, apply_fused_qkv_rotary_pos_emb(qkv, rows, rows, [8, 8, 8]), strict=True):
            assert_same_bits(ours, wanted)


def test_bad_sequences_and_starts():
    """Of the packed and the dense layout, fused and not."""
    t, starts = torch.randn(6, 2, 8), torch.tensor([4, 9], dtype=torch.int32)
    packed = {"tensor_format": "thd", "cu_seqlens": cumulative(2, 4)}
    for change, words in (
        ({"cu_seqlens": torch.tensor([0, 20], dtype=torch.int32)}, ("'cu_seqlens'", "[0, 20]", "6 tokens")),
        ({"cu_seqlens": torch.tensor([0, 4, 2, 6], dtype=torch.int32)}, ("'cu_seqlens'", "[0, 4, 2, 6]")),
        ({"cu_seqlens": torch.tensor([1, 6], dtype=torch.int32)}, ("'cu_seqlens'", "[1, 6]")),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int32)}, ("'cu_seqlens'", "[0]", "sequences + 1")),
        ({"cu_seqlens": cumulative(6, 6), "cp_size": 2}, ("'cu_seqlens'", "[0, 6, 12]", "multiples of 4")),
        ({"cu_seqlens": cumulative(16), "cp_size": 2}, ("'cu_seqlens'", "[0, 16]", "12 tokens")),
        ({"start_positions": starts.float()}, ("'start_positions'", "float32", "int32 [2]")),
        ({"start_positions": starts[:1]}, ("'start_positions'", "[1]", "int32 [2]")),
        ({"start_positions": starts.repeat(2)}, ("'start_positions'", "[4]", "int32 [2]")),
        ({"tensor_format": "sbhd", "start_positions": starts[:1]}, ("'start_positions'", "int32 [3]")),
        ({"tensor_format": "bshd", "start_positions": starts.double()}, ("'start_positions'", "float64", "int32 [2]")),
    ):
        call = packed | change
        if call["tensor_format"] != "thd":
            call["cu_seqlens"] = None
        of = t if call["tensor_format"] == "thd" else t.view(2, 3, 2, 8)
        for fused in (False, True):
            with refused(ValueError, "apply_rotary_pos_emb", *words):
                apply_rotary_pos_emb(of, FREQS, fused=fused, **call)


def test_bad_arguments():
    t, starts = torch.randn(6, 2, 8), cumulative(6)
    for change, words in (
        ({"cu_seqlens": None}, ("'cu_seqlens'", "None", "thd")),
        ({"cu_seqlens": starts.long()}, ("'cu_seqlens'", "int64")),
        ({"tensor_format": "hsbd"}, ("'tensor_format'", "hsbd")),
        ({"cp_size": 2, "cp_rank": 2}, ("'cp_rank'", "2", "below cp_size")),
        ({"cp_size": 0}, ("'cp_size'", "0")),
        ({"freqs": FREQS[:5]}, ("'freqs'", "5 positions", "6")),
        ({"cu_seqlens": starts * 8, "cp_size": 8}, ("'freqs'", "24 positions", "48")),
    ):
        arguments = {"freqs": FREQS, "tensor_format": "thd", "cu_seqlens": starts} | change
        with refused(ValueError, "apply_rotary_pos_emb", *words):
            apply_rotary_pos_emb(t, **arguments)
    with refused(ValueError, "apply_rotary_pos_emb", "'cu_seqlens'", "sbhd"):
        apply_rotary_pos_emb(t[:, None], FREQS, "sbhd", cu_seqlens=starts)
    with refused(ValueError, "apply_rotary_pos_emb", "5 tokens", "two chunks"):
        apply_rotary_pos_emb(t[:5, None], FREQS, "sbhd", cp_size=2)
    with refused(ValueError, "apply_rotary_pos_emb", "'freqs'", "at least 30"):
        apply_rotary_pos_emb(t[:, None], FREQS, "sbhd", cp_size=5)
    with refused(NotImplementedError, "apply_rotary_pos_emb", "'start_positions'", "'cp_size'"):
        apply_rotary_pos_emb(t[:, None], FREQS, "sbhd", start_positions=starts[:1], cp_size=2)
    with refused(NotImplementedError, "apply_fused_qkv_rotary_pos_emb", "'tensor_format'", "thd"):
        apply_fused_qkv_rotary_pos_emb(torch.randn(4, 2, 24), FREQS, FREQS, [8] * 3, "thd", cu_seqlens=starts)
