# Quantized weights that a module keeps between microbatches, where the weights or the dtypes around them change.
# Mutants: clearing kept weights in set_extra_state alone (which a checkpoint without scales never reaches) turns the
# first test red; quantizing the parameter in place of its cast, the second.
import pytest
import torch
from fp8_plain import RECIPES
from support import assert_same_bits, randn

import transformer_engine.pytorch as te


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("key", ["with the key", "without the key"])
def test_loading_makes_kept_weights_stale(device, recipe, key):
    """Whatever the checkpoint says of scales, and as a part of another module too."""
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
    """Kept inside and used outside it is made anew, and the other way round."""
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
