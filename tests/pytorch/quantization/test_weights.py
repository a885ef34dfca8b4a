# Quantized weights that a module keeps between microbatches, where the weights or the dtypes around them change.
import copy
from typing import ClassVar

import pytest
import torch
from fp8_steps import RECIPES
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, DelayedScaling
from transformer_engine.pytorch.quantization.module.weights import KeptWeights


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("key", ["with the key", "without the key"])
def test_loading_makes_kept_weights_stale(device, recipe, key):
    """With any scales in the checkpoint or none, and as a part of another module too."""
    module, other = (te.Linear(128, 128, bias=False, device=device) for _ in range(2))
    x = randn(16, 128, device=device)
    given = {f"0.{k}": v for k, v in other.state_dict().items() if key == "with the key" or k == "weight"}
    with torch.no_grad():
        with te.autocast(recipe=RECIPES[recipe]()):
            module.eval()(x, is_first_microbatch=True)
        torch.nn.Sequential(module).load_state_dict(given, strict=key == "with the key")
        with te.autocast(recipe=RECIPES[recipe]()):
            kept, wanted = module(x, is_first_microbatch=False), module(x)
    assert_same_bits(kept, wanted)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP"])
def test_under_torch_autocast_a_kept_weight_changes_no_bit(device, name, recipe):
    """A weight that is kept inside and used outside is quantized again, and the other way round."""
    module = getattr(te, name)(128, 128, device=device)
    x, dtype = randn(16, 128, device=device), torch.bfloat16

    def call(first, casting=True):
        with torch.no_grad(), torch.autocast(device, dtype, enabled=casting), te.autocast(recipe=RECIPES[recipe]()):
            return module(x, is_first_microbatch=first)

    module.eval()
    wanted, plain = call(None), call(None, casting=False)
    assert_same_bits(call(True), wanted)
    assert_same_bits(call(False), wanted)
    assert_same_bits(call(False, casting=False), plain)
    assert_same_bits(call(False), wanted)


