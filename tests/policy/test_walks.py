# The two walks of walks.py are no longer than they were, and Python runs their first functions one after the other.
import sys

import pytest
import torch
import walks

import transformer_engine.pytorch as te

MOST = {"swiglu": (13, 10), "grouped": (14, 12)}  # (names, files)


@pytest.mark.parametrize("name", walks.WALKS)
def test_a_walk_grows_no_longer(name):
    names, files = walks.figures(name)
    assert names <= MOST[name][0] and files <= MOST[name][1], walks.as_text(name)


def python_calls(call, last):
    """Names of the package's functions that are active in call() when the extension's function `last` is called."""
    found = []

    def profile(frame, event, called):
        if event == "c_call" and getattr(called, "__name__", "") == last and not found:
            while frame is not None:
                if "/transformer_engine/" in frame.f_code.co_filename:
                    found.insert(0, frame.f_code.co_name)
                frame = frame.f_back

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_python_runs_the_functions_of_the_walks():
    mlp, x = te.LayerNormMLP(32, 64, activation="swiglu", device="cpu"), torch.randn(4, 32)
    assert python_calls(lambda: mlp(x), "layernorm_mlp") == ["forward", "layernorm_mlp"]
    experts, splits = te.GroupedLinear(2, 32, 64, device="cpu"), torch.tensor([3, 1])
    assert python_calls(lambda: experts(x, splits), "grouped_linear") == ["forward", "grouped_linear"]
