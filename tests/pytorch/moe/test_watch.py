# te.verdict.watch: the verdict on a step from pinned memory, its gate, also over ranks and in a stash's, and the
# capacity_factor that holds the rows of every MoEMLP.
import math
from contextlib import closing

import pytest
import rank_workers
import torch
from ranks import on_ranks
from support import randn

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional
from transformer_engine.pytorch.verdict import StepVerdict, split_verdict, watch

from .cases import BF16, EXPERTS, FFN, HIDDEN, TOPK, build

TOKENS = 300


@pytest.fixture
def watched(device):
    found = watch(device)
    found.reset()
    if device == "cuda":  # the report of that step, which arrives late, is nothing that a test looks for
        torch.cuda.synchronize()
    found.verdict()
    yield found
    found.reset()


def crowded(device, factor, **options):
    """All tokens go to experts 0 and 1."""
    layer = build(device, capacity_factor=factor, **options)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:2] = 1
    return layer, torch.ones(TOKENS, HIDDEN, dtype=BF16, device=device)


def test_the_same_one_for_a_device(device):
    assert watch(device) is watch(torch.device(device)) is watch(randn(1, device=device).device)


def test_steps(watched, device):
    """Each verdict comes once, after the step, and names it; a good step has no faults."""
    layer, x = crowded(device, 0.5)
    first = watched.verdict(wait=True).step
    layer(x)
    rows = layer._rows(TOKENS)
    cut = TOKENS * TOPK - rows
    bad = watched.verdict(wait=True)
    assert (bad.step, bad.negative, bad.cut, bad.ok) == (first, 0, cut, False)
    assert split_verdict(device).cut == cut and watched.gate() == 1
    watched.reset()
    assert watched.gate() == 0
    layer(x[:3])
    later = watched.verdict(wait=True)
    assert (later.step, later.ok, later.capacity_factor) == (first + 1, True, 0)
    assert str(later) == f"step {first + 1} is good."


def test_a_verdict_is_read_once(watched, device):
    layer, x = crowded(device, 0.5)
    layer(x)
    watched.reset()
    if device == "cuda":
        torch.cuda.synchronize()
    found = watched.verdict()
    assert found.cut > 0 and watched.verdict() is None
    watched.reset()
    if device == "cuda":
        torch.cuda.synchronize()
    assert watched.verdict() == StepVerdict(found.step + 1, 0, 0, 0.0)


def test_a_look_at_the_current_step_takes_no_report_away(watched, device):
    layer, x = crowded(device, 0.5)
    step = watched.verdict(wait=True).step
    assert watched.verdict() is None, "the step has not ended"
    layer(x)
    watched.reset()
    if device == "cuda":
        torch.cuda.synchronize()
    found = watched.verdict()
    assert found.step == step and found.cut > 0


@pytest.mark.parametrize("experts", [None, (0, 3), (1, 2)])
def test_the_capacity_that_would_have_done(experts, watched, device):
    """Of the layer that lacked most. With it nothing is cut, and with a hundredth less than the rows that it has
    something is."""
    small, x = crowded(device, 0.5, experts=experts)
    layers = [small, build(device, capacity_factor=0.9)]
    for layer in layers:
        layer(x)
    found = watched.verdict(wait=True)
    local = range(EXPERTS)[slice(*experts or (None,))]
    wanted = int(small.tokens_per_expert[local.start : local.stop].sum())
    assert found.capacity_factor == pytest.approx(wanted * EXPERTS / (TOKENS * TOPK * len(local)))
    assert f"capacity_factor={math.ceil(100 * found.capacity_factor) / 100}" in str(found)
    watched.reset()
    for layer in layers:
        layer.capacity_factor = found.capacity_factor
        layer(x)
    assert watched.verdict(wait=True).ok
    small.capacity_factor = found.capacity_factor * (wanted - 129) / wanted
    small(x)
    assert not watched.verdict(wait=True).ok


