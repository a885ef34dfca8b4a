# Which tensors of our nodes a group's counts apply to: matrices with a row for each token, and vectors with a value for
# each. An input of one dimension is one token, whose elements no counts apply to. Outputs and gradients are those of a
# run that keeps everything, rows after the live ones having no gradient.
import pytest
import torch
from support import randn

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional

from .cases import count, made, report, same

WIDTH, TOKENS, LIVE = 64, 32, 20
MODULES = {
    "linear": lambda device: te.Linear(WIDTH, WIDTH, device=device),
    "layer norm": lambda device: te.LayerNorm(WIDTH, device=device),
    "rms norm": lambda device: te.RMSNorm(WIDTH, device=device),
    "layer norm, linear": lambda device: te.LayerNormLinear(WIDTH, WIDTH, device=device),
    "layer norm, mlp": lambda device: te.LayerNormMLP(WIDTH, 2 * WIDTH, device=device),
}
FUNCTIONS = {
    "activation": lambda x: functional.activation(x, "gelu"),
    "gated activation": lambda x: functional.activation(x, "swiglu"),
    "router": lambda x: functional.router_topk(x.float(), 2, score_function="softmax")[0],
    "router scores": lambda x: functional.router_scores(x.float(), 2, score_function="softmax")[0],
}


def step(call, parameters, x, live, stash=None, counts=None):
    """Gradients of x and the parameters, through two groups; tokens after the live ones have no gradient."""
    torch.manual_seed(5)  # of the outputs' gradients
    leaf = x.clone().requires_grad_()
    for p in parameters:
        p.grad = None
    outputs = []
    for i in range(2):
        if stash is None:
            outputs.append(call(leaf * 1))
        else:
            with stash.group(i, counts):
                outputs.append(call(leaf * 1))
    for i, y in enumerate(outputs):
        dy = randn(*y.shape, device=y.device, dtype=y.dtype)
        if live is not None:
            dy[live:] = 0
        outputs[i] = (y * dy).sum()
    sum(outputs).backward()
    return [leaf.grad, *(p.grad for p in parameters)]


def agree(call, parameters, x, live, counts, stash):
    expected = step(call, parameters, x, live)
    for _ in range(2):
        stash.reset()
        same(step(call, parameters, x, live, stash, counts), expected)
        assert report(stash)["flags"] == 0


@pytest.mark.parametrize("name", [*MODULES, *FUNCTIONS])
def test_an_input_of_one_dimension_is_one_token(name, device):
    module = MODULES[name](device).to(torch.bfloat16) if name in MODULES else None
    parameters = [] if module is None else list(module.parameters())
    with made(device) as stash:
        agree(
            module or FUNCTIONS[name],
            parameters,
            randn(WIDTH, device=device, dtype=torch.bfloat16),
            None,
            count(1, device),
            stash,
        )


@pytest.mark.parametrize("shape", [(TOKENS,), (4, TOKENS // 4)], ids=["matrix", "sequences"])
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("live", [LIVE, TOKENS])
def test_a_mixture_with_counts_of_its_tokens(topk, shape, live, device):
    """The rows of its experts have counters of their own, the scales of the rows too."""
    torch.manual_seed(3)
    layer = te.MoEMLP(WIDTH, WIDTH, num_experts=4, topk=topk, params_dtype=torch.bfloat16, device=device)
    x = randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
    with made(device, page_bytes=512) as stash:
        agree(
            lambda leaf: layer(leaf.view(*shape, WIDTH))[0].view(TOKENS, WIDTH),
            list(layer.parameters()),
            x,
            live,
            count(live, device),
            stash,
        )


@pytest.mark.parametrize("live", [LIVE, TOKENS])
@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"linear"}))
def test_norms_of_several_rows_a_token(name, live, device):
    """A norm over each head has a statistic for each token and head, which no counts of tokens apply to."""
    module = MODULES[name](device).to(torch.bfloat16)
    x = randn(TOKENS, 2 * WIDTH, device=device, dtype=torch.bfloat16)
    with made(device) as stash:
        agree(
            lambda leaf: module(leaf.view(TOKENS, 2, WIDTH)).view(TOKENS, -1),
            list(module.parameters()),
            x,
            live,
            count(live, device),
            stash,
        )


def test_targets_of_two_dimensions_are_kept_whole(device):
    weight = randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16).requires_grad_()
    target = torch.arange(8, device=device).view(4, 2)

    def call(leaf):
        return te.fused_linear_cross_entropy(leaf.view(4, 2, WIDTH), weight, target, reduce_loss=False).view(8, 1)

    with made(device) as stash:
        agree(call, [weight], randn(8, WIDTH, device=device, dtype=torch.bfloat16), None, count(8, device), stash)


def test_values_of_tokens_leave_with_their_rows(device):
    """Of a norm: its input, a row for each token, and one float32 for each."""
    norm = te.RMSNorm(WIDTH, device=device).to(torch.bfloat16)
    with made(device) as stash:
        with stash.group("norm", count(LIVE, device)):
            y = norm(randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16).requires_grad_() * 1)
        assert report(stash)["live_bytes"] == LIVE * (2 * WIDTH + 4)
        del y
