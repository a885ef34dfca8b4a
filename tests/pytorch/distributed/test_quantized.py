# gather_along_first_dim with a quantizer, or of quantized tensors, on two processes: byte-equal to the whole tensor
# quantized, in every format and direction; what travels; what quantizers note; refusals.
import pytest
import torch
from ranks import on_ranks
from support import assert_same_bits

from . import gather_workers
from .gather_workers import USAGES, gather, quantizer_of

RANKS = 2


@pytest.fixture(scope="module")
def results():
    return on_ranks(gather_workers.everything, RANKS, ranks=RANKS)


@pytest.mark.dist
def test_it_is_the_whole_quantized(results):
    for got in results:
        wrong, cases = got["quantized"]
        assert cases > 400
        assert not wrong, "\n".join(wrong)


@pytest.mark.dist
def test_fp8_travels(results):
    for got in results:
        moved = got["bytes_moved"]
        plain = moved[None, None]
        for (name, usages), size in moved.items():
            if name is not None:
                # 1 x 128 blocks of each direction are other bytes; the scales of both are at most a 1/16 of them
                least = plain / 2 * (sum(usages) if name == "block1d" else 1)
                assert least * 0.99 <= size <= least * (1 + 1 / 16), (name, usages, size, plain)


@pytest.mark.dist
def test_what_quantizers_note(results):
    values = [gather_workers.values((128, 128), rank, torch.float32) for rank in range(RANKS)]
    largest = torch.cat(values).abs().amax().view(1)
    for rank, got in enumerate(got["notes"] for got in results):
        assert_same_bits(got["delayed"], values[rank].abs().amax().view(1), "a rank's own: a region reduces it")
        assert_same_bits(got["current"], largest)
        assert_same_bits(got["existing"], torch.tensor([6.0]) / 448)
        assert_same_bits(got["kept"], torch.tensor([rank + 5.0]))
        assert_same_bits(got["scale"], results[0]["notes"]["scale"])


@pytest.mark.dist
def test_refusals_are_the_same_on_every_rank(results):
    words = {
        "scales": ("ValueError", "different scales", "with_amax_reduction"),
        "delayed scales": ("ValueError", "different scales"),
        "rows": ("ValueError", "'inp'", "100 rows", "128"),
        "directions": ("ValueError", "'inp'", "columnwise", "1 x 128"),
        "format": ("ValueError", "'inp'", "'quantizer'", "Float8Quantizer", "dequantize"),
        "hybrid": ("NotImplementedError", "'inp'", "Hybrid", "dequantize"),
        "output": ("NotImplementedError", "'output_tensor'"),
        "dtype": ("ValueError", "'inp'", "int32", "bfloat16"),
        "uneven": ("ValueError", "'inp'", "rank 0", "[128, 128]", "[127, 128]"),
        "mixed": ("ValueError", "quantize differently"),
        "nothing": ("ValueError", "rowwise_usage"),
        "quantizer": ("TypeError", "'quantizer'", "fp8", "Quantizer"),
        "device": ("ValueError", "'inp'", "meta", "gloo"),
    }
    first, second = (got["refusals"] for got in results)
    assert first == second and sorted(first) == sorted(words)
    for case, told in first.items():
        assert told is not None and told[0] == words[case][0], (case, told)
        assert all(word in told[1] for word in words[case][1:]), (case, told)


def test_alone():
    x = gather_workers.values((6, 32), 0, torch.float32)
    for name in ("delayed", "current", "block1d", "block2d", "identity", "hybrid"):
        for usages in USAGES:
            want = quantizer_of(name, *usages)(x)
            got, work = gather(x, None, quantizer=quantizer_of(name, *usages))
            assert work is None and not list(gather_workers.differences(got, want, False)), name
        if name in ("identity", "hybrid"):
            continue
        both = quantizer_of(name, True, True)(x)
        assert gather(both, None) == (both, None)
        got, _ = gather(both, None, quantizer=quantizer_of(name, False, True))
        assert got.get_usages() == {"rowwise": False, "columnwise": True} and all(both.get_usages().values())