def test_grouped_linear_reports_there(watched, device):
    layer = te.GroupedLinear(3, HIDDEN, FFN, params_dtype=BF16, device=device)
    layer(randn(10, HIDDEN, dtype=BF16, device=device), torch.tensor([3, -2, 9], device=device))
    found = watched.verdict(wait=True)
    assert found[1:] == (1, 2, 0.0)
    assert str(found).endswith("1 sizes of groups were negative, 2 rows were cut.")


def test_a_recomputation_adds_nothing(watched, device):
    layer, x = crowded(device, 0.5)
    y, _ = te.checkpoint(layer, x.requires_grad_(), use_reentrant=False)
    before = watched.verdict(wait=True)
    y.sum().backward()
    assert watched.verdict(wait=True) == before


def test_the_gate_skips_a_step(watched, device):
    layer, x = crowded(device, 0.5)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    for factor, skipped in ((0.5, True), (None, False)):
        layer.capacity_factor = factor
        watched.reset()
        layer.zero_grad()
        layer(x)[0].sum().backward()
        before = layer.experts.fc1.weight.detach().clone()
        optimizer.found_inf = watched.gate()
        optimizer.step()
        assert torch.equal(before, layer.experts.fc1.weight) is skipped


def test_it_is_up_in_a_stash_too(watched, device):
    with closing(te.stash.PagedStash(page_bytes=512, device_pages=4000, device=device)) as stash:
        layers = [crowded(device, 0.5, stash=stash)[0] for _ in range(2)]
        x = crowded(device, 0.5)[1].requires_grad_()
        gates = []
        for factor in (None, 0.5, None):
            watched.reset()
            stash.reset()
            y = x
            for layer in layers:
                layer.capacity_factor = factor
                y = y + layer(y)[0]
            y.sum().backward()
            gates.append(stash.gate())
            assert float(gates[-1]) == (factor is not None)
            assert stash.verdict(wait=True).ok
        assert gates[0] is gates[1] is gates[2]


@pytest.mark.dist
def test_the_gate_of_two_ranks(device):
    """Rows that one rank cut keep both from the step; the ranks' own verdicts stay their own."""
    rank0, rank1 = on_ranks(rank_workers.watch_gates, device=device)
    assert rank0 == [(0.0, 1.0, False, True), (0.0, 0.0, True, True)]
    assert rank1 == [(1.0, 1.0, False, False), (0.0, 0.0, True, True)]


def test_counts_in_given_memory(device):
    """permute_routing writes the tokens of every expert there, which a backward that saved them sees."""
    probs = torch.rand(7, 5, device=device)
    chosen = probs.topk(2).indices.int()
    kept = torch.full((5,), -1, device=device)
    version = kept._version
    *_, counts = functional.permute_routing(probs.requires_grad_(), chosen, (0, 5), 14, counts=kept)
    assert counts is kept and kept._version > version
    assert kept.tolist() == torch.bincount(chosen.flatten().long(), minlength=5).tolist()
    with pytest.raises(ValueError, match="permute_routing: argument 'counts' is Long"):
        functional.permute_routing(probs, chosen, (0, 5), 14, counts=kept[:4])
    with pytest.raises(ValueError, match="permute_routing: argument 'counts' is Int"):
        functional.permute_routing(probs, chosen, (0, 5), 14, counts=kept.int())


def test_a_captured_step(watched, device):
    if device == "cpu":
        pytest.skip("CUDA graphs")
    layer, x = crowded(device, 0.5)

    def step():
        watched.reset()
        layer(x)
        return watched.gate()

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gate = step()
    for factor in (1, -1):  # -1: the other experts, which the capacity holds no better
        x.mul_(factor)
        graph.replay()
        torch.cuda.synchronize()
        first = watched.verdict()
        graph.replay()
        torch.cuda.synchronize()
        later = watched.verdict()
        assert later.step == first.step + 1 and later.cut > 0 and gate == 1
