# te.GroupedLinear in FP8 with sizes on the device, in rare cases: weights kept by captures, groups held otherwise than
# their neighbours, calibration, memory that overlaps.
import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R

from .grouped_cases import SPLITS, K, N, build

pytestmark = pytest.mark.usefixtures("fp8_left_off")

ROWS = sum(SPLITS)


def there(device):
    return torch.tensor(SPLITS, device=device)


def test_captured_calls_keep_weights_for_a_microbatch(device):
    """cache_quantized_params: the first microbatch quantizes, the others read what it made."""
    ours, _ = build(device=device, dtype=torch.bfloat16)
    twin, _ = build(device=device, dtype=torch.bfloat16)
    twin.load_state_dict(ours.state_dict())
    made = R.Float8CurrentScaling()
    sample = (randn(ROWS, K, dtype=torch.bfloat16, device=device, requires_grad=True), there(device))
    graphed = te.make_graphed_callables(twin, sample, enabled=True, recipe=made, cache_quantized_params=True)
    for first in (True, False):
        x = randn(ROWS, K, dtype=torch.bfloat16, device=device, requires_grad=True)
        with te.autocast(recipe=made):
            want = ours(x, there(device), is_first_microbatch=first)
            got = graphed(x, there(device), is_first_microbatch=first)
        assert_same_bits(got, want)
        with torch.no_grad():  # which the second microbatch must not see
            for p in (*ours.parameters(), *twin.parameters()):
                if p.ndim == 2:
                    p.mul_(-3)


def test_a_plain_weight_beside_fp8_ones_is_quantized_again(device):
    ours, _ = build(device=device, dtype=torch.bfloat16, quantized=R.Float8CurrentScaling())
    ours.weight1 = torch.nn.Parameter(ours.weight1.dequantize().to(torch.bfloat16))
    x = randn(ROWS, K, dtype=torch.bfloat16, device=device)
    alone = torch.tensor([0, ROWS, 0, 0], device=device)
    with te.autocast(recipe=R.Float8CurrentScaling()):
        before = ours(x, alone)
        with torch.no_grad():
            ours.weight1.mul_(-2), ours.bias1.mul_(-2)
        assert_same_bits(ours(x, alone), before * -2)


def test_out_under_torchs_autocast(device):
    ours, _ = build(device=device)
    x = randn(ROWS, K, device=device)
    with torch.autocast(device, torch.bfloat16), te.autocast(recipe=R.Float8CurrentScaling()):
        want = ours(x, there(device))
        assert_same_bits(ours(x, there(device), out=torch.empty_like(want)), want)


@pytest.mark.parametrize("by_list", [True, False])
def test_calibration_sees_each_group(by_list):
    """On the CPU: on a GPU sizes in a tensor would have to be waited for."""
    ours, _ = build(device="cpu", dtype=torch.bfloat16)
    x = randn(ROWS, K, dtype=torch.bfloat16)
    x[SPLITS[0] :] *= 8
    with te.autocast(enabled=False, calibrating=True, recipe=R.DelayedScaling(amax_history_len=4)):
        ours(x, SPLITS if by_list else there("cpu"))
    history = ours.fp8_meta["scaling_fwd"].amax_history
    for i, rows in enumerate(x.split(SPLITS)):
        assert history[:, 3 * i].max() == (rows.abs().max() if rows.numel() else 0), i


def test_an_out_that_overlaps_the_input_is_refused(device):
    ours, _ = build(device=device, dtype=torch.bfloat16)
    memory = randn(ROWS * max(K, N) + 64, dtype=torch.bfloat16, device=device)
    x, out = memory[: ROWS * K].view(ROWS, K), memory[64 : 64 + ROWS * N].view(ROWS, N)
    with te.autocast(recipe=R.Float8CurrentScaling()), refused(ValueError, "'out'", "shares memory with inp"):
        ours(x, there(device), out=out)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return weight * 2


def test_a_parametrized_weight(device):
    ours, _ = build(device=device, dtype=torch.bfloat16)
    twin, _ = build(device=device, dtype=torch.bfloat16)
    twin.load_state_dict(ours.state_dict())
    torch.nn.utils.parametrize.register_parametrization(ours, "weight2", Doubled())
    with torch.no_grad():
        twin.weight2.mul_(2)
    x = randn(ROWS, K, dtype=torch.bfloat16, device=device)
    with te.autocast(recipe=R.Float8CurrentScaling()):
        assert_same_bits(ours(x, there(device)), twin(x, there(device)))


def test_an_input_without_rows_cuts_what_sizes_claim(device):
    ours, _ = build(device=device, dtype=torch.bfloat16)
    with te.autocast(recipe=R.Float8CurrentScaling()):
        assert ours(randn(0, K, dtype=torch.bfloat16, device=device), there(device)).shape == (0, N)


def test_a_quantizer_that_differs_in_one_group():
    """On the CPU: on a GPU such groups want a list."""

    def factory(role):
        quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")
        quantizer.amax_epsilon = 300.0 if str(getattr(role, "name", role)).endswith("1") else 0.0
        return quantizer

    ours, _ = build(device="cpu", dtype=torch.bfloat16)
    x = randn(ROWS, K, dtype=torch.bfloat16)
    with te.autocast(recipe=R.CustomRecipe(qfactory=factory)):
        assert_same_bits(ours(x, there("cpu")), ours(x, SPLITS))


def test_the_tail_of_out_stays_beside_a_float32_bias():
    """On the CPU: float32 with sizes in a tensor is refused on a GPU."""
    ours, _ = build(device="cpu")
    out = torch.full((ROWS + 4, N), 7.0)
    with te.autocast(recipe=R.Float8BlockScaling()):
        ours(randn(ROWS + 4, K), there("cpu"), out=out)
    assert (out[ROWS:] == 7).all()
