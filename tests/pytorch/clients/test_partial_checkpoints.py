"""Checkpoints without our modules' `_extra_state`, as torch's and accelerate's loaders hand them on, and the warning of
a recomputation without its autocast."""

import warnings

import accelerate
import pytest
import torch
from support import assert_same_bits, refused
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common import recipe

from .modules import MODULES, build, values


def two(name, device, seed=0):
    return torch.nn.Sequential(build(name, device, seed=seed), build(name, device, seed=seed + 1))


def bare(module):
    return {k: v.clone() for k, v in module.state_dict().items() if not k.endswith("_extra_state")}


@pytest.mark.parametrize("name", MODULES)
def test_set_model_state_dict_without_extra_state(device, name):
    module, other = two(name, device), two(name, device, seed=5)
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(other, bare(module), options=options)
    for key, want in values(module).items():
        assert_same_bits(values(other)[key], want, key)


def test_scales_stay_where_a_checkpoint_has_none(device):
    module = build("Linear", device)
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=2)):
        module(torch.randn(8, 32, device=device)).sum().backward()
    scale = module.fp8_meta["scaling_fwd"].scale.clone()
    set_model_state_dict(module, bare(module), options=StateDictOptions(full_state_dict=True, strict=False))
    assert_same_bits(module.fp8_meta["scaling_fwd"].scale, scale)


def test_other_objects_are_still_refused(device):
    module = build("Linear", device)
    with refused(ValueError, "_extra_state", "wanted a uint8 tensor"):
        module.load_state_dict({**module.state_dict(), "_extra_state": object()})


def test_accelerate_reads_what_it_wrote(device, tmp_path):
    module = two("LayerNormMLP", device)
    accelerate.Accelerator(cpu=device == "cpu").save_model(module, tmp_path)
    other = two("LayerNormMLP", device, seed=5)
    accelerate.load_checkpoint_in_model(other, str(tmp_path))
    for key, want in values(module).items():
        assert_same_bits(values(other)[key], want, key)


@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP", "TransformerLayer"])
def test_torchs_checkpoint_under_autocast_warns(device, name):
    module, x = build(name, device), torch.randn(32, 2, 32, device=device, requires_grad=True)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        y = checkpoint(module, x, use_reentrant=True)
    with pytest.warns(UserWarning, match="runs without it inside a backward.*te.checkpoint"):
        y.sum().backward()
    with warnings.catch_warnings():  # none of these is one
        warnings.simplefilter("error", UserWarning)
        with te.autocast(recipe=recipe.Float8CurrentScaling()):
            y = te.checkpoint(module, x, use_reentrant=True)
        y.sum().backward()
        module(x).sum().backward()
        checkpoint(module, x, use_reentrant=True).sum().backward()