@pytest.mark.parametrize("change", ["none", "torch.autocast", "no gradients before"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_copies_of_all_groups_are_found_at_once_or_made_again(device, recipe, change, monkeypatch):
    """A kept copy serves a call as long as it fits; what does not fit any more is quantized again, in one call."""
    calls, slow = [], KeptWeights.copies_of
    monkeypatch.setattr(KeptWeights, "copies_of", lambda self, *args: calls.append(1) or slow(self, *args))
    module = te.GroupedLinear(3, 64, 32, bias=False, params_dtype=torch.bfloat16, device=device).eval()
    x = randn(48, 64, dtype=torch.bfloat16, device=device)

    def call(first, casting=False):
        module.zero_grad()
        with torch.autocast(device, torch.float16, enabled=casting), te.autocast(recipe=RECIPES[recipe]()):
            y = module(x, [16, 0, 32], is_first_microbatch=first)
        if y.requires_grad:
            y.float().square().sum().backward()
        return y.detach()

    with torch.set_grad_enabled(change != "no gradients before"):
        kept = call(True)
        assert_same_bits(call(False), kept)
    assert len(calls) == 1
    casting = change == "torch.autocast"
    for fresh in (change != "none", False):
        calls.clear()
        assert_same_bits(call(False, casting), call(None, casting))
        assert len(calls) == fresh


# ---- columnwise data and gradients ----

HELD = {name: RECIPES[name] for name in ("delayed", "current", "block")}


def held(device, recipe, name="Linear"):
    with te.quantized_model_init(recipe=HELD[recipe]()):
        return getattr(te, name)(128, 128, device=device)


def columnwise(module):
    return [p.get_usages()["columnwise"] for p in module.parameters() if isinstance(p, te.QuantizedTensor)]


@pytest.mark.parametrize("recipe", HELD)
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_without_gradients_columnwise_data_of_weights_go(device, name, recipe):
    """They come back for the next training step, and a backward that was under way when they went has its own."""
    chosen = HELD[recipe]()
    module = held(device, recipe, name)
    twin = copy.deepcopy(module)
    x = randn(16, 128, device=device)

    def forward(module):
        with te.autocast(recipe=chosen):
            return module(x.requires_grad_())

    for step in range(3):
        for one in (module, twin):
            y = forward(one)
            assert all(columnwise(one))
            if one is module:
                with torch.no_grad():
                    again = forward(one)
                assert not any(columnwise(one)) and (recipe == "delayed" or torch.equal(again, y))
            y.square().sum().backward()
            torch.optim.SGD(one.parameters(), 0.1).step()
            one.zero_grad()
        for got, want in zip(module.parameters(), twin.parameters(), strict=True):
            got, want = (p.dequantize() if isinstance(p, te.QuantizedTensor) else p for p in (got, want))
            assert_same_bits(got, want, f"step {step}")


def test_a_recomputation_and_a_capture_keep_columnwise_data(device):
    chosen = HELD["current"]()
    module = held(device, "current")
    x = randn(16, 128, device=device, requires_grad=True)
    with te.autocast(recipe=chosen):
        module(x)
        before = module.weight._transpose
        te.checkpoint(module, x, use_reentrant=True).sum().backward()
    assert module.weight._transpose is before
    te.make_graphed_callables(module, (torch.randn_like(x).requires_grad_(),), enabled=True, recipe=chosen)
    kept = module.weight._transpose
    module.eval()
    with torch.no_grad(), te.autocast(recipe=chosen):
        module(x)
    assert module.weight._transpose is kept


class Seen(te.Float8CurrentScalingQuantizer):
    """Tells which directions it was asked for."""

    asked: ClassVar[list] = []

    def quantize_impl(self, tensor):
        Seen.asked.append((self.columnwise_usage, tensor.shape[0]))
        return super().quantize_impl(tensor)


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "a recomputed LayerNormMLP"])
@pytest.mark.parametrize("first", [None, True])
def test_without_gradients_no_columnwise_copy_is_made(device, first, name):
    """Of weights, which have 48 or 32 rows, and of other tensors, whether they require a gradient or not."""
    options = {"checkpoint": True} if "recomputed" in name else {}
    module = getattr(te, name.split()[-1])(32, 48, device=device, **options)
    recipe = CustomRecipe(qfactory=lambda role: Seen(te.DType.kFloat8E4M3, torch.device(device)))
    for grad in (True, False):
        Seen.asked.clear()
        with torch.set_grad_enabled(grad), te.autocast(recipe=recipe):
            module(randn(16, 32, device=device, requires_grad=True), is_first_microbatch=first)
        assert {wanted for wanted, rows in Seen.asked if rows > 16} == {grad}
        assert grad or not any(wanted for wanted, _ in Seen.asked)


# ---- amax histories ----


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("algorithm", ["max", "most_recent", "of the caller"])
def test_a_column_of_the_history_moves_where_its_tensor_was_quantized(device, algorithm, captured):
    """The weight's rests while the one that was kept is used, the output's always."""
    chosen = {"max": "max", "most_recent": "most_recent", "of the caller": lambda history: history.amax(0)}[algorithm]
    recipe = DelayedScaling(amax_history_len=6, amax_compute_algo=chosen)
    module = te.Linear(32, 32, device=device)
    with te.autocast(recipe=recipe):
        module.init_fp8_metadata()
    state = module.fp8_meta["scaling_fwd"]
    state.amax_history[1:, 2] = torch.arange(1.0, 6.0)  # of a checkpoint
    if captured:
        sample = randn(16, 32, device=device, requires_grad=True)
        te.make_graphed_callables(module, (sample,), enabled=True, recipe=recipe, cache_quantized_params=True)
    seen, kept = [], []
    for step in range(7):
        x = torch.full((16, 32), step + 1.0, device=device, requires_grad=True)
        first = step in (0, 3)
        with te.autocast(recipe=recipe):
            module(x, is_first_microbatch=first).sum().backward()
        seen = [*seen, step + 1.0][-5:]
        if first:
            kept.append(module.weight.abs().max().item())
            with torch.no_grad():
                module.weight.mul_(2.0)
        history = state.amax_history.clone()
        assert history[:, 0].tolist() == [0.0] * (6 - len(seen)) + seen
        assert history[:, 1].tolist() == [0.0] * (6 - len(kept)) + kept
        assert history[:, 2].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
