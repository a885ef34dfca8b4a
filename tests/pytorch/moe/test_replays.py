# A MoEMLP on a GPU: no step waits for the device; captured once and replayed with other routings each time, it has the
# bits of the same layer eager.
import copy

import pytest
import torch

import transformer_engine.pytorch as te

from .cases import BF16, EXPERTS, HIDDEN, TOKENS, build, every_recipe, recipe_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fp8_left_off")]

ROUTINGS = ("even", "zipf", "one expert", "none of the first two")


def biases(routing, generator):
    """Of the router's logits: the weights of x's first feature, which is 1."""
    if routing == "zipf":
        return -2 * torch.log1p(torch.randperm(EXPERTS, generator=generator).float())
    values = torch.zeros(EXPERTS)
    if routing == "one expert":
        values[int(torch.randint(EXPERTS, (), generator=generator))] = 100
    elif routing == "none of the first two":
        values[:2] = -100
    return values


def run(module, call, x, dy, recipe):
    """Both outputs and all gradients of a step."""
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y, loss = call(leaf)
    torch.autograd.backward([y, loss], [dy, torch.ones_like(loss)])
    return [y.detach(), loss.detach(), leaf.grad, *(p.grad for p in module.parameters())]


@every_recipe
@pytest.mark.parametrize("options", [{}, {"experts": (1, 4), "capacity_factor": 2.0, "aux_loss_coeff": 0.01}], ids=str)
def test_the_host_waits_for_nothing(options, recipe):
    module, made = build("cuda", **options), recipe_of(recipe)
    x, dy = (torch.randn(TOKENS, HIDDEN, dtype=BF16, device="cuda") for _ in range(2))
    one = torch.ones((), device="cuda")

    def step():
        with te.autocast(enabled=made is not None, recipe=made):
            outs = [out for out in module(x.clone().requires_grad_()) if out.requires_grad]
        torch.autograd.backward(outs, [dy, one][: len(outs)])

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 1.0}], ids=["all rows", "capacity"])
@pytest.mark.parametrize("recipe", ["none", "delayed", "block"])
def test_a_thousand_replays_with_other_routings(recipe, options):
    replays = 1000 if recipe == "none" else 300
    ours, made = build("cuda", aux_loss_coeff=0.01, **options), recipe_of(recipe)
    twin = copy.deepcopy(ours)
    sample = torch.randn(TOKENS, HIDDEN, dtype=BF16, device="cuda").requires_grad_()
    graphed = te.make_graphed_callables(twin, (sample,), enabled=made is not None, recipe=made)
    generator, held = torch.Generator().manual_seed(0), None
    differing = torch.zeros(replays, dtype=torch.int64, device="cuda")  # bytes of each turn
    for turn in range(replays):
        values = biases(ROUTINGS[turn % len(ROUTINGS)], generator).to("cuda", BF16)
        with torch.no_grad():
            for module in (ours, twin):
                module.router.weight[:, 0].copy_(values)
        x, dy = (torch.randn(TOKENS, HIDDEN, dtype=BF16, device="cuda") for _ in range(2))
        x[:, 0] = 1
        results = [run(module, call, x, dy, made) for module, call in ((ours, ours), (twin, graphed))]
        for a, b in zip(*results, strict=True):
            differing[turn] += (a.reshape(-1).view(torch.uint8) != b.reshape(-1).view(torch.uint8)).sum()
        differing[turn] += (ours.tokens_per_expert != twin.tokens_per_expert).sum()
        del results, a, b
        if turn == 10:
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= held + 2**16
    assert not differing.any(), f"these replays differ: {differing.nonzero().flatten().tolist()}"
