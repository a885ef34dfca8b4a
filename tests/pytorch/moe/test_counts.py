# Counts of te.MoEMLP and te.moe.GroupedMLP: tokens of each expert, and rows that were cut. A recomputation, and parts
# that run one after the other, count nothing twice; parameters that are assigned to a module on meta leave its counts
# to the first call.
import pytest
import torch
from support import assert_same_bits, randn, refused
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.pytorch.moe import GroupedMLP, MoEMLP
from transformer_engine.pytorch.verdict import SplitVerdict, reset_split_verdict, split_gate, split_verdict

from .cases import FFN, HIDDEN, in_parts

EXPERTS, TOPK, TOKENS = 6, 2, 37
BF16 = torch.bfloat16


def build(device, **options):
    return MoEMLP(HIDDEN, FFN, EXPERTS, TOPK, params_dtype=BF16, device=device, **options)


def draw(device):
    return randn(TOKENS, HIDDEN, dtype=BF16, device=device)


def cut_in(device, run):
    reset_split_verdict(device)
    run()
    found = split_verdict(device)
    reset_split_verdict(device)
    return found


reentrant_or_not = pytest.mark.parametrize("reentrant", [False, True])
every_checkpoint = pytest.mark.parametrize("checkpoint", [te.checkpoint, torch_checkpoint], ids=["te", "torch"])


@reentrant_or_not
@every_checkpoint
def test_a_recomputation_keeps_the_last_calls_tokens(checkpoint, reentrant, device):
    """The first microbatch's backward comes after the forward of the second."""
    ours = build(device)
    x = draw(device).requires_grad_()
    first, _ = checkpoint(ours, x, use_reentrant=reentrant)
    checkpoint(ours, x[:5], use_reentrant=reentrant)
    counts = ours.tokens_per_expert.clone()
    assert counts.sum() == 5 * TOPK
    first.backward(torch.ones_like(first))
    assert torch.equal(ours.tokens_per_expert, counts) and ours.experts.fc1.weight.grad is not None


SPLITS, ROWS = [3, -2, 9], 10  # one that counts as 0, and two rows that there are not
BAD = SplitVerdict(negative=1, cut=2)


@reentrant_or_not
@every_checkpoint
@pytest.mark.parametrize("kind", [GroupedMLP, te.GroupedLinear])
def test_a_recomputation_cuts_and_does_not_count(kind, checkpoint, reentrant, device):
    options = {} if kind is GroupedMLP else {"bias": False}
    module = kind(3, HIDDEN, FFN, params_dtype=BF16, device=device, **options)
    x, splits = randn(ROWS, HIDDEN, dtype=BF16, device=device).requires_grad_(), torch.tensor(SPLITS, device=device)
    results = []

    def step(again):
        module.zero_grad()
        y = checkpoint(module, x, splits, use_reentrant=reentrant) if again else module(x, splits)
        y.sum().backward()
        results.append([y.detach(), *(p.grad for p in module.parameters())])

    assert [cut_in(device, lambda again=again: step(again)) for again in (False, True)] == [BAD, BAD]
    for once, twice in zip(*results, strict=True):
        assert_same_bits(twice, once)


def test_parts_one_after_the_other_count_once(device):
    ours = GroupedMLP(3, HIDDEN, FFN, params_dtype=BF16, device=device)
    x, splits = randn(ROWS, HIDDEN, dtype=BF16, device=device), torch.tensor(SPLITS, device=device)
    twin = in_parts(ours)
    assert cut_in(device, lambda: ours(x, splits)) == cut_in(device, lambda: twin(x, splits)) == BAD
    assert_same_bits(twin(x, splits), ours(x, splits))


def test_the_gate_is_up_after_bad_splits(device):
    ours = te.GroupedLinear(3, HIDDEN, FFN, params_dtype=BF16, device=device)
    x = randn(ROWS, HIDDEN, dtype=BF16, device=device)
    for splits, wanted in ([3, 2, 5], 0), ([3, -2, 5], 1), ([3, 2, 9], 1), ([3, -2, 9], 1):
        reset_split_verdict(device)
        ours(x, torch.tensor(splits, device=device))
        gate = split_gate(device)
        assert (gate.dtype, gate.shape, gate.device, float(gate)) == (torch.float32, (), x.device, wanted)
    reset_split_verdict(device)
    assert gate == 1 and split_gate(device) == 0  # each is a tensor of its own


def test_parameters_assigned_to_a_module_on_meta(device):
    options = {"expert_bias": True, "score_function": "sigmoid"}
    whole, meta = build(device, **options), build("meta", **options)
    meta.load_state_dict(whole.state_dict(), assign=True)
    assert meta.tokens_per_expert.is_meta
    x = draw(device)
    for _ in range(2):
        assert_same_bits(meta(x)[0], whole(x)[0])
        assert meta.tokens_per_expert.device == x.device
        assert torch.equal(meta.tokens_per_expert, whole.tokens_per_expert)


def test_parameters_assigned_before_inference(device):
    whole, meta, x = build(device), build("meta"), draw(device)
    meta.load_state_dict(whole.state_dict(), assign=True)
    with torch.inference_mode():
        meta(x)
    meta(x[:5])
    assert meta.tokens_per_expert.sum() == 5 * TOPK


@pytest.mark.gpu
def test_counts_on_another_device():
    ours = build("cuda")
    ours.tokens_per_expert = ours.tokens_per_expert.cpu()
    with refused(ValueError, "MoEMLP", "'tokens_per_expert' is on cpu", "cuda:0", ".to(device)"):
        ours(draw("cuda"))
