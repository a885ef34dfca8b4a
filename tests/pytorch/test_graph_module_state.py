# What a capture leaves of the modules: buffers, parameters and gradients as they were, whatever the forward wrote to
# them. Mutant: putting back the buffers alone turns the parameters red; ending at the first thing that cannot be put
# back, the gradients.
import pytest
import torch
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph import is_graph_capturing, state

WIDTH = 8


class Shifted(torch.nn.Module):
    def __init__(self, device, positions):
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH, device=device)
        self.register_buffer("positions", positions)

    def forward(self, x):
        return self.inner(x) + self.positions.real.sum()


def sample(device):
    return torch.randn(4, WIDTH, device=device)


def made_in_inference_mode(make):
    def inside(device):
        with torch.inference_mode():
            return make(device)

    return inside


BUFFERS = {
    "expanded": lambda device: torch.arange(4.0, device=device)[None].expand(5, 4),
    "windows": lambda device: torch.arange(5.0, device=device).unfold(0, 3, 1),
    "of inference mode": made_in_inference_mode(lambda device: torch.arange(4.0, device=device)),
    "zeros of inference mode": made_in_inference_mode(lambda device: torch.zeros(4, device=device)),
    "conjugated": lambda device: torch.randn(4, dtype=torch.complex64, device=device).conj(),
    "negated": lambda device: torch.randn(4, dtype=torch.complex64, device=device).conj().imag,
    "sparse": lambda device: torch.eye(4, device=device).to_sparse(),
}


@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS.keys())
def test_buffers_that_are_not_written_as_others_are(device, make):
    if device == "cuda" and make is BUFFERS["sparse"]:
        pytest.skip("a sparse sum waits for the device")
    module = Shifted(device, make(device))
    module.inner.weight.grad = torch.ones_like(module.inner.weight)
    grad, positions, x = module.inner.weight.grad, module.positions.clone(), sample(device)
    want = module(x)
    te.make_graphed_callables(module, (sample(device),))
    assert not is_graph_capturing()
    assert module.inner.weight.grad is grad
    assert torch.equal(module.positions.to_dense(), positions.to_dense())
    assert_same_bits(module(x), want)


def test_what_cannot_be_put_back_leaves_the_rest(device, monkeypatch):
    def raising():
        raise OSError("gone")

    module = Shifted(device, torch.ones(2, device=device))
    module.inner.weight.grad = torch.ones_like(module.inner.weight)
    grad, x, random = module.inner.weight.grad, sample(device), torch.get_rng_state()
    monkeypatch.setattr(state, "restorer", lambda t: raising)
    with pytest.raises(OSError, match="gone"):
        te.make_graphed_callables(module, (x,))
    assert not is_graph_capturing()
    assert module.inner.weight.grad is grad
    assert torch.equal(torch.get_rng_state(), random)
    assert "forward" not in vars(module)
    monkeypatch.undo()
    te.make_graphed_callables(module, (sample(device),))
